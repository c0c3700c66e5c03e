"""What every part of a simulation shares: the clock, the configuration, the account, the measures."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from attrs import define, field

from yeto.core import State
from yeto.core.decisions import Decision
from yeto.core.events import Event, SessionResumed
from yeto.sim.account import Account
from yeto.sim.agenda import Agenda, chance
from yeto.sim.config import SimConfig
from yeto.sim.measures import Measures
from yeto.tape import Header, Mark

if TYPE_CHECKING:
    from yeto.learner.anchors import FragmentBook
    from yeto.sim.learner import Learner
    from yeto.sim.syncer import Syncer


class Observer(Protocol):
    """Watches the syncer's side of a run, fact by fact."""

    def began(self, header: Header) -> None:
        """A new tape begins; what stood on an older one was never durable in a checkpoint."""

    def line(self, line: bytes) -> None:
        """A line was appended."""

    def told(self, seq: int, event: Event, decisions: tuple[Decision, ...], after: State) -> None:
        """The coordinator was told a fact, recorded as ``seq``, and every line of it was appended."""

    def acted(self, decision: Decision, seq: int, durable_seq: int) -> None:
        """A decision that had to be durable first is being acted upon."""

    def stopped(self, last_seq: int) -> None:
        """The process is gone; the tape ends, perhaps torn, behind record ``last_seq``."""

    def resuming(self, event: SessionResumed, checkpoint: Mark) -> None:
        """A new process goes on from a checkpoint; ``event`` comes next."""


@define(eq=False, kw_only=True)
class World:
    """One run."""

    config: SimConfig
    agenda: Agenda
    account: Account
    measures: Measures
    observer: Observer | None = None
    make_book: Callable[[], FragmentBook]
    """Makes the book of a learner's new life."""
    learners: list[Learner] = field(factory=list)
    happened: dict[str, int] = field(factory=dict)
    """How often each kind of fault really happened."""
    exit_code: int | None = None
    is_over: bool = False
    syncer: Syncer = field(init=False)
    """Set before anything happens: it needs the world to be made."""

    def chance(self, concern: str) -> random.Random:
        """Return the source of chance of one concern."""
        return chance(self.config.seed, concern)

    def is_calm(self) -> bool:
        """Whether the time in which things go wrong is over."""
        until = self.config.faults.until_seconds
        return until is not None and self.agenda.now >= until

    def note(self, fault: str) -> None:
        """Count a fault that happened."""
        self.happened[fault] = self.happened.get(fault, 0) + 1
