"""What --record-payloads writes, when, and what becomes of a run whose disk is slow or full."""

import contextlib
import errno
import functools
import os
import signal
import threading

import attrs
import numpy as np
import pytest
import trio
from fake_learner import FakeLearner
from recorded_audit import flip, lively, recorded_config
from syncer_runs import bodies, fakes, on_tape, running, until, verify

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.values import Member
from yeto.errors import RecordingError
from yeto.state import read_checkpoint
from yeto.state.files import Disk
from yeto.syncer.app import serve
from yeto.syncer.config import StartMode
from yeto.syncer.payloads import (
    Arithmetic,
    checkpoint_folder,
    gradient_file,
    open_recording,
    push_file,
    read_recording,
)
from yeto.syncer.recorder import ATTEMPTS_QUEUED_MAX
from yeto.syncer.start import prepare
from yeto.tape import read
from yeto.wire import codecs
from yeto.wire.digest import digest

GENERATION = "00112233445566ff"


def session_of(config):
    return next(read(config.event_tape)).body.session_id


def pushes_of(payloads):
    """Return the recorded pushes: (start, round, file name) -> digest."""
    return {
        (path.parts[-3], int(path.parts[-2].removeprefix("round-")), path.name): digest(path.read_bytes())
        for path in payloads.glob("start-*/round-*/*-learner-*")
    }


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q4"])
async def test_the_bytes_of_every_sealed_push_are_there_and_no_others(tmp_path, dtype):
    config = recorded_config(tmp_path, total_steps=6)
    learners = lively(3, dtype=dtype)
    config = attrs.evolve(config, core=attrs.evolve(config.core, num_learners=3, quorum=2, wait_for=3))

    async def too_late(learner, pull):
        if pull.step == 1:
            await until(on_tape(config, de.RoundCommitted))
        return True

    learners[2].before_push = too_late
    async with running(config, *learners) as run:
        assert await run.end() == 0

    received = {
        (event.step, event.attempt, event.learner, event.generation): event.digest
        for event in bodies(config.event_tape, ev.PushReceived)
    }
    seals = bodies(config.event_tape, de.AttemptSealed)
    expected = {
        ("start-0", seal.step, f"attempt-{seal.attempt}-learner-{part.learner}-{part.generation}.{dtype}"):
        received[seal.step, seal.attempt, part.learner, part.generation]
        for seal in seals
        for part in seal.responders
    }  # fmt: skip
    payloads = tmp_path / "payloads"
    assert pushes_of(payloads) == expected
    assert len(next(seal for seal in seals if seal.step == 1).responders) == 2
    sizes = [codecs.by_name(dtype).encoded_size(part.numel) for part in learners[0].layout.fragments]
    for _, step, name in expected:
        path = payloads / "start-0" / f"round-{step:08d}" / name
        assert path.stat().st_size == sizes[(step - 1) % 3]

    start = read_checkpoint(checkpoint_folder(payloads, 0) / "manifest-0.json")
    initial = {event.fragment: event.digest for event in bodies(config.event_tape, ev.FragmentInitialised)}
    assert {version.fragment: version.params_digest for version in start.fragments} == initial
    assert all(not version.momentum.any() for version in start.fragments)
    assert (start.step, start.dtype, start.iso_backend) == (0, dtype, "scalar")
    assert start.training_manifest == learners[0].manifest.to_dict()
    recording = read_recording(payloads)
    assert recording.session_id == session_of(config)
    assert [(part.tape_seq, part.step, part.arithmetic) for part in recording.starts] == [
        (0, 0, Arithmetic.here())
    ]
    # Nothing else lies about: neither half a file nor a copy that nobody would check.
    files = {path for path in payloads.rglob("*") if path.is_file()}
    assert len(files) == len(expected) + 3 + 3
    assert {path.name for path in payloads.iterdir()} == {"recording.json", "recording.lock", "start-0"}


async def test_a_commit_on_the_tape_has_its_payloads_on_the_disk_whenever_the_syncer_dies(tmp_path):
    config = recorded_config(tmp_path, total_steps=40)
    for deaths, step in enumerate((1, 4, 5, 8)):
        again = recorded_config(tmp_path, total_steps=40, resume=deaths > 0)
        async with running(again, *lively(reconnects=True)) as run:
            await until(
                lambda step=step: any(
                    commit.step >= step for commit in bodies(config.event_tape, de.RoundCommitted)
                )
            )
            run.stop()
    starts = ["start-0", *_resumed(config)]
    assert [f"start-{start.tape_seq}" for start in read_recording(tmp_path / "payloads").starts] == starts
    recorded = pushes_of(tmp_path / "payloads")
    start = 0
    for record in read(config.event_tape):
        start = record.seq if isinstance(record.body, ev.SessionResumed) else start
        if isinstance(record.body, de.RoundCommitted):
            for part in record.body.responders:
                commit = record.body
                name = f"attempt-{commit.attempt}-learner-{part.learner}-{part.generation}.f32"
                assert (f"start-{start}", commit.step, name) in recorded


def _resumed(config):
    return [
        f"start-{record.seq}"
        for record in read(config.event_tape)
        if isinstance(record.body, ev.SessionResumed)
    ]


async def test_a_folder_of_another_session_is_refused_and_keeps_what_it_has(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first = recorded_config(tmp_path / "one", total_steps=3)
    async with running(first, *lively()) as run:
        assert await run.end() == 0
    before = pushes_of(first.record_payloads)
    second = attrs.evolve(
        recorded_config(tmp_path / "two", total_steps=3), record_payloads=first.record_payloads
    )
    with (
        pytest.raises(RecordingError, match=rf"holds the payloads of session {session_of(first)}"),
        prepare(second),
    ):
        pass
    # The refusal came before anything was made.
    assert not second.event_tape.exists()
    assert pushes_of(first.record_payloads) == before
    # A new tape for an old run is a new session.
    other_tape = attrs.evolve(
        recorded_config(tmp_path / "one", total_steps=4, resume=True), event_tape=tmp_path / "second.jsonl"
    )
    with pytest.raises(RecordingError, match="name a new folder"), prepare(other_tape):
        pass
    assert not other_tape.event_tape.exists()


async def test_a_run_that_never_got_to_a_round_gives_its_folder_away(tmp_path):
    """As after a kill before the first checkpoint: a supervisor starts it again, with a new tape."""
    config = attrs.evolve(recorded_config(tmp_path, total_steps=3), start=StartMode.RESUME_OR_START)
    async with running(config) as run:
        run.stop()
    forsaken = read_recording(config.record_payloads).session_id
    async with running(config, *lively()) as run:
        assert await run.end() == 0
    assert (tmp_path / "events.jsonl.1").exists()
    recording = read_recording(config.record_payloads)
    assert recording.session_id == session_of(config) != forsaken
    assert len(recording.starts) == 1


def test_what_a_folder_may_hold(tmp_path):
    folder = tmp_path / "deep" / "payloads"
    with open_recording(folder, "mine") as first:
        first.begin(0, 0, Arithmetic.here())
        with (
            pytest.raises(RecordingError, match="another syncer records there"),
            open_recording(folder, "mine"),
        ):
            pass
    with open_recording(folder, "mine") as again:
        again.begin(7, 3, Arithmetic.here())
        again.begin(7, 4, Arithmetic.here())
        again.write_pushes(5, 1, "f32", [(Member(learner=0, generation=GENERATION), b"12345678")])
    assert [(start.tape_seq, start.step) for start in read_recording(folder).starts] == [(0, 0), (7, 4)]
    with (
        pytest.raises(RecordingError, match="holds the payloads of session mine, this one is yours"),
        open_recording(folder, "yours"),
    ):
        pass
    (folder / "recording.json").unlink()
    with (
        pytest.raises(RecordingError, match=r"holds no recording \(recording.json is missing\)"),
        open_recording(folder, "mine"),
    ):
        pass
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    with (
        pytest.raises(RecordingError, match=r"is not empty and holds no recording \(thesis.tex\)"),
        open_recording(foreign, "mine"),
    ):
        pass
    assert [path.name for path in foreign.iterdir() if path.suffix != ".lock"] == ["thesis.tex"]
    with (
        pytest.raises(RecordingError, match="cannot be used"),
        open_recording(foreign / "thesis.tex", "mine"),
    ):
        pass


def test_a_damaged_recording_is_not_added_to(tmp_path):
    with open_recording(tmp_path / "payloads", "mine") as folder:
        folder.begin(0, 0, Arithmetic.here())
    path = tmp_path / "payloads" / "recording.json"
    whole = path.read_bytes()
    for spoil in (
        lambda: flip(path),
        lambda: path.write_bytes(whole[:-9]),
        lambda: path.write_bytes(b"{}\n"),
    ):
        spoil()
        with pytest.raises(RecordingError, match=r"recording\.json"):
            read_recording(tmp_path / "payloads")
        with (
            pytest.raises(RecordingError, match=r"recording\.json"),
            open_recording(tmp_path / "payloads", "mine"),
        ):
            pass
        path.write_bytes(whole)
    newer = whole.replace(b'"format_version": 1', b'"format_version": 2')
    body = newer[: newer.index(b'  "digest"')]
    path.write_bytes(body + f'  "digest": "{digest(body)}"\n}}\n'.encode())
    with pytest.raises(RecordingError, match="format version 2; this software reads 1"):
        read_recording(tmp_path / "payloads")


@pytest.mark.parametrize(
    "generation",
    ["", "../../../../etc/cron.d/x", "0011223344556677\n", "00112233445566zz", "0" * 17, "A" * 16],
)
def test_nothing_but_16_hex_digits_of_a_generation_becomes_a_name(tmp_path, generation):
    with pytest.raises(RecordingError, match="is no generation"):
        push_file(tmp_path, 0, 1, 1, Member(learner=0, generation=generation), "f32")


def test_names_stay_inside_the_folder(tmp_path):
    member = Member(learner=2**40, generation=GENERATION)
    for path in (push_file(tmp_path, 2**40, 2**40, 2**40, member, "q4"), gradient_file(tmp_path, 0, 1, 1)):
        assert path.resolve().is_relative_to(tmp_path)
        assert path.relative_to(tmp_path).parts[0].startswith("start-")


class FaultyDisk(Disk):
    """A disk that has room for so many files of pushes, then is full; or that waits until it may write."""

    def __init__(self, room=None):
        self.room = room
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self._paths = {}

    def create(self, path):
        descriptor = super().create(path)
        self._paths[descriptor] = path
        return descriptor

    def write(self, descriptor, data):
        if "-learner-" in self._paths[descriptor].name:
            self.waiting.set()
            self.gate.wait()
            if self.room is not None:
                self.room -= 1
                if self.room < 0:
                    # As a disk does that fills up: half of it is written.
                    os.write(descriptor, data[: len(data) // 2])
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, data)


def with_disk(monkeypatch, disk):
    monkeypatch.setattr("yeto.syncer.start.open_recording", functools.partial(open_recording, disk=disk))


async def test_a_full_disk_ends_the_run_which_goes_on_from_where_it_was(tmp_path, monkeypatch):
    config = recorded_config(tmp_path, total_steps=9)
    learners = lively(reconnects=True)
    with monkeypatch.context() as patch:
        with_disk(patch, FaultyDisk(room=7))
        with pytest.raises(BaseExceptionGroup) as caught:
            async with running(config, *learners):
                await trio.sleep_forever()
    # Pushes of several learners and rounds are written at once: each that found no room says so.
    errors = _leaves(caught.value)
    assert errors
    assert all(isinstance(error, RecordingError) for error in errors)
    message = str(errors[0])
    assert message.startswith(f"--record-payloads: {config.record_payloads}")
    assert "No space left on device" in message
    assert "the tape and the last checkpoint are intact" in message
    assert "--resume" in message
    assert "without --record-payloads" in message

    # Seven pushes of two learners: three rounds, and half a fourth, which was not committed. Rounds overlap,
    # so the disk may be full before the third is committed, and both pushes of a round may fail.
    commits = bodies(config.event_tape, de.RoundCommitted)
    assert max((commit.step for commit in commits), default=0) <= 3
    recorded = pushes_of(config.record_payloads)
    for commit in commits:
        for part in commit.responders:
            name = f"attempt-{commit.attempt}-learner-{part.learner}-{part.generation}.f32"
            assert ("start-0", commit.step, name) in recorded
    # What was written of the push that found no room is gone: room is what is needed now.
    assert not list(config.record_payloads.rglob("*.tmp"))
    assert read_checkpoint(config.checkpoint_path).step <= 3

    resumed = recorded_config(tmp_path, total_steps=9, resume=True)
    async with running(resumed, *lively()) as run:
        assert await run.end() == 0
    assert bodies(config.event_tape, de.RoundCommitted)[-1].step == 9


def _leaves(error):
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


async def test_a_disk_that_is_full_at_the_start_stops_it_before_anything_changed(tmp_path, monkeypatch):
    class Full(Disk):
        def write(self, descriptor, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = recorded_config(tmp_path, total_steps=4)
    with monkeypatch.context() as patch:
        with_disk(patch, Full())
        with pytest.raises(RecordingError, match="No space left on device"), prepare(config):
            pass
    assert not config.event_tape.exists()
    async with running(config, *lively()) as run:
        await until(on_tape(config, de.RoundCommitted, 2))
        run.stop()
    resumed = recorded_config(tmp_path, total_steps=4, resume=True)
    before = config.event_tape.read_bytes()
    with monkeypatch.context() as patch:
        with_disk(patch, Full())
        with pytest.raises(RecordingError, match="No space left on device"), prepare(resumed):
            pass
    assert config.event_tape.read_bytes() == before
    async with running(resumed, *lively()) as run:
        assert await run.end() == 0


@contextlib.contextmanager
def standing_still(disk):
    """Let nothing onto the disk meanwhile; its thread would keep a nursery from ending."""
    disk.gate.clear()
    try:
        yield
    finally:
        disk.gate.set()


async def test_a_slow_disk_holds_up_merges_and_nothing_else(tmp_path, monkeypatch):
    disk = FaultyDisk()
    with_disk(monkeypatch, disk)
    config = recorded_config(tmp_path, total_steps=6, num_learners=3)
    learners = lively(no_tokens_at=0)
    async with running(config) as run:
        with standing_still(disk):
            for learner in learners:
                run.join(learner)
            # Both rounds of the pipeline are answered, sealed, and their merges ordered.
            await until(on_tape(config, de.MergeOrdered, 2))
            await until(disk.waiting.is_set)
            late = FakeLearner(learner=2, layout=learners[0].layout)
            run.join(late)
            await until(lambda: len(late.versions) == 3)
            beats = len(bodies(config.event_tape, ev.Heartbeat))
            learners[0].local_step += 1
            learners[0].beat()
            await until(on_tape(config, ev.Heartbeat, beats + 1))
            assert not bodies(config.event_tape, ev.MergeFinished)
            assert not bodies(config.event_tape, de.CommitOrdered)
        assert await run.end() == 0
    # What the wait was is on the tape, with the merge it belongs to.
    assert bodies(config.event_tape, ev.MergeFinished)[0].seconds > 0


async def test_memory_is_bounded_by_rounds_that_are_open(tmp_path, monkeypatch):
    """While the disk stands still no more rounds are sealed than the pipeline allows to be open."""
    disk = FaultyDisk()
    with_disk(monkeypatch, disk)
    config = recorded_config(tmp_path, total_steps=12, pipeline=3)
    async with running(config) as run:
        with standing_still(disk):
            for learner in lively(no_tokens_at=0):
                run.join(learner)
            await until(on_tape(config, de.MergeOrdered, 3))
            await until(disk.waiting.is_set)
            await trio.sleep(0.1)
            assert len(bodies(config.event_tape, de.AttemptSealed)) == 3 <= ATTEMPTS_QUEUED_MAX + 1
            assert not bodies(config.event_tape, ev.MergeFinished)
        assert await run.end() == 0


async def test_a_stop_does_not_wait_for_a_disk_that_stands_still(tmp_path, monkeypatch):
    """The merges that wait for it are dropped when the stop budget is used up, as any slow merge is."""
    disk = FaultyDisk()
    with_disk(monkeypatch, disk)
    config = recorded_config(tmp_path, total_steps=6, stop_budget_seconds=0.2)
    codes = []

    async def run(task_status):
        codes.append(await serve(config, watch_signals=True, task_status=task_status))

    async with trio.open_nursery() as nursery:
        address = await nursery.start(run)
        with standing_still(disk):
            for learner in lively(no_tokens_at=0):
                nursery.start_soon(learner.run, address.host, address.port)
            await until(on_tape(config, de.MergeOrdered, 2))
            signal.raise_signal(signal.SIGTERM)
            await until(on_tape(config, de.SessionEnded))
        # The thread that stood in the disk is waited for; a second signal would not.
        await until(lambda: codes)
        nursery.cancel_scope.cancel()
    assert codes == [4]
    verify(config.event_tape)
    assert {event.reason for event in bodies(config.event_tape, de.AttemptDiscarded)} == {"stopping"}


async def test_recording_changes_nothing_that_is_decided(tmp_path):
    """The same deltas give the same digests with and without a recording."""
    digests = []
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        config = recorded_config(tmp_path / name, record=name == "with", total_steps=6)
        learners = fakes()
        for learner in learners:
            learner.make_delta = lambda pull, numel, k=learner.learner: _delta(pull, numel, k)
        async with running(config, *learners) as run:
            assert await run.end() == 0
        digests.append([commit.params_digest for commit in bodies(config.event_tape, de.RoundCommitted)])
    assert digests[0] == digests[1]


def _delta(pull, numel, learner):
    return np.random.default_rng([pull.step, learner]).standard_normal(numel).astype(np.float32)
