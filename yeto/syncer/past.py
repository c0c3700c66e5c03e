"""What the event tape says about a checkpoint: whether it is its tape, and who still owes an ACK."""

from __future__ import annotations

from pathlib import Path

from yeto.errors import CheckpointError
from yeto.state import Checkpoint
from yeto.tape import Mark, Past, Tail, TapeWriter, read
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


def _search(checkpoint: Checkpoint) -> PastSearch:
    digests = {version.fragment: version.params_digest for version in checkpoint.fragments}
    return PastSearch(Mark(step=checkpoint.step, digests=digests, seq=checkpoint.tape_seq))


def _found(search: PastSearch, path: Path, checkpoint: Checkpoint) -> Past:
    past = search.past()
    if past is None:
        raise CheckpointError(
            f"{path} is not the tape of this checkpoint: it never was at step {checkpoint.step} with these "
            "values; name the right one, or a new one to go on without its history (--event-tape)"
        )
    return past
