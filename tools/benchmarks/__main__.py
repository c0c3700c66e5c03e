"""``tools/bench``: chooses a benchmark and its sizes, prints what it found.

Each benchmark is imported when it is run: some need torch, and the memory of others must not hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators

from benchmarks.figures import Report, as_json, machine, print_machine, print_table
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

app = App(name="tools/bench", help=HELP, help_format="plaintext", version_flags=[])


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


def _merge(quick: bool, repeats: int | None = None, elements: int | None = None) -> Report:
    from benchmarks import merge

    chosen = _pick(elements, quick, MIB // 4, 64 * MIB)
    return merge.measure(repeats=_pick(repeats, quick, 2, 3), elements=chosen, growth_elements=chosen // 16)


def _wire(quick: bool, repeats: int | None = None, mib: int | None = None, streams: int = 4) -> Report:
    from benchmarks import wire

    return wire.measure(
        repeats=_pick(repeats, quick, 2, 9), size=_pick(mib, quick, 8, 256) * MIB, num_streams=streams
    )


def _checkpoint(
    quick: bool, repeats: int | None = None, elements: int | None = None, folder: Path = Path("runs")
) -> Report:
    from benchmarks import checkpoint

    return checkpoint.measure(
        repeats=_pick(repeats, quick, 2, 9), elements=_pick(elements, quick, MIB // 4, 8 * MIB), folder=folder
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
) -> None:
    """Wire: push and broadcast between two processes over loopback, beside a bare receiver."""
    _show(as_document, partial(_wire, quick, repeats, mib, streams))


@app.command(name="checkpoint")
def checkpoint_command(
    *,
    quick: Quick = False,
    as_document: Json = False,
    repeats: Repeats = None,
    elements: Elements = None,
    folder: Folder = Path("runs"),
) -> None:
    """Checkpoint: one changed fragment made durable, beside a plain write and fsync."""
    _show(as_document, partial(_checkpoint, quick, repeats, elements, folder))


@app.command(name="all")
def all_command(*, quick: Quick = False, as_document: Json = False) -> None:
    """All of them, with their usual sizes."""
    measures: tuple[Callable[..., Report], ...] = (_core, _replay, _merge, _wire, _checkpoint)
    _show(as_document, *(partial(measure, quick) for measure in measures))


if __name__ == "__main__":
    app()
