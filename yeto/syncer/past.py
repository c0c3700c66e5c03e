"""What the event tape says about a checkpoint: whether it is its tape, and who still owes an ACK."""

from __future__ import annotations

from pathlib import Path

from yeto.errors import CheckpointError
from yeto.state import Checkpoint
from yeto.tape import Mark, Past, read
from yeto.tape import find_past as fold_past


def find_past(path: Path, checkpoint: Checkpoint) -> Past:
    """Read a tape for what concerns a checkpoint.

    Raises:
        CheckpointError: the tape is that of another run.
        TapeError: the tape is damaged before its tail.
    """
    digests = {version.fragment: version.params_digest for version in checkpoint.fragments}
    mark = Mark(step=checkpoint.step, digests=digests, seq=checkpoint.tape_seq)
    past = fold_past(read(path), mark)
    if past is None:
        raise CheckpointError(
            f"{path} is not the tape of this checkpoint: it never was at step {checkpoint.step} with these "
            "values; name the right one, or a new one to go on without its history (--event-tape)"
        )
    return past
