"""A folder that is there whole or not at all, whatever ends the process that makes it.

It is made under a hidden name beside its place, made durable file by file, and only then renamed. A folder
that is to be replaced changes places with the new one in a single call where the system has one; elsewhere it
is moved aside first, and put back by the next export if that was cut short in between.

Whoever makes such a folder holds a lock on it. The system drops the lock with the process, so that a later
export can tell what a killed one left behind from what another one is making, and removes only the former.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from yeto.storage import sync_folder

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


@contextmanager
def made_aside(place: Path) -> Iterator[Path]:
    """Give an empty folder to fill; what is left of it goes at the end, when it was not put in its place.

    Raises:
        OSError: the system refuses.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = _hidden(place, "partial")
    try:
        descriptor = _made(aside)
        try:
            yield aside
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def put_in_place(aside: Path, place: Path, *, replace: bool) -> None:
    """Give a folder its name, durably.

    Args:
        aside: the folder, whole.
        place: its name.
        replace: put it there instead of a folder that has the name by now; else that is refused.

    Raises:
        OSError: the system refuses; what was at ``place`` is there still.
    """
    _sync_tree(aside)
    if not (replace and place.exists()):
        try:
            # Takes the place of an empty folder at most.
            aside.rename(place)
        except OSError as error:
            if place.exists():
                raise FileExistsError(errno.EEXIST, "somebody else made it meanwhile", str(place)) from error
            raise
        sync_folder(place.parent)
        return
    old = aside
    if not _exchange(aside, place):
        old = _hidden(place, "old")
        place.rename(old)
        try:
            aside.rename(place)
        except OSError:
            old.rename(place)
            raise
    sync_folder(place.parent)
    # Nobody has it locked now, so another export may be removing it as well; the new one is in its place.
    shutil.rmtree(old, ignore_errors=True)


def clear_up(place: Path) -> None:
    """Remove what killed exports to ``place`` left beside it; put a folder back that one had moved aside."""
    name = glob.escape(place.name)
    for left in sorted(place.parent.glob(f".{name}.old-*")):
        if place.exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            with suppress(OSError):
                left.rename(place)
    for left in sorted(place.parent.glob(f".{name}.partial-*")):
        with suppress(OSError):
            descriptor = _open_folder(left)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)


def _made(aside: Path) -> int:
    """Make a folder; return the descriptor that has it locked."""
    while True:
        aside.mkdir()
        descriptor = -1
        # Another export may take it for a left one before it is locked; then there is none of this name.
        with suppress(FileNotFoundError):
            try:
                descriptor = _open_folder(aside)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(descriptor), os.stat(aside)):
                    return descriptor
            except BaseException:
                if descriptor >= 0:
                    os.close(descriptor)
                raise
            os.close(descriptor)


def _hidden(place: Path, what: str) -> Path:
    return place.with_name(f".{place.name}.{what}-{os.getpid()}")


def _exchange(left: Path, right: Path) -> bool:
    """Swap two names at once; return whether this system can."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    return bool(
        call(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), ctypes.c_uint(_RENAME_EXCHANGE))
        == 0
    )


def _sync_tree(folder: Path) -> None:
    for here, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(here, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(here))


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
