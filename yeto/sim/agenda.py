"""What happens next: one heap of moments, and one source of chance for each concern.

Whatever is planned for one moment happens in the order in which it was planned, so a run does not depend on
how a heap breaks ties. Chance is split by concern: how long the steps of learner 3 take is drawn from a
stream of its own, and is the same whether or not anybody else fails.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from heapq import heappush
from typing import Any

INFINITY = float("inf")

Deed = Callable[..., None]

Planned = tuple[float, int, Deed, tuple[Any, ...]]
"""When, in which order, and what."""


def _nothing() -> None:
    raise AssertionError("this never happens")


NOTHING: Planned = (INFINITY, 0, _nothing, ())
"""What comes next when nothing is planned."""


class Agenda:
    """The simulated clock and everything planned on it."""

    def __init__(self) -> None:
        """Start at 0 with nothing planned."""
        self.now = 0.0
        self.heap: list[Planned] = []
        """What is planned; a heap. Whoever takes from it sets ``now``."""
        self._planned = 0

    def at(self, when: float, deed: Deed, *details: Any) -> None:
        """Plan a deed; one that should have happened already happens now."""
        self._planned += 1
        heappush(self.heap, (when if when > self.now else self.now, self._planned, deed, details))

    def after(self, seconds: float, deed: Deed, *details: Any) -> None:
        """Plan a deed for so many seconds from now."""
        self._planned += 1
        heappush(self.heap, (self.now + seconds, self._planned, deed, details))


def chance(seed: int, concern: str) -> random.Random:
    """Return the source of chance of one concern; the same seed and concern give the same numbers."""
    return random.Random(f"{seed}/{concern}")


class Deviates:
    """Numbers of the standard normal distribution from one source of chance, drawn ahead in blocks.

    The same numbers in the same order as ``rng.gauss(0, 1)`` gives, each at half the price (the transform of
    Box and Muller). What is drawn ahead is lost to any other use of the source.
    """

    BLOCK = 64
    """Pairs that are drawn at a time."""

    def __init__(self, rng: random.Random) -> None:
        """Draw from ``rng``, and be the only one to do so."""
        self._random = rng.random
        self.drawn: list[float] = []
        """What comes next, the next one last. Who takes from it asks for more when it is empty."""

    def more(self) -> list[float]:
        """Draw the next block, once ``drawn`` is empty; return ``drawn``."""
        chance, log, sqrt, cos, sin, circle = self._random, math.log, math.sqrt, math.cos, math.sin, math.tau
        drawn = self.drawn
        for _ in range(self.BLOCK):
            angle = chance() * circle
            radius = sqrt(-2.0 * log(1.0 - chance()))
            drawn.append(cos(angle) * radius)
            drawn.append(sin(angle) * radius)
        drawn.reverse()
        return drawn

    def draw(self) -> float:
        """Return the next one."""
        return (self.drawn or self.more()).pop()


def spell(rng: random.Random, mean_seconds: float | None) -> float:
    """Return how long until something happens that happens at random; infinite when it never does."""
    return INFINITY if mean_seconds is None else rng.expovariate(1.0 / mean_seconds)
