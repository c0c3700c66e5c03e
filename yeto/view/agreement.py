"""Whether the learners agree, and whether what is published is ahead of them, as the commits told it.

Single rounds are noisy, so what the faces show of the run, and what an alert is raised for, is a mean over
the last few commits; of each fragment the newest is kept as well. Tapes on which no merge told are as if
there were none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import sqrt
from typing import Final

from attrs import frozen

from yeto.core.decisions import RoundCommitted

ROUNDS: Final = 8
"""Commits that are put together. At right angles to one another the deltas of two learners have a cosine of 0
give or take 0.1 in small fragments; a mean of eight is steady to within 0.04."""


@frozen
class Told:
    """What one commit said."""

    step: int
    at: float
    fragment: int
    learners: int
    """Whose pushes had a weight."""
    delta_cosine: float | None
    norm_ratio: float | None
    offset_ratio: float | None

    @property
    def excess(self) -> float | None:
        """Norm of the merge beside what deltas at right angles make of it, sqrt(M); None for one learner."""
        if self.norm_ratio is None or self.learners < 2:
            return None
        return self.norm_ratio / sqrt(self.learners)


class Agreement:
    """The fold: told of every commit."""

    def __init__(self) -> None:
        """Start before the first."""
        self.by_fragment: dict[int, Told] = {}
        """The newest of each."""
        self.last: deque[Told] = deque(maxlen=ROUNDS)

    def committed(self, at: float, commit: RoundCommitted) -> None:
        """Take a commit; one that moved nothing or told nothing is passed over."""
        if commit.delta_cosine is None and commit.norm_ratio is None and commit.offset_ratio is None:
            return
        told = Told(
            commit.step,
            at,
            commit.fragment,
            sum([responder.contribution > 0.0 for responder in commit.responders]),
            commit.delta_cosine,
            commit.norm_ratio,
            commit.offset_ratio,
        )
        self.by_fragment[commit.fragment] = told
        self.last.append(told)

    def resume(self, step: int) -> None:
        """Forget the commits above ``step``, which a restart took back, and begin the mean anew."""
        self.last.clear()
        self.by_fragment = {key: told for key, told in self.by_fragment.items() if told.step <= step}

    def mean(self, value: Callable[[Told], float | None]) -> float | None:
        """Return the mean of a figure over the last commits that told it; None if none did."""
        known = self._known(value)
        return sum(known) / len(known) if known else None

    def settled(self, value: Callable[[Told], float | None], of: Callable[[list[float]], float]) -> float:
        """Return mean, least or the like of a figure over the last commits; NaN until there are enough."""
        known = self._known(value)
        return of(known) if len(known) == ROUNDS else float("nan")

    def _known(self, value: Callable[[Told], float | None]) -> list[float]:
        return [found for found in map(value, self.last) if found is not None]


def mean(values: Iterable[float]) -> float:
    """Return the mean of some numbers."""
    numbers = list(values)
    return sum(numbers) / len(numbers)
