"""How far long work is, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

BAR_SECONDS = 0.2
LINE_SECONDS = 10.0
"""Between two looks; work that is done sooner says nothing."""


class Progress:
    """Shows the share of simulations that is done and the time that is left."""

    def __init__(self, total: int) -> None:
        """Begin counting; nothing is printed yet."""
        self._total = total
        self._done = 0
        self._begin = time.monotonic()
        # A bar is redrawn, which not every terminal can do.
        self._is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._next = self._begin + (BAR_SECONDS if self._is_terminal else LINE_SECONDS)
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown and self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def done(self, count: int) -> None:
        """Take note that so many simulations are finished."""
        self._done = count

    def tick(self, share: float) -> None:
        """Show the share of the work that is done, if the last look is long enough ago."""
        now = time.monotonic()
        if now < self._next:
            return
        spent = now - self._begin
        text = f"{share:4.0%}, {self._done} of {self._total} simulations"
        if share > 0:
            text += f", {_clock(spent / share - spent)} left"
        if self._is_terminal:
            filled = round(share * 30)
            print(f"\r\x1b[K[{'#' * filled:<30}] {text}", end="", file=sys.stderr, flush=True)
        else:
            print(f"yeto simulate: {text}", file=sys.stderr, flush=True)
        self._shown = True
        self._next = now + (BAR_SECONDS if self._is_terminal else LINE_SECONDS)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"
