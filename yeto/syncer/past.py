"""What a tape says about a checkpoint: whether it is its tape, and who still owes an ACK.

The tape may have gone on beyond the checkpoint, and may hold several timelines: every resume falls back to
a checkpoint, and what was recorded above it no longer counts. An unfinished final cut does count, if it is
of the very step and timeline that is resumed: who has it need not be asked again.
"""

from __future__ import annotations

from pathlib import Path

from attrs import define, field, frozen

from yeto.core.decisions import CheckpointOrdered, FinalCutOrdered, Ignored, RoundCommitted
from yeto.core.events import FinalAckReceived, SessionResumed
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
    known = False
    checkpoint_seq: int | None = None
    cut: _Cut | None = None
    ack: Record | None = None
    for record in read(path):
        body = record.body
        if ack is not None and record.because != ack.seq:
            _count(cut, ack)
            ack = None
        match body:
            case CheckpointOrdered(step=checkpoint.step) if record.seq == checkpoint.tape_seq:
                known, checkpoint_seq = True, record.seq
            case SessionResumed():
                known = known or _resumes(body, checkpoint)
                if cut is not None and cut.step == body.step:
                    cut = _Cut(cut.step, set(body.awaited), set(body.acked), ordered=False)
                else:
                    cut = None
            case RoundCommitted():
                cut = None
            case FinalCutOrdered():
                if cut is None:
                    cut = _Cut(body.step, set(body.awaited))
                elif not cut.ordered:
                    cut.awaited |= set(body.awaited)
                    cut.ordered = True
            case FinalAckReceived():
                ack = record
            case Ignored() if ack is not None:
                ack = None
            case _:
                pass
    if ack is not None:
        _count(cut, ack)
    if not known:
        raise CheckpointError(
            f"{path} is not the tape of this checkpoint: its record {checkpoint.tape_seq} does not order the "
            f"checkpoint of step {checkpoint.step}; name the right one, or a new one (--event-tape)"
        )
    if cut is None or cut.step != checkpoint.step:
        return Past(checkpoint_seq=checkpoint_seq)
    return Past(
        checkpoint_seq=checkpoint_seq,
        awaited=tuple(sorted(cut.awaited - cut.acked)),
        acked=tuple(sorted(cut.acked)),
    )


def _count(cut: _Cut | None, ack: Record) -> None:
    body = ack.body
    if isinstance(body, FinalAckReceived) and cut is not None and body.step == cut.step:
        cut.acked.add(body.learner)


def _resumes(event: SessionResumed, checkpoint: Checkpoint) -> bool:
    """Whether a tape's resume was from this very checkpoint, whose own record is on an older tape."""
    marks = {
        (version.fragment, version.version, version.params_digest, version.momentum_digest)
        for version in checkpoint.fragments
    }
    return event.step == checkpoint.step and marks == {
        (mark.fragment, mark.version, mark.params_digest, mark.momentum_digest) for mark in event.fragments
    }
