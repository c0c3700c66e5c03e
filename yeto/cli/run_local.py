"""``yeto run --role local``: a training on this machine from rows to a verified, scored result."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
from attrs import frozen
from cyclopts import Group, Parameter

from yeto.cli.common import sigterm_unwinds
from yeto.cli.fitting import fitting_merge_alpha, fitting_outer
from yeto.cli.length import steps_of_run
from yeto.cli.passing import flags_without, to_words
from yeto.cli.quiet import silence_libraries
from yeto.cli.run_learner import LearnerFlags
from yeto.cli.run_syncer import SyncerFlags
from yeto.errors import EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError, ReplayDivergence
from yeto.fleet.local import READY_SECONDS, LocalRun, hold_folder

if TYPE_CHECKING:
    from yeto.core.config import CoreConfig
    from yeto.text.config import TextConfig

_LOCAL = Group("This run", sort_key=-1)

# What this command decides itself, because all parts are on one machine and in one folder.
SYNCER_LEFT_OUT = {
    *("learners", "total_steps", "host", "port", "ready_file", "checkpoint_path", "event_tape"),
    *("resume", "resume_or_start", "auth_key_file", "allow_unauthenticated", "require_profile_binding"),
    *("learner_budget_steps", "budget_finish", "tls_cert", "tls_key", "tls_client_ca"),
}
LEARNER_LEFT_OUT = {
    *("syncer", "learner_id", "num_learners", "output_dir", "log_jsonl", "model", "data", "eval_data"),
    *("auth_key_file", "no_manifest", "profile", "learner_budget_steps", "max_local_steps", "torch_threads"),
    *("tls_ca", "tls_cert", "tls_key", "tls_server_name", "state_dir", "shard", "rank_timeout"),
    "check",
    *("merge_alpha", "task", "height", "width", "resize_mode", "diffusion_loss_weighting"),
    # Falling rates need a last local step, which a run with a syncer leaves open.
    "lr_schedule",
}

SyncerPart: Any = flags_without(SyncerFlags, SYNCER_LEFT_OUT, name="SyncerPart", group="Syncer")
LearnerPart: Any = flags_without(LearnerFlags, LEARNER_LEFT_OUT, name="LearnerPart", group="Learner")


@Parameter(name="*", group=_LOCAL)
@frozen(kw_only=True)
class LocalFlags:
    """What is special to a run on one machine."""

    learners: int = 2
    """How many learners to start (M)."""
    model: str
    """Hugging Face id, or a local model folder."""
    data: str
    """Rows to train on: a data set id, a jsonl, json or parquet file, a folder of them, or a URL."""
    eval_data: str | None = None
    """Held-out rows. Without them the last --eval-rows rows of --data are held out."""
    run_dir: Path = Path("yeto-run")
    """Folder of the run: tape, checkpoint, logs, and the result in adapter/ (full tuning: model/)."""
    resume: Annotated[bool, Parameter(negative=())] = False
    """Go on with the run in --run-dir, from its checkpoint."""
    total_steps: int | None = None
    """Global steps (merges of one fragment) of the run. Default: 8 times --fragments."""
    token_budget: int | None = None
    """Raw tokens to train on, all learners together, instead of --total-steps."""
    epochs: float | None = None
    """Passes over the training rows, instead of --total-steps."""
    torch_threads: int | None = None
    """Threads of each learner. Default: this machine's cores, shared out."""
    merge_alpha: float | Literal["carry"] | None = None
    """What a merge leaves of the local weights; see yeto run --role learner. Default: carry where fragments
    become averages (--outer direct, or auto where it comes to that), else 0.5."""


def run_local_command(
    flags: LocalFlags,
    *,
    syncer: Annotated[SyncerPart, Parameter(name="*")] = SyncerPart(),  # noqa: B008 - frozen
    learner: Annotated[LearnerPart, Parameter(name="*")] = LearnerPart(),  # noqa: B008 - frozen
) -> int:
    """Train on this machine, export, and compare the result with the base model on held-out rows.

    A syncer and its learners are child processes. Ctrl-C stops them in order, with a checkpoint; the same
    command with --resume goes on.
    """
    if flags.learners < 1:
        raise ConfigError(f"--learners {flags.learners}: need at least 1")
    silence_libraries()
    settings = LearnerFlags(
        **{"syncer": "127.0.0.1:1", "model": flags.model, "data": flags.data, "eval_data": flags.eval_data}
        | {field.name: getattr(learner, field.name) for field in attrs.fields(LearnerPart)}
        | {"num_learners": flags.learners}
        | ({} if flags.merge_alpha is None else {"merge_alpha": flags.merge_alpha})
    )
    settings.learner_config()
    text = settings.text_config()
    syncer = attrs.evolve(syncer, outer=fitting_outer(syncer.outer, settings.matrix_merge))
    # The syncer's own checks; only then is anything written.
    policy = (
        SyncerFlags(
            learners=flags.learners,
            total_steps=1 if flags.total_steps is None else flags.total_steps,
            **{field.name: getattr(syncer, field.name) for field in attrs.fields(SyncerPart)},
        )
        .config()
        .core
    )
    # Not at the top: --help, and launches that take these flags, need not wait for it.
    from yeto.text.inputs import check_inputs

    check_inputs(text)
    with hold_folder(flags.run_dir, resume=flags.resume):
        return _run(flags, syncer, learner, settings, text, policy)


def _run(
    flags: LocalFlags,
    syncer: SyncerPart,
    learner: LearnerPart,
    settings: LearnerFlags,
    text: TextConfig,
    policy: CoreConfig,
) -> int:
    """Do what the command is for, in a folder that is held; return its exit code."""
    from yeto.cli.local_show import show_run
    from yeto.text.inputs import hold_out

    if flags.eval_data is None:
        train, heldout = hold_out(text, flags.run_dir / "data")
        print(
            f"held out the last {text.eval_rows} rows of {flags.data}: {heldout}; the others: {train}",
            flush=True,
        )
        # The rows are local files now, whatever --data was.
        text = attrs.evolve(text, data=str(train), eval_data=str(heldout), data_revision=None)
    total_steps = steps_of_run(
        text,
        total_steps=flags.total_steps,
        token_budget=flags.token_budget,
        epochs=flags.epochs,
        fragments=settings.fragments,
        grad_accum=settings.grad_accum,
        ranks=flags.learners,
        interval=syncer.sync_interval_steps,
    )
    learner = attrs.evolve(learner, data_revision=text.data_revision)
    alpha = fitting_merge_alpha(
        flags.merge_alpha, policy, num_fragments=settings.fragments, total_steps=total_steps
    )
    threads = flags.torch_threads or max(1, (os.cpu_count() or 1) // flags.learners)

    def learner_words(learner_id: int) -> list[str]:
        output = run.learner(learner_id)
        return [
            *(f"--model={flags.model}", f"--data={text.data}", f"--eval-data={text.eval_data}"),
            *(f"--output-dir={output}", f"--state-dir={output / 'state'}", f"--torch-threads={threads}"),
            *([] if alpha is None else [f"--merge-alpha={alpha}"]),
            *to_words(learner),
        ]

    run = LocalRun(
        folder=flags.run_dir,
        num_learners=flags.learners,
        resume=flags.resume,
        syncer_words=[f"--learners={flags.learners}", f"--total-steps={total_steps}", *to_words(syncer)],
        learner_words=learner_words,
        show=show_run,
        ready_seconds=READY_SECONDS
        + (syncer.iso_worker_startup_timeout_s if syncer.iso_worker_devices else 0.0),
    )
    print(f"{flags.learners} learners, {total_steps} global steps; everything is in {run.folder}", flush=True)
    if syncer.http_port is not None:
        # With any free port, or a token that was made up, only the syncer can say it.
        print(f"the address of the dashboard is in {run.logs / 'syncer.log'}", flush=True)
    code = run.train()
    if code == EXIT_STOPPED:
        so_far = f" The model so far: {_export(run, text)}" if run.checkpoint.exists() else ""
        print(f"stopped before the end. Go on: the same command with --resume.{so_far}")
        return code
    try:
        with sigterm_unwinds():
            return _finish(run, text)
    except KeyboardInterrupt:
        print(f"interrupted after the end of training. The result: {_export(run, text)}")
        return EXIT_INTERRUPTED


def _result(run: LocalRun, text: Any) -> Path:
    """Return the folder of the exported result."""
    return run.folder / ("adapter" if text.tuning == "lora" else "model")


def _export(run: LocalRun, text: Any) -> str:
    """Return the command that exports what the checkpoint holds."""
    words = ["yeto-export", "--checkpoint", str(run.checkpoint), "--model", text.model]
    return shlex.join([*words, "--output-dir", str(_result(run, text))])


def _finish(run: LocalRun, text: Any) -> int:
    """Export, verify the tape, score; all from what the syncer left, not from the learners."""
    from yeto.cli.local_result import print_scores, score
    from yeto.tape import replay
    from yeto.text.export import export

    result = _result(run, text)
    export(
        run.checkpoint,
        text.model,
        result,
        model_revision=text.model_revision,
        trust_remote_code=text.trust_remote_code,
        overwrite=True,
        say=lambda line: print(line, flush=True),
    )
    verdict = replay(run.tape)
    if verdict.divergence is not None:
        raise ReplayDivergence(f"{run.tape}: {verdict.divergence}")
    print(f"tape: {verdict.records} records, every decision follows from its events")
    print("scoring base and fine-tuned model on the held-out rows", flush=True)
    print_scores(*score(text, result))
    print(f"result      {result}\ncheckpoint  {run.checkpoint}\ntape        {run.tape}")
    return 0
