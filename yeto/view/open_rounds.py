"""The open rounds, as their records tell them.

The records say everything that the coordinator did to a round except two things, which follow from its rules:
that a member which went away is gone from every attempt that still gathers, and that rounds which nobody
will retry are dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, field
from immutables import Map

from yeto.core.config import CoreConfig
from yeto.core.decisions import AttemptOpened, PushRefused
from yeto.core.parts import Round, Status
from yeto.core.pushes import held_deadline
from yeto.core.values import Member


@define
class OpenRound:
    """One open round and its present attempt. Times are None until they come."""

    step: int
    fragment: int
    attempt: int
    quorum: int
    base_version: int
    sweep: bool
    opened_at: float
    """Of the first attempt."""
    attempt_at: float
    """Of the present attempt."""
    deadline: float
    members: dict[int, str]
    """Generation of each frozen member."""
    status: Status = Status.GATHERING
    answers: dict[int, float] = field(factory=dict)
    """When each answer was accepted, in that order."""
    gone: dict[int, bool] = field(factory=dict)
    """Members nobody waits for any more; True when declined."""
    refused: dict[int, str] = field(factory=dict)
    """Of members whose push to the present attempt was refused, the sentence why."""
    grace_deadline: float | None = None
    quorum_at: float | None = None
    sealed_at: float | None = None
    merged_at: float | None = None
    ordered_at: float | None = None
    discarded_at: float | None = None
    retry_at: float | None = None

    @classmethod
    def of(cls, opened: AttemptOpened, at: float, before: OpenRound | None) -> OpenRound:
        """Return the round that a new attempt makes of the one before, if there was one."""
        return cls(
            opened.step,
            opened.fragment,
            opened.attempt,
            opened.quorum,
            opened.base_version,
            opened.sweep,
            at if before is None else before.opened_at,
            at,
            opened.deadline,
            {member.learner: member.generation for member in opened.members},
        )

    @property
    def owing(self) -> tuple[int, ...]:
        """Members that may still answer, in learner order."""
        if self.status is not Status.GATHERING:
            return ()
        return tuple(
            sorted(
                learner
                for learner in self.members
                if learner not in self.answers and learner not in self.gone
            )
        )

    @property
    def phase(self) -> str:
        """What people call its status: a gathering round past its quorum is in grace."""
        in_grace = self.status is Status.GATHERING and self.grace_deadline is not None
        return "grace" if in_grace else str(self.status)

    def since(self) -> float:
        """When it came to stand as it stands."""
        known = {
            Status.MERGING: self.sealed_at,
            Status.MERGED: self.merged_at,
            Status.COMMITTING: self.ordered_at,
            Status.RETRY: self.discarded_at,
        }.get(self.status, self.quorum_at if self.grace_deadline is not None else None)
        return self.attempt_at if known is None else known

    def until(self, at: float) -> float | None:
        """When it goes on at the latest, where time decides that."""
        if self.status is Status.GATHERING:
            return self.deadline if self.grace_deadline is None else self.grace_deadline
        if self.status is Status.RETRY and self.retry_at is not None and self.retry_at > at:
            return self.retry_at
        return None

    def hold_deadline(self, at: float, config: CoreConfig) -> bool:
        """Move the quorum deadline, as an upload that advances does; return whether it moved."""
        before = self.deadline
        self.deadline = held_deadline(
            at,
            opened_at=self.attempt_at,
            deadline=before,
            timeout_seconds=config.quorum_timeout_seconds,
        )
        return self.deadline != before

    def as_core(self) -> Round:
        """Return as much of the coordinator's own round as its sentence is made of."""
        return Round(
            step=self.step,
            fragment=self.fragment,
            attempt=self.attempt,
            status=self.status,
            members=Map(
                {
                    learner: Member(learner=learner, generation=generation)
                    for learner, generation in self.members.items()
                }
            ),
            quorum=self.quorum,
            base_version=self.base_version,
            opened_at=self.attempt_at,
            deadline=self.deadline,
            sweep=self.sweep,
            answers=Map(dict.fromkeys(self.answers, True)),  # type: ignore[arg-type]
            gone=Map(self.gone),
            grace_deadline=self.grace_deadline,
            retry_at=self.retry_at,
        )


class OpenRounds:
    """All open rounds by step; in ascending order, because that is how rounds open."""

    def __init__(self) -> None:
        self._rounds: dict[int, OpenRound] = {}

    def __len__(self) -> int:
        return len(self._rounds)

    def __iter__(self) -> Iterator[OpenRound]:
        return iter(self._rounds.values())

    def holds(self, step: int) -> bool:
        """Whether a round is open."""
        return step in self._rounds

    def first(self) -> OpenRound | None:
        """Return the round that commits next."""
        return next(iter(self._rounds.values()), None)

    def find(self, step: int, attempt: int) -> OpenRound | None:
        """Return an open round if just this attempt is its present one."""
        round_ = self._rounds.get(step)
        return round_ if round_ is not None and round_.attempt == attempt else None

    def find_gathering(self, step: int, attempt: int) -> OpenRound | None:
        """Return an open round if just this attempt of it still takes answers."""
        round_ = self._rounds.get(step)
        if round_ is None or round_.attempt != attempt or round_.status is not Status.GATHERING:
            return None
        return round_

    def open(self, opened: AttemptOpened, at: float) -> None:
        """Take a new attempt."""
        self._rounds[opened.step] = OpenRound.of(opened, at, self._rounds.get(opened.step))

    def pop(self, step: int) -> OpenRound | None:
        """Take a committed round out."""
        return self._rounds.pop(step, None)

    def clear(self) -> None:
        """Forget all."""
        self._rounds.clear()

    def refuse(self, refused: PushRefused) -> None:
        """Take note of a refused push; a member whose push was refused for its content is not waited for."""
        round_, learner = self.find_gathering(refused.step, refused.attempt), refused.learner
        if round_ is None:
            return
        if refused.declined:
            round_.gone[learner] = True
        if learner in round_.members and (refused.declined or learner not in round_.refused):
            round_.refused[learner] = refused.why

    def member_left(self, learner: int, generation: str) -> None:
        """Wait no more for a member that is gone; answers that were accepted stay."""
        for round_ in self._rounds.values():
            if (
                round_.status is Status.GATHERING
                and round_.members.get(learner) == generation
                and learner not in round_.answers
                and learner not in round_.gone
            ):
                round_.gone[learner] = False

    def drop_from(self, step: int) -> None:
        """Drop a round and all later ones whose commit was not ordered."""
        for later in [known for known in self._rounds if known >= step]:
            if self._rounds[later].status is not Status.COMMITTING:
                del self._rounds[later]

    def drop_from_first_retry(self) -> None:
        """Drop the first round that waits for a retry, and all later ones: the session is stopping."""
        for round_ in self._rounds.values():
            if round_.status is Status.RETRY:
                self.drop_from(round_.step)
                return

    def discard(self, step: int, attempt: int, at: float, retry_at: float | None) -> None:
        """Throw a round's present attempt away; it waits for the next one."""
        round_ = self.find(step, attempt)
        if round_ is None:
            return
        round_.status = Status.RETRY
        round_.discarded_at, round_.retry_at = at, retry_at
        round_.grace_deadline = None
        round_.answers.clear()
        round_.gone.clear()
        round_.members.clear()
