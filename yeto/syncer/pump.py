"""The pump: the only owner of the coordinator's state, and the only place where time gets into it.

For every fact, in this order and without an ``await`` in between: stamp it, append it to the tape, step,
append the decisions, act. So tape and state can never tell different stories, and nothing that happens
elsewhere can slip between a fact and what was decided about it.

A fact that nothing waits before is fed at once by the task that tells it; else it queues for the pump's own
task, which also feeds the timers. Either way it is the same stretch. Left out are the turns of tasks between
"told" and "decided", which would cost a small push more than everything else. What goes wrong in it ends the
pump's task, and with it the run, never the connection that happened to tell.

Acting does not wait for the disk, with one exception. A decision marked durable (a commit, a broadcast, a
release) is queued behind the flusher: one task that writes and fsyncs whatever has been appended, and then
runs the queued acts whose record is safe, in order. While one fsync is under way the pump goes on and the
next batch grows, so a batch costs one fsync however long it is. When a flush fails the flusher raises, the
nursery of the run falls, and none of those acts ever happens.

Nothing here may wait for a socket, for tensors or for a file: whoever is slow would make everybody slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol

import attrs
import trio
from attrs import define, field, frozen

from yeto.core import State, next_timer, step
from yeto.core.decisions import Decision
from yeto.core.events import Event
from yeto.core.timers import next_deadline
from yeto.tape import TapeWriter, round_at

UNSTAMPED = 0.0
"""The ``at`` of an event that has not reached the pump yet."""

Act = Callable[[], Awaitable[None]]
"""What is left to do about a decision once its record is durable."""


class Dispatcher(Protocol):
    """Carries decisions out. Called by the pump inside its one uninterrupted stretch."""

    def stepped(self, event: Event, decisions: tuple[Decision, ...]) -> None:
        """Take notice of an event that was stepped, before its decisions are carried out."""

    def act(self, decision: Decision, *, event: Event, seq: int, state: State) -> Act | None:
        """Carry a decision out at once; if it is marked durable, return what waits for record ``seq``."""


class SessionClock:
    """Seconds since the session began, monotonic over restarts.

    A resumed session goes on from the last second on its tape; the time it was down is not session time.
    """

    def __init__(self, begin_at: float = 0.0) -> None:
        """Start now, at ``begin_at`` seconds of the session."""
        self._offset = begin_at - trio.current_time()
        self._latest = begin_at

    def now(self) -> float:
        """Return the session's time, rounded as on the tape, never less than before."""
        self._latest = max(self._latest, round_at(trio.current_time() + self._offset))
        return self._latest

    def as_trio_time(self, at: float) -> float:
        """Convert session seconds to Trio's clock, for a deadline."""
        return at - self._offset


@define(eq=False)
class _Answer:
    """Where the decisions about one event are put for the task that told it."""

    decisions: tuple[Decision, ...] = ()
    ready: trio.Event = field(factory=trio.Event)


@frozen(eq=False)
class _Told:
    event: Event
    answer: _Answer | None


@frozen(eq=False)
class _Waiting:
    seq: int
    act: Act


class Pump:
    """Feeds events to the coordinator, one at a time, and hands its decisions to the dispatcher."""

    def __init__(self, *, state: State, tape: TapeWriter, clock: SessionClock, events_max: int) -> None:
        """Own ``state`` and ``tape`` from now on; hold at most ``events_max`` events that wait."""
        self.state = state
        self.clock = clock
        self.dispatcher: Dispatcher | None = None
        self._tape = tape
        self._facts, self._queue = trio.open_memory_channel[_Told](events_max)
        self._due = next_deadline(state)
        self._queued = 0
        self._failure: BaseException | None = None
        # The pump's own task sleeps in it, until the earliest deadline.
        self._sleep = trio.CancelScope()
        self._waiting: deque[_Waiting] = deque()
        self._settled = trio.lowlevel.ParkingLot()
        self._dirty = trio.Event()
        # One flush at a time, on a thread of its own: tensor work must not stand in its way.
        self._flush_thread = trio.CapacityLimiter(1)

    async def tell(self, event: Event) -> None:
        """Feed an event, or queue it behind what came before; its ``at`` is stamped when its turn comes."""
        if self._is_its_turn():
            await self._feed_here(event)
        else:
            await self._queue_up(_Told(event, None))

    async def ask(self, event: Event) -> tuple[Decision, ...]:
        """Feed or queue an event and return what was decided about it.

        Decisions that act at once have acted by then; durable ones may still wait for the disk.
        """
        if self._is_its_turn():
            return await self._feed_here(event)
        answer = _Answer()
        await self._queue_up(_Told(event, answer))
        await answer.ready.wait()
        return answer.decisions

    def _is_its_turn(self) -> bool:
        """Whether nothing waits that has to be fed first."""
        return not self._queued and self._failure is None and self.clock.now() < self._due

    async def _queue_up(self, told: _Told) -> None:
        self._queued += 1
        try:
            await self._facts.send(told)
        except BaseException:
            self._queued -= 1
            raise

    async def _feed_here(self, event: Event) -> tuple[Decision, ...]:
        due = self._due
        try:
            decisions = self.feed(event)
        except BaseException as error:
            self._failure = error
            self._sleep.cancel()
            await trio.sleep_forever()
            raise
        if self._due != due:
            self._sleep.deadline = self.clock.as_trio_time(self._due)
        return decisions

    def feed(self, event: Event) -> tuple[Decision, ...]:
        """Stamp, append, step, append, act: one uninterrupted stretch. For the pump and for the start."""
        assert self.dispatcher is not None
        event = attrs.evolve(event, at=self.clock.now())
        seq = self._tape.append_event(event)
        self.state, decisions = step(self.state, event)
        self._due = next_deadline(self.state)
        self._tape.append_decisions(decisions, because=seq, at=event.at)
        self.dispatcher.stepped(event, decisions)
        for place, decision in enumerate(decisions, start=1):
            act = self.dispatcher.act(decision, event=event, seq=seq + place, state=self.state)
            assert (act is not None) == decision.durable, (
                f"{decision.kind}: its mark says when it is acted upon"
            )
            if act is not None:
                self._waiting.append(_Waiting(seq + place, act))
        self._dirty.set()
        return decisions

    async def run(self) -> NoReturn:
        """Feed queued events and due timers, for ever.

        Raises:
            BaseException: what went wrong when an event was fed, here or by the task that told it.
        """
        try:
            while True:
                told = await self._next()
                decisions = self.feed(told.event)
                if told.answer is not None:
                    told.answer.decisions = decisions
                    told.answer.ready.set()
        except BaseException as error:
            # The end of this task is the end of all feeding, also for who has not heard of it yet.
            self._failure = error
            raise

    async def _next(self) -> _Told:
        """Return the next event: a timer that is due goes before what is queued.

        Raises:
            BaseException: what went wrong when a task fed an event itself.
        """
        while self._failure is None:
            if self.clock.now() >= self._due:
                # A cancelled run must not be kept alive by a chain of timers.
                await trio.lowlevel.checkpoint()
                timer = next_timer(self.state)
                assert timer is not None, "something is due"
                return _Told(timer.event, None)
            with trio.CancelScope(deadline=self.clock.as_trio_time(self._due)) as self._sleep:
                told = await self._queue.receive()
                self._queued -= 1
                if self._failure is None:
                    return told
        raise self._failure

    async def flush_forever(self) -> NoReturn:
        """Make records durable in batches and run the acts that waited for them, in order.

        Raises:
            TapeError: records could not be made durable; no act that waited for them has run.
        """
        while True:
            await self._dirty.wait()
            self._dirty = trio.Event()
            durable = await trio.to_thread.run_sync(self._tape.flush, limiter=self._flush_thread)
            while self._waiting and self._waiting[0].seq <= durable:
                await self._waiting[0].act()
                self._waiting.popleft()
            if not self._waiting:
                self._settled.unpark_all()

    async def settled(self) -> None:
        """Wait until no act waits for the disk any more."""
        while self._waiting:
            await self._settled.park()
