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

import enum
import math
from collections.abc import Iterable
from typing import Any, TypeVar

from attrs import define, frozen
from immutables import Map

from yeto.core.config import CoreConfig
from yeto.core.decisions import Decision, Ignored
from yeto.core.events import Event
from yeto.core.values import FragmentMark, LedgerEntry, Member, SessionTerms, Weighted

_T = TypeVar("_T")
_EMPTY: Map[Any, Any] = Map()
_NAMES_SHOWN = 8  # a sentence that lists two thousand learners explains nothing


class Phase(enum.StrEnum):
    """Where the session stands. Only the resume of a session goes backwards."""

    PROVISIONAL = "provisional"
    """Learner 0 has not sent every initial value yet."""
    WAITING = "waiting"
    """Initialised; the step-0 checkpoint or enough learners are missing."""
    RUNNING = "running"
    BUDGET = "budget"
    """A learner used up its budget: no round opens, reports are collected."""
    DRAINING = "draining"
    """All rounds are committed; the SVD pool and the final checkpoint come before the final cut."""
    FINALISING = "finalising"
    """The final cut is out; ACKs are collected."""
    STOPPING = "stopping"
    """Rounds in flight end or are dropped, then a checkpoint, then the exit."""
    ENDED = "ended"


class Status(enum.StrEnum):
    """Where an open round stands."""

    GATHERING = "gathering"
    SEALED = "sealed"
    """Between the seal and the merge order of the same step; never seen from outside."""
    MERGING = "merging"
    MERGED = "merged"
    """Waits for its turn to commit."""
    COMMITTING = "committing"
    RETRY = "retry"
    """Discarded; waits for the next attempt."""


@frozen(kw_only=True, slots=False)
class Dial:
    """The newest accepted HELLO of a learner id; joined or not."""

    generation: str
    terms: SessionTerms


@frozen(kw_only=True, slots=False)
class Link:
    """What is known of a joined generation; dropped with it."""

    generation: str
    report_at: float = 0.0
    report_step: int | None = None
    """Local step of the last advancing report."""
    xi_step: float | None = None
    """Smoothed seconds of one inner step."""
    xi_quorum: float | None = None
    """Smoothed seconds from pull to accepted answer."""
    bad_run: int = 0
    """Non-finite pushes in a row."""
    bad_step: int | None = None
    """Local step of the last non-finite push that counted."""


@frozen(kw_only=True, slots=False)
class Upload:
    """An admitted push whose bytes are still coming; sizes as its header stated them."""

    base_version: int
    staleness: int
    local_step: int
    c_steps: int
    c_tokens: int


@frozen(kw_only=True, slots=False)
class Answer:
    """An accepted push."""

    upload: Upload
    norm: float
    cosine: float | None
    xi_quorum: float
    """The learner's smoothed latency, this answer included."""


@frozen(kw_only=True, slots=False)
class Sealed:
    """What an attempt was sealed with, and what became of it since."""

    members: tuple[int, ...]
    responders: tuple[Weighted, ...]
    missed: tuple[int, ...]
    left_out: tuple[int, ...]
    total_weight: float
    gradient_norm: float = 0.0
    corrected: tuple[int, ...] = ()
    merge_seconds: float = 0.0
    commit_ordered_at: float = 0.0

    @property
    def no_op(self) -> bool:
        """All weights are 0: the version moves, nothing else does."""
        return self.total_weight <= 0.0


@frozen(kw_only=True, slots=False)
class Round:
    """An open round and its present attempt.

    A frozen member is in exactly one of: ``answers``, ``gone``, or it still owes its answer. ``uploads``
    and ``chances`` concern members that owe one.
    """

    step: int
    fragment: int
    attempt: int
    status: Status
    members: Map[int, Member] = _EMPTY
    quorum: int
    base_version: int
    opened_at: float
    deadline: float
    sweep: bool
    answers: Map[int, Answer] = _EMPTY
    uploads: Map[int, Upload] = _EMPTY
    chances: Map[int, bool] = _EMPTY
    """Members that were sent the fragment and the pull a second time."""
    gone: Map[int, bool] = _EMPTY
    """Members nobody waits for any more; True when declined, False when disconnected."""
    declined: int = 0
    """How many of ``gone`` were declined."""
    excused: int = 0
    """Members that owe an answer but are not waited for (closing sweep)."""
    quorum_seconds: float = 0.0
    grace_seconds: float | None = None
    grace_deadline: float | None = None
    overdue: bool = False
    """Its grace or deadline has passed: seal with what is there, or discard."""
    sealed: Sealed | None = None
    discards: int = 0
    """Discarded attempts of this round."""
    failures: int = 0
    """Attempts of this round whose merge or outer step was unusable."""
    retry_at: float | None = None
    """Not before this moment; None when it is due."""

    @property
    def owing(self) -> int:
        """Members that may still answer."""
        return len(self.members) - len(self.answers) - len(self.gone)

    def owes(self, learner: int, generation: str) -> bool:
        """Whether this very member of the attempt may still answer."""
        member = self.members.get(learner)
        return (
            member is not None
            and member.generation == generation
            and learner not in self.answers
            and learner not in self.gone
        )


@frozen(kw_only=True, slots=False)
class Gated:
    """The broadcast of a committed round that was not ordered yet."""

    step: int
    fragment: int
    gate: int | None
    """The checkpoint step that must be durable first; None when only its place in the queue holds it."""
    sync_seconds: float
    """Merge and outer step of this round, its checkpoint not included."""


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
        return 0 if self.terms is None else self.terms.num_fragments

    @property
    def quorum(self) -> int:
        """K of the next attempt: every learner in a budget finish."""
        return self.config.num_learners if self.config.budget_finish else self.config.quorum

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

    def everyone(self) -> tuple[Member, ...]:
        """The current members, in learner order."""
        return tuple(self.current[learner] for learner in sorted(self.current))

    def find(self, step: int) -> Round | None:
        """The open round ``step``, or None."""
        index = step - self.step - 1
        return self.rounds[index] if 0 <= index < len(self.rounds) else None

    def find_gathering(self, step: int, attempt: int) -> Round | None:
        """The open round ``step`` if just this attempt of it still takes answers, or None."""
        round_ = self.find(step)
        if round_ is None or round_.status is not Status.GATHERING or round_.attempt != attempt:
            return None
        return round_


@frozen(kw_only=True, slots=False)
class State(Fields):
    """What the coordinator knows after an event. Never changes."""


class Draft(Fields):
    """The next state while one event is being worked in, and the decisions it caused."""

    decisions: list[Decision]

    @classmethod
    def of(cls, state: State) -> Draft:
        """A draft that starts as ``state``."""
        draft = object.__new__(cls)
        draft.__dict__ = state.__dict__.copy()
        draft.decisions = []
        return draft

    def freeze(self) -> tuple[State, tuple[Decision, ...]]:
        """The finished state and its decisions; the draft is used up, its fields are the state's."""
        fields = self.__dict__
        decisions = tuple(fields.pop("decisions"))
        self.__dict__ = {}
        return _made(State, fields), decisions

    def emit(self, decision: Decision) -> None:
        """Take a decision."""
        self.decisions.append(decision)

    def ignore(self, event: Event, reason: str, why: str) -> None:
        """Record that ``event`` came too late, too early or twice."""
        self.decisions.append(Ignored(event=event.kind, reason=reason, why=why))

    def put(self, round_: Round) -> None:
        """Replace the open round of the same step."""
        index = round_.step - self.step - 1
        self.rounds = (*self.rounds[:index], round_, *self.rounds[index + 1 :])


def replace(value: _T, **changes: object) -> _T:
    """A copy of one of this module's records with some fields changed.

    ``attrs.evolve`` runs the whole ``__init__``; copying the dictionary costs a fifth of that, and this
    is the hottest line of the coordinator.
    """
    fields = value.__dict__.copy()
    fields.update(changes)
    assert len(fields) == len(value.__dict__), f"no such field: {changes}"
    return _made(type(value), fields)


def _made(kind: type[_T], fields: dict[str, object]) -> _T:
    """An instance of a frozen class with these fields."""
    instance = object.__new__(kind)
    object.__setattr__(instance, "__dict__", fields)
    return instance


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
