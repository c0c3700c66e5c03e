"""What another policy would have changed, in numbers: a fold of the outcomes of :mod:`yeto.view.what_if`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs
from attrs import define, field

from yeto.view.what_if_attempt import Outcome, Verdict


@define
class Side:
    """All attempts as one of the two policies ended them."""

    statuses: Counter[str] = field(factory=Counter)
    reasons: Counter[str] = field(factory=Counter)
    """Of the discarded ones."""
    seconds: float = 0.0
    """From opening to seal, summed over the attempts that both policies seal."""
    asked: int = 0
    merged: int = 0
    """Members and merged pushes of the sealed attempts."""

    def feed(self, verdict: Verdict, members: int) -> None:
        """Take one attempt."""
        self.statuses[verdict.status] += 1
        if verdict.status == "discarded":
            self.reasons[verdict.reason] += 1
        elif verdict.status == "sealed":
            self.asked += members
            self.merged += len(verdict.weights)

    @property
    def participation(self) -> float | None:
        """Share of the asked members that were merged; None when nothing was sealed."""
        return self.merged / self.asked if self.asked else None


@define
class Part:
    """One learner's part under both policies."""

    recorded: int = 0
    """Merges."""
    other: int = 0
    gained: int = 0
    """Attempts that merge it only under the other policy."""
    lost: int = 0
    recorded_share: float = 0.0
    """Sum of its shares of the weights, over the attempts that were sealed."""
    other_share: float = 0.0


class WhatIfSummary:
    """The fold.

    Args:
        outcomes: of all attempts.
    """

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        self.attempts = 0
        self.changed = 0
        """Attempts that end otherwise: at another time, with others, or differently."""
        self.earlier = 0
        """Of those that both policies seal."""
        self.later = 0
        self.sealed_twice = 0
        """Attempts that both policies seal."""
        self.estimated = 0
        """Pushes whose time of arrival is an estimate."""
        self.recorded = Side()
        self.other = Side()
        self.learners: dict[int, Part] = {}
        for outcome in outcomes:
            self._feed(outcome)

    def _feed(self, outcome: Outcome) -> None:
        recorded, other = outcome.recorded, outcome.other
        self.attempts += 1
        self.changed += recorded != other
        self.estimated += len(outcome.estimated)
        self.recorded.feed(recorded, len(outcome.members))
        self.other.feed(other, len(outcome.members))
        if recorded.status == other.status == "sealed":
            assert recorded.seconds is not None
            assert other.seconds is not None
            self.sealed_twice += 1
            self.earlier += other.seconds < recorded.seconds
            self.later += other.seconds > recorded.seconds
            self.recorded.seconds += recorded.seconds
            self.other.seconds += other.seconds
        for learner in outcome.members:
            part = self.learners.setdefault(learner, Part())
            before, after = learner in recorded.weights, learner in other.weights
            part.recorded += before
            part.other += after
            part.gained += after and not before
            part.lost += before and not after
            part.recorded_share += _share(recorded, learner)
            part.other_share += _share(other, learner)

    def mean_seconds(self, side: Side) -> float | None:
        """Mean time from opening to seal, over the attempts that both policies seal; None without any."""
        return side.seconds / self.sealed_twice if self.sealed_twice else None

    def share(self, sum_of_shares: float, side: Side) -> float | None:
        """Mean share of the weights over the sealed attempts of a side; None without any."""
        sealed = side.statuses["sealed"]
        return sum_of_shares / sealed if sealed else None

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "attempts": self.attempts,
            "changed": self.changed,
            "sealed_by_both": self.sealed_twice,
            "sealed_earlier": self.earlier,
            "sealed_later": self.later,
            "estimated_arrivals": self.estimated,
            "recorded": self._side_json(self.recorded),
            "what_if": self._side_json(self.other),
            "learners": {
                str(learner): {
                    "merges": {"recorded": part.recorded, "what_if": part.other},
                    "gained": part.gained,
                    "lost": part.lost,
                    "contribution": {
                        "recorded": self.share(part.recorded_share, self.recorded),
                        "what_if": self.share(part.other_share, self.other),
                    },
                }
                for learner, part in sorted(self.learners.items())
            },
        }

    def _side_json(self, side: Side) -> dict[str, Any]:
        return {
            **dict(sorted(side.statuses.items())),
            "discard_reasons": dict(sorted(side.reasons.items())),
            "mean_seconds": self.mean_seconds(side),
            "participation": side.participation,
        }


def most_changed(outcomes: Iterable[Outcome], count: int) -> list[Outcome]:
    """Return the attempts that change most: ended differently first, then by learners, then by time."""
    changed = [outcome for outcome in outcomes if outcome.recorded != outcome.other]
    return sorted(changed, key=_change, reverse=True)[:count]


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Return one attempt as plain JSON values."""
    return {
        "seq": outcome.seq,
        "at": outcome.at,
        "step": outcome.step,
        "attempt": outcome.attempt,
        "members": list(outcome.members),
        "recorded": _verdict_json(outcome.recorded),
        "what_if": _verdict_json(outcome.other),
        "estimated": list(outcome.estimated),
    }


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        **attrs.asdict(verdict),
        "weights": {str(learner): weight for learner, weight in sorted(verdict.weights.items())},
    }


def _share(verdict: Verdict, learner: int) -> float:
    total = sum(verdict.weights.values())
    return verdict.weights.get(learner, 0.0) / total if total > 0.0 else 0.0


def _change(outcome: Outcome) -> tuple[bool, int, float]:
    recorded, other = outcome.recorded, outcome.other
    seconds = abs((other.seconds or 0.0) - (recorded.seconds or 0.0))
    others = set(recorded.weights) ^ set(other.weights)
    return recorded.status != other.status, len(others), seconds
