"""Learners that die, come back, come twice, or send what no merge can use."""

import random

import attrs
import numpy as np
import pytest
import trio
from fake_learner import FakeLearner, small_layout
from syncer_runs import BOUNDS, bodies, fakes, held_back, make_config, on_tape, running, until, verify

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.link import FrameStream
from yeto.wire.frames import SLICE_BYTES, MessageType, encode_header
from yeto.wire.messages import ChunkHeader


async def send_half_a_push(learner, pull, config):
    """Send the beginning of a push, then cut every socket as a killed process does, once it is admitted."""
    head, tensor = learner.push_message(pull, learner.anchor(pull.fragment))
    inner = encode_header(head.TYPE, head.BYTES + len(tensor)) + head.encode() + bytes(tensor)
    chunk = ChunkHeader(message_id=len(learner.pushes), total=len(inner), offset=0).encode()
    data = encode_header(MessageType.CHUNK, len(chunk) + len(inner)) + chunk + inner
    stream = learner.streams[1].stream
    await stream.send_all(data[: len(data) - 20])
    await until(lambda: (pull.step, pull.attempt, learner.learner) in admitted(config))
    await learner.hang_up()
    return False


def admitted(config):
    pushes = bodies(config.event_tape, de.PushAdmitted)
    return {(push.step, push.attempt, push.learner) for push in pushes}


async def test_a_death_in_the_middle_of_a_push_is_retried_and_nothing_is_lost(tmp_path):
    config = make_config(tmp_path, pipeline=1)
    deaths = []

    async def die_once(learner, pull):
        if pull.step == 3 and not deaths:
            deaths.append(pull)
            return await send_half_a_push(learner, pull, config)
        return True

    steady, mortal = fakes(reconnects=True)
    mortal.before_push = die_once
    async with running(config, steady, mortal) as run:
        assert await run.end() == 0
    assert mortal.dials == 2
    discards = bodies(config.event_tape, de.AttemptDiscarded)
    assert {discard.reason for discard in discards} == {"unreachable"}
    assert 3 in {discard.step for discard in discards}
    # The cut push was admitted, and is counted nowhere.
    assert (3, 1, 1) in admitted(config)
    accepted = bodies(config.event_tape, de.PushAccepted)
    assert (3, 1, 1) not in {(push.step, push.attempt, push.learner) for push in accepted}
    third = next(commit for commit in bodies(config.event_tape, de.RoundCommitted) if commit.step == 3)
    assert third.attempt == 2


async def test_a_quorum_outlives_a_death(tmp_path):
    config = make_config(tmp_path, num_learners=3, quorum=2, wait_for=3, total_steps=8)

    async def die(learner, pull):
        if pull.step == 3:
            await learner.hang_up()
            return False
        return True

    learners = fakes(3)
    learners[2].before_push = die
    async with running(config, *learners) as run:
        # The dead one left less than a minute before the cut, so its ACK is awaited; it comes back for it.
        await until(on_tape(config, de.FinalCutOrdered))
        learners[2].before_push = None
        run.join(learners[2])
        assert await run.end() == 0
    commits = bodies(config.event_tape, de.RoundCommitted)
    assert [len(commit.responders) for commit in commits][-3:] == [2, 2, 2]
    assert learners[2].final_digests() == learners[0].final_digests()


async def test_a_learner_that_dials_again_supersedes_itself(tmp_path):
    """The old connection still looks alive: it is told why and closed, the run goes on with the new one."""
    config = make_config(tmp_path)
    first, twin = fakes(2)[1], fakes(2)[1]
    held = trio.Event()

    async def hold(learner, pull):
        held.set()
        await trio.sleep_forever()

    first.before_push = hold
    async with running(config, *fakes(1), first) as run:
        await held.wait()
        run.join(twin)
        assert await run.end() == 0
    assert first.error.startswith("learner 1 connected again from 127.0.0.1:")
    assert "two processes with one --learner-id?" in first.error
    assert twin.released
    refused = bodies(config.event_tape, de.LearnerRefused)
    assert [refusal.reason for refusal in refused] == ["superseded"]


async def test_a_learner_of_another_run_takes_nobodys_place(tmp_path):
    """It dialled the wrong port: its id is one that is here, too."""
    config = make_config(tmp_path, bounds=attrs.evolve(BOUNDS, second_look_seconds=0.0))
    learners = fakes()
    told = held_back(learners)
    async with running(config, *learners) as run:
        await until(lambda: all(learner.pulls for learner in learners))
        for settings in ({"binding": {"model": "other"}}, {"layout": small_layout(4)}, {"dtype": "bf16"}):
            for learner in (0, 1):
                stranger = FakeLearner(learner=learner, **settings)
                await stranger.run(run.address.host, run.address.port)
                assert stranger.error is not None
        told.set()
        assert await run.end() == 0
    assert [learner.dials for learner in learners] == [1, 1]


async def test_whoever_comes_back_waits_no_longer_than_its_old_connection_lives(tmp_path, monkeypatch):
    """Both ends are on their way, and the HELLO was quicker: nothing has to be superseded."""
    config = make_config(tmp_path, bounds=attrs.evolve(BOUNDS, second_look_seconds=3600.0))
    first, again = fakes(2)[1], fakes(2)[1]
    looks, ended = [], FrameStream.ended

    async def look(stream):
        looks.append(stream)
        return await ended(stream)

    monkeypatch.setattr(FrameStream, "ended", look)

    async def hold(learner, pull):
        await trio.sleep_forever()

    first.before_push = hold
    async with running(config, *fakes(1), first) as run:
        await until(lambda: first.pulls)
        run.join(again)
        await until(lambda: len(looks) > 4)
        await first.hang_up()
        assert await run.end() == 0
    assert again.released
    assert again.dials == 1
    assert first.error is None
    assert not bodies(config.event_tape, de.LearnerRefused)


@pytest.mark.parametrize(
    ("dtype", "value"), [("f32", np.nan), ("bf16", -np.inf), ("q4", np.nan), ("q4", np.inf), ("q4", 1e30)]
)
async def test_non_finite_pushes_are_refused_and_the_third_closes_the_door(tmp_path, dtype, value):
    """One value of a push is enough, also if it becomes the scale of a block, or only has an absurd norm."""
    config = make_config(tmp_path, quorum=1, total_steps=9)
    learners = fakes(dtype=dtype)

    def spoilt(pull, numel):
        delta = np.full(numel, 0.01, np.float32)
        delta[numel // 2] = value
        return delta

    learners[1].make_delta = spoilt

    async def follow(learner, pull):
        # One round at a time, so that none is sealed before the bad push is here.
        await until(lambda: learners[1].error or pull.step in refused())
        return True

    def refused():
        return {refusal.step for refusal in bodies(config.event_tape, de.PushRefused)}

    learners[0].before_push = follow
    async with running(config, *learners) as run:
        # Nobody waits for the final ACK of the one that was sent away for good.
        assert await run.end() == 0
    refusals = bodies(config.event_tape, de.PushRefused)
    assert [(refusal.reason, refusal.learner) for refusal in refusals] == [("non_finite", 1)] * 3
    assert "lower --inner-lr" in learners[1].error
    for commit in bodies(config.event_tape, de.RoundCommitted):
        assert [responder.learner for responder in commit.responders] == [0]


async def test_non_finite_initial_values_are_refused_with_the_remedy(tmp_path):
    config = make_config(tmp_path)
    (learner,) = fakes(1)
    learner.initial[1][3] = np.inf
    async with running(config, learner):
        await until(lambda: learner.error is not None)
    assert "initial fragment 1 holds NaN or Inf" in learner.error
    assert bodies(config.event_tape, de.SessionReleased)


async def test_an_initial_set_belongs_to_one_connection(tmp_path):
    """Half a set, then another process as learner 0 with other values: only its set counts."""
    config = make_config(tmp_path)
    layout = small_layout()
    half = FakeLearner(learner=0, layout=layout)
    whole = FakeLearner(learner=0, layout=layout)
    whole.initial = [values + 1 for values in whole.initial]
    sent = []

    async def leave(learner):
        await until(lambda: len(bodies(config.event_tape, ev.FragmentInitialised)) == 1)
        sent.append(True)
        await learner.hang_up()

    half.on_connected = leave
    half.initial = half.initial[:1]
    async with running(config, half) as run:
        await until(on_tape(config, de.SessionReleased))
        run.join(whole)
        run.join(FakeLearner(learner=1, layout=layout))
        assert await run.end() == 0
    assert sent == [True]
    np.testing.assert_array_equal(whole.values[0].shape, (40,))
    first_broadcast = bodies(config.event_tape, de.BroadcastOrdered)[0]
    assert [ref.version for ref in first_broadcast.fragments] == [0, 0, 0]


async def test_a_learner_that_lives_on_in_another_run_is_told_so_and_nobody_waits_for_it(tmp_path):
    """Its syncer lost everything and began anew: its initial values went to the one before."""

    async def beat_on(learner):
        while True:
            learner.beat()
            await trio.sleep(0.02)

    config = make_config(tmp_path, bounds=attrs.evolve(BOUNDS, initial_seconds=0.2))
    layout = small_layout()
    stray = FakeLearner(learner=0, layout=layout, local_step=153, reconnects=True, on_connected=beat_on)
    stray.has_been_sent(range(len(layout.fragments)))
    async with running(config, stray) as run:
        await until(lambda: stray.error is not None)
        assert "at the beginning of a run, and learner 0, at local step 153 of another" in stray.error
        assert "start it again; " in stray.error
        # Neither is it refused to have trained: who sends its values is welcome.
        for learner in fakes(layout=layout, local_step=7, on_connected=beat_on):
            run.join(learner)
        assert await run.end() == 0
    (released,) = bodies(config.event_tape, de.SessionReleased)
    assert "after 0 of 3 initial fragments" in released.why


async def test_a_large_push_goes_in_slices_over_all_streams(tmp_path):
    layout = small_layout(num_fragments=2, numel=(2 * SLICE_BYTES + 4096) // 4)
    config = make_config(tmp_path, total_steps=2)
    learners = fakes(layout=layout, num_streams=3)
    async with running(config, *learners) as run:
        assert await run.end() == 0
    assert learners[0].final_digests() == learners[1].final_digests()


async def test_a_silent_learner_is_taken_for_dead(tmp_path):
    """Like a process that was stopped: its sockets stay open and nothing comes."""
    bounds = attrs.evolve(BOUNDS, silence_seconds=1.0)
    config = make_config(tmp_path, bounds=bounds, quorum=1, total_steps=4)
    # On a busy machine anybody may be silent for a second, and comes back; but not who stands still for good.
    steady, frozen = fakes(reconnects=True)

    async def stand_still(learner, pull):
        learner.reconnects = False
        await trio.sleep_forever()

    async def wait_for_the_verdict(learner, pull):
        await until(lambda: not frozen.reconnects and frozen.closed)
        return True

    def reasons():
        return [left.reason for left in bodies(config.event_tape, ev.LearnerLeft) if left.learner == 1]

    async def keep_beating(learner):
        while learner.reconnects:
            learner.local_step += 1
            learner.beat()
            await trio.sleep(0.25)

    frozen.before_push = stand_still
    steady.before_push = wait_for_the_verdict
    for learner in (steady, frozen):
        learner.on_connected = keep_beating
    async with running(config, steady, frozen):
        await until(on_tape(config, de.FinalCutOrdered))
    assert "no byte on the control stream" in reasons()[-1]


async def test_twenty_joins_and_leaves_leave_no_ghosts(tmp_path):
    config = make_config(tmp_path, quorum=1, wait_for=2, total_steps=4)
    (steady,) = fakes(1)
    passed = trio.Event()

    async def wait(learner, pull):
        await passed.wait()
        return True

    steady.before_push = wait
    async with running(config, steady) as run:
        for _ in range(20):
            passer = FakeLearner(learner=1, layout=steady.layout)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(passer.run, run.address.host, run.address.port)
                await until(lambda passer=passer: passer.group is not None)
                await passer.hang_up()
                nursery.cancel_scope.cancel()
        last = FakeLearner(learner=1, layout=steady.layout)
        run.join(last)
        await until(lambda: last.versions)
        passed.set()
        assert await run.end() == 0
    state = verify(config.event_tape).state
    assert state.step == 4
    assert last.released


@pytest.mark.parametrize("seed", range(3))
async def test_learners_that_drop_at_random_never_stop_the_run(tmp_path, seed):
    chance = random.Random(seed)
    config = make_config(tmp_path, num_learners=3, quorum=2, wait_for=3, total_steps=9)

    async def stumble(learner, pull):
        if chance.random() < 0.12 and learner.dials < 4:
            await learner.hang_up()
            return False
        return True

    learners = fakes(3, reconnects=True, before_push=stumble)
    async with running(config, *learners) as run:
        assert await run.end() == 0
    assert verify(config.event_tape).state.step == 9
    assert len({tuple(learner.final_digests()) for learner in learners}) == 1
