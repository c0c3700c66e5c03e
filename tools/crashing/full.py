"""A disk that is really full: a small file system in memory, a page more for each point.

Mounting one is the privilege of an administrator. Elsewhere only the refusals that ``calls`` makes up stand
for a full disk, and the campaign says so.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

PAGE_KIB = 4
ROOM_KIB = 4096
"""Enough for a whole run: what an operator gives a run whose disk was full."""


def can_mount(folder: Path) -> bool:
    """Whether a small file system can be mounted here."""
    folder.mkdir(exist_ok=True)
    try:
        if _mount(folder, 4 * PAGE_KIB, "").returncode:
            return False
    except FileNotFoundError:  # there is no mount
        return False
    subprocess.run(["umount", str(folder)], check=True)
    return True


@asynccontextmanager
async def small_disk(folder: Path, pages: int) -> AsyncIterator[None]:
    """Have a file system of so many pages at a folder during the block."""
    await trio.Path(folder).mkdir(exist_ok=True)
    done = await trio.to_thread.run_sync(_mount, folder, pages * PAGE_KIB, "")
    done.check_returncode()
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            await trio.run_process(["umount", "-l", str(folder)])


async def make_room(folder: Path) -> None:
    """Have the file system at a folder grow."""
    done = await trio.to_thread.run_sync(_mount, folder, ROOM_KIB, "remount,")
    done.check_returncode()


def used_pages(folder: Path) -> int:
    """Return how many pages the files below a folder take."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(-(-size // (1024 * PAGE_KIB)) for size in sizes)


def _mount(folder: Path, kib: int, how: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"{how}size={kib}k", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    )
