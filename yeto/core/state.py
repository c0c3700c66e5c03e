"""The state: everything the coordinator knows, as immutable values.

A :class:`State` never changes, so a replay can stop anywhere and a what-if can branch from any point.
During one ``step`` the handlers write to a :class:`Draft`, a shallow mutable copy with the same fields;
the persistent maps and frozen records inside are replaced, never edited. Making the draft copies one
dictionary, whatever the number of learners; the new state takes that dictionary over. Nothing here grows
with the length of the run.

Open rounds are contiguous: ``rounds[i]`` is round ``step + 1 + i``. That makes finding a round an index
and the commit order a matter of looking at ``rounds[0]`` only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from attrs import define, frozen
from immutables import Map

from yeto.core.config import CoreConfig
from yeto.core.decisions import Decision, Ignored
from yeto.core.events import Event
from yeto.core.outer import Outer
from yeto.core.parts import GATHERING, Dial, Gated, Link, Phase, Round, made
from yeto.core.values import FragmentMark, LedgerEntry, Member, OuterMark, SessionTerms

_EMPTY: Map[Any, Any] = Map()
_new = object.__new__
_NAMES_SHOWN = 8  # a sentence that lists two thousand learners explains nothing


Slowest = float | tuple[float, "Slowest", "Slowest"]
"""A tournament tree over learner ids (see :mod:`yeto.core.pacing`)."""

NO_ESTIMATE = -1.0


@define(kw_only=True, slots=False)
class Fields:
    """The fields that a :class:`State` and a :class:`Draft` share."""

    config: CoreConfig
    at: float = 0.0
    phase: Phase = Phase.PROVISIONAL
    started_at: float = 0.0
    resumed: bool = False
    exit_code: int | None = None
    """Of the ended session; while stopping, the one it will end with."""
    exit_why: str = ""

    # Who is there.
    terms: SessionTerms | None = None
    opener: str | None = None
    """Learner 0's generation that fixed a session which is still provisional."""
    newest: Map[int, Dial] = _EMPTY
    seen: Map[int, tuple[str, ...]] = _EMPTY
    """Generations each id used, oldest first, bounded."""
    current: Map[int, Member] = _EMPTY
    links: Map[int, Link] = _EMPTY
    away: Map[int, float] = _EMPTY
    """When each id that was here was last seen leaving."""
    dismissed: Map[int, bool] = _EMPTY
    """Ids whose last group was refused for good and that have not dialled since: nobody expects them back."""
    strangers: Map[int, str] = _EMPTY
    """Learners turned away before the session was sure of itself, with the sentence why."""
    initial: Map[int, str] = _EMPTY
    """Digests of the INIT set that is being received."""
    start_deadline: float | None = None
    start_with_quorum: bool = False
    """The start timeout has passed: the quorum is enough."""

    # What is committed.
    step: int = 0
    target: int = 0
    """The last round of this run."""
    marks: tuple[FragmentMark, ...] = ()
    versions: tuple[int, ...] = ()
    broadcast: tuple[int, ...] = ()
    """Per fragment the last version whose broadcast was ordered; empty before the first."""
    outer: Outer | None = None
    """The outer settings in force; None before rounds have started."""
    outer_marks: tuple[OuterMark, ...] = ()
    """Per fragment, what its momentum buffer has gathered."""
    ledger: Map[int, LedgerEntry] = _EMPTY
    durable: int = -1
    """Step of the newest durable checkpoint."""
    writing: int | None = None
    """Step of the checkpoint that is being written."""
    due: int | None = None
    """Newest due checkpoint that waits for the writer."""
    gated: tuple[Gated, ...] = ()

    # Rounds and their pace.
    rounds: tuple[Round, ...] = ()
    last_open: float | None = None
    opens_at: float = math.inf
    """While running: when the throttle lets the next round open, by the estimates after this event."""
    paced: Map[int, Member] = _EMPTY
    """Members last frozen: the throttle looks at them."""
    slowest: Slowest = NO_ESTIMATE
    blind_opened: int = 0
    """Rounds opened without any step-time estimate."""
    blind_until: float | None = None
    blind_over: bool = False
    xi_sync: float | None = None
    sweep_missed: Map[int, str] = _EMPTY
    """Generation of each learner that the last sweep round it belonged to had to miss."""

    # The end.
    pool_drained: bool = False
    awaited: Map[int, bool] = _EMPTY
    """Learners whose ACK is missing; True when awaited only while connected."""
    acked: Map[int, bool] = _EMPTY
    cut_sent: Map[int, bool] = _EMPTY
    ack_deadline: float | None = None
    reports: Map[int, bool] = _EMPTY
    """Learners whose budget report was accepted."""
    budget_deadline: float | None = None
    """No configured learner can have been away too long before this moment."""
    stop_gather_deadline: float | None = None
    stop_deadline: float | None = None

    @property
    def num_fragments(self) -> int:
        """P; 0 before the session has terms."""
        terms = self.terms
        return 0 if terms is None else terms.num_fragments

    @property
    def quorum(self) -> int:
        """K of the next attempt: every learner in a budget finish."""
        config = self.config
        return config.num_learners if config.budget_finish else config.quorum

    @property
    def depth(self) -> int:
        """How many rounds may be open."""
        return min(max(self.config.pipeline, 1), self.num_fragments)

    @property
    def next_step(self) -> int:
        """The round that opens next."""
        return self.step + len(self.rounds) + 1

    def fragment_of(self, step: int) -> int:
        """The fragment that round ``step`` works on: they take turns."""
        return (step - 1) % self.num_fragments

    def is_sweep(self, step: int) -> bool:
        """Whether round ``step`` belongs to the closing sweep."""
        if self.config.budget_finish:
            return True
        return (
            self.config.closing_sweep == "plain"
            and self.target >= 2 * self.num_fragments
            and step > self.target - self.num_fragments
        )

    def is_plain(self, round_: Round) -> bool:
        """Whether the pushes of a round are averaged whatever the layout says, and not corrected."""
        return round_.sweep or (self.outer is not None and self.outer.plain)

    def everyone(self) -> tuple[Member, ...]:
        """The current members, in learner order."""
        current = self.current
        return tuple([current[learner] for learner in sorted(current)])

    def find(self, step: int) -> Round | None:
        """The open round ``step``, or None."""
        index, rounds = step - self.step - 1, self.rounds
        return rounds[index] if 0 <= index < len(rounds) else None

    def find_gathering(self, step: int, attempt: int) -> Round | None:
        """The open round ``step`` if just this attempt of it still takes answers, or None."""
        index, rounds = step - self.step - 1, self.rounds
        if not 0 <= index < len(rounds):
            return None
        round_ = rounds[index]
        return round_ if round_.attempt == attempt and round_.status is GATHERING else None


@frozen(kw_only=True, slots=False)
class State(Fields):
    """What the coordinator knows after an event. Never changes."""


class Draft(Fields):
    """The next state while one event is being worked in, and the decisions it caused."""

    __slots__ = ("decisions",)  # beside the dictionary, which becomes the state's as it is
    decisions: list[Decision]

    @classmethod
    def of(cls, state: State) -> Draft:
        """A draft that starts as ``state``."""
        draft = _new(cls)
        draft.__dict__ = state.__dict__.copy()
        draft.decisions = []
        return draft

    def freeze(self) -> tuple[State, tuple[Decision, ...]]:
        """The finished state and its decisions; the draft is used up, its dictionary is the state's now."""
        return made(State, self.__dict__), tuple(self.decisions)

    def emit(self, decision: Decision) -> None:
        """Take a decision."""
        self.decisions.append(decision)

    def ignore(self, event: Event, reason: str, why: str) -> None:
        """Record that ``event`` came too late, too early or twice."""
        self.decisions.append(Ignored(event=event.kind, reason=reason, why=why))

    def put(self, round_: Round) -> None:
        """Replace the open round of the same step."""
        rounds = list(self.rounds)
        rounds[round_.step - self.step - 1] = round_
        self.rounds = tuple(rounds)


def moment(at: float) -> float:
    """A deadline on the clock's grid of one microsecond, rounded up.

    Events carry times of that grid, so a timer that fires at its deadline is never a fraction early.
    """
    return math.ceil(at * 1e6 - 1e-3) / 1e6


def names(learners: Iterable[int]) -> str:
    """Learners for a sentence: ``learner 1`` or ``learners 0, 2 and 5 more``."""
    ids = sorted(learners)
    if not ids:
        return "nobody"
    if len(ids) == 1:
        return f"learner {ids[0]}"
    shown = ", ".join(str(learner) for learner in ids[:_NAMES_SHOWN])
    rest = len(ids) - _NAMES_SHOWN
    return f"learners {shown} and {rest} more" if rest > 0 else f"learners {shown}"


def initial_state(config: CoreConfig) -> State:
    """The state of a session that nothing has happened in yet.

    Raises:
        ConfigError: A setting is out of range; the message names its flag.
    """
    config.validated()
    return State(
        config=config, target=config.total_steps, start_deadline=moment(config.start_timeout_seconds)
    )
