"""What every room that writes files does alike. Like errors, open to all rooms."""

from __future__ import annotations

import os
from pathlib import Path


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
