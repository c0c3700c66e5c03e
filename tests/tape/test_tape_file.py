"""The file: what is durable, what is refused, and where a torn or damaged tape ends."""

import errno
import os
import subprocess
import sys
import threading

import pytest
from tape_lines import summed

from yeto.core.config import CoreConfig
from yeto.core.decisions import Ignored, PushAdmitted
from yeto.core.events import Heartbeat, LearnerJoined, LearnerLeft, SessionResumed
from yeto.core.values import SessionTerms
from yeto.errors import TapeError
from yeto.tape import Header, Restart, TapeFile, TapeWriter, find_restarts, read
from yeto.tape import writer as writer_module

HEADER = Header(
    software_version="0.1.0",
    wall_clock="2026-01-02T03:04:05+00:00",
    session_id="5e551011",
    config=CoreConfig(num_learners=2, total_steps=4, quorum=2, wait_for=2),
)


def beat(at, step=1):
    return Heartbeat(at=at, learner=0, generation="a0", local_step=step)


def late(why="too late"):
    return Ignored(why=why, event="heartbeat", reason="late")


def resumed(at, step):
    terms = SessionTerms(dtype="f32", num_fragments=1, fingerprint="f0", contract="c0")
    return SessionResumed(
        at=at,
        wall_clock="2026-01-02T04:00:00+00:00",
        config=HEADER.config,
        terms=terms,
        step=step,
        fragments=(),
        ledger=(),
        checkpoint_seq=None,
    )


@pytest.fixture
def tape(tmp_path):
    """Return the path of a tape of 7 records: header, two events with two decisions each."""
    path = tmp_path / "events.jsonl"
    with TapeWriter.create(path, HEADER) as writer:
        for at in (1.0, 2.0):
            seq = writer.append_event(beat(at))
            writer.append_decisions((late(), late(why="é\u2028\x85 and more")), because=seq, at=at)
    return path


def kinds(path):
    return [record.kind for record in read(path)]


class FaultyFile(TapeFile):
    """A tape file whose calls fail as often as a test declares; what is left over fails the test."""

    faults: dict
    calls: list

    def hit(self, call):
        self.calls.append(call)
        if self.faults.get(call):
            self.faults[call] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, data):
        if self.faults.get("write"):
            # A disk that fills up takes a part first.
            super().write(data[: len(data) // 2])
        self.hit("write")
        super().write(data)

    def sync(self):
        self.hit("sync")
        super().sync()

    def cut(self, size):
        self.hit("cut")
        super().cut(size)


@pytest.fixture
def faulty():
    made = []

    def open_file(path):
        file = FaultyFile(path)
        file.faults, file.calls = {}, []
        made.append(file)
        return file

    open_file.made = made
    yield open_file
    assert all(count == 0 for file in made for count in file.faults.values()), "a declared fault never came"


def test_a_new_tape_holds_its_header_at_once(tmp_path):
    path = tmp_path / "events.jsonl"
    writer = TapeWriter.create(path, HEADER)
    assert [record.body for record in read(path)] == [HEADER]
    assert (writer.next_seq, writer.durable_seq) == (1, 0)
    assert not path.with_name("events.jsonl.new").exists()
    writer.close()
    writer.close()


def test_appends_reach_the_file_by_one_write_and_one_fsync(tmp_path, faulty):
    path = tmp_path / "events.jsonl"
    writer = TapeWriter.create(path, HEADER, open_file=faulty)
    faulty.made[0].calls.clear()
    for at in (1.0, 2.0, 3.0):
        seq = writer.append_event(beat(at))
        writer.append_decisions((late(), late()), because=seq, at=at)
    assert kinds(path) == ["header"]
    assert (writer.next_seq, writer.durable_seq) == (10, 0)
    assert writer.flush() == 9
    assert writer.durable_seq == 9
    assert faulty.made[0].calls == ["write", "sync"]
    assert kinds(path) == ["header"] + ["heartbeat", "ignored", "ignored"] * 3
    assert writer.flush() == 9
    assert faulty.made[0].calls == ["write", "sync"], "nothing to write, nothing to wait for"
    writer.close()


def test_close_writes_what_waits(tape):
    assert kinds(tape) == ["header"] + ["heartbeat", "ignored", "ignored"] * 2


def test_an_existing_tape_is_not_overwritten(tape):
    before = tape.read_bytes()
    with pytest.raises(TapeError, match=r"exists already: go on .*--resume.*--event-tape"):
        TapeWriter.create(tape, HEADER)
    assert tape.read_bytes() == before
    TapeWriter.resume(tape)[0].close()


def test_one_process_writes_a_tape(tape, tmp_path):
    writer, _ = TapeWriter.resume(tape)
    code = (
        "import sys; from yeto.tape import TapeWriter\n"
        "try: TapeWriter.resume(sys.argv[1])\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    other = subprocess.run([sys.executable, "-c", code, tape], capture_output=True, text=True, check=True)
    assert other.stdout.startswith("TapeError")
    assert "is being written by another process" in other.stdout
    for attempt in (TapeWriter.resume, lambda path: TapeWriter.create(path, HEADER)):
        with pytest.raises(TapeError, match="is being written by another process"):
            attempt(tape)
    assert len(kinds(tape)) == 7, "reading needs no lock"
    writer.close()
    TapeWriter.resume(tape)[0].close()


def test_a_tape_that_cannot_be_made_says_why(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TapeError, match=r"Not a directory|File exists"):
        TapeWriter.create(tmp_path / "file" / "events.jsonl", HEADER)
    with pytest.raises(TapeError, match="no such tape"):
        TapeWriter.resume(tmp_path / "events.jsonl")
    with pytest.raises(TapeError, match="no such tape"):
        list(read(tmp_path / "events.jsonl"))
    with pytest.raises(TapeError, match=r"is a folder; name the tape in it, such as events\.jsonl"):
        list(read(tmp_path))


def test_a_failed_create_leaves_nothing_behind(tmp_path, faulty):
    path = tmp_path / "events.jsonl"

    def failing(path):
        file = faulty(path)
        file.faults["sync"] = 1
        return file

    with pytest.raises(TapeError, match="cannot make the tape: No space left on device"):
        TapeWriter.create(path, HEADER, open_file=failing)
    assert not path.exists()
    assert not path.with_name("events.jsonl.new").exists()
    TapeWriter.create(path, HEADER).close()


def test_what_a_dead_process_left_aside_is_not_in_the_way(tmp_path):
    (tmp_path / "events.jsonl.new").write_bytes(b'{"seq":0,"at":0.0,"ki')
    TapeWriter.create(tmp_path / "events.jsonl", HEADER).close()
    assert kinds(tmp_path / "events.jsonl") == ["header"]


def test_resume_goes_on_behind_the_last_record(tape):
    before = tape.read_bytes()
    writer, tail = TapeWriter.resume(tape)
    assert (tail.header, tail.last_seq, tail.last_at, tail.torn_bytes) == (HEADER, 6, 2.0, 0)
    assert (writer.next_seq, writer.durable_seq) == (7, 6)
    # The last event may still get decisions: they may have been on their way when the process ended.
    writer.append_decisions((late(),), because=4, at=2.0)
    assert writer.append_event(beat(2.0)) == 8
    writer.close()
    assert tape.read_bytes().startswith(before)
    assert [record.seq for record in read(tape)] == list(range(9))


def test_a_tape_torn_at_any_byte_of_its_last_record_opens(tape):
    whole = tape.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(start, len(whole)):
        tape.write_bytes(whole[:cut])
        assert [record.seq for record in read(tape)] == list(range(6))
        seen = []
        writer, tail = TapeWriter.resume(tape, feed=seen.append)
        assert (tail.last_seq, tail.last_at, tail.torn_bytes) == (5, 2.0, cut - start)
        assert [record.seq for record in seen] == list(range(6))
        assert (writer.next_seq, writer.durable_seq) == (6, 5)
        if cut % 2:
            writer.close()
            assert tape.read_bytes() == whole[:cut], "who writes nothing changes nothing"
            writer, _ = TapeWriter.resume(tape)
        writer.append_decisions((late(why="é\u2028\x85 and more"),), because=4, at=2.0)
        writer.close()
        assert tape.read_bytes() == whole, "the same outcome at every cut point"


def test_a_torn_tail_of_rubbish_is_cut_away(tape):
    whole = tape.read_bytes()
    tape.write_bytes(whole + b"\x00" * 4096)
    writer, tail = TapeWriter.resume(tape)
    assert tail.torn_bytes == 4096
    assert writer.append_event(beat(2.0)) == 7
    writer.close()
    assert tape.read_bytes().startswith(whole)
    assert [record.seq for record in read(tape)] == list(range(8))


def test_damage_before_the_tail_is_refused_with_its_line(tape):
    whole = tape.read_bytes()
    lines = whole.splitlines(keepends=True)
    start = len(b"".join(lines[:3]))
    for offset in range(start, start + len(lines[3])):
        # The highest bit makes any byte of an ASCII line, its LF too, illegal where it stands.
        damaged = whole[:offset] + bytes([whole[offset] ^ 0x80]) + whole[offset + 1 :]
        tape.write_bytes(damaged)
        with pytest.raises(TapeError, match=r"events\.jsonl: line 4: "):
            list(read(tape))
        with pytest.raises(TapeError, match=r"events\.jsonl: line 4: "):
            TapeWriter.resume(tape)
        assert tape.read_bytes() == damaged, "nothing is repaired that is not the tail"


def test_a_damaged_complete_last_line_is_no_torn_tail(tape):
    tape.write_bytes(tape.read_bytes() + b'{"seq":7,\n')
    with pytest.raises(TapeError, match="line 8: "):
        TapeWriter.resume(tape)


@pytest.mark.parametrize("content", [b"", b'{"seq":0,"at":0.0,"kind":"header"'])
def test_a_tape_without_a_header_holds_nothing(tmp_path, content):
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    with pytest.raises(TapeError, match="line 1: no header: the tape holds no record, remove it"):
        list(read(path))
    with pytest.raises(TapeError, match="line 1: no header: the tape holds no record, remove it"):
        TapeWriter.resume(path)
    assert path.read_bytes() == content


def test_a_file_without_line_ends_is_no_tape(tmp_path, monkeypatch):
    monkeypatch.setattr("yeto.tape.reader.LINE_BYTES_MAX", 1000)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 5000)
    with pytest.raises(TapeError, match="a line of more than 1000 bytes: this is not a tape"):
        list(read(path))


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_failing_disk_stops_the_tape_and_leaves_it_whole(tmp_path, faulty, call):
    path = tmp_path / "events.jsonl"
    writer = TapeWriter.create(path, HEADER, open_file=faulty)
    writer.append_event(beat(1.0))
    writer.flush()
    durable = path.read_bytes()
    writer.append_event(beat(2.0))
    faulty.made[0].faults[call] = 1
    message = (
        r"cannot write beyond record 1: No space left on device; the tape is whole up to there; .*--resume"
    )
    with pytest.raises(TapeError, match=message):
        writer.flush()
    assert writer.durable_seq == 1
    assert path.read_bytes() == durable
    for again in (
        writer.flush,
        lambda: writer.append_event(beat(3.0)),
        lambda: writer.append_decisions((late(),), because=2, at=2.0),
    ):
        with pytest.raises(TapeError, match=message):
            again()
    writer.close()
    resumed_writer, tail = TapeWriter.resume(path)
    assert tail.last_seq == 1
    resumed_writer.close()


def test_a_disk_that_cannot_even_cut_leaves_a_torn_tail(tmp_path, faulty):
    path = tmp_path / "events.jsonl"
    writer = TapeWriter.create(path, HEADER, open_file=faulty)
    writer.append_event(beat(1.0))
    faulty.made[0].faults.update(write=1, cut=1)
    with pytest.raises(TapeError, match="could not be cut away"):
        writer.flush()
    writer.close()
    assert kinds(path) == ["header"]
    writer, tail = TapeWriter.resume(path)
    assert tail.torn_bytes > 0
    writer.close()


def test_a_failing_last_flush_gives_the_lock_back(tmp_path, faulty):
    path = tmp_path / "events.jsonl"
    writer = TapeWriter.create(path, HEADER, open_file=faulty)
    writer.append_event(beat(1.0))
    faulty.made[0].faults["sync"] = 1
    with pytest.raises(TapeError):
        writer.close()
    TapeWriter.resume(path)[0].close()


def test_a_real_file_limit_cuts_the_partial_record_back(tmp_path):
    """The kernel itself takes a part of the batch and refuses the rest."""
    path = tmp_path / "events.jsonl"
    code = """
import resource, sys
from yeto.core.config import CoreConfig
from yeto.core.events import Heartbeat
from yeto.errors import TapeError
from yeto.tape import Header, TapeWriter
config = CoreConfig(num_learners=2, total_steps=4, quorum=2, wait_for=2)
header = Header(software_version="0", wall_clock="", session_id="", config=config)
writer = TapeWriter.create(sys.argv[1], header)
beat = lambda at: Heartbeat(at=at, learner=0, generation="a0", local_step=1)
writer.append_event(beat(1.0))
writer.flush()
size = len(open(sys.argv[1], "rb").read())
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, size + 50))
writer.append_event(beat(2.0))
try:
    writer.flush()
except TapeError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert "cannot write beyond record 1: File too large; the tape is whole up to there" in run.stdout
    assert path.read_bytes().endswith(b"\n")
    assert kinds(path) == ["header", "heartbeat"]


def test_the_wait_for_the_disk_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "PENDING_BYTES_MAX", 300)
    with TapeWriter.create(tmp_path / "events.jsonl", HEADER) as writer:
        for _ in range(3):
            writer.append_event(beat(1.0))
        with pytest.raises(TapeError, match=r"the disk is too slow: \d+ bytes of records wait"):
            writer.append_event(beat(1.0))
        writer.flush()
        writer.append_event(beat(1.0))


def test_order_is_kept_on_writing_too(tmp_path):
    with TapeWriter.create(tmp_path / "events.jsonl", HEADER) as writer:
        with pytest.raises(TapeError, match="do not follow the last event"):
            writer.append_decisions((late(),), because=0, at=0.0)
        writer.append_event(beat(2.0))
        with pytest.raises(TapeError, match=r"record 2: at 1\.5 lies before 2\.0"):
            writer.append_event(beat(1.5))
        for because, at in ((2, 2.0), (1, 2.5)):
            with pytest.raises(TapeError, match=r"do not follow the last event, 1 at 2\.0"):
                writer.append_decisions((late(),), because=because, at=at)
        assert writer.next_seq == 2
    with pytest.raises(TapeError, match="the tape is closed"):
        writer.append_event(beat(3.0))


def test_decisions_are_buffered_all_or_none(tmp_path):
    with TapeWriter.create(tmp_path / "events.jsonl", HEADER) as writer:
        seq = writer.append_event(beat(1.0))
        bad = PushAdmitted(why="", learner=0, generation="a0", step=1, attempt=1, staleness=object())
        with pytest.raises(TapeError, match=r"record 3 \(push_admitted\) cannot be written"):
            writer.append_decisions((late(), bad), because=seq, at=1.0)
        assert writer.next_seq == 2


def test_appending_while_another_thread_flushes_loses_nothing(tmp_path):
    path = tmp_path / "events.jsonl"
    writer = TapeWriter.create(path, HEADER)
    done = threading.Event()

    def flush():
        while not done.is_set():
            writer.flush()

    thread = threading.Thread(target=flush)
    thread.start()
    for at in range(2000):
        seq = writer.append_event(beat(float(at), step=at))
        writer.append_decisions((late(),), because=seq, at=float(at))
    done.set()
    thread.join()
    writer.close()
    assert [record.seq for record in read(path)] == list(range(4001))


def test_line_breaks_of_other_alphabets_are_data(tmp_path):
    path = tmp_path / "events.jsonl"
    reason = "a\u2028b\u2029c\x85d\x0be\x1cf"
    with TapeWriter.create(path, HEADER) as writer:
        writer.append_event(LearnerLeft(at=1.0, learner=0, generation="a0", reason=reason))
    raw = path.read_bytes() + summed(
        (f'{{"seq":2,"at":1.0,"kind":"learner_left","learner":0,"generation":"a0","reason":"{reason}"}}\n')
        .replace("\x0b", "")
        .replace("\x1c", "")
        .encode()
    )
    path.write_bytes(raw)
    records = list(read(path))
    assert [record.seq for record in records] == [0, 1, 2]
    assert records[1].body.reason == reason
    writer, tail = TapeWriter.resume(path)
    assert (tail.last_seq, tail.torn_bytes) == (2, 0)
    writer.close()


def test_restarts_are_found_without_reading_the_rest(tmp_path):
    path = tmp_path / "events.jsonl"
    with TapeWriter.create(path, HEADER) as writer:
        writer.append_event(LearnerJoined(at=1.0, learner=0, generation="a0"))
        writer.append_event(resumed(2.0, 3))
        writer.append_event(LearnerLeft(at=3.0, learner=0, generation="a0", reason="session_resumed"))
        writer.append_event(resumed(4.0, 2))
    assert find_restarts(path) == (Restart(seq=2, step=3), Restart(seq=4, step=2))
    assert find_restarts(path, until=3) == (Restart(seq=2, step=3),)
