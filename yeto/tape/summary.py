"""A tape in numbers: one fold over its records, in constant memory, for people and programs alike.

Commits that a later restart fell back below are *superseded*: they happened, but the model does not
contain them, so they count only as superseded. Whoever folds finds the restarts first (``find_restarts``);
the fold then knows of each commit, as it comes, whether it will stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from attrs import asdict, define, field

from yeto.core.decisions import (
    AttemptDiscarded,
    AttemptOpened,
    AttemptSealed,
    GraceOpened,
    LearnerRefused,
    PushRefused,
    RoundCommitted,
    SessionEnded,
    SessionOpened,
)
from yeto.core.events import LearnerJoined, LearnerLeft, SessionResumed
from yeto.core.values import LedgerEntry, SessionTerms
from yeto.tape.reader import Restart
from yeto.tape.records import HEADER_KIND, Header
from yeto.tape.skim import Item

_Key = TypeVar("_Key")


@define
class Spread:
    """Count, mean and extremes of a quantity that is met one value at a time."""

    count: int = 0
    total: float = 0.0
    least: float = 0.0
    most: float = 0.0

    def add(self, value: float) -> None:
        """Take one more value."""
        # Met for every push: builtins that compare two numbers would take twice as long.
        if not self.count:
            self.least = self.most = value
        elif value < self.least:
            self.least = value
        elif value > self.most:
            self.most = value
        self.count += 1
        self.total += value

    def to_json(self) -> dict[str, Any]:
        """Return count, mean, min and max; null instead of the numbers when there is no value."""
        if self.count == 0:
            return {"count": 0, "mean": None, "min": None, "max": None}
        return {
            "count": self.count,
            "mean": self.total / self.count,
            "min": self.least,
            "max": self.most,
        }


@define
class LearnerSummary:
    """What one learner did, and what became of it."""

    merges: int = 0
    """Merges, steps and tokens are those of the ledger: also what a resumed checkpoint brought along."""
    c_steps: int = 0
    c_tokens: int = 0
    contribution: float = 0.0
    """Sum over this tape's standing commits of the learner's share in the applied weights."""
    missed: int = 0
    """Standing commits that it was a member of but gave nothing to."""
    left_out: int = 0
    joins: int = 0
    leaves: int = 0
    staleness: Spread = field(factory=Spread)


@define
class Refusal:
    """Refusals of one sort: how many, and the last of them."""

    count: int
    seq: int
    why: str
    """The coordinator's sentence about the last one."""


class Summary:
    """The fold: feed it every record in order, read its attributes at any time.

    Args:
        restarts: all restarts of the part of the tape that will be fed.
    """

    HANDLERS: ClassVar[Mapping[str, Callable[[Summary, Any], None]]]
    """What is done with a record of each kind that changes a figure; nine of ten records are of others."""

    def __init__(self, restarts: Sequence[Restart] = ()) -> None:
        self._restarts = tuple(restarts)
        self.header: Header | None = None
        self.records = 0
        self.at = 0.0
        self.terms: SessionTerms | None = None
        self.restarts: list[SessionResumed] = []
        self.endings: list[SessionEnded | None] = []
        """How what stands before each restart had ended; None when it was cut off."""
        self.ended: SessionEnded | None = None
        self.step = 0
        """Committed global step."""
        self.commits = 0
        """Commits of this tape that stand."""
        self.superseded = 0
        self.no_ops = 0
        self.attempts = 0
        self.sealed = 0
        self.discarded: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        """Merged pushes of standing commits by their staleness, in global steps."""
        self.quorum_seconds = Spread()
        self.grace_seconds = Spread()
        self.merge_seconds = Spread()
        self.learners: dict[int, LearnerSummary] = {}
        self.refused_pushes: dict[tuple[int, str], Refusal] = {}
        """By learner and reason."""
        self.refused_learners: dict[str, Refusal] = {}
        """By reason. Not by learner: the id may be a stranger's and anything at all."""

    def feed(self, record: Item) -> None:
        """Take the next record."""
        self.records += 1
        self.at = record.at
        handle = self.HANDLERS.get(record.kind)
        if handle is not None:
            handle(self, record)

    def _header(self, record: Item) -> None:
        header: Any = record.body
        self.header = header
        for learner in range(header.config.num_learners):
            self._learner(learner)

    def _opened(self, record: Item) -> None:
        body: Any = record.body
        self.terms = body.terms

    def _ended(self, record: Item) -> None:
        body: Any = record.body
        self.ended = body

    def _attempt_opened(self, _: Item) -> None:
        self.attempts += 1

    def _attempt_sealed(self, _: Item) -> None:
        self.sealed += 1

    def _attempt_discarded(self, record: Item) -> None:
        body: Any = record.body
        self.discarded[body.reason] += 1

    def _grace_opened(self, record: Item) -> None:
        body: Any = record.body
        self.grace_seconds.add(body.grace_seconds)

    def _push_refused(self, record: Item) -> None:
        body: Any = record.body
        _count(self.refused_pushes, (body.learner, body.reason), record.seq, body.why)

    def _learner_refused(self, record: Item) -> None:
        body: Any = record.body
        _count(self.refused_learners, body.reason, record.seq, body.why)

    def _joined(self, record: Item) -> None:
        body: Any = record.body
        self._learner(body.learner).joins += 1

    def _left(self, record: Item) -> None:
        body: Any = record.body
        if body.learner in self.learners:
            self.learners[body.learner].leaves += 1

    def _learner(self, learner: int) -> LearnerSummary:
        summary = self.learners.get(learner)
        if summary is None:
            summary = self.learners[learner] = LearnerSummary()
        return summary

    def _resumed(self, record: Item) -> None:
        resumed: Any = record.body
        self.restarts.append(resumed)
        self.endings.append(self.ended)
        self.ended = None
        self.terms = resumed.terms
        self.step = resumed.step
        for summary in self.learners.values():
            summary.merges = summary.c_steps = summary.c_tokens = 0
        for entry in resumed.ledger:
            summary = self._learner(entry.learner)
            summary.merges, summary.c_steps, summary.c_tokens = entry.merges, entry.c_steps, entry.c_tokens

    def _committed(self, record: Item) -> None:
        commit: Any = record.body
        self.step = commit.step
        for responder in commit.responders:
            summary = self._learner(responder.learner)
            summary.merges += 1
            summary.c_steps += responder.c_steps
            summary.c_tokens += responder.c_tokens
        if not self.stands(record.seq, commit.step):
            self.superseded += 1
            return
        self.commits += 1
        self.no_ops += commit.no_op
        self.quorum_seconds.add(commit.quorum_seconds)
        self.merge_seconds.add(commit.merge_seconds)
        for responder in commit.responders:
            summary = self._learner(responder.learner)
            summary.contribution += responder.contribution
            summary.staleness.add(responder.staleness)
            self.staleness[responder.staleness] += 1
        for learner in commit.missed:
            self._learner(learner).missed += 1
        for learner in commit.left_out:
            self._learner(learner).left_out += 1

    def stands(self, seq: int, step: int) -> bool:
        """Return whether no restart falls back below the commit of ``step`` in record ``seq``."""
        return not any(restart.seq > seq and restart.step < step for restart in self._restarts)

    def ledger(self) -> tuple[LedgerEntry, ...]:
        """Return the ledger as the records give it, in learner order; learners without a merge left out."""
        return tuple(
            LedgerEntry(
                learner=learner, merges=summary.merges, c_steps=summary.c_steps, c_tokens=summary.c_tokens
            )
            for learner, summary in sorted(self.learners.items())
            if summary.merges
        )

    def contribution(self, learner: int) -> float | None:
        """Return a learner's mean share in the standing commits that moved something; None without any."""
        moved = self.commits - self.no_ops
        return self.learners[learner].contribution / moved if moved else None

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        header, ended = self.header, self.ended
        return {
            "session": {
                "session_id": header.session_id if header else None,
                "software_version": header.software_version if header else None,
                "wall_clock": header.wall_clock if header else None,
                "records": self.records,
                "seconds": self.at,
                "restarts": [
                    {"at": event.at, "step": event.step, "after_exit_code": last.exit_code if last else None}
                    for event, last in zip(self.restarts, self.endings, strict=True)
                ],
                "ended": {"exit_code": ended.exit_code, "why": ended.why} if ended else None,
            },
            "rounds": {
                "step": self.step,
                "committed": self.commits,
                "superseded": self.superseded,
                "no_op": self.no_ops,
                "quorum_seconds": self.quorum_seconds.to_json(),
                "merge_seconds": self.merge_seconds.to_json(),
            },
            "attempts": {
                "opened": self.attempts,
                "sealed": self.sealed,
                "discarded": dict(sorted(self.discarded.items())),
            },
            "grace_seconds": self.grace_seconds.to_json(),
            "staleness": {str(value): count for value, count in sorted(self.staleness.items())},
            "learners": {
                str(learner): {
                    "merges": summary.merges,
                    "c_steps": summary.c_steps,
                    "c_tokens": summary.c_tokens,
                    "contribution": self.contribution(learner),
                    "missed": summary.missed,
                    "left_out": summary.left_out,
                    "joins": summary.joins,
                    "leaves": summary.leaves,
                    "staleness": summary.staleness.to_json(),
                }
                for learner, summary in sorted(self.learners.items())
            },
            "refused_pushes": [
                {"learner": learner, "reason": reason, **asdict(refusal)}
                for (learner, reason), refusal in sorted(self.refused_pushes.items())
            ],
            "refused_learners": [
                {"reason": reason, **asdict(refusal)}
                for reason, refusal in sorted(self.refused_learners.items())
            ],
        }


def _count(refusals: dict[_Key, Refusal], key: _Key, seq: int, why: str) -> None:
    known = refusals.get(key)
    refusals[key] = Refusal(count=known.count + 1 if known else 1, seq=seq, why=why)


Summary.HANDLERS = {
    HEADER_KIND: Summary._header,
    AttemptDiscarded.kind: Summary._attempt_discarded,
    AttemptOpened.kind: Summary._attempt_opened,
    AttemptSealed.kind: Summary._attempt_sealed,
    GraceOpened.kind: Summary._grace_opened,
    LearnerJoined.kind: Summary._joined,
    LearnerLeft.kind: Summary._left,
    LearnerRefused.kind: Summary._learner_refused,
    PushRefused.kind: Summary._push_refused,
    RoundCommitted.kind: Summary._committed,
    SessionEnded.kind: Summary._ended,
    SessionOpened.kind: Summary._opened,
    SessionResumed.kind: Summary._resumed,
}
