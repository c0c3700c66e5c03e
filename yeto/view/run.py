"""A run as a person sees it: a fold of the tape, record by record, and nothing else.

Because nothing but the tape goes in, the same fold serves a running, a finished and a crashed run, here or on
a copy of the file elsewhere. Memory is bounded by the learners that take part, never by the length of the run
or by who knocked.
"""

from __future__ import annotations

from collections import deque

from attrs import Factory, define

from yeto.core.config import CoreConfig
from yeto.core.decisions import (
    AttemptDiscarded,
    AttemptOpened,
    AttemptSealed,
    FinalCutOrdered,
    GraceOpened,
    RoundCommitted,
    RoundsStarted,
    SessionEnded,
    SessionEnding,
)
from yeto.core.events import LearnerJoined, LearnerLeft, SessionResumed
from yeto.tape import Header, Record

PACE_COMMITS = 32
"""Commits that the pace (and so the ETA) is measured over: long enough to smooth stragglers, short enough to
follow a fleet that changes."""


@define
class LearnerView:
    """One learner's part in the run."""

    linked: bool = False
    merges: int = 0
    contribution: float = 0.0
    """Sum over the rounds committed since this start of its share of the applied weights."""
    staleness: int | None = None
    """Of its last merged push."""


@define
class RunView:
    """The fold. Feed it every record of a tape in order."""

    config: CoreConfig | None = None
    at: float = 0.0
    step: int = 0
    phase: str = "starting"
    """``starting``, ``rounds``, ``final``, ``budget``, ``stop`` or ``ended``."""
    exit_code: int | None = None
    why: str = ""
    """The coordinator's last sentence about what it is doing."""
    learners: dict[int, LearnerView] = Factory(dict)
    moved: int = 0
    """Rounds committed since this start that moved anything: what contributions are shares of."""
    resumes: int = 0
    """How often the syncer was started again."""
    _commit_times: deque[float] = Factory(lambda: deque(maxlen=PACE_COMMITS))

    def feed(self, record: Record) -> None:
        """Take the next record of the tape."""
        self.at = record.at
        body = record.body
        match body:
            case Header():
                self._configure(body.config)
            case SessionResumed():
                self._resume(body)
            case LearnerJoined():
                self.learner(body.learner).linked = True
            case LearnerLeft() if body.learner in self.learners:
                self.learners[body.learner].linked = False
            case RoundsStarted():
                self.phase, self.why = "rounds", body.why
            case RoundCommitted():
                self._commit(body)
            case SessionEnding():
                self.phase, self.why = body.phase, body.why
            case AttemptOpened() | GraceOpened() | AttemptSealed() | AttemptDiscarded() | FinalCutOrdered():
                self.why = body.why
            case SessionEnded():
                self.phase, self.exit_code, self.why = "ended", body.exit_code, body.why
            case _:
                pass

    def learner(self, learner: int) -> LearnerView:
        """Return the view of one learner, made on first mention."""
        return self.learners.setdefault(learner, LearnerView())

    def contribution(self, learner: int) -> float | None:
        """Return a learner's mean share in the rounds of this start that moved anything; None without any."""
        return self.learner(learner).contribution / self.moved if self.moved else None

    @property
    def total_steps(self) -> int | None:
        """Rounds to commit, once the header was read."""
        return None if self.config is None else self.config.total_steps

    def seconds_left(self) -> float | None:
        """Return the time the remaining rounds take at the present pace; None until there is a pace."""
        times = self._commit_times
        if self.total_steps is None or len(times) < 2:
            return None
        pace = (times[-1] - times[0]) / (len(times) - 1)
        return max(0.0, (self.total_steps - self.step) * pace - (self.at - times[-1]))

    def _configure(self, config: CoreConfig) -> None:
        self.config = config
        for learner in range(config.num_learners):
            self.learner(learner)

    def _commit(self, merge: RoundCommitted) -> None:
        self.step, self.why = merge.step, merge.why
        self.moved += not merge.no_op
        self._commit_times.append(self.at)
        for responder in merge.responders:
            view = self.learner(responder.learner)
            view.merges += 1
            view.contribution += responder.contribution
            view.staleness = responder.staleness

    def _resume(self, event: SessionResumed) -> None:
        """Begin a new timeline: commits above its step are superseded, the ledger is the checkpoint's."""
        self._configure(event.config)
        self.step, self.phase, self.exit_code = event.step, "starting", None
        # The sentence of before, often "stopped by ...", would read as if it were so now.
        self.why = f"resumed at step {event.step}, waiting for learners"
        self.resumes += 1
        self.moved = 0
        self._commit_times.clear()
        for view in self.learners.values():
            view.linked, view.merges, view.contribution = False, 0, 0.0
        for entry in event.ledger:
            self.learner(entry.learner).merges = entry.merges
