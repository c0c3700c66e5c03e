"""What is usual for each learner, for the pushes that a tape has only the headers of."""

from __future__ import annotations

from collections import deque

from yeto.core.events import Event, PushOffered, PushReceived
from yeto.tape import round_at

UPLOADS_KEPT = 33
"""Uploads of a learner that its usual one is the median of."""


class Uploads:
    """What is usual for each learner: how long its uploads take, and the norm of its pushes."""

    def __init__(self) -> None:
        self._offered: dict[tuple[int, int], PushOffered] = {}
        """By learner and fragment, so that what never arrives is not kept for ever."""
        self._seconds: dict[int, deque[float]] = {}
        self._norms: dict[int, deque[float]] = {}

    def feed(self, event: Event) -> None:
        """Take note of a header or of what was received."""
        if isinstance(event, PushOffered):
            self._offered[event.learner, event.fragment] = event
        elif isinstance(event, PushReceived):
            offer = self._offered.pop((event.learner, event.fragment), None)
            if offer is not None and (offer.step, offer.attempt) == (event.step, event.attempt):
                _kept(self._seconds, event.learner).append(event.at - offer.at)
            if event.norm is not None:
                _kept(self._norms, event.learner).append(event.norm)

    def received(self, offer: PushOffered, not_before: float) -> PushReceived:
        """Return the fact that the record lacks: the push of this header is here."""
        learner = offer.learner
        return PushReceived(
            at=round_at(max(offer.at + _median(self._seconds.get(learner)), not_before)),
            learner=learner,
            generation=offer.generation,
            fragment=offer.fragment,
            step=offer.step,
            attempt=offer.attempt,
            payload_bytes=offer.payload_bytes,
            digest="",
            finite=True,
            norm=_median(self._norms.get(learner)),
            cosine_to_momentum=None,
        )


def _kept(lasts: dict[int, deque[float]], learner: int) -> deque[float]:
    return lasts.setdefault(learner, deque(maxlen=UPLOADS_KEPT))


def _median(values: deque[float] | None) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
