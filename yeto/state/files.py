"""How a file gets onto the disk so that a crash leaves the old one or the new one, never half of either.

Written aside under another name, fsynced, renamed; the folder is fsynced after that, because the name lives
there. Whatever stops the process in between leaves a ``*.tmp`` that nothing refers to.

``Disk`` is the whole of what this package asks of the operating system when it writes. A test hands in one
that stops at the n-th call, which is what a kill at that instant does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeAlias

from yeto.errors import CheckpointError
from yeto.storage import size_text, sync_folder

ASIDE: Final = ".tmp"
"""Suffix of a file that is being written."""

BytesLike: TypeAlias = bytes | memoryview


class Disk:
    """The system calls that writing takes."""

    def create(self, path: Path) -> int:
        """Open a new, empty file for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: BytesLike) -> int:
        """Write some of the data; return how many bytes."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Wait until the file is on the medium."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close the file."""
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, replacing what has it."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file; one that is gone already is as good."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def make_folder(self, path: Path) -> None:
        """Make a folder with its parents, unless there is one."""
        path.mkdir(parents=True, exist_ok=True)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on the medium."""
        sync_folder(path)


def write_aside(disk: Disk, path: Path, parts: Iterable[BytesLike], *, durable: bool = True) -> int:
    """Write a file under its name with ``ASIDE`` added, then rename it.

    What was written of it goes when the system refuses: on a full disk nothing else needs that room more.

    The folder is not fsynced: the caller does, once for all files it writes there.

    Args:
        disk: the system calls.
        path: final name.
        parts: contents, in order; plain bytes or one-dimensional views of bytes.
        durable: fsync before renaming; not needed for what nothing relies on.

    Returns:
        Bytes written.
    """
    aside = path.with_name(path.name + ASIDE)
    written = 0
    try:
        descriptor = disk.create(aside)
        try:
            for part in parts:
                view = memoryview(part)
                while len(view):
                    count = disk.write(descriptor, view)
                    written += count
                    view = view[count:]
            if durable:
                disk.sync(descriptor)
        finally:
            disk.close(descriptor)
        disk.rename(aside, path)
    except OSError:
        with suppress(OSError):
            disk.remove(aside)
        raise
    return written


def remove_asides(disk: Disk, folder: Path) -> None:
    """Remove what a crash left half written in a folder."""
    for path in sorted(folder.glob(f"*{ASIDE}")):
        disk.remove(path)


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Turn the system's refusals into one sentence that names the path and the free space.

    Args:
        path: where the writing goes on.
        what: what is intact if it fails.

    Raises:
        CheckpointError: for any OSError inside.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(
            f"{where}: cannot be written: {error.strerror or error} "
            f"({size_text(free_bytes(path))} free); {what}"
        ) from error


def free_bytes(path: Path) -> int:
    """Return the free space where ``path`` is, or would be made."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def require_space(path: Path, params: int) -> None:
    """Check that two whole checkpoints fit, the one that is kept and the one being written.

    Args:
        path: the checkpoint folder, which need not exist yet. Of what it holds, one checkpoint counts as
            there already: a run that is resumed on the disk it ran on needs no more room than before.
        params: elements of all fragments together; parameters and momentum take 8 bytes each.

    Raises:
        CheckpointError: naming the path, the space needed and the space there is.
    """
    one = 8 * params
    needed, free = 2 * one - min(one, _held_bytes(Path(path))), free_bytes(Path(path))
    if free < needed:
        raise CheckpointError(
            f"{path}: two checkpoints take {size_text(2 * one)}, for which {size_text(needed)} must "
            f"be free and only {size_text(free)} are; make room, or move the run to a larger disk"
        )


def _held_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder and the folders in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
