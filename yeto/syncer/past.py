"""What a resume knows of the past: what the tape says about the checkpoint, and the one event that is told.

Whether it is the checkpoint's tape, and who still owes an ACK, is a fold of the tape. Everything else that
the coordinator goes on with stands in the checkpoint.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import attrs

from yeto.core import CoreConfig
from yeto.core.events import CheckpointWritten, SessionResumed
from yeto.core.values import FragmentMark, LedgerEntry, OuterMark, SessionTerms
from yeto.errors import CheckpointError
from yeto.state import Checkpoint
from yeto.syncer.pump import UNSTAMPED
from yeto.tape import Mark, Past, Record, Tail, TapeWriter, read
from yeto.tape.past import PastSearch


def find_past(path: Path, checkpoint: Checkpoint) -> Past:
    """Read a tape for what concerns a checkpoint.

    Raises:
        CheckpointError: the tape is that of another run.
        TapeError: the tape is damaged before its tail.
    """
    search = _search(checkpoint)
    for record in read(path):
        search.feed(record)
    return _found(search, path, checkpoint)


def resume_tape(path: Path, checkpoint: Checkpoint) -> tuple[TapeWriter, Tail, Past]:
    """Open a tape to go on from a checkpoint, and read in the same pass what concerns that.

    Raises:
        CheckpointError: the tape is that of another run.
        TapeError: the tape is damaged before its tail, or cannot be written on.
    """
    search = _search(checkpoint)
    tape, tail = TapeWriter.resume(path, feed=search.feed)
    try:
        return tape, tail, _found(search, path, checkpoint)
    except BaseException:
        tape.close()
        raise


def last_checkpoint(path: Path) -> int | None:
    """Return the step of the last checkpoint that a tape tells of; None if its run never reached one.

    Raises:
        TapeError: the tape is damaged before its tail, or another process writes it.
    """
    step: int | None = None

    def look(record: Record) -> None:
        nonlocal step
        if isinstance(record.body, CheckpointWritten | SessionResumed):
            step = record.body.step

    # Opening it to write shows that no other process does.
    TapeWriter.resume(path, feed=look)[0].close()
    return step


def _search(checkpoint: Checkpoint) -> PastSearch:
    digests = {version.fragment: version.params_digest for version in checkpoint.fragments}
    return PastSearch(Mark(step=checkpoint.step, digests=digests, seq=checkpoint.tape_seq))


def _found(search: PastSearch, path: Path, checkpoint: Checkpoint) -> Past:
    past = search.past()
    if past is None:
        raise CheckpointError(
            f"{path} is not the tape of this checkpoint: it never was at step {checkpoint.step} with these "
            "values; name the right one, or, if its end is lost, a new one to go on without it (--event-tape)"
        )
    return past


def unknown_terms(checkpoint: Checkpoint) -> SessionTerms:
    """Return terms that stand for those which a learner will state."""
    return SessionTerms(
        dtype="f32",
        num_fragments=len(checkpoint.fragments),
        fingerprint=checkpoint.fingerprint or "0" * 64,
        contract=checkpoint.contract or "0" * 64,
        profile=None,
    )


def _stated_terms(checkpoint: Checkpoint) -> SessionTerms:
    """Return the terms that a checkpoint of our own format fixes."""
    dtype, fingerprint, contract = checkpoint.dtype, checkpoint.fingerprint, checkpoint.contract
    assert dtype is not None, "only our own format states its terms"
    assert fingerprint is not None
    assert contract is not None
    return SessionTerms(
        dtype=dtype,
        num_fragments=len(checkpoint.fragments),
        fingerprint=fingerprint,
        contract=contract,
        profile=checkpoint.profile,
    )


def resumed_event(
    checkpoint: Checkpoint, core: CoreConfig, past: Past, terms: SessionTerms | None = None
) -> SessionResumed:
    """Return what the coordinator is told of a checkpoint that a resume may take.

    Args:
        checkpoint: what is gone on from.
        core: the settings now.
        past: what the tape knows of it.
        terms: of the session, where the checkpoint does not state them itself.
    """
    return SessionResumed(
        at=UNSTAMPED,
        wall_clock=wall_clock(),
        config=core,
        terms=_stated_terms(checkpoint) if terms is None else terms,
        step=checkpoint.step,
        fragments=tuple(
            FragmentMark(
                fragment=version.fragment,
                version=version.version,
                params_digest=version.params_digest,
                momentum_digest=version.momentum_digest,
            )
            for version in checkpoint.fragments
        ),
        ledger=tuple(LedgerEntry(**attrs.asdict(entry)) for entry in checkpoint.ledger),
        checkpoint_seq=past.checkpoint_seq,
        awaited=past.awaited,
        acked=past.acked,
        finish_target=checkpoint.finish_target,
        outer_marks=None
        if checkpoint.outer_marks is None
        else tuple(OuterMark(**attrs.asdict(mark)) for mark in checkpoint.outer_marks),
    )


def wall_clock() -> str:
    """Return the time of day, with its offset, as people write it."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
