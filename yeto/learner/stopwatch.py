"""Where the training thread's time goes: sections that add up to the whole, and what no section claims.

``compute`` and ``data`` are the steps; ``boundary`` is looking what has arrived, ``receive`` taking it into
the weights, ``send`` copying the weights for an answer; ``waiting`` is for the syncer, at the start, frozen,
and at the end; ``loading``, ``evaluation``, ``saving``, ``logging`` and ``closing`` are what they say. What
the network does beside training (encoding, sending, receiving) takes no time of this thread and is in no
section.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

UNACCOUNTED = "unaccounted"


class Stopwatch:
    """Adds up seconds per named section. One thread; a section inside another interrupts it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start now; ``clock`` gives seconds."""
        self._clock = clock
        self._started = self._since = clock()
        self._current = UNACCOUNTED
        self._seconds: dict[str, float] = {UNACCOUNTED: 0.0}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the time inside the block for ``name``, and for nothing else."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def seconds(self) -> dict[str, float]:
        """Return seconds per section up to now, ``unaccounted`` among them; they sum to ``total``."""
        self._switch(self._current)
        return dict(self._seconds)

    @property
    def total(self) -> float:
        """Seconds from the start to when ``seconds`` was last asked for: their sum."""
        return self._since - self._started

    def _switch(self, name: str) -> str:
        now = self._clock()
        outer = self._current
        self._seconds[outer] = self._seconds.get(outer, 0.0) + now - self._since
        self._since, self._current = now, name
        return outer
