"""Links: how long messages take, and what a connection that ends takes with it.

A connection has a control stream and a lane for bulk each way. Control messages arrive in order, a latency
after they were sent. Bulk messages queue: a lane carries one at a time, at the rate of the learner's link and
of what the syncer's machine has left. So a pull may overtake a broadcast, and a late one (the streams of a
lane are several) may be overtaken by the next.

What has not arrived when a connection breaks never does. The learner notices at once, the syncer after a
latency or, when the connection stays half-open, after the silence it allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from random import Random
from typing import TYPE_CHECKING, Any

from yeto.core.values import Member
from yeto.sim.agenda import Agenda
from yeto.sim.config import Faults, LearnerSpec

if TYPE_CHECKING:
    from yeto.sim.client import Client

SILENCE_SECONDS = 15.0
"""What the syncer waits for a sign of life on a half-open connection."""


class SharedRate:
    """A rate that all learners share: what is reserved goes one after the other."""

    def __init__(self, rate: float) -> None:
        """Start idle, with so many bytes a second."""
        self._rate = rate
        self._free_at = 0.0

    def reserve(self, begin: float, size: int) -> float:
        """Carry ``size`` bytes from ``begin`` on; return when the last one is through."""
        free = self._free_at
        self._free_at = (begin if begin > free else free) + size / self._rate
        return self._free_at


class Delays:
    """How long messages of one learner take on the way."""

    def __init__(
        self,
        spec: LearnerSpec,
        faults: Faults,
        rng: Random,
        is_calm: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        """Draw from ``rng``; ``is_calm`` says whether the time of faults is over, ``note`` counts them."""
        self._latency = spec.latency_seconds
        # Uniform, and as wide as has the deviation that is asked for; no message arrives before it was sent.
        self._spread = min(1.0, math.sqrt(3.0) * spec.latency_jitter)
        self._late = faults.late
        self._late_seconds = faults.late_seconds
        self._random = rng.random
        self._is_calm = is_calm
        self._note = note

    def draw(self) -> float:
        """Return the delay of one message."""
        delay = self._latency
        if self._spread:
            delay *= 1.0 + self._spread * (2.0 * self._random() - 1.0)
        if self._late and self._random() < self._late and not self._is_calm():
            self._note("late")
            delay += self._late_seconds
        return delay


Arrive = Callable[..., None]


class Lane:
    """Bulk one way: one message at a time, newest of each key first come."""

    def __init__(self, agenda: Agenda, rate: float, shared: SharedRate, delays: Delays) -> None:
        """Carry at ``rate``, within what ``shared`` has left."""
        self._agenda = agenda
        self._rate = rate
        self._shared = shared
        self._delays = delays
        self._free_at = 0.0
        self._waiting: dict[Hashable, tuple[int, Arrive | None, Arrive, tuple[Any, ...]]] = {}
        self.is_open = True
        self.num_bytes = 0

    def put(self, key: Hashable, size: int, begun: Arrive | None, arrived: Arrive, *details: Any) -> None:
        """Send a message; one of the same key that still waits gives way to it.

        Args:
            key: what it replaces.
            size: bytes.
            begun: called with ``details`` when its head arrives.
            arrived: called with ``details`` when it is there whole.
            details: the message.
        """
        if self._waiting or self._agenda.now < self._free_at:
            if not self._waiting:
                self._agenda.at(self._free_at, self._next)
            self._waiting[key] = (size, begun, arrived, details)
        else:
            self._carry(size, begun, arrived, details)

    def _next(self) -> None:
        if not self.is_open:
            self._waiting.clear()
        if self._waiting:
            self._carry(*self._waiting.pop(next(iter(self._waiting))))
        if self._waiting:
            self._agenda.at(self._free_at, self._next)

    def _carry(self, size: int, begun: Arrive | None, arrived: Arrive, details: tuple[Any, ...]) -> None:
        agenda = self._agenda
        now = agenda.now
        own, shared = now + size / self._rate, self._shared.reserve(now, size)
        self._free_at = end = own if own > shared else shared
        self.num_bytes += size
        delay = self._delays.draw()
        if begun is not None:
            agenda.at(now + delay, begun, *details)
        agenda.at(end + delay, arrived, *details)


class Connection:
    """One generation of one learner: both ends of it, and what is on the way."""

    def __init__(
        self,
        learner: int,
        generation: int,
        *,
        client: Client,
        process: int,
        agenda: Agenda,
        up: Lane,
        down: Lane,
        delays: Delays,
    ) -> None:
        """Connect a learner to the syncer's ``process``."""
        self.generation = generation
        self.member = Member(learner=learner, generation=f"{generation:016x}")
        self.client = client
        self.process = process
        """Which process of the syncer it reached."""
        self.up = up
        self.down = down
        self.who = {"learner": learner, "generation": self.member.generation}
        """Fields of every fact that is told of it."""
        self._agenda = agenda
        self._delays = delays
        self._up_at = self._down_at = 0.0
        self.was_heard = False
        """Whether the syncer sent anything on it."""
        self.is_released = False
        """Whether SHUTDOWN was sent on it."""
        self.told_step = 0
        """Local step of the last heartbeat that was sent."""
        self.known_step = 0
        """The same as the syncer knows it, also from pushes."""

    def send_up(self, arrive: Arrive, *details: Any) -> None:
        """Send a control message to the syncer."""
        at = self._agenda.now + self._delays.draw()
        self._up_at = at = at if at > self._up_at else self._up_at
        self._agenda.at(at, self._arrive_up, arrive, details)

    def send_down(self, arrive: Arrive, *details: Any) -> None:
        """Send a control message to the learner."""
        at = self._agenda.now + self._delays.draw()
        self._down_at = at = at if at > self._down_at else self._down_at
        self._agenda.at(at, self._arrive_down, arrive, details)

    def delay(self) -> float:
        """Return how long something takes that is no message: the end of a connection."""
        return self._delays.draw()

    def break_off(self) -> None:
        """What is on the way, either way, is lost."""
        self.up.is_open = self.down.is_open = False

    def _arrive_up(self, arrive: Arrive, details: tuple[Any, ...]) -> None:
        if self.up.is_open:
            arrive(self, *details)

    def _arrive_down(self, arrive: Arrive, details: tuple[Any, ...]) -> None:
        if self.down.is_open:
            self.was_heard = True
            arrive(self, *details)
