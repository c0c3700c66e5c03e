"""A changed byte in the middle of a tape: whoever reads it names its line.

Lines of format 1 have no checksum: there it is the reader that names the line, or replay the decision that
differs. What remains unnoticed is a fact that no decision follows from, changed into another fact of the same
form; the list below is all there is of that.
"""

import copy
import json
from collections import deque

import pytest

from yeto.core.decisions import DECISIONS
from yeto.core.events import EVENTS
from yeto.errors import TapeError
from yeto.tape import (
    EVERYTHING,
    Decoder,
    Replayer,
    Skimmer,
    TapeWriter,
    read,
    replay,
)
from yeto.view.follow import WANTED, Watcher
from yeto.view.sources import tell_story

RECORDS = 60
"""Enough for a record of every kind that a round makes."""
NOTHING_FOLLOWS = {
    ("header", "at"),
    ("header", "config"),
    ("header", "session_id"),
    ("header", "software_version"),
    ("header", "wall_clock"),
    ("hello_received", "address"),
    ("fragment_initialised", "at"),
    ("fragment_initialised", "digest"),
    ("learner_joined", "at"),
    ("push_offered", "local_step"),  # a report behind these records would tell
    ("push_offered", "payload_bytes"),
    ("push_received", "digest"),
    ("push_received", "payload_bytes"),
    ("outer_step_applied", "seconds"),
    ("checkpoint_written", "seconds"),
    ("checkpoint_written", "written_bytes"),
}
"""Kind and field: when something was, how long it took, who it was from, and digests that only
``--checkpoint`` and ``--tensors`` hold against files. Of the header's settings, those that no record here
depends on."""


def fork(replayer):
    """Return a replayer that goes on from here by itself. States are never changed, so they are shared."""
    other = copy.copy(replayer)
    other._decoder = copy.copy(replayer._decoder)
    other._due = deque(replayer._due)
    return other


def found(replayer, line, later):
    """Return what names the damage; None when nothing does."""
    try:
        replayer.feed(line)
        for following in later:
            if replayer.divergence is not None:
                break
            replayer.feed(following)
    except TapeError as error:
        return str(error)
    return None if replayer.divergence is None else f"tape: line {replayer.divergence.line}"


def test_without_checksums_a_changed_byte_is_found_unless_nothing_follows_from_it(fixtures):
    path = fixtures / "tapes" / "two-learners-v1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)[:RECORDS]
    replayer, seen, unnoticed, places = Replayer("tape"), set(), set(), 0
    for number, line in enumerate(lines[:-1]):
        record = json.loads(line)
        if record["kind"] not in seen:
            seen.add(record["kind"])
            for place in range(len(line)):
                places += 1
                changed = bytearray(line)
                changed[place] ^= 0x01
                name = found(fork(replayer), bytes(changed), lines[number + 1 :])
                assert name is None or name.startswith("tape: line ")
                if name is None:
                    other = json.loads(changed)
                    (name,) = [name for name in other if other[name] != record[name]]
                    unnoticed.add((record["kind"], name))
        replayer.feed(line)
    assert unnoticed <= NOTHING_FOLLOWS
    assert {"merge", "push_received", "attempt_sealed", "broadcast_ordered"} <= seen
    assert places > 4000


@pytest.fixture
def tape(fixtures, tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes((fixtures / "tapes" / "two-learners-v2.jsonl").read_bytes())
    return path


READERS = {
    "reader": lambda: Decoder("tape"),
    "view": lambda: Skimmer("tape", WANTED),
    "story": lambda: Skimmer("tape", dict.fromkeys((*EVENTS, *DECISIONS), EVERYTHING)),
}


@pytest.mark.parametrize("name", READERS)
def test_any_changed_byte_of_any_line_is_found_and_named(tape, name):
    reader, places = READERS[name](), 0
    take = reader.decode if name == "reader" else reader.take
    for number, line in enumerate(tape.read_bytes().splitlines(keepends=True)):
        damaged = f"tape: line {number + 1}: "
        for place in range(len(line)):
            changed = bytearray(line)
            changed[place] ^= 1 << (number + place) % 8
            with pytest.raises(TapeError) as caught:
                take(bytes(changed))
            assert str(caught.value).startswith(damaged)
            if number:
                assert "the checksum does not fit" in str(caught.value)
            reader.line = number
            places += 1
        take(line)
    assert places == tape.stat().st_size > 40_000


def test_where_lines_end_is_not_changed_unnoticed(tape):
    content = tape.read_bytes()
    lines = content.splitlines(keepends=True)
    end = 0
    for number, line in enumerate(lines[:-1], 1):
        end += len(line)
        for changed in (
            content[: end - 1] + b"\x0b" + content[end:],  # two lines are one
            content[: end - 9] + b"\n" + content[end - 8 :],  # one is two
        ):
            tape.write_bytes(changed)
            with pytest.raises(TapeError, match=rf"events.jsonl: line {number}: "):
                list(read(tape))
    # Without its LF the last line is a torn tail, and with it damage.
    tape.write_bytes(content[:-1] + b"\x0b")
    assert len(list(read(tape))) == len(lines) - 1


def everybody(path):
    """Return what reads a tape, by name."""
    return {
        "read": lambda: list(read(path)),
        "replay": lambda: replay(path),
        "resume": lambda: TapeWriter.resume(path),
        "watch": lambda: Watcher(path, history=True).look(),
        "story": lambda: tell_story(path, 3),
    }


@pytest.mark.parametrize("name", everybody(None))
@pytest.mark.parametrize("where", ["a push", "the end"])
def test_whoever_reads_a_tape_stops_at_a_fact_that_became_another(tape, name, where):
    """In a kind that a view does not look at, and in the last record, which is not torn but damaged."""
    lines = tape.read_bytes().splitlines(keepends=True)
    number = len(lines) - 1
    if where == "a push":
        number = next(number for number, line in enumerate(lines) if b'"kind":"push_received"' in line)
    place = lines[number].index(b',"kind"') - 1
    digit = b"1" if lines[number][place : place + 1] == b"0" else b"0"
    lines[number] = lines[number][:place] + digit + lines[number][place + 1 :]
    tape.write_bytes(b"".join(lines))
    with pytest.raises(TapeError, match=rf"events.jsonl: line {number + 1}: the checksum does not fit"):
        everybody(tape)[name]()
