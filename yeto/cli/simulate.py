"""``yeto simulate``: what settings would do to a fleet, from the coordinator itself and a simulated clock.

Flags become configurations, all of them checked before the first is simulated. What is done when Ctrl-C comes
is printed like a whole sweep.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from attrs import frozen
from cyclopts import Group, Parameter

from yeto.cli.common import sigterm_unwinds
from yeto.cli.simulate_flags import (
    FaultFlags,
    FleetFlags,
    LearnerFlags,
    LengthFlags,
    PolicyPart,
    SyncerMachineFlags,
    WireFlags,
)
from yeto.cli.simulate_setup import NO_END, Setup, read_flag, sweepable
from yeto.errors import EXIT_INTERRUPTED, ConfigError, TapeError
from yeto.sim.config import SimConfig

SIMULATIONS_MAX = 100_000
"""At a time: more of them would run for months, and all are described before the first begins."""


@Parameter(name="*", group=Group("What to simulate, and what to do with it", sort_key=-1))
@frozen(kw_only=True)
class OutputFlags:
    """Seeds, sweeps, and where results go."""

    seed: int = 0
    """What all randomness comes from. The same flags and seed give the same results."""
    seeds: int = 1
    """Simulate so many times, with this seed and the next ones, and show mean and standard deviation."""
    sweep: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(),
            show_default=False,
            help=(
                "A flag and its values: quorum=1,2,4. Any flag below can be swept, but for --learner. Given "
                "several times, every combination is simulated, a line for each. What the columns mean is "
                "printed by a simulation without --sweep."
            ),
        ),
    ] = ()
    jobs: int | None = None
    """Processes that simulate at a time. Default: this machine's cores."""
    event_tape: Path | None = None
    """Write the tape of a single simulation here; yeto replay reads it."""
    csv: Path | None = None
    """Write a line for each combination here, with units in the names of the columns."""
    plot: Path | None = None
    """Draw the sweep here (.svg, .png or .pdf); needs pip install 'yeto[plot]'."""
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False
    """Print JSON on stdout, and nothing else."""
    egress_cost_per_gb: float = 0.09
    """Dollars for a gigabyte. Both ways count: pushes leave the learner's cloud, broadcasts the syncer's."""
    published: Annotated[bool, Parameter(negative=())] = False
    """Compare a model with the published goodput figures instead; exit code 1 when it is off."""


def simulate_command(
    *,
    output: OutputFlags = OutputFlags(),
    length: LengthFlags = LengthFlags(),  # noqa: B008 - frozen
    fleet: FleetFlags = FleetFlags(),  # noqa: B008 - frozen
    learner: LearnerFlags = LearnerFlags(),  # noqa: B008 - frozen
    wire: WireFlags = WireFlags(),  # noqa: B008 - frozen
    policy: PolicyPart = PolicyPart(),  # noqa: B008 - frozen
    syncer: SyncerMachineFlags = SyncerMachineFlags(),  # noqa: B008 - frozen
    faults: FaultFlags = FaultFlags(),  # noqa: B008 - frozen
) -> int:
    """Choose settings before paying: run the coordinator itself against a simulated fleet."""
    setup = Setup(
        length=length, fleet=fleet, learner=learner, wire=wire, policy=policy, syncer=syncer, faults=faults
    )
    if output.published:
        alone = OutputFlags(seed=output.seed, as_json=output.as_json, published=True)
        if output != alone or setup != Setup.default():
            raise ConfigError("--published has models of its own: only --seed and --json go with it")
        from yeto.cli.simulate_published import print_published

        return print_published(output.seed, as_json=output.as_json)
    combinations = _combinations(output.sweep)
    configs = _configs(setup, combinations, output)
    _check(output, len(configs))
    return _simulate(combinations, configs, output)


def _combinations(sweeps: Sequence[str]) -> list[dict[str, str]]:
    """Return every combination of the swept values, the last sweep changing fastest."""
    values: dict[str, list[str]] = {}
    for text in sweeps:
        flag, equals, listed = text.partition("=")
        flag = flag.strip().removeprefix("--")
        if flag not in sweepable():
            raise ConfigError(
                f"--sweep {text}: no flag {flag!r} to sweep; there are {', '.join(sweepable())}"
            )
        if flag in values:
            raise ConfigError(f"--sweep {text}: {flag} is swept already; give all its values at once")
        values[flag] = [value.strip() for value in listed.split(",")]
        if not equals or not all(values[flag]):
            raise ConfigError(f"--sweep {text}: say {flag}=VALUE,VALUE")
        if math.prod(map(len, values.values())) > SIMULATIONS_MAX:
            raise ConfigError(f"--sweep {text}: that makes more than {SIMULATIONS_MAX:,} simulations")
        # 1 and 01, or true and yes, are one value in two spellings.
        if len({read_flag(flag, value) for value in values[flag]}) < len(values[flag]):
            raise ConfigError(f"--sweep {text}: a value is there twice")
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _configs(
    setup: Setup, combinations: Sequence[dict[str, str]], output: OutputFlags
) -> dict[tuple[int, int], SimConfig]:
    """Return what to simulate, by combination and seed; a mistake in the last is found before the first."""
    if output.seeds < 1:
        raise ConfigError(f"--seeds {output.seeds}: need at least 1")
    if output.seeds * len(combinations) > SIMULATIONS_MAX:
        raise ConfigError(f"--seeds {output.seeds}: that makes more than {SIMULATIONS_MAX:,} simulations")
    configs = {}
    for place, combination in enumerate(combinations):
        try:
            changed = setup.replaced(combination)
            for seed in range(output.seed, output.seed + output.seeds):
                configs[place, seed] = changed.config(seed)
        except ConfigError as error:
            if len(combination) < 2 or str(error).startswith("--sweep"):
                raise
            said = " ".join(f"--sweep {flag}={value}" for flag, value in combination.items())
            raise ConfigError(f"{said}: {error}") from error
    return configs


def _check(output: OutputFlags, count: int) -> None:
    """Find what would fail after the simulations before them."""
    if output.jobs is not None and output.jobs < 1:
        raise ConfigError(f"--jobs {output.jobs}: need at least 1")
    if not 0 <= output.egress_cost_per_gb < float("inf"):
        raise ConfigError(f"--egress-cost-per-gb {output.egress_cost_per_gb}: must be finite, not negative")
    if output.event_tape is not None:
        if count > 1:
            raise ConfigError(f"--event-tape is for one simulation; these are {count}")
        if output.event_tape.exists():
            raise ConfigError(f"--event-tape {output.event_tape}: exists already; name another file")
    _check_paths({"--event-tape": output.event_tape, "--csv": output.csv, "--plot": output.plot})
    if output.plot is not None:
        if not output.sweep:
            raise ConfigError("--plot draws a sweep: add --sweep, such as --sweep quorum=1,2,4")
        from yeto.sim.plot import check_plot

        check_plot(output.plot)


def _check_paths(paths: Mapping[str, Path | None]) -> None:
    """Refuse what no file can be written to, and two results for one file."""
    taken: dict[Path, str] = {}
    for flag, path in paths.items():
        if path is None:
            continue
        folder = path.absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {folder}")
        if path.is_dir():
            raise ConfigError(f"{flag} {path}: is a folder; name a file")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"{flag} {path}: there is no permission to write it")
        if path.resolve() in taken:
            raise ConfigError(f"{flag} {path}: {taken[path.resolve()]} writes that file already")
        taken[path.resolve()] = flag


def _simulate(
    combinations: Sequence[dict[str, str]],
    configs: dict[tuple[int, int], SimConfig],
    output: OutputFlags,
) -> int:
    from yeto.cli.simulate_progress import Progress
    from yeto.sim.sweep import Run, run_all

    keys = list(configs)
    runs: dict[tuple[int, int], Run] = {}
    jobs = output.jobs or len(os.sched_getaffinity(0))
    interrupted = False
    try:
        with sigterm_unwinds(), Progress(len(keys)) as progress:
            for index, run in run_all(
                list(configs.values()), jobs=jobs, tape=output.event_tape, tick=progress.tick
            ):
                runs[keys[index]] = run
                progress.done(len(runs))
    except KeyboardInterrupt:
        interrupted = True
    except OSError as error:
        if output.event_tape is None:
            raise
        # The tape is the one file that a simulation writes.
        raise TapeError(f"--event-tape {output.event_tape}: cannot be written: {error.strerror}") from error
    _report(combinations, runs, output)
    ends = [run for run in runs.values() if run.config.core.total_steps != NO_END]
    open_ends = sum(run.result.exit_code is None for run in ends)
    if open_ends:
        print(f"yeto: {open_ends} of {len(ends)} sessions had not ended by then", file=sys.stderr)
    if interrupted:
        print(f"yeto: interrupted: {len(runs)} of {len(keys)} simulations are done", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _report(
    combinations: Sequence[dict[str, str]], runs: dict[tuple[int, int], Any], output: OutputFlags
) -> None:
    """Print and write what is done; nothing when nothing is."""
    from yeto.sim.cases import Case, cases_json, write_csv
    from yeto.sim.table import print_case, print_cases, print_json

    cases = []
    for place, combination in enumerate(combinations):
        done = {seed: run for (of, seed), run in sorted(runs.items()) if of == place}
        if done:
            cases.append(Case(values=combination, runs=done))
    if not cases:
        return
    price = output.egress_cost_per_gb
    if output.as_json:
        print_json(cases_json(cases, price))
    elif output.sweep:
        print_cases(cases, price)
    else:
        print_case(cases[0], price)
    if output.csv is not None:
        write_csv(output.csv, cases, price)
    if output.plot is not None:
        from yeto.sim.plot import plot_cases

        plot_cases(output.plot, cases, price)
