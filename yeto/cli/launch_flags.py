"""The flags of ``yeto launch``, and the launch they stand for.

Everything that can be wrong is found here, before a name is taken or anything is rented: a mistake that shows
on eight machines is a dear one.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
from attrs import frozen
from cyclopts import Group, Parameter, validators

from yeto.cli.fitting import fitting_merge_alpha, fitting_outer
from yeto.cli.learner_diffusion_flags import DIFFUSION_ONLY
from yeto.cli.length import steps_of_run
from yeto.cli.passing import flags_without, to_words
from yeto.cli.run_learner import LearnerFlags
from yeto.cli.run_local import LEARNER_LEFT_OUT, SYNCER_LEFT_OUT
from yeto.cli.run_syncer import SyncerFlags
from yeto.errors import ConfigError
from yeto.fleet.grammar import CLOUDS, Island, join_islands, parse_islands
from yeto.fleet.launch import Launch, check_name, is_remote, local_path, require_one_kind
from yeto.fleet.models import resolve_model
from yeto.text.config import TextConfig

HEAD_MEMORY_GB_MIN = 16
"""Least memory of a rented head: small machines have it."""
DISK_GB_MIN = 256
"""Least disk of a rented machine: SkyPilot's own default."""

_LAUNCH = Group("This launch", sort_key=-1)

Gigabytes = Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=1 << 20))]

SyncerPart: Any = flags_without(
    SyncerFlags,
    SYNCER_LEFT_OUT | {"http_port", "http_host", "http_token_file", "record_payloads"},
    name="SyncerPart",
    group="Syncer",
)
LearnerPart: Any = flags_without(
    LearnerFlags,
    (LEARNER_LEFT_OUT - ({"shard", "rank_timeout", "task"} | DIFFUSION_ONLY)) | {"chat_template", "device"},
    name="LearnerPart",
    group="Learner",
)


@Parameter(name="*", group=_LAUNCH)
@frozen(kw_only=True)
class LaunchFlags:
    """Which islands, what they train, and where the result goes."""

    gpu: Annotated[
        str | None,
        Parameter(
            help="The islands, one entry each: cloud:[NODESx]COUNTxGPU[@region], such as "
            "aws:8xa100@us-east-2,runpod:8xh100; local:1xcpu is one on this machine."
        ),
    ] = None
    model: str | None = None
    """Hugging Face id, an alias that yeto shape knows, or a local model folder."""
    data: str | None = None
    """Rows to train on: a data set id, a file, a folder, or a URL. What is on this machine travels along."""
    output: str | None = None
    """Where the verified result goes: a folder, or a URI such as s3://bucket/run (for rented islands)."""
    eval_data: str | None = None
    """Held-out rows, a source as --data."""
    chat_template: str | None = None
    """File with a chat template to use instead of the tokenizer's."""
    total_steps: int | None = None
    """Global steps (merges of one fragment) of the run. Default: 8 times --fragments."""
    token_budget: int | None = None
    """Raw tokens to train on, all islands together, instead of --total-steps."""
    epochs: float | None = None
    """Passes over the training rows, instead of --total-steps; the rows are counted here first."""
    merge_alpha: float | Literal["carry"] | None = None
    """What a merge leaves of the local weights; see yeto run --role learner. Default: carry where fragments
    become averages, else 0.5."""
    name: str | None = None
    """What the run is called in yeto status, logs and down. Default: made of the model's name."""
    mirror: Annotated[
        str | None,
        Parameter(
            help="Where checkpoint and tape are copied to all the time, so that a head that is lost comes "
            "back. Default: --output with /mirror; on this machine nowhere."
        ),
    ] = None
    resume: Annotated[str | None, Parameter(help="Go on with this run as it was launched.")] = None
    dry_run: Annotated[bool, Parameter(negative=())] = False
    """Write the tasks to ./NAME-tasks and print every command; start and rent nothing."""
    detach: Annotated[bool, Parameter(negative=())] = False
    """Come back as soon as the run is started; yeto status NAME shows it then."""
    budget: Annotated[
        float | None,
        Parameter(
            help="Instead of --gpu: dollars an hour, head included. Shows the fastest plan for them and ends "
            "with exit code 0 (1 when there is none); with --confirm launches it."
        ),
    ] = None
    confirm: Annotated[bool, Parameter(negative=())] = False
    """Launch the plan for --budget, and pay for it."""
    offers: Path | None = None
    """Offers that --budget chooses from, as for yeto shape. Default: SkyPilot's catalogue."""
    weights_gb: float | None = None
    """Size of the model's weights in bf16, in GB. Default: looked up."""
    on_demand: str | None = None
    """Numbers of islands, from 0, that are rented on demand instead of spot: 0,2; or all."""
    head_infra: str | None = None
    """Where the head is rented: cloud, or cloud/region. Default: the cheapest place that SkyPilot knows."""
    head_memory_gb: Gigabytes = None
    """Memory of the head's machine. Default: what the export of the model needs, 16 at least."""
    disk_gb: Gigabytes = None
    """Disk of every machine. Default: what the model needs, 256 at least."""
    verify: Annotated[
        bool,
        Parameter(
            help="Load the result back at the end and compare it with the base model; the head needs memory "
            "for the model then."
        ),
    ] = True


def make_launch(flags: LaunchFlags, syncer: Any, learner: Any) -> Launch:
    """Return what the flags launch; nothing is written or asked of a cloud.

    Raises:
        ConfigError: a flag is missing, impossible, or contradicts another one.
    """
    for flag, value in (("--gpu", flags.gpu), ("--model", flags.model), ("--data", flags.data)):
        if value is None:
            raise ConfigError(f"{flag} is missing (see yeto launch --help)")
    assert flags.gpu is not None
    assert flags.model is not None
    assert flags.data is not None
    if flags.output is None:
        raise ConfigError("--output is missing: the folder or URI that the result goes to")
    islands = parse_islands(flags.gpu)
    require_one_kind(islands)
    here = islands[0].is_local
    model = resolve_model(flags.model)
    settings = LearnerFlags(
        **{"syncer": "127.0.0.1:1", "model": model, "data": flags.data, "eval_data": flags.eval_data}
        | {"chat_template": flags.chat_template, "num_learners": len(islands)}
        | {field.name: getattr(learner, field.name) for field in attrs.fields(LearnerPart)}
        | ({} if flags.merge_alpha is None else {"merge_alpha": flags.merge_alpha})
    )
    settings.learner_config()
    syncer = attrs.evolve(syncer, outer=fitting_outer(syncer.outer, settings.matrix_merge))
    task = settings.task_config()
    core = (
        SyncerFlags(
            learners=len(islands),
            total_steps=1 if flags.total_steps is None else flags.total_steps,
            **{field.name: getattr(syncer, field.name) for field in attrs.fields(SyncerPart)},
        )
        .config()
        .core
    )
    name = check_name(flags.name or _made_up(flags.model))
    output = _output(flags.output, here=here)
    if isinstance(task, TextConfig) and (here or local_path(model) is not None):
        from yeto.text.inputs import check_inputs

        check_inputs(task)
    _require_files(flags)
    total_steps = steps_of_run(
        task if isinstance(task, TextConfig) else None,
        total_steps=flags.total_steps,
        token_budget=flags.token_budget,
        epochs=flags.epochs,
        fragments=settings.fragments,
        grad_accum=settings.grad_accum,
        ranks=sum(island.ranks for island in islands),
        interval=syncer.sync_interval_steps,
    )
    alpha = fitting_merge_alpha(
        flags.merge_alpha, core, num_fragments=settings.fragments, total_steps=total_steps
    )
    memory_gb, disk_gb = (0, 0) if here else _machine_sizes(flags, learner, model, len(islands))
    return Launch(
        name=name,
        islands=join_islands(islands),
        model=_named(model),
        data=_named(flags.data),
        output=output,
        eval_data=None if flags.eval_data is None else _named(flags.eval_data),
        chat_template=None if flags.chat_template is None else _named(flags.chat_template),
        task=learner.task,
        quorum=core.quorum,
        syncer_words=(f"--total-steps={total_steps}", *to_words(syncer)),
        learner_words=(*([] if alpha is None else [f"--merge-alpha={alpha}"]), *to_words(learner)),
        export_words=(
            *([] if learner.model_revision is None else [f"--model-revision={learner.model_revision}"]),
            *(["--trust-remote-code"] if learner.trust_remote_code else []),
            *([] if flags.verify else ["--no-verify"]),
        ),
        on_demand=_on_demand(flags.on_demand, len(islands), here=here),
        mirror=_mirror(flags.mirror, output, here=here),
        head_infra=_head_infra(flags.head_infra, here=here),
        head_memory_gb=memory_gb,
        disk_gb=disk_gb,
        torch_threads=_threads(islands) if here else None,
    )


def _on_demand(text: str | None, islands: int, *, here: bool) -> tuple[int, ...]:
    """Return the numbers of the islands that --on-demand names."""
    if text is None:
        return ()
    if here:
        raise ConfigError("--on-demand: local: islands are not rented")
    if text == "all":
        return tuple(range(islands))
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,3}", word) and int(word) < islands for word in words):
        raise ConfigError(
            f"--on-demand {text}: say all, or numbers of islands from 0 to {islands - 1}, such as 0,2"
        )
    return tuple(sorted({int(word) for word in words}))


def _made_up(model: str) -> str:
    """Return a name for a run: letters of the model's, and four that make it the only one."""
    letters = "".join(letter for letter in Path(model).name.lower() if letter.isascii() and letter.isalnum())
    return f"{(letters.lstrip('0123456789') or 'run')[:16]}-{secrets.token_hex(2)}"


def _output(text: str, *, here: bool) -> str:
    if is_remote(text):
        return text
    if not here:
        raise ConfigError(
            f"--output {text}: a folder of this machine, which a rented head cannot reach; "
            "name a URI such as s3://bucket/run"
        )
    path = Path(text.removeprefix("file://")).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"--output {text} is there and not empty; name another folder or remove it")
    return str(path)


def _mirror(text: str | None, output: str, *, here: bool) -> str | None:
    if text is None:
        return None if here else f"{output.rstrip('/')}/mirror"
    if is_remote(text):
        return text
    if not here:
        raise ConfigError(
            f"--mirror {text}: a folder of this machine, which a rented head cannot reach; "
            "name a URI such as s3://bucket/mirror"
        )
    return str(Path(text.removeprefix("file://")).expanduser().absolute())


def _head_infra(text: str | None, *, here: bool) -> str | None:
    if text is not None and here:
        raise ConfigError(f"--head-infra {text}: with local: islands the head is on this machine")
    if text is not None and text.partition("/")[0] not in CLOUDS:
        raise ConfigError(f"--head-infra {text}: cloud or cloud/region; known clouds are {', '.join(CLOUDS)}")
    return text


def _named(text: str) -> str:
    """Return an input as every process of the run can find it: absolute, if it is of this machine."""
    path = local_path(text)
    return text if path is None else str(path)


def _require_files(flags: LaunchFlags) -> None:
    """Refuse a path of this machine that is not there; what may be an id is for its reader to find."""
    for flag, value in (("--model", flags.model), ("--data", flags.data), ("--eval-data", flags.eval_data)):
        if value is not None and value.startswith((".", "/", "~")) and local_path(value) is None:
            raise ConfigError(f"{flag} {value}: no such file or folder")
    if flags.chat_template is not None and local_path(flags.chat_template) is None:
        raise ConfigError(f"--chat-template {flags.chat_template}: no such file")


def _machine_sizes(flags: LaunchFlags, learner: Any, model: str, islands: int) -> tuple[int, int]:
    """Return memory of the head and disk of every machine, in GB."""
    from yeto.fleet.memory import Training
    from yeto.fleet.models import model_size

    memory, disk = flags.head_memory_gb, flags.disk_gb
    if memory is None or disk is None:
        try:
            size = model_size(model, weights_gb=flags.weights_gb)
        except ConfigError as error:
            raise ConfigError(f"{error}; or give --head-memory-gb and --disk-gb") from None
        syncer = Training(model=size, tuning=learner.tuning, lora_r=learner.lora_r).head_memory_gb(islands)
        # The export holds the model once; the disk what is downloaded, beside what is made of it.
        export = size.weights_gb * 1.25 if flags.verify else 0.0
        memory = memory or max(HEAD_MEMORY_GB_MIN, math.ceil(max(syncer, export)) + 8)
        disk = disk or max(DISK_GB_MIN, math.ceil(size.weights_gb * 2.5) + 100)
    return memory, disk


def _threads(islands: tuple[Island, ...]) -> int:
    return max(1, (os.cpu_count() or 1) // sum(island.ranks for island in islands))
