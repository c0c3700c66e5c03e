"""Reading and writing a tape: records a second, and whether memory stays flat however long it is.

*Verified replay* reads a line strictly, folds an event through the rules, and compares each decision with the
one the rules give. *Reading and folding* is what a summary does: the same strict reading, no rules. The peer
parses the same lines with ``json.loads`` and throws the result away.

*Showing* is what ``yeto status`` and a report do before they show anything: the fold to the present moment
and to the history, which reads only what it uses. It is told also as the time that 100,000 rounds take.

*Writing* is what the syncer's pump does: events and decisions that are there become lines in a file. Its peer
renders the same records from dictionaries with ``json.dumps`` and throws the lines away.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.core import ordinary_run
from benchmarks.figures import Report, Target, figure_of
from benchmarks.timing import cpu_clock, in_child, peak_bytes, rates, take_turns
from yeto import __version__
from yeto.core.decisions import Decision
from yeto.core.events import Event
from yeto.tape import Header, Summary, TapeWriter, read, replay
from yeto.view.follow import Watcher

VERIFIED = Target(sense="at least", number=30_000, of="value")
FOLDED = Target(sense="at least", number=100_000, of="value")
WRITTEN = Target(sense="at least", number=150_000, of="value")
SHOWN = Target(sense="at most", number=30, of="value")
SHOWN_ROUNDS = 100_000
FLAT = Target(sense="at most", number=1.05, of="ratio")
"""Ten times the records; what is held for each of them, were it 10 bytes, would show."""

FLUSH_RECORDS = 10_000

Told = list[tuple[Event, list[Decision]]]
"""Events, each with what was decided because of it."""


def write_tape(path: Path, num_records: int) -> None:
    """Write a tape of an ordinary run with about so many records."""
    with TapeWriter.create(path, _header()) as tape:
        for _, event, decisions in ordinary_run().run():
            _append(tape, event, decisions)
            if tape.next_seq >= num_records:
                return


def _header() -> Header:
    return Header(
        software_version=__version__,
        wall_clock="2026-01-01T00:00:00+00:00",
        session_id="bench",
        config=ordinary_run().config,
    )


def _append(tape: TapeWriter, event: Event, decisions: Sequence[Decision]) -> None:
    seq = tape.append_event(event)
    tape.append_decisions(decisions, because=seq, at=event.at)
    if tape.next_seq - tape.durable_seq > FLUSH_RECORDS:
        tape.flush()


def told_by(path: Path) -> Told:
    """Read all events of a tape, each with its decisions."""
    told: Told = []
    for record in read(path):
        body = record.body
        if isinstance(body, Event):
            told.append((body, []))
        elif isinstance(body, Decision):
            told[-1][1].append(body)
    return told


def write(path: Path, told: Told) -> None:
    """Write a tape of what was told, then remove it."""
    with TapeWriter.create(path, _header()) as tape:
        for event, decisions in told:
            _append(tape, event, decisions)
    path.unlink()


def render(objects: Sequence[object]) -> None:
    """Render every object as JSON."""
    for value in objects:
        json.dumps(value)


def verify(path: Path) -> int:
    """Replay a tape; return its number of records."""
    result = replay(path)
    assert result.divergence is None, "the rules differ from themselves"
    return result.records


def summarise(path: Path) -> int:
    """Read a tape and fold it into a summary; return its number of records."""
    summary = Summary()
    for record in read(path):
        summary.feed(record)
    return summary.records


def show(path: Path) -> int:
    """Fold a tape to what a report shows; return its number of rounds."""
    watcher = Watcher(path, history=True)
    watcher.look()
    assert watcher.moment() is not None, "the tape has a header"
    return watcher.board.shadow.step


def parse(path: Path) -> int:
    """Parse every line of a tape as JSON; return how many there are."""
    lines = 0
    with path.open("rb") as file:
        for line in file:
            json.loads(line)
            lines += 1
    return lines


def peak_of_verify(path: Path) -> int:
    """Replay a tape; return the most bytes this process ever had resident."""
    verify(path)
    return peak_bytes()


def measure(*, repeats: int, num_records: int) -> Report:
    """Measure reading, verifying and writing.

    Args:
        repeats: samples of each figure.
        num_records: length of the tape; the memory figure takes ten times as many as well.
    """
    with TemporaryDirectory(prefix="yeto-bench-") as folder:
        path, long_path = Path(folder, "events.jsonl"), Path(folder, "long.jsonl")
        write_tape(long_path, 10 * num_records)
        with long_path.open("rb") as long_tape:
            # The beginning of a tape is a tape.
            path.write_bytes(b"".join(islice(long_tape, num_records)))
        records = parse(path)
        told, objects = told_by(path), [json.loads(line) for line in path.read_bytes().splitlines()]
        # Of a short run it would be the beginning that is measured: columns get cheaper as they get wider.
        rounds = show(long_path)
        verified, folded, shown, parsed, written, rendered = take_turns(
            repeats,
            partial(verify, path),
            partial(summarise, path),
            partial(show, long_path),
            partial(parse, path),
            partial(write, Path(folder, "written.jsonl"), told),
            partial(render, objects),
            clock=cpu_clock,
        )
        peaks = [in_child(peak_of_verify, each) / 2**20 for each in (long_path, path)]
        line_bytes = path.stat().st_size / records
    parse_rates = rates(records, parsed)
    return Report(
        benchmark="replay",
        what="a tape of an ordinary run, one thread, CPU seconds; memory of a process that does only this",
        settings={"records": records, "bytes_per_record": round(line_bytes), "repeats": repeats},
        figures=(
            figure_of(
                "verified_records_per_second",
                "verified replay",
                "records/s",
                rates(records, verified),
                peer="json.loads of the lines",
                peer_values=parse_rates,
                target=VERIFIED,
            ),
            figure_of(
                "folded_records_per_second",
                "reading and folding",
                "records/s",
                rates(records, folded),
                peer="json.loads of the lines",
                peer_values=parse_rates,
                target=FOLDED,
            ),
            figure_of(
                "shown_records_per_second",
                "showing",
                "records/s",
                rates(10 * num_records, shown),
                peer="json.loads of the lines",
                peer_values=parse_rates,
            ),
            figure_of(
                "seconds_to_show_100000_rounds",
                "showing 100,000 such rounds",
                "s",
                [seconds / rounds * SHOWN_ROUNDS for seconds in shown],
                target=SHOWN,
            ),
            figure_of(
                "written_records_per_second",
                "writing",
                "records/s",
                rates(records, written),
                peer="json.dumps of the records",
                peer_values=rates(records, rendered),
                target=WRITTEN,
            ),
            figure_of(
                "peak_mib_of_ten_times_the_records",
                "peak memory, 10 times the records",
                "MiB",
                peaks[:1],
                peer=f"{records:,} records",
                peer_values=peaks[1:],
                target=FLAT,
            ),
        ),
    )
