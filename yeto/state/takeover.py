"""From an older single file to a folder: the run that goes on from one writes the other in its place.

Nothing happens to the file until there is a whole checkpoint to put there. The folder is written beside it
(``.new``), then the file gets another name (``.single-file``, kept) and the folder gets the file's. Should
the process die between these two renames, the file under its other name is what is there, and the next start
goes on from it: what left this one was never more than the file holds, because a broadcast waits for the
checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from yeto.errors import CheckpointError
from yeto.state.checkpoint import Checkpoint
from yeto.state.files import Disk, writing
from yeto.state.writing import write_checkpoint


def kept_single_file(path: Path | str) -> Path:
    """Return where the older file is kept once a folder has its place."""
    return Path(f"{Path(path)}.single-file")


def checkpoint_at(path: Path | str) -> Path:
    """Return where to read what ``path`` stands for: itself, or the file of a takeover that was cut off."""
    path = Path(path)
    return kept_single_file(path) if not path.exists() and kept_single_file(path).is_file() else path


def take_over(
    path: Path | str, checkpoint: Checkpoint, keep_every: int = 0, *, disk: Disk | None = None
) -> int:
    """Write a checkpoint where an older single file is, which is kept under another name.

    Returns:
        Bytes written.

    Raises:
        CheckpointError: the disk is full or refuses, or the other name is taken. The file is intact.
    """
    path, disk = Path(path), disk or Disk()
    kept, aside = kept_single_file(path), path.with_name(f"{path.name}.new")
    if path.exists() and kept.exists():
        raise CheckpointError(f"{path}: is to be kept as {kept}, which exists; move that away")
    try:
        written = write_checkpoint(aside, checkpoint, keep_every, disk=disk)
        with writing(path, "nothing was lost"):
            if path.exists():
                disk.rename(path, kept)
                disk.sync_folder(path.absolute().parent)
            disk.rename(aside, path)
            disk.sync_folder(path.absolute().parent)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {checkpoint_at(path)} is intact") from error
    return written
