"""Learners that say too much: the tape stays small, others notice nothing, and who overdoes it has to go."""

import contextlib
import itertools

import pytest
import trio
import trio.lowlevel
from dialled import dial
from fake_learner import FakeLearner
from syncer_runs import bodies, fakes, held_back, make_config, running, until

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.link import LinkClosed
from yeto.syncer.allowances import (
    CONTROL,
    DIALS,
    GENERATIONS,
    HEARTBEATS,
    PUSHES,
    REPLAYS,
    Allowance,
    Allowances,
    Rate,
)
from yeto.wire.frames import MessageType, encode_header
from yeto.wire.messages import BudgetDone, FinalAck, Heartbeat, PushHeader


class TestAllowance:
    async def test_a_burst_and_then_a_rate(self, mock_clock):
        allowance = Allowance(Rate(3, 0.5))
        assert [allowance.take() for _ in range(5)] == [True, True, True, False, False]
        assert allowance.refused == 2
        mock_clock.jump(2)
        assert [allowance.take() for _ in range(2)] == [True, False]
        mock_clock.jump(1000)
        assert [allowance.take() for _ in range(4)] == [True, True, True, False]
        assert allowance.refused == 1

    async def test_what_is_granted_comes_on_top_and_does_not_melt(self, mock_clock):
        allowance = Allowance(Rate(2, 1))
        allowance.grant(50)
        mock_clock.jump(1000)
        assert sum(allowance.take() for _ in range(100)) == 52

    async def test_a_generation_of_before_has_a_rate_of_its_own(self):
        allowances = Allowances()
        assert allowances.of_dial(7) is allowances.dials
        assert allowances.of_dial(7) is allowances.replays
        for generation in range(100, 100 + GENERATIONS):
            assert allowances.of_dial(generation) is allowances.dials
        assert allowances.of_dial(7) is allowances.dials


class Guest(FakeLearner):
    """A third learner that nobody needs: it says what a test has it say, and answers no pull."""

    def __init__(self, say, **settings):
        super().__init__(learner=2, on_connected=say, sends_manifest=False, acknowledges=False, **settings)

        async def never(learner, pull):
            return False

        self.before_push = never


async def put_all(guest, messages):
    """Send messages, a bunch after the other, until they are sent or the group has ended."""
    with contextlib.suppress(LinkClosed):
        for start in range(0, len(messages), 50):
            for message in messages[start : start + 50]:
                guest.group.outbox.put_control(message.TYPE, message.encode())
            await guest.group.outbox.control_flushed()


async def visit(tmp_path, say, *, told):
    """Run two learners; the guest says something meanwhile, until `told(config)`.

    Returns:
        The config, and the seconds that it took: so long what is allowed a second was allowed.
    """
    config = make_config(tmp_path, num_learners=3, total_steps=3, final_ack_timeout_seconds=0.2)
    steady = fakes()
    done = held_back(steady)
    guest = Guest(say)
    began = trio.current_time()
    async with running(config, *steady) as run:
        await until(lambda: all(learner.pulls for learner in steady))
        run.join(guest)
        await until(lambda: told(config))
        done.set()
        await run.end()
    assert [learner.dials for learner in steady] == [1, 1]
    assert [commit.step for commit in bodies(config.event_tape, de.RoundCommitted)] == [1, 2, 3]
    return config, trio.current_time() - began


def left(config):
    """Return why the guest left."""
    return [body.reason for body in bodies(config.event_tape, ev.LearnerLeft) if body.learner == 2]


def most_of(rate, seconds):
    """Return how often a rate allows something in a time."""
    return rate.burst + rate.per_second * seconds


def count(config, kind):
    return sum(getattr(body, "learner", None) == 2 for body in bodies(config.event_tape, kind))


async def test_what_is_no_news_is_not_told(tmp_path):
    """The same step, ACK and budget again and again, within what a learner may send."""

    async def repeat(guest):
        beats = [Heartbeat(learner=2, local_step=step) for step in (0, *(5, 4) * 5)]
        await put_all(guest, [*beats, *[FinalAck(step=9)] * 10, *[BudgetDone(local_steps=5)] * 10])
        await put_all(guest, [Heartbeat(learner=2, local_step=6)])

    def told(config):
        return any(beat.local_step == 6 for beat in bodies(config.event_tape, ev.Heartbeat))

    config, _ = await visit(tmp_path, repeat, told=told)
    beats = [beat.local_step for beat in bodies(config.event_tape, ev.Heartbeat) if beat.learner == 2]
    assert beats == [5, 6]
    assert count(config, ev.FinalAckReceived) == 1
    assert count(config, ev.BudgetReported) == 1


async def test_heartbeats_are_told_about_once_a_second(tmp_path):
    async def hurry(guest):
        await put_all(guest, [Heartbeat(learner=2, local_step=step) for step in range(1, 51)])
        for step in itertools.count(100):
            await trio.sleep(0.5)
            await put_all(guest, [Heartbeat(learner=2, local_step=step)])

    def told(config):
        return any(beat.local_step >= 100 for beat in bodies(config.event_tape, ev.Heartbeat))

    config, seconds = await visit(tmp_path, hurry, told=told)
    assert HEARTBEATS.burst < count(config, ev.Heartbeat) <= most_of(HEARTBEATS, seconds)


FLOODS = {
    "heartbeats": [Heartbeat(learner=2, local_step=step) for step in range(5000)],
    "the same heartbeat": [Heartbeat(learner=2, local_step=1)] * 5000,
    "ACKs": [FinalAck(step=step) for step in range(5000)],
    "budgets": [BudgetDone(local_steps=1 + step) for step in range(5000)],
}


@pytest.mark.parametrize("case", FLOODS)
async def test_a_flood_of_control_messages_ends_the_group(tmp_path, case, caplog):
    async def flood(guest):
        await put_all(guest, FLOODS[case])

    config, seconds = await visit(tmp_path, flood, told=left)
    (reason,) = left(config)
    kind = FLOODS[case][0].TYPE.name
    if case == "budgets":
        # The coordinator does not like the second one, either; which comes first is a race.
        assert "budget" in reason or "more control messages" in reason
    else:
        assert reason == f"{kind}: more control messages: at most 64 at once and 5 a second"
        assert f"broke the protocol: {reason}" in caplog.text
    told = count(config, ev.Heartbeat) + count(config, ev.FinalAckReceived) + count(config, ev.BudgetReported)
    assert told <= most_of(CONTROL, seconds)


async def test_a_flood_of_pushes_that_nobody_asked_for_ends_the_group(tmp_path):
    async def flood(guest):
        delta = memoryview(bytes(160))
        for step in range(1000, 1200):
            head = PushHeader(
                learner=2,
                fragment=0,
                step=step,
                attempt=1,
                base_version=0,
                local_step=1,
                c_steps=1,
                c_tokens=1,
            )
            guest.group.outbox.put(head, delta, order=(step,))
            # Or the next one would take its place.
            while guest.group.outbox.bytes_held:
                await trio.lowlevel.checkpoint()

    config, seconds = await visit(tmp_path, flood, told=left)
    (reason,) = left(config)
    assert reason == "PUSH_FRAGMENT: more pushes than were asked for: at most 16 at once and 1 a second"
    pulls = sum(
        2 in [m.learner for m in opened.members] for opened in bodies(config.event_tape, de.AttemptOpened)
    )
    assert count(config, ev.PushOffered) <= most_of(PUSHES, seconds) + 2 * pulls


async def say_hello(run, learner):
    """Dial once, say HELLO on the control stream alone, and wait for what comes of it."""
    (control,) = await dial(run.address.host, run.address.port, 0)
    try:
        await control.send(MessageType.HELLO, learner.hello().encode(learner.key))
        with trio.move_on_after(0.5):
            await control.read_header()
            return "answered"
    except LinkClosed:
        return "closed"
    finally:
        await control.close()
    return "nothing"


async def test_dials_without_end_are_closed_before_the_coordinator_hears_of_them(tmp_path, caplog):
    config = make_config(tmp_path, num_learners=3, total_steps=3, final_ack_timeout_seconds=0.2)
    steady = fakes()
    done = held_back(steady)
    began = trio.current_time()
    async with running(config, *steady) as run:
        await until(lambda: all(learner.pulls for learner in steady))
        restless = FakeLearner(learner=2, num_streams=1)
        for generation in range(1, 2 * int(DIALS.burst)):
            restless.generation = generation
            (control,) = await dial(run.address.host, run.address.port, 0)
            await control.send(MessageType.HELLO, restless.hello().encode())
            await control.close()
        # An id that there is not has no more of them than one that there is.
        nobody = FakeLearner(learner=77, num_streams=0)
        for nobody.generation in range(1, 10):
            nobody.learner += 1000
            await say_hello(run, nobody)
        done.set()
        await run.end()
    assert [learner.dials for learner in steady] == [1, 1]
    assert count(config, ev.HelloReceived) <= most_of(DIALS, trio.current_time() - began)
    assert caplog.text.count("learner 2 dials too often (60 times at once, 1 a second)") >= 1


async def test_a_recorded_hello_said_again_and_again_hinders_nobody(tmp_path, caplog):
    """Who has recorded the bytes has no key, but the coordinator knows the generation."""
    config = make_config(tmp_path, auth_key=b"secret", total_steps=4)
    learners = fakes(key=b"secret", reconnects=True)
    replayed = []
    began = trio.current_time()

    async def replay(learner, pull):
        if pull.step == 2 and not replayed:
            recorded = learner.hello().encode(learner.key)
            for _ in range(40):
                (control,) = await dial(run.address.host, run.address.port, 0)
                await control.send(MessageType.HELLO, recorded)
                replayed.append(control)
            for control in replayed:
                await control.close()
            # And now the true one has to dial again.
            await learner.hang_up()
            return False
        return True

    learners[1].before_push = replay
    async with running(config, *learners) as run:
        assert await run.end() == 0
    assert [learner.dials for learner in learners] == [1, 2]
    refused = bodies(config.event_tape, de.LearnerRefused)
    reused = [refusal for refusal in refused if refusal.reason == "generation_reused"]
    assert 1 <= len(reused) <= most_of(REPLAYS, trio.current_time() - began)
    assert count(config, ev.HelloReceived) == 0
    assert "was used before in this session" in caplog.text


async def test_a_generation_seen_before_is_refused_by_name_and_the_true_one_goes_on(tmp_path):
    config = make_config(tmp_path, total_steps=3)
    learners = fakes()
    said = []

    async def replay(learner, pull):
        if pull.step == 2:
            double = FakeLearner(learner=1, draw_generation=lambda: learner.generation, num_streams=0)
            await double.run(run.address.host, run.address.port)
            said.append(double.error)
        return True

    learners[1].before_push = replay
    async with running(config, *learners) as run:
        assert await run.end() == 0
    assert "was used before in this session; a learner draws a new one for every dial" in said[0]
    assert [learner.dials for learner in learners] == [1, 1]


async def test_huge_first_frames_wait_in_their_senders_and_small_ones_do_not(tmp_path):
    """What strangers may hold together is bounded: of four frames of 16 MiB, two are read."""
    config = make_config(tmp_path, total_steps=3)
    huge, strangers, sent = 16 * 2**20, [], [0] * 4

    async def fill(place):
        """Send all but the last bytes of a HELLO that claims all that one may claim."""
        try:
            await strangers[place].stream.send_all(encode_header(MessageType.HELLO, huge))
            while sent[place] < huge - 2**16:
                await strangers[place].stream.send_all(bytes(2**16))
                sent[place] += 2**16
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async with running(config) as run:
        for place in range(4):
            strangers += await dial(run.address.host, run.address.port, 0)
            run.nursery.start_soon(fill, place)
        await until(lambda: sorted(sent)[-2] == huge - 2**16)
        for learner in fakes():
            run.join(learner)
        assert await run.end() == 0
        # The other two are still in the system's buffers.
        assert sorted(sent)[1] < huge // 2
        for stream in strangers:
            await stream.close()
