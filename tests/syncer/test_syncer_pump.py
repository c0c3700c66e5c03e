"""The pump alone: order of duties, time, timers, and a disk that refuses."""

import errno

import pytest
import trio
import trio.testing

from yeto.core import CoreConfig, initial_state
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.values import SessionTerms
from yeto.errors import TapeError
from yeto.syncer.pump import UNSTAMPED, Pump, SessionClock
from yeto.tape import Header, TapeFile, TapeWriter, read
from yeto.tape.replay import replay

CONFIG = CoreConfig(num_learners=2, total_steps=4, quorum=2, wait_for=2, start_timeout_seconds=30.0)
TERMS = SessionTerms(dtype="f32", num_fragments=2, fingerprint="f" * 64, contract="c" * 64)


def header():
    return Header(software_version="0", wall_clock="2026-01-01T00:00:00+00:00", session_id="s", config=CONFIG)


class Recorder:
    """A dispatcher that writes down what it is told and what it does."""

    def __init__(self, tape):
        self.tape = tape
        self.log = []

    def stepped(self, event, decisions):
        self.log.append(("stepped", event.kind))

    def act(self, decision, *, event, seq, state):
        self.log.append(("now", decision.kind, seq))
        if not decision.durable:
            return None

        async def act():
            self.log.append(("durable", decision.kind, seq <= self.tape.durable_seq))

        return act


class BrokenDisk(TapeFile):
    """A file whose fsync fails from the n-th on."""

    syncs_left = 1

    def sync(self):
        if not self.syncs_left:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.syncs_left -= 1
        super().sync()


def make_pump(tape):
    pump = Pump(state=initial_state(CONFIG), tape=tape, clock=SessionClock(), events_max=8)
    pump.dispatcher = Recorder(tape)
    return pump


def hello(learner=0, generation="00000000000000a1"):
    return ev.HelloReceived(
        at=UNSTAMPED, learner=learner, generation=generation, address="127.0.0.1:1", terms=TERMS
    )


async def test_a_fact_is_on_the_tape_before_it_is_stepped_and_acted_on(tmp_path):
    with TapeWriter.create(tmp_path / "tape", header()) as tape:
        pump = make_pump(tape)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump.run)
            decisions = await pump.ask(hello())
            nursery.cancel_scope.cancel()
        assert [type(decision) for decision in decisions] == [de.SessionOpened]
        assert pump.dispatcher.log == [("stepped", "hello_received"), ("now", "session_opened", 2)]
    records = list(read(tmp_path / "tape"))
    assert [(record.seq, record.kind, record.because) for record in records] == [
        (0, "header", None),
        (1, "hello_received", None),
        (2, "session_opened", 1),
    ]
    assert replay(tmp_path / "tape").divergence is None


async def _never():
    raise AssertionError("nothing is written here")


@pytest.mark.parametrize(
    ("event", "act", "kind"),
    [
        (ev.StopRequested(at=UNSTAMPED, signal="SIGTERM"), None, "session_ended"),
        (hello(), _never, "session_opened"),
    ],
)
async def test_a_decision_waits_for_the_disk_if_and_only_if_it_is_marked_durable(tmp_path, event, act, kind):
    with TapeWriter.create(tmp_path / "tape", header()) as tape:
        pump = make_pump(tape)
        pump.dispatcher.act = lambda decision, **rest: act
        with pytest.raises(AssertionError, match=f"{kind}: its mark says"):
            pump.feed(event)


async def test_stop_is_acted_on_only_when_it_is_durable(tmp_path):
    with TapeWriter.create(tmp_path / "tape", header()) as tape:
        pump = make_pump(tape)
        pump.feed(ev.StopRequested(at=UNSTAMPED, signal="SIGTERM"))
        assert ("now", "session_ended", 2) in pump.dispatcher.log
        assert not [entry for entry in pump.dispatcher.log if entry[0] == "durable"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump.flush_forever)
            await pump.settled()
            nursery.cancel_scope.cancel()
        assert pump.dispatcher.log[-1] == ("durable", "session_ended", True)


async def test_a_disk_that_refuses_stops_everything_before_it_is_done(tmp_path):
    with TapeWriter.create(tmp_path / "tape", header(), open_file=BrokenDisk) as tape:
        pump = make_pump(tape)
        pump.feed(ev.StopRequested(at=UNSTAMPED, signal="SIGTERM"))
        with pytest.raises(TapeError, match="No space left"):
            await pump.flush_forever()
    assert not [entry for entry in pump.dispatcher.log if entry[0] == "durable"]
    assert [record.kind for record in read(tmp_path / "tape")] == ["header"]


async def test_timers_come_from_the_state_and_carry_the_time_they_fired(tmp_path, mock_clock):
    with TapeWriter.create(tmp_path / "tape", header()) as tape:
        pump = make_pump(tape)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump.run)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(29.0)
            await trio.testing.wait_all_tasks_blocked()
            assert pump.dispatcher.log == []
            mock_clock.jump(1.5)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert pump.dispatcher.log[0] == ("stepped", "start_timeout_passed")
    event = list(read(tmp_path / "tape"))[1].body
    assert event.at == 30.5


async def test_session_time_goes_on_where_the_tape_ended(mock_clock):
    began = trio.current_time()
    clock = SessionClock(begin_at=12.5)
    assert clock.now() == 12.5
    mock_clock.jump(0.0000014)
    assert clock.now() == 12.500001
    assert clock.as_trio_time(13.5) == pytest.approx(began + 1.0)


async def test_what_waits_for_a_timer_queues_and_a_full_queue_holds_back_who_tells(tmp_path, mock_clock):
    with TapeWriter.create(tmp_path / "tape", header()) as tape:
        pump = make_pump(tape)
        mock_clock.jump(30.5)  # the start timeout is due and goes first
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(pump.tell, hello(generation=f"{number + 1:016x}"))
            await trio.testing.wait_all_tasks_blocked()
            assert pump.dispatcher.log == []
            nursery.start_soon(pump.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    facts = [record.body for record in read(tmp_path / "tape") if isinstance(record.body, ev.Event)]
    assert isinstance(facts[0], ev.StartTimeoutPassed)
    assert {fact.generation for fact in facts[1:]} == {f"{number + 1:016x}" for number in range(20)}


async def test_a_fact_that_nothing_waits_before_is_fed_at_once(tmp_path):
    with TapeWriter.create(tmp_path / "tape", header()) as tape:
        pump = make_pump(tape)
        with trio.fail_after(0):  # no turn is given away
            decisions = await pump.ask(hello())
        assert [type(decision) for decision in decisions] == [de.SessionOpened]


async def test_what_goes_wrong_ends_the_run_and_not_who_told(tmp_path):
    with TapeWriter.create(tmp_path / "tape", header()) as tape:
        pump = make_pump(tape)
        tape.close()  # every append is refused from now on
        went_on = []

        async def ask():
            await trio.testing.wait_all_tasks_blocked()
            await pump.ask(hello())
            went_on.append(True)

        async def run():
            async with trio.open_nursery() as nursery:
                for work in (pump.run, ask, ask):
                    nursery.start_soon(work)

        with pytest.raises(BaseExceptionGroup) as caught:
            await run()
        assert caught.group_contains(TapeError, match="closed")
        assert not went_on


async def test_what_goes_wrong_before_the_pumps_own_task_runs_ends_it_too(tmp_path):
    with TapeWriter.create(tmp_path / "tape", header()) as tape:
        pump = make_pump(tape)
        tape.close()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump.tell, hello())
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(TapeError, match="closed"), trio.fail_after(30):
                await pump.run()
            nursery.cancel_scope.cancel()


async def test_nothing_is_fed_any_more_when_the_pumps_own_task_has_failed(tmp_path, mock_clock):
    """Who tells in the same turn must not write behind an event that was not dealt with."""
    with TapeWriter.create(tmp_path / "tape", header()) as tape:
        pump = make_pump(tape)
        failed = trio.Event()

        class Failing(Recorder):
            def stepped(self, event, decisions):
                failed.set()
                raise AssertionError("it does not work")

        pump.dispatcher = Failing(tape)
        mock_clock.jump(30.5)  # the start timeout, which the pump feeds itself

        async def tell():
            await failed.wait()
            pump.dispatcher = Recorder(tape)
            await pump.tell(hello())

        async def run():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tell)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(pump.run)

        with pytest.raises(BaseExceptionGroup) as caught:
            await run()
        assert caught.group_contains(AssertionError, match="does not work")
    kinds = [record.kind for record in read(tmp_path / "tape") if isinstance(record.body, ev.Event)]
    assert kinds == ["start_timeout_passed"]
