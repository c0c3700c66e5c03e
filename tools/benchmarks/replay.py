"""Reading a tape: records a second, and whether memory stays flat however long it is.

*Verified replay* reads a line strictly, folds an event through the rules, and compares each decision with the
one the rules give. *Reading and folding* is what a summary or a live view does: the same strict reading, no
rules. The peer parses the same lines as JSON and throws them away, which whoever reads JSON lines in Python
cannot beat.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.core import ordinary_run
from benchmarks.figures import Report, Target, figure_of
from benchmarks.timing import cpu_clock, in_child, peak_bytes, rates, take_turns
from yeto import __version__
from yeto.tape import Header, Summary, TapeWriter, read, replay

VERIFIED = Target(sense="at least", number=30_000, of="value")
FOLDED = Target(sense="at least", number=100_000, of="value")
FLAT = Target(sense="at most", number=1.05, of="ratio")
"""Ten times the records; what is held for each of them, were it 10 bytes, would show."""

FLUSH_RECORDS = 10_000


def write_tape(path: Path, num_records: int) -> None:
    """Write a tape of an ordinary run with about so many records."""
    fleet = ordinary_run()
    header = Header(
        software_version=__version__,
        wall_clock="2026-01-01T00:00:00+00:00",
        session_id="bench",
        config=fleet.config,
    )
    with TapeWriter.create(path, header) as tape:
        for _, event, decisions in fleet.run():
            seq = tape.append_event(event)
            tape.append_decisions(decisions, because=seq, at=event.at)
            if tape.next_seq - tape.durable_seq > FLUSH_RECORDS:
                tape.flush()
            if tape.next_seq >= num_records:
                return


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
    """Measure reading and verifying.

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
        verified, folded, parsed = take_turns(
            repeats,
            partial(verify, path),
            partial(summarise, path),
            partial(parse, path),
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
