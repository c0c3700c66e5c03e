"""What a tape says about a checkpoint: whether it is its tape, and who still owes an ACK.

The tape may have gone on beyond the checkpoint, and may hold several timelines: every resume falls back to
a checkpoint, and what was recorded above it no longer counts. So the tape is folded: which digest each
fragment has, and which final cut is open, at every record. It is the checkpoint's tape if it orders the
checkpoint's step at the checkpoint's record *with these very digests*, or resumed from it: two runs of the
same shape count their records alike.

An unfinished final cut counts, if it is of the step and timeline that is resumed: who has it need not be
asked again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import define, field, frozen

from yeto.core.decisions import (
    CheckpointOrdered,
    Decision,
    FinalCutOrdered,
    Ignored,
    LearnerRefused,
    RoundCommitted,
    SessionReleased,
)
from yeto.core.events import Event, FinalAckReceived, FragmentInitialised, SessionResumed
from yeto.tape.records import Record

RELEVANT: frozenset[type[Event] | type[Decision]] = frozenset(
    {
        CheckpointOrdered,
        FinalAckReceived,
        FinalCutOrdered,
        FragmentInitialised,
        Ignored,
        LearnerRefused,
        RoundCommitted,
        SessionReleased,
        SessionResumed,
    }
)
"""Classes of the records that matter here; a fold that is fed no others comes to the same result."""

RELEVANT_KINDS = frozenset(cls.kind for cls in RELEVANT)


@frozen(kw_only=True)
class Past:
    """What the coordinator is told of the tape when it resumes."""

    checkpoint_seq: int | None
    """Number of the checkpoint's ``checkpoint_ordered`` record; None when it is on another tape."""
    awaited: tuple[int, ...] = ()
    """Who still owed an ACK of the final cut of the checkpoint's step."""
    acked: tuple[int, ...] = ()


@frozen(kw_only=True)
class Mark:
    """What a record says a checkpoint holds: one that is ordered there, or was resumed from."""

    step: int
    digests: Mapping[int, str]
    """Digest of each fragment's parameters."""
    seq: int | None
    """Number of its ``checkpoint_ordered`` record; None where it was resumed from."""


@define
class _Cut:
    step: int
    awaited: set[int]
    acked: set[int] = field(factory=set)
    ordered: bool = True
    """Whether this timeline has ordered it; later orders of a timeline are for learners that joined."""


class PastFold:
    """Folds a tape's records, in order."""

    def __init__(self) -> None:
        """Start before the first record."""
        self._digests: dict[int, str] = {}
        self._cut: _Cut | None = None
        self._held: Record | None = None

    def feed(self, record: Record) -> Mark | None:
        """Take a record; return what it says about a checkpoint, if it does.

        Whether a fact was taken is only known from the record behind it, so facts wait for that one.
        """
        self._settle(record)
        if record.kind not in RELEVANT_KINDS:
            return None  # its body is not even read
        body = record.body
        match body:
            case FragmentInitialised() | FinalAckReceived():
                self._held = record
            case SessionReleased():
                self._digests.clear()
            case RoundCommitted():
                self._digests[body.fragment] = body.params_digest
                self._cut = None
            case CheckpointOrdered():
                return Mark(step=body.step, digests=dict(self._digests), seq=record.seq)
            case SessionResumed():
                self._digests = {mark.fragment: mark.params_digest for mark in body.fragments}
                if self._cut is not None and self._cut.step == body.step:
                    self._cut = _Cut(body.step, set(body.awaited), set(body.acked), ordered=False)
                else:
                    self._cut = None
                return Mark(step=body.step, digests=dict(self._digests), seq=None)
            case FinalCutOrdered():
                if self._cut is None:
                    self._cut = _Cut(body.step, set(body.awaited))
                elif not self._cut.ordered:
                    self._cut.awaited |= set(body.awaited)
                    self._cut.ordered = True
            case _:
                pass
        return None

    def past(self, step: int, checkpoint_seq: int | None) -> Past:
        """Return what concerns a checkpoint of ``step``, now that the tape has ended."""
        self._settle(None)
        cut = self._cut
        if cut is None or cut.step != step:
            return Past(checkpoint_seq=checkpoint_seq)
        return Past(
            checkpoint_seq=checkpoint_seq,
            awaited=tuple(sorted(cut.awaited - cut.acked)),
            acked=tuple(sorted(cut.acked)),
        )

    def _settle(self, following: Record | None) -> None:
        """Take the fact that waits, unless the record behind it says that the coordinator did not."""
        held, self._held = self._held, None
        if held is None:
            return
        if (
            following is not None
            and following.because == held.seq
            and isinstance(following.body, Ignored | LearnerRefused)
        ):
            return
        match held.body:
            case FragmentInitialised() as initialised:
                self._digests[initialised.fragment] = initialised.digest
            case FinalAckReceived() as ack:
                if self._cut is not None and self._cut.step == ack.step:
                    self._cut.acked.add(ack.learner)
            case _:
                pass


class PastSearch:
    """Looks for a checkpoint on a tape, record by record."""

    def __init__(self, checkpoint: Mark) -> None:
        """Start before the first record.

        Args:
            checkpoint: what the checkpoint says of itself.
        """
        self._checkpoint = checkpoint
        self._fold = PastFold()
        self._is_known = False
        self._checkpoint_seq: int | None = None

    def feed(self, record: Record) -> None:
        """Take the next record of the tape."""
        checkpoint, mark = self._checkpoint, self._fold.feed(record)
        if mark is None or (mark.step, mark.digests) != (checkpoint.step, checkpoint.digests):
            return
        if mark.seq is None:
            self._is_known = True
        elif mark.seq == checkpoint.seq:
            self._is_known, self._checkpoint_seq = True, mark.seq

    def past(self) -> Past | None:
        """Return what concerns the checkpoint, now that the tape has ended; None when it is not its tape."""
        return self._fold.past(self._checkpoint.step, self._checkpoint_seq) if self._is_known else None


def find_past(records: Iterable[Record], checkpoint: Mark) -> Past | None:
    """Fold a tape's records for what concerns a checkpoint.

    Args:
        records: the whole tape.
        checkpoint: what the checkpoint says of itself.

    Returns:
        None when it is not this checkpoint's tape.
    """
    search = PastSearch(checkpoint)
    for record in records:
        search.feed(record)
    return search.past()
