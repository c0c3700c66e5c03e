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

from collections.abc import Iterator
from pathlib import Path

from attrs import define, field, frozen

from yeto.core.decisions import (
    CheckpointOrdered,
    FinalCutOrdered,
    Ignored,
    LearnerRefused,
    RoundCommitted,
    SessionReleased,
)
from yeto.core.events import FinalAckReceived, FragmentInitialised, SessionResumed
from yeto.errors import CheckpointError
from yeto.state import Checkpoint
from yeto.tape import Record, read


@frozen(kw_only=True)
class Past:
    """What the coordinator is told of the tape when it resumes."""

    checkpoint_seq: int | None
    """Number of the checkpoint's ``checkpoint_ordered`` record; None when it is on another tape."""
    awaited: tuple[int, ...] = ()
    """Who still owed an ACK of the final cut of the checkpoint's step."""
    acked: tuple[int, ...] = ()


@define
class _Cut:
    step: int
    awaited: set[int]
    acked: set[int] = field(factory=set)
    ordered: bool = True
    """Whether this timeline has ordered it; later orders of a timeline are for learners that joined."""


def find_past(path: Path, checkpoint: Checkpoint) -> Past:
    """Read a tape for what concerns a checkpoint.

    Raises:
        CheckpointError: the tape is that of another run.
        TapeError: the tape is damaged before its tail.
    """
    wanted = {version.fragment: version.params_digest for version in checkpoint.fragments}
    known = False
    checkpoint_seq: int | None = None
    digests: dict[int, str] = {}
    cut: _Cut | None = None
    for record, refused in _with_outcome(path):
        body = record.body
        match body:
            case FragmentInitialised() if not refused:
                digests[body.fragment] = body.digest
            case SessionReleased():
                digests.clear()
            case RoundCommitted():
                digests[body.fragment] = body.params_digest
                cut = None
            case CheckpointOrdered():
                if record.seq == checkpoint.tape_seq and (body.step, digests) == (checkpoint.step, wanted):
                    known, checkpoint_seq = True, record.seq
            case SessionResumed():
                digests = {mark.fragment: mark.params_digest for mark in body.fragments}
                known = known or (body.step, digests) == (checkpoint.step, wanted)
                if cut is not None and cut.step == body.step:
                    cut = _Cut(cut.step, set(body.awaited), set(body.acked), ordered=False)
                else:
                    cut = None
            case FinalCutOrdered():
                if cut is None:
                    cut = _Cut(body.step, set(body.awaited))
                elif not cut.ordered:
                    cut.awaited |= set(body.awaited)
                    cut.ordered = True
            case FinalAckReceived() if not refused:
                if cut is not None and cut.step == body.step:
                    cut.acked.add(body.learner)
            case _:
                pass
    if not known:
        raise CheckpointError(
            f"{path} is not the tape of this checkpoint: it never was at step {checkpoint.step} with these "
            "values; name the right one, or a new one to go on without its history (--event-tape)"
        )
    if cut is None or cut.step != checkpoint.step:
        return Past(checkpoint_seq=checkpoint_seq)
    return Past(
        checkpoint_seq=checkpoint_seq,
        awaited=tuple(sorted(cut.awaited - cut.acked)),
        acked=tuple(sorted(cut.acked)),
    )


def _with_outcome(path: Path) -> Iterator[tuple[Record, bool]]:
    """Yield each record, and whether it is a fact that the coordinator did not take."""
    held: Record | None = None
    for record in read(path):
        if held is not None:
            answer = record.because == held.seq
            yield held, answer and isinstance(record.body, Ignored | LearnerRefused)
        held = record
    if held is not None:
        yield held, False
