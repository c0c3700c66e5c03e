"""Two small files beside the checkpoint folder: a lock, and the mark of a finished run.

The lock keeps two syncers from sharing a folder. The system drops it with the process, so a killed syncer
never locks anyone out; the empty file that stays means nothing. Where no checkpoint came to be, not even that
stays: a start that was refused leaves the folder as it found it.

The final marker tells supervisors that a run ended with every learner holding the final cut. It is exactly
two lines, written once and atomically; it is removed before the first new round of a later run, because a
marker beside a run that goes on would be a lie.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from yeto.errors import CheckpointError
from yeto.state.digested import IncompleteCheckpoint, read_bounded
from yeto.state.files import Disk, write_aside, writing

_MARKER: Final = re.compile(rb"YETO_FINAL_V1\nglobal_step=(0|[1-9][0-9]{0,19})\n")


def lock_file(path: Path | str) -> Path:
    """Return the file that a syncer locks as long as it uses the checkpoint at ``path``."""
    return Path(f"{path}.lock")


@contextmanager
def checkpoint_lock(path: Path | str) -> Iterator[None]:
    """Hold the checkpoint at ``path`` (which need not exist yet) for this process.

    Raises:
        CheckpointError: another process holds it, or the lock file cannot be made.
    """
    with ExitStack() as held:
        held.enter_context(_held(path, lock_file(path)))
        if os.path.islink(path):
            # Others may come by another name: what the link leads to is locked as well.
            held.enter_context(_held(path, lock_file(os.path.realpath(path))))
        yield


@contextmanager
def _held(path: Path | str, name: Path) -> Iterator[None]:
    try:
        descriptor = _locked(name)
    except BlockingIOError as error:
        raise CheckpointError(
            f"{path}: another syncer is using this checkpoint (it holds {name}); "
            "stop it or choose another --checkpoint-path"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be locked: {error.strerror or error}") from error
    try:
        yield
    finally:
        if not Path(path).exists():
            with suppress(OSError):
                os.unlink(name)
        os.close(descriptor)


def _locked(name: Path) -> int:
    """Return the descriptor that holds a lock file, which is the one that has the name now.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be made.
    """
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed it between the two calls; then this locks nothing any more.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(name)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def final_marker_path(path: Path | str) -> Path:
    """Return where the final marker of a checkpoint is."""
    return Path(f"{Path(path)}.final")


def write_final_marker(path: Path | str, step: int, *, disk: Disk | None = None) -> None:
    """Mark the checkpoint at ``path`` as the final cut of a finished run, durably.

    Raises:
        CheckpointError: the system refuses.
    """
    marker, disk = final_marker_path(path), disk or Disk()
    with writing(marker, "the checkpoint is intact and not marked as final"):
        write_aside(disk, marker, [f"YETO_FINAL_V1\nglobal_step={step}\n".encode("ascii")])
        disk.sync_folder(marker.absolute().parent)


def remove_final_marker(path: Path | str, *, disk: Disk | None = None) -> None:
    """Remove the marker, durably; nothing happens if there is none.

    Raises:
        CheckpointError: the system refuses.
    """
    marker, disk = final_marker_path(path), disk or Disk()
    if marker.exists():
        with writing(marker, "the checkpoint is intact"):
            disk.remove(marker)
            disk.sync_folder(marker.absolute().parent)


def read_final_marker(path: Path | str) -> int | None:
    """Return the step that the marker states; None if there is no marker.

    Raises:
        CheckpointError: the marker is not exactly two lines of the right form.
    """
    marker = final_marker_path(path)
    try:
        data = read_bounded(marker, 64)
    except IncompleteCheckpoint:
        return None
    match = _MARKER.fullmatch(data)
    if match is None:
        raise CheckpointError(f"{marker}: not a final marker; remove it if the run is not finished")
    return int(match[1])
