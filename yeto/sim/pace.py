"""How fast a learner steps: one inner step after the other, each as long as chance will have it.

Steps cost no event. A learner is asked for its next step boundary, or to have crossed all boundaries up to a
moment, and makes up the lengths of its steps then, in their order; so it does not matter who asks when.
"""

from __future__ import annotations

from yeto.sim.agenda import INFINITY, Deviates
from yeto.sim.config import LearnerSpec

LEAST_SHARE = 0.05
"""No step is shorter than this share of an average one, whatever the jitter."""


class Pace:
    """The steps of one learner's life."""

    def __init__(self, spec: LearnerSpec, deviates: Deviates) -> None:
        """Stand still."""
        self._mean = spec.step_seconds
        self._jitter = spec.step_jitter
        self._phase_jitter = spec.phase_jitter
        self._deviates = deviates
        self._factor = 1.0
        self.is_running = False
        """Whether a step is being taken."""
        self.boundary = INFINITY
        """When the present step ends; infinite while standing still."""
        self._length = 0.0
        self.stepped_seconds = 0.0
        """Time spent in steps that were finished."""

    def start(self, now: float) -> None:
        """Begin a step now."""
        self.is_running = True
        self._length = self._draw()
        self.boundary = now + self._length

    def stop(self) -> None:
        """Stand still; a step that was not finished is lost."""
        self.is_running = False
        self.boundary = INFINITY

    def advance(self, now: float, limit: int) -> int:
        """Finish the steps that end until ``now``, at most ``limit``; return how many."""
        count = 0
        boundary, length, seconds = self.boundary, self._length, 0.0
        mean, jitter, deviates = self._mean * self._factor, self._jitter, self._deviates
        least, drawn = mean * LEAST_SHARE, deviates.drawn
        while boundary <= now and count < limit:
            count += 1
            seconds += length
            length = mean
            if jitter:
                length = mean * (1.0 + (drawn or deviates.more()).pop() * jitter)
                if length < least:
                    length = least
            boundary += length
        self.boundary, self._length = boundary, length
        self.stepped_seconds += seconds
        return count

    def new_stretch(self) -> None:
        """Draw the pace of the steps from the next one on."""
        if self._phase_jitter:
            self._factor = max(LEAST_SHARE, 1.0 + self._deviates.draw() * self._phase_jitter)

    def _draw(self) -> float:
        mean = self._mean * self._factor
        if not self._jitter:
            return mean
        return max(LEAST_SHARE * mean, mean * (1.0 + self._deviates.draw() * self._jitter))
