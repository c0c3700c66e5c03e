"""Slow readers, slow uploads, full disks: what one part lacks is not taken from the others."""

import math
import threading

import attrs
import trio
from dialled import dial
from fake_learner import FakeLearner, small_layout
from syncer_runs import BOUNDS, HANGS_SECONDS, bodies, fakes, make_config, on_tape, running, until

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.link import LinkClosed
from yeto.syncer import jobs, rounds
from yeto.wire.frames import SLICE_BYTES, MessageType, encode_header
from yeto.wire.messages import ChunkHeader, Heartbeat


async def test_a_learner_that_never_reads_slows_nobody(tmp_path, skipping_clock):
    layout = small_layout(num_fragments=2, numel=1 << 20)
    # Without the sweep, which would wait for everybody who is alive.
    config = make_config(
        tmp_path,
        bounds=attrs.evolve(BOUNDS, silence_seconds=math.inf),
        quorum=1,
        total_steps=6,
        final_ack_timeout_seconds=3600.0,
        closing_sweep="off",
    )
    (steady,) = fakes(1, layout=layout)
    deaf = FakeLearner(learner=1, layout=layout, num_streams=0)

    async def only_beat(address):
        deaf.generation = 77
        (control,) = await dial(address.host, address.port, 0)
        deaf.streams = (control,)
        try:
            await control.send(MessageType.HELLO, deaf.hello().encode())
            while True:
                deaf.local_step += 1
                beat = Heartbeat(learner=1, local_step=deaf.local_step)
                await control.send(beat.TYPE, beat.encode())
                await trio.sleep(1)  # more than a few a second would end it
        except LinkClosed:
            pass
        finally:
            await deaf.hang_up()

    async with running(config, steady) as run:
        run.nursery.start_soon(only_beat, run.address)
        await until(on_tape(config, ev.FinalAckReceived))
        skipping_clock.jump(config.core.final_ack_timeout_seconds)
        assert await run.end() == 3
    assert "learner 1" in bodies(config.event_tape, de.SessionEnded)[0].why
    assert not [left for left in bodies(config.event_tape, ev.LearnerLeft) if left.learner == 1]
    commits = bodies(config.event_tape, de.RoundCommitted)
    assert [commit.step for commit in commits] == [1, 2, 3, 4, 5, 6]


async def test_an_upload_that_advances_is_told(tmp_path):
    layout = small_layout(num_fragments=1, numel=SLICE_BYTES // 2)
    bounds = attrs.evolve(BOUNDS, progress_seconds=0.1)
    config = make_config(tmp_path, bounds=bounds, total_steps=1)
    learners = fakes(layout=layout)

    async def dawdle(learner, pull):
        head, tensor = learner.push_message(pull, learner.anchor(0))
        inner = encode_header(head.TYPE, head.BYTES + len(tensor)) + head.encode() + bytes(tensor)
        stream = learner.streams[1]
        for offset in range(0, len(inner), SLICE_BYTES):
            chunk = ChunkHeader(message_id=0, total=len(inner), offset=offset)
            await stream.send(chunk.TYPE, chunk.encode(), inner[offset : offset + SLICE_BYTES])
            await until(told_of_1)
        return False

    def told_of_1():
        return [told for told in bodies(config.event_tape, ev.UploadProgress) if told.learner == 1]

    learners[1].before_push = dawdle
    async with running(config, *learners) as run:
        assert await run.end() == 0
    assert told_of_1()[0].received_bytes == SLICE_BYTES


async def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_nothing_sent(tmp_path):
    config = make_config(tmp_path)
    config.checkpoint_path.mkdir()
    (config.checkpoint_path / "fragments").write_text("in the way")
    learners = fakes()
    async with running(config, *learners) as run:
        assert await run.end() == 1
    (ended,) = bodies(config.event_tape, de.SessionEnded)
    assert "fragments" in ended.why
    assert "free" in ended.why
    assert not bodies(config.event_tape, de.BroadcastOrdered)
    assert learners[0].versions == learners[1].versions == []


async def test_a_disk_without_room_for_two_checkpoints_is_found_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("yeto.state.files.free_bytes", lambda path: 1000)
    config = make_config(tmp_path)
    async with running(config, *fakes()) as run:
        assert await run.end() == 1
    (ended,) = bodies(config.event_tape, de.SessionEnded)
    assert "two checkpoints take" in ended.why


async def test_pushes_of_a_merge_weigh_nothing_when_they_have_no_tokens(tmp_path):
    config = make_config(tmp_path, total_steps=3)
    learners = fakes(c_tokens=0)
    async with running(config, *learners) as run:
        assert await run.end() == 0
    commits = bodies(config.event_tape, de.RoundCommitted)
    assert all(commit.no_op for commit in commits)
    assert [learner.final_digests() for learner in learners] == [
        [commit.params_digest for commit in commits]
    ] * 2


async def test_a_stale_push_gets_the_fragment_and_the_pull_once_more(tmp_path):
    config = make_config(tmp_path, total_steps=6, max_base_lag=0)
    learners = fakes()

    async def forget_once(learner, pull):
        if pull.step == 4 and not forgotten:
            forgotten.append(pull)
            head, tensor = learner.push_message(pull, 0)
            learner.group.outbox.put(head, tensor, order=(pull.step, 0))
            return False
        return True

    forgotten = []
    learners[1].before_push = forget_once
    async with running(config, *learners) as run:
        assert await run.end() == 0
    (refusal,) = bodies(config.event_tape, de.PushRefused)
    assert (refusal.reason, refusal.resend, refusal.declined) == ("stale_base", True, False)
    assert [pull.step for pull in learners[1].pulls].count(4) == 2
    fourth = next(commit for commit in bodies(config.event_tape, de.RoundCommitted) if commit.step == 4)
    assert (fourth.attempt, len(fourth.responders)) == (1, 2)


async def test_nobody_waits_for_the_compiler_while_a_tiny_push_is_examined(tmp_path, monkeypatch):
    """The first run on a machine compiles for seconds, and learners may be quicker."""
    compiled, places = threading.Event(), []
    examine_push = jobs.examine_push

    def examine(*args, **settings):
        if not compiled.is_set():
            places.append(threading.current_thread())
        facts = examine_push(*args, **settings)
        if len(places) == 3:
            compiled.set()  # the end of the run waits for the compiler
        return facts

    monkeypatch.setattr(rounds, "compile_kernels", lambda: compiled.wait(HANGS_SECONDS))
    monkeypatch.setattr(jobs, "examine_push", examine)
    try:
        async with running(make_config(tmp_path, total_steps=3), *fakes()) as run:
            assert await run.end() == 0
    finally:
        compiled.set()
    assert places
    assert threading.main_thread() not in places
