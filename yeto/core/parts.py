"""What the state is made of: phases, and the immutable records of learners, pushes and rounds.

They are frozen attrs classes without slots, because :func:`replace` makes a changed copy from the dictionary
of the old one.
"""

from __future__ import annotations

import enum
from typing import Any, TypeVar

from attrs import frozen
from immutables import Map

from yeto.core.values import Member, SessionTerms, Weighted

_T = TypeVar("_T")
_EMPTY: Map[Any, Any] = Map()
_new = object.__new__
_set = object.__setattr__  # frozen classes have their own, which refuses


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


# Naming a member of an enum looks it up anew each time, at the price of several comparisons. What is asked
# for every event has a name of its own.
PROVISIONAL, WAITING, RUNNING, BUDGET, DRAINING, FINALISING, STOPPING, ENDED = Phase
GATHERING, SEALED, MERGING, MERGED, COMMITTING, RETRY = Status


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
    delta_cosine: float | None = None
    norm_ratio: float | None = None

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


def replace(value: _T, **changes: object) -> _T:
    """A copy of one of these records with some fields changed.

    ``attrs.evolve`` runs the whole ``__init__``; copying the dictionary costs a fifth of that, and this
    is the hottest line of the coordinator.
    """
    known = value.__dict__
    fields = {**known, **changes}
    assert len(fields) == len(known), f"no such field: {changes}"
    instance = _new(type(value))
    _set(instance, "__dict__", fields)
    return instance


def made(kind: type[_T], fields: dict[str, object]) -> _T:
    """An instance of a frozen class with exactly these fields, all of them, without its ``__init__``.

    For what is made for every push: half the price. A test compares the names that stand there with the
    class's.
    """
    instance = _new(kind)
    _set(instance, "__dict__", fields)
    return instance


def put_at(items: tuple[_T, ...], index: int, item: _T) -> tuple[_T, ...]:
    """The same items, but for the one at ``index``."""
    return (*items[:index], item, *items[index + 1 :])
