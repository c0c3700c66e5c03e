"""``tools/bench``: chooses a benchmark and its sizes, prints what it found.

Each benchmark is imported when it is run: some need torch, and the memory of others must not hold it.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import CycloptsError, Parameter, validators

from benchmarks.figures import Report, as_json, machine, print_machine, print_table
from yeto.cli.help import house_app
from yeto.cli.usage import refused
from yeto.wire.frames import WAN_STREAMS_MAX

HELP = """Measure how fast Yeto's parts are, each beside a limit or a bare peer
that is measured in the same run, in turn with it.

A figure is the median of several samples, a ratio the median of the ratios
of neighbours. docs/BENCHMARKS.md says what each means and what it should be.

    tools/bench core            one part, at its usual size
    tools/bench merge --quick   small sizes, a few seconds; the figures mean little
    tools/bench all --json      every part, for a program to read
"""

AT_LEAST_ONE = validators.Number(gte=1)

Quick = Annotated[bool, Parameter(negative=(), help="Small sizes, a few seconds; the figures mean little.")]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON instead of a table.")]
Repeats = Annotated[
    int | None,
    Parameter(validator=AT_LEAST_ONE, help="Samples of each figure (as a rule 3 to 9; with --quick 2)."),
]
Elements = Annotated[
    int | None, Parameter(validator=validators.Number(gte=1024), help="Elements of the fragment.")
]
Folder = Annotated[Path, Parameter(help="Where to write: a folder on the disk to be measured.")]

MIB = 1 << 20

app = house_app("tools/bench", help=HELP, version_flags=[], help_epilogue=None)


def _pick(chosen: int | None, quick: bool, small: int, usual: int) -> int:
    if chosen is not None:
        return chosen
    return small if quick else usual


def _core(quick: bool, repeats: int | None = None, events: int | None = None) -> Report:
    from benchmarks import core

    return core.measure(
        repeats=_pick(repeats, quick, 2, 7),
        num_events=_pick(events, quick, 2_000, 40_000),
        members=(25, 50, 100, 200) if quick else core.MEMBERS,
    )


def _replay(quick: bool, repeats: int | None = None, records: int | None = None) -> Report:
    from benchmarks import replay

    return replay.measure(repeats=_pick(repeats, quick, 2, 5), num_records=_pick(records, quick, 500, 10_000))


def _sim(quick: bool, repeats: int | None = None, hours: float | None = None) -> Report:
    from benchmarks import sim

    usual = 0.02 if quick else 0.5
    return sim.measure(repeats=_pick(repeats, quick, 2, 3), hours=usual if hours is None else hours)


def _merge(quick: bool, repeats: int | None = None, elements: int | None = None) -> Report:
    from benchmarks import merge

    chosen = _pick(elements, quick, MIB // 4, 64 * MIB)
    return merge.measure(repeats=_pick(repeats, quick, 2, 5), elements=chosen, growth_elements=chosen // 16)


def _wire(
    quick: bool,
    repeats: int | None = None,
    mib: int | None = None,
    streams: int = 4,
    learners: int | None = None,
) -> Report:
    from benchmarks import wire

    return wire.measure(
        repeats=_pick(repeats, quick, 2, 9),
        size=_pick(mib, quick, 8, 256) * MIB,
        num_streams=streams,
        elements=MIB // 4 if quick else 16 * MIB,
        learners=_pick(learners, quick, 6, 200),
        rounds=8 if quick else 60,
    )


def _http(
    quick: bool, repeats: int | None = None, learners: int | None = None, rounds: int | None = None
) -> Report:
    from benchmarks import http

    return http.measure(
        repeats=_pick(repeats, quick, 2, 5),
        learners=_pick(learners, quick, 2, 8),
        rounds=_pick(rounds, quick, 40, 800),
    )


def _checkpoint(
    quick: bool, repeats: int | None = None, elements: int | None = None, folder: Path = Path("runs")
) -> Report:
    from benchmarks import checkpoint

    return checkpoint.measure(
        repeats=_pick(repeats, quick, 2, 9),
        elements=_pick(elements, quick, MIB // 4, 8 * MIB),
        folder=folder,
        runs=1 if quick else 3,
        rounds=2 if quick else 16,
        free_rounds=4 if quick else 40,
    )


def _svd(
    quick: bool,
    repeats: int | None = None,
    devices: str = "cpu:0,cpu:1",
    jobs: int | None = None,
    side: int | None = None,
    mib: int | None = None,
) -> Report:
    from benchmarks import svd
    from yeto.syncer.svd_settings import parse_devices

    return svd.measure(
        repeats=_pick(repeats, quick, 2, 7),
        devices=parse_devices(devices),
        jobs=_pick(jobs, quick, 4, 16),
        side=_pick(side, quick, 32, 384),
        size=_pick(mib, quick, 1, 64) * MIB,
    )


def _data(
    quick: bool,
    repeats: int | None = None,
    rows: int | None = None,
    mib: int | None = None,
    model: Path | None = None,
    data: Path | None = None,
) -> Report:
    from benchmarks import data as benchmark

    return benchmark.measure(
        repeats=_pick(repeats, quick, 2, 5),
        rows=_pick(rows, quick, 200, 9_000),
        small=(1 if quick else 10) * MIB,
        large=_pick(mib, quick, 4, 1_000) * MIB,
        model=model,
        data=data,
    )


def _learner(
    quick: bool,
    repeats: int | None = None,
    steps: int | None = None,
    boundaries: int | None = None,
    model: Path | None = None,
) -> Report:
    from benchmarks import learner

    return learner.measure(
        repeats=_pick(repeats, quick, 2, 10),
        # A model that somebody brings is larger; 18 counted steps still have six merges among them.
        steps=_pick(steps, quick, 8, 60 if model is None else 21),
        boundaries=_pick(boundaries, quick, 400, 10_000),
        model=model,
    )


def _peers(
    quick: bool,
    repeats: int | None = None,
    elements: int | None = None,
    folder: Path = Path("runs"),
    flower_python: Path | None = None,
) -> Report:
    from benchmarks import outer_peers

    return outer_peers.measure(
        repeats=_pick(repeats, quick, 2, 9),
        learners=(2,) if quick else (2, 4),
        elements=_pick(elements, quick, MIB // 4, 16 * MIB),
        folder=folder,
        flower_python=flower_python,
    )


def _show(as_document: bool, *measures: Callable[[], Report]) -> None:
    at_start = machine()
    if as_document:
        print(as_json([measure() for measure in measures], at_start))
        return
    print_machine(at_start)
    for measure in measures:
        print_table(measure())


@app.command(name="core")
def core_command(
    *,
    quick: Quick = False,
    as_document: Json = False,
    repeats: Repeats = None,
    events: Annotated[
        int | None, Parameter(validator=AT_LEAST_ONE, help="Length of the ordinary stream.")
    ] = None,
) -> None:
    """Coordinator: events a second at 8 learners; seconds for each member of one attempt of 250 to 2,000."""
    _show(as_document, partial(_core, quick, repeats, events))


@app.command(name="replay")
def replay_command(
    *,
    quick: Quick = False,
    as_document: Json = False,
    repeats: Repeats = None,
    records: Annotated[int | None, Parameter(validator=AT_LEAST_ONE, help="Length of the tape.")] = None,
) -> None:
    """Tape: records a second, verified and merely read; peak memory of a tape ten times as long."""
    _show(as_document, partial(_replay, quick, repeats, records))


@app.command(name="sim")
def sim_command(
    *,
    quick: Quick = False,
    as_document: Json = False,
    repeats: Repeats = None,
    hours: Annotated[
        float | None, Parameter(validator=validators.Number(gt=0, lte=24), help="Hours of the day.")
    ] = None,
) -> None:
    """Simulator: seconds for a simulated day of 16 learners, and for thirty days of slower steps."""
    _show(as_document, partial(_sim, quick, repeats, hours))


@app.command(name="merge")
def merge_command(
    *, quick: Quick = False, as_document: Json = False, repeats: Repeats = None, elements: Elements = None
) -> None:
    """Merge: from pushes to the encoded broadcast, beside copying memory; growth with M; peak memory."""
    _show(as_document, partial(_merge, quick, repeats, elements))


@app.command(name="wire")
def wire_command(
    *,
    quick: Quick = False,
    as_document: Json = False,
    repeats: Repeats = None,
    mib: Annotated[
        int | None, Parameter(name="--mib", validator=AT_LEAST_ONE, help="Size of the fragment on the wire.")
    ] = None,
    streams: Annotated[
        int, Parameter(validator=validators.Number(gte=1, lte=WAN_STREAMS_MAX), help="Data streams.")
    ] = 4,
    learners: Annotated[
        int | None, Parameter(validator=validators.Number(gte=2, lte=1000), help="Size of the crowd.")
    ] = None,
) -> None:
    """Wire: push and broadcast beside a bare receiver; codecs; a slow reader; a crowd of learners."""
    _show(as_document, partial(_wire, quick, repeats, mib, streams, learners))


@app.command(name="http")
def http_command(
    *,
    quick: Quick = False,
    as_document: Json = False,
    repeats: Repeats = None,
    learners: Annotated[
        int | None, Parameter(validator=validators.Number(gte=2, lte=1000), help="Learners of a run.")
    ] = None,
    rounds: Annotated[
        int | None, Parameter(validator=validators.Number(gte=8), help="Rounds that are counted.")
    ] = None,
) -> None:
    """Observers: rounds a second of a syncer that is scraped and followed, beside one that is not."""
    _show(as_document, partial(_http, quick, repeats, learners, rounds))


@app.command(name="checkpoint")
def checkpoint_command(
    *,
    quick: Quick = False,
    as_document: Json = False,
    repeats: Repeats = None,
    elements: Elements = None,
    folder: Folder = Path("runs"),
) -> None:
    """Checkpoint: one fragment made durable, beside a plain write; rounds with it, beside rounds without."""
    _show(as_document, partial(_checkpoint, quick, repeats, elements, folder))


@app.command(name="svd")
def svd_command(
    *,
    quick: Quick = False,
    as_document: Json = False,
    repeats: Repeats = None,
    devices: Annotated[str, Parameter(help="Of the workers, as for --iso-worker-devices.")] = "cpu:0,cpu:1",
    jobs: Annotated[int | None, Parameter(validator=AT_LEAST_ONE, help="Matrices of a sample.")] = None,
    side: Annotated[int | None, Parameter(validator=AT_LEAST_ONE, help="Columns of a matrix.")] = None,
    mib: Annotated[
        int | None, Parameter(name="--mib", validator=AT_LEAST_ONE, help="Size of the matrix in the pipes.")
    ] = None,
) -> None:
    """SVD pool: matrices a second, beside this process; what goes through the pipes, beside bare ones."""
    _show(as_document, partial(_svd, quick, repeats, devices, jobs, side, mib))


@app.command(name="data")
def data_command(
    *,
    quick: Quick = False,
    as_document: Json = False,
    repeats: Repeats = None,
    rows: Annotated[int | None, Parameter(validator=AT_LEAST_ONE, help="Rows of one sample.")] = None,
    mib: Annotated[
        int | None,
        Parameter(name="--mib", validator=validators.Number(gte=10), help="Size of the long file."),
    ] = None,
    model: Annotated[Path | None, Parameter(help="Folder with another tokenizer.")] = None,
    data: Annotated[Path | None, Parameter(help="JSONL file with other rows.")] = None,
) -> None:
    """Data: rows into blocks beside the tokenizer alone; the first block and the memory of a long file."""
    _show(as_document, partial(_data, quick, repeats, rows, mib, model, data))


@app.command(name="learner")
def learner_command(
    *,
    quick: Quick = False,
    as_document: Json = False,
    repeats: Repeats = None,
    steps: Annotated[
        int | None, Parameter(validator=validators.Number(gte=5), help="Optimizer steps of one run.")
    ] = None,
    boundaries: Annotated[
        int | None, Parameter(validator=validators.Number(gte=2), help="Boundaries while memory is watched.")
    ] = None,
    model: Annotated[Path | None, Parameter(help="Folder with another model.")] = None,
) -> None:
    """Learner: a step with a syncer beside one without; the boundary; memory over many boundaries."""
    _show(as_document, partial(_learner, quick, repeats, steps, boundaries, model))


@app.command(name="peers")
def peers_command(
    *,
    quick: Quick = False,
    as_document: Json = False,
    repeats: Repeats = None,
    elements: Annotated[
        int | None, Parameter(validator=validators.Number(gte=1024), help="Elements of the whole model.")
    ] = None,
    folder: Folder = Path("runs"),
    flower_python: Annotated[
        Path | None, Parameter(help="Python of an environment that has Flower (pip install flwr).")
    ] = None,
) -> None:
    """Peers: an outer round of a whole run, beside an all-reduce of gloo and, if there is one, Flower."""
    _show(as_document, partial(_peers, quick, repeats, elements, folder, flower_python))


@app.command(name="all")
def all_command(*, quick: Quick = False, as_document: Json = False) -> None:
    """All of them, with their usual sizes."""
    measures: tuple[Callable[..., Report], ...] = (
        _core,
        _replay,
        _sim,
        _merge,
        _svd,
        _wire,
        _http,
        _checkpoint,
        _data,
        _learner,
        _peers,
    )
    _show(as_document, *(partial(measure, quick) for measure in measures))


def main() -> None:
    """Run the command; whoever ends it, by Ctrl-C or SIGTERM, ends the processes it started with it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        app(sys.argv[1:], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        sys.exit(refused("tools/bench", error))


if __name__ == "__main__":
    main()
