"""How much of a long tape is read, on stderr, for whoever waits for it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

PROGRESS_SECONDS = 1.0
"""A tape that is read faster than this is read without a word."""


class Reading:
    """Says how much is read: every second on a terminal, now and then elsewhere."""

    def __init__(self, command: str, tape: Path) -> None:
        """Begin; nothing is printed yet."""
        self._command = command
        self._tape = tape
        self._next = time.monotonic() + PROGRESS_SECONDS
        self._every = PROGRESS_SECONDS if sys.stderr.isatty() else 10 * PROGRESS_SECONDS

    def __call__(self, share: float) -> None:
        """Take note of the share that is read."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every
        print(f"{self._command}: {share:4.0%} of {self._tape} is read", file=sys.stderr, flush=True)
