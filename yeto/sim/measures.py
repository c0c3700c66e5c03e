"""What a simulation measures, counted as it happens."""

from __future__ import annotations

from yeto.core.decisions import RoundCommitted


class Spread:
    """A running mean."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.total = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Take one more value."""
        self.total += value
        self.count += 1

    @property
    def mean(self) -> float:
        """The mean; 0 of nothing."""
        return self.total / self.count if self.count else 0.0


class Measures:
    """Everything that is counted at the syncer, and how long enough learners were training."""

    def __init__(self, num_learners: int, quorum: int) -> None:
        """Start before the first moment."""
        self.attempts = 0
        self.discarded = 0
        self.participation = Spread()
        self.staleness = Spread()
        self.quorum_seconds = Spread()
        self.grace_seconds = Spread()
        self.learner_staleness = [Spread() for _ in range(num_learners)]
        self._quorum = quorum
        self._training = 0
        self._enough_since: float | None = None
        self._enough_seconds = 0.0

    def committed(self, commit: RoundCommitted) -> None:
        """A round was committed, on whatever timeline."""
        self.participation.add(len(commit.responders) / len(commit.members))
        self.quorum_seconds.add(commit.quorum_seconds)
        if commit.grace_seconds is not None:
            self.grace_seconds.add(commit.grace_seconds)
        for responder in commit.responders:
            self.staleness.add(responder.staleness)
            self.learner_staleness[responder.learner].add(responder.staleness)

    def training(self, change: int, now: float) -> None:
        """One learner more (or less) holds every anchor and trains."""
        self._training += change
        if self._training >= self._quorum:
            if self._enough_since is None:
                self._enough_since = now
        elif self._enough_since is not None:
            self._enough_seconds += now - self._enough_since
            self._enough_since = None

    def enough_seconds(self, now: float) -> float:
        """Return how long at least K learners were training."""
        since = self._enough_since
        return self._enough_seconds + (0.0 if since is None else now - since)
