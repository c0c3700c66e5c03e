"""What every room that writes files does alike. Like errors, open to all rooms."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from filelock import BaseFileLock


class Held:
    """A lock file that this process holds, until ``release`` or the end of a ``with``."""

    def __init__(self, lock: BaseFileLock) -> None:
        """Take over a lock that was acquired."""
        self._lock = lock

    def release(self) -> None:
        """Give it back; the second time does nothing."""
        self._lock.release()

    def __enter__(self) -> None:
        """Nothing is left to be done."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""
        self.release()


def hold(file: Path, taken: Exception) -> Held:
    """Hold a lock file for this process, as long as the result is there; any thread may give it back.

    Args:
        file: made if need be, and left behind.
        taken: raised when another process holds it.

    Raises:
        OSError: the system refuses.
    """
    # Imported here: whoever writes no files does not pay for it.
    from filelock import FileLock, Timeout

    lock = FileLock(file, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise taken from None
    return Held(lock)


def is_held(file: Path) -> bool:
    """Return whether a process holds a lock file now, this one included. Makes nothing, and keeps nothing."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the medium; a renamed file is not durable before.

    Raises:
        OSError: the system refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rate_text(rate: float) -> str:
    """Return how many come a second as people read it: ``2,916``, ``12``, ``0.35``: slow is not none."""
    return f"{rate:,.0f}" if rate >= 10.0 else f"{rate:.2g}"


def size_text(count: int) -> str:
    """Return a number of bytes as people read it: ``12 B``, ``2.0 KiB``, ``3.0 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024.0:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024.0
    return f"{value:.1f} TiB"
