"""The flags of ``tools/compare_diloco.py``, and what becomes of them."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import attrs
import trio
from attrs import frozen
from breaking import until_interrupted
from cyclopts import CycloptsError, Group, Parameter

from comparing.campaign import Campaign, Run, plan
from comparing.plots import AVAILABLE, draw
from comparing.processes import prepare
from comparing.recipe import Recipe
from comparing.report import report
from comparing.results import Folder, replace_text, write_json
from comparing.settings import LEARNER, SYNCER, Arm, chosen
from comparing.summary import summarise
from yeto import __version__
from yeto.cli.help import house_app
from yeto.cli.passing import flags_without
from yeto.cli.run_learner import LearnerFlags
from yeto.cli.usage import refuse_what_would_be_changed, refused
from yeto.errors import EXIT_INTERRUPTED, ConfigError, YetoError

FIXTURES = Path(__file__).parents[2] / "fixtures"

HELP = """Does it train as well as one synchronous group? Runs both, on this machine, and compares.

Every arm is a real syncer with real learners as processes of their own, ended by the learner budget; its \
baseline is one synchronous group of as many devices on the same rows in the same order. What is scored is \
what the syncer's checkpoint exports to. docs/LM_BENCHMARK.md says how to read what comes out.
"""

_THIS = Group("This comparison", sort_key=-1)

# Decided by the arm, by the run, or by this command with a default of its own.
LEFT_OUT = {
    *("syncer", "learner_id", "num_learners", "output_dir", "max_local_steps", "eval_every", "log_jsonl"),
    *("tensorboard", "wandb", "state_dir", "state_every", "seed", "learner_budget_steps", "give_up_after"),
    *("auth_key_file", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "no_manifest", "profile"),
    *("model", "data", "eval_data", "eval_rows", "seq_len", "micro_batch_size", "torch_threads", "inner_lr"),
    *("data_shard", "tokenize", "stream_workers", "rank_timeout", "shard", "compile", "wan_streams"),
    *(flag.replace("-", "_") for flag in LEARNER),
    *("q4_error_feedback", "mask_report"),
}
RecipePart: Any = flags_without(LearnerFlags, LEFT_OUT, name="RecipePart", group="Recipe of both sides")


@Parameter(name="*", group=_THIS)
@frozen(kw_only=True)
class CompareFlags:
    """What is compared, and where."""

    settings: Annotated[
        str,
        Parameter(
            help=(
                "all, or arms separated by commas; NAME@KEY=VALUE,KEY=VALUE changes one: m2@H=2, "
                "direct@M=4,H=16. Keys: M, G, H, P, alpha, tau, slow (the last learner's steps take so many "
                "times as long), and every flag of the syncer's policy or the learners' exchange."
            )
        ),
    ] = "all"
    set: Annotated[
        tuple[str, ...], Parameter(help="KEY=VALUE for all arms; may be given again.", negative=())
    ] = ()
    seeds: str = "17,29,43"
    """Roots of chance, separated by commas; each is one pair with its baseline."""
    token_budget: int = 98_304
    """Raw tokens of a run, all devices together."""
    output_dir: Path = Path("compare-run")
    """Folder of the comparison: config.json, results.jsonl, summary.json, report.md, plots, runs/."""
    resume: Annotated[bool, Parameter(negative=())] = False
    """Go on in --output-dir; what is finished is not repeated."""
    dry_run: Annotated[bool, Parameter(negative=())] = False
    """Say what would be run, and run nothing."""
    jobs: int = 1
    """Runs side by side; each has as many processes as devices."""
    before_finish: Annotated[bool, Parameter(negative=())] = False
    """Score the checkpoint of the cut-off, too: what an arm was worth before its last merges."""
    model: str = str(FIXTURES / "tiny-llama")
    """Model folder, or Hugging Face id."""
    train_data: str = str(FIXTURES / "chat" / "train.jsonl")
    """Rows to train on; any source of yeto run --role learner."""
    eval_data: str = str(FIXTURES / "chat" / "heldout.jsonl")
    """Held-out rows."""
    eval_rows: int = 64
    """At most so many of them are scored."""
    seq_len: int = 512
    """Tokens of one packed block."""
    micro_batch_size: int = 1
    """Blocks of one forward pass of one device."""
    inner_lr: float = 3e-3
    """AdamW's learning rate, on both sides."""
    torch_threads: int = 1
    """Threads of each device's process."""


def compare_command(
    flags: CompareFlags = CompareFlags(),
    *,
    recipe: Annotated[RecipePart, Parameter(name="*")] = RecipePart(),  # noqa: B008 - frozen
) -> int:
    """Compare; exit codes: 0 done, 1 a run failed or is invalid, 2 wrong usage, 130 interrupted."""
    arms, seeds = chosen(flags.settings, flags.set), _seeds(flags.seeds)
    both = _recipe(flags, recipe)
    if flags.jobs < 1:
        raise ConfigError(f"--jobs {flags.jobs}: need at least 1")
    both.check(arms)
    runs = plan(arms, seeds)
    if flags.dry_run:
        return _tell(runs, both)
    both.require_sources()
    folder = Folder(flags.output_dir)
    config = _config(both, arms, seeds)
    done = {result.key: result for result in folder.begin(config, resume=flags.resume)}
    campaign = Campaign(
        recipe=both, folder=folder, runs=runs, done=done, jobs=flags.jobs, before_finish=flags.before_finish
    )
    missing = campaign.missing
    print(f"{len(runs)} runs, {len(runs) - len(missing)} of them finished before", flush=True)
    prepare(flags.model, flags.torch_threads)
    interrupted = bool(missing) and trio.run(until_interrupted, campaign.go)
    summary = _write(folder, config, arms, campaign)
    if interrupted:
        print("interrupted; what is finished is kept: go on with --resume", flush=True)
        return EXIT_INTERRUPTED
    invalid = [f"{line['name']}, {why}" for line in summary["arms"] for why in line["invalid"]]
    for trouble in [*campaign.failures, *(f"INVALID: {why}" for why in invalid)]:
        print(trouble, file=sys.stderr)
    print(f"report: {folder.path / 'report.md'}", flush=True)
    return 1 if campaign.failures or invalid else 0


def _recipe(flags: CompareFlags, part: Any) -> Recipe:
    if flags.token_budget < 1:
        raise ConfigError(f"--token-budget {flags.token_budget}: need at least 1")
    given = {item.name: getattr(part, item.name) for item in attrs.fields(RecipePart)}
    return Recipe(
        flags=LearnerFlags(
            syncer="none",
            model=flags.model,
            data=flags.train_data,
            eval_data=flags.eval_data,
            eval_rows=flags.eval_rows,
            seq_len=flags.seq_len,
            micro_batch_size=flags.micro_batch_size,
            inner_lr=flags.inner_lr,
            torch_threads=flags.torch_threads,
            # One stream: with several, which rows come next would depend on how many there are.
            stream_workers=0,
            **given,
        ),
        token_budget=flags.token_budget,
    )


def _seeds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words) or len(set(words)) < len(words):
        raise ConfigError(f"--seeds {text}: need different whole numbers, separated by commas")
    return [int(word) for word in words]


def _config(recipe: Recipe, arms: Sequence[Arm], seeds: Sequence[int]) -> dict[str, Any]:
    return {
        "recipe": recipe.to_json(),
        "seeds": list(seeds),
        "arms": {
            arm.name: {
                "what": arm.what,
                "learners": arm.learners,
                "ranks": arm.ranks,
                "slow": arm.slow,
                "steps": recipe.steps(arm.learners * arm.ranks),
                "syncer": [f"--{flag}={value}" for flag, value in arm.syncer_flags().items()],
                "learner": [f"--{flag}={value}" for flag, value in arm.learner_flags().items()],
            }
            for arm in arms
        },
        "machine": {
            "yeto": __version__,
            "torch": version("torch"),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cores": os.cpu_count(),
        },
    }


def _tell(runs: Sequence[Run], recipe: Recipe) -> int:
    for run in runs:
        if run.seed is None:
            print(f"{run.title}: scored as it is")
            continue
        words = f"{run.title}: {run.devices} devices, {recipe.steps(run.devices)} steps each"
        if run.arm is not None:
            own = {**run.arm.syncer, **run.arm.learner}
            same = {**SYNCER, **LEARNER}
            changes = [f"--{flag} {value}" for flag, value in own.items() if same.get(flag) != value]
            words += f"; {' '.join(changes) or 'base settings'}"
        print(words)
    print(f"{len(runs)} runs")
    return 0


def _write(folder: Folder, config: dict[str, Any], arms: Sequence[Arm], campaign: Campaign) -> dict[str, Any]:
    results = list(campaign.done.values())
    summary = summarise(results, arms)
    write_json(folder.path / "summary.json", summary)
    replace_text(folder.path / "report.md", report(config, summary, campaign.failures))
    if AVAILABLE:
        draw(summary, results, folder.path)
    else:
        print("no plots without matplotlib: pip install 'yeto[plot]'", file=sys.stderr)
    return summary


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    app = house_app("tools/compare_diloco.py", help=HELP, version_flags=[], help_epilogue=None)
    app.default(compare_command)
    app.config = [refuse_what_would_be_changed]
    try:
        result = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return refused("tools/compare_diloco.py", error)
    except YetoError as error:
        print(f"compare_diloco: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(
            f"compare_diloco: {error}; once that is mended, go on with --resume: what is finished is kept",
            file=sys.stderr,
        )
        return 1
    return int(result or 0)
