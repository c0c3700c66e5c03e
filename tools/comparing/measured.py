"""What the tape says of an arm: how often it merged, what the pushes were like, who took part.

The rounds up to the cut-off are the training that an arm is about; those of its finish are counted apart.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from yeto.core.decisions import RoundCommitted, RoundsStarted
from yeto.core.events import BudgetReported, PushOffered, SessionResumed
from yeto.tape import read


@frozen(kw_only=True)
class Measured:
    """Figures of one arm; None where there was nothing to measure."""

    interval_steps: float | None
    """Measured H: median steps of a learner between two pushes of one fragment that were merged."""
    merges_per_fragment: float
    """Before the finish."""
    finish_merges: int
    """Rounds of the finish, one for each fragment."""
    pushes: int
    """Merged ones, before the finish."""
    corrected: int
    """Of those, turned by the delta correction."""
    tokens_per_push: float | None
    """Mean; the tokens that a push answers for."""
    participation: float | None
    """Share of the frozen members whose push was merged."""
    staleness: float | None
    """Mean, in global steps."""
    cosine_to_momentum: float | None
    """Mean over the merged pushes."""
    pushed_bytes: int
    """Payloads of all pushes, the finish's too."""
    session_seconds: float
    """From the first round's opening to the last budget report."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain JSON."""
        return asdict(self)


def measure(tape: Path) -> Measured:
    """Fold the tape of an arm that is over."""
    fold = _Fold()
    for record in read(tape):
        fold.feed(record.body, record.at)
    return fold.result()


class _Fold:
    def __init__(self) -> None:
        self.finishing = False
        self.local_steps: dict[tuple[int, int, int], int] = {}
        self.merged_at: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.merges: Counter[int] = Counter()
        self.finish_merges = self.pushed_bytes = self.members = 0
        self.began = self.ended = 0.0
        self.responders: list[Any] = []

    def feed(self, body: Any, at: float) -> None:
        if isinstance(body, SessionResumed):
            self.finishing = True
        elif isinstance(body, RoundsStarted) and not self.finishing:
            self.began = at
        elif isinstance(body, BudgetReported) and not self.finishing:
            self.ended = at
        elif isinstance(body, PushOffered):
            self.pushed_bytes += body.payload_bytes
            self.local_steps[body.step, body.attempt, body.learner] = body.local_step
        elif isinstance(body, RoundCommitted):
            self._committed(body)

    def _committed(self, body: RoundCommitted) -> None:
        if self.finishing:
            self.finish_merges += 1
            return
        self.merges[body.fragment] += 1
        self.members += len(body.members)
        self.responders += body.responders
        for responder in body.responders:
            local_step = self.local_steps[body.step, body.attempt, responder.learner]
            self.merged_at[responder.learner, body.fragment].append(local_step)
        self.local_steps = {key: step for key, step in self.local_steps.items() if key[0] > body.step}

    def result(self) -> Measured:
        intervals = [
            later - earlier for steps in self.merged_at.values() for earlier, later in pairwise(steps)
        ]
        responders = self.responders
        return Measured(
            interval_steps=statistics.median(intervals) if intervals else None,
            # The finish merges every fragment, those too that were never merged before.
            merges_per_fragment=self.merges.total() / max(1, self.finish_merges),
            finish_merges=self.finish_merges,
            pushes=len(responders),
            corrected=sum(responder.corrected for responder in responders),
            tokens_per_push=_mean(responder.c_tokens for responder in responders),
            participation=len(responders) / self.members if self.members else None,
            staleness=_mean(responder.staleness for responder in responders),
            cosine_to_momentum=_mean(
                responder.cosine_to_momentum
                for responder in responders
                if responder.cosine_to_momentum is not None
            ),
            pushed_bytes=self.pushed_bytes,
            session_seconds=self.ended - self.began,
        )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
