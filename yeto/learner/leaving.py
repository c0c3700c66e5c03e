"""How a learner's process is asked to end, and how it ends without waiting for any thread."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

import trio

SIGNALS = (signal.SIGINT, signal.SIGTERM)

REPEAT_SECONDS = 5.0
"""torchrun passes on a Ctrl-C that the terminal has sent to every rank already: one signal, seen twice."""


class Patience:
    """Tells a second signal from an echo of the first."""

    def __init__(self, has_launcher: bool) -> None:
        """Begin with no signal seen; a launcher repeats what it is sent."""
        self._has_launcher = has_launcher
        self._asked_at: float | None = None

    def is_first(self) -> bool:
        """Take note of a signal; return whether it is the first."""
        if self._asked_at is not None:
            return False
        self._asked_at = trio.current_time()
        return True

    def is_over(self) -> bool:
        """Whether a signal that is not the first is meant."""
        assert self._asked_at is not None, "there was a first one"
        return not self._has_launcher or trio.current_time() - self._asked_at >= REPEAT_SECONDS


def leave_now(code: int) -> NoReturn:
    """End the process without waiting for any thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
