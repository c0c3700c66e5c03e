"""How fast a learner is, from its last few steps."""

from __future__ import annotations

import time
from collections import deque

RATE_STEPS = 20
"""Steps that tokens/s is averaged over: enough to be steady, few enough to show a change."""


class Pace:
    """Remembers when the last steps were taken."""

    def __init__(self) -> None:
        """Begin without a step."""
        self._recent: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS + 1)

    def stepped(self, tokens: int) -> None:
        """A step was taken now; ``tokens`` is the sum since the start."""
        self._recent.append((time.monotonic(), tokens))

    def tokens_per_second(self) -> float:
        """Return the rate; 0 before it is known."""
        if len(self._recent) < 2:
            return 0.0
        (first, before), (last, after) = self._recent[0], self._recent[-1]
        return (after - before) / (last - first) if last > first else 0.0

    def seconds_for(self, steps: int) -> float | None:
        """Return how long so many more steps will take; None before it is known."""
        if len(self._recent) < 2:
            return None
        return steps * (self._recent[-1][0] - self._recent[0][0]) / (len(self._recent) - 1)
