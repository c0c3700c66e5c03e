"""The fold of a run's records to the moment after the last of them: what every face of a run shows.

Two folds do most of it: :class:`~yeto.tape.Summary` has the numbers of a whole run, as ``yeto replay`` prints
them, and :class:`~yeto.view.shadow.Shadow` has what is going on. Here is what people want beside that: the
pace, when things happened last, what was unusual. Memory is bounded by learners, fragments and open rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from yeto.core import Phase
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.tape import EVERYTHING, HEADER_KIND, Header, Item, Restart, Summary
from yeto.view.agreement import Agreement
from yeto.view.shadow import AFTER_THE_END, Shadow

if TYPE_CHECKING:
    from yeto.view.history import History

PACE_COMMITS = 32
"""Commits that give the pace: enough to smooth stragglers, few enough to follow a fleet that changes."""

PACE_NEEDED = 4
"""Commits of this start before there is a pace: the first rounds wait for whoever comes late."""

NORMS_KEPT = 32
"""Norms of merged gradients that the next one is compared with."""

NORMS_NEEDED = 8
"""Norms before one is compared with their median: the first steps of a training are often large."""

NORM_SPIKE_TIMES = 10.0
"""A merged gradient is a spike above this many times the median of the ones before it. Those of healthy runs
stay within a few times; a diverging learner is above by orders of magnitude."""


@frozen
class Spike:
    """A merged gradient far above the ones before it."""

    step: int
    at: float
    norm: float
    median: float


@frozen
class Fault:
    """What failed, when, and the round that was next then."""

    at: float
    step: int
    message: str
    learner: int | None = None


class Board:
    """The fold: feed it every record in order; ask at any time.

    Args:
        restarts: all restarts of the part of the tape that will be fed (:func:`yeto.tape.find_restarts`).
        history: told of every commit that stands, and of faults, if there is one.
    """

    def __init__(self, restarts: Sequence[Restart] = (), history: History | None = None) -> None:
        self.summary = Summary(restarts)
        self.shadow = Shadow()
        self.history = history
        self.wall: tuple[str, float] | None = None
        """Wall clock of the last start, and the session's time then."""
        self.committed_at: dict[int, float] = {}
        """By fragment, its last commit."""
        self.written: ev.CheckpointWritten | None = None
        self.commit_times: deque[float] = deque(maxlen=PACE_COMMITS)
        self.norms: deque[float] = deque(maxlen=NORMS_KEPT)
        self.agreement = Agreement()
        self.spike: Spike | None = None
        self.bad_push: Fault | None = None
        """The last push that was not finite."""
        self.bad_merge: Fault | None = None
        """The last merge or outer step that was unusable."""
        self.refused_at: dict[tuple[int | None, str], float] = {}
        """By learner (None for connections) and reason, the last refusal."""
        self.pool: Fault | None = None
        self.disk: Fault | None = None

    def feed(self, record: Item) -> None:
        """Take the next record."""
        # The one place that every record passes, so each fold's handler is called from here, without detours.
        kind, summary, shadow = record.kind, self.summary, self.shadow
        summary.records += 1
        summary.at = shadow.at = record.at
        route = _ROUTES.get(kind)
        if route is None:
            return
        body = record.body
        of_summary, own, of_shadow = route
        if of_summary is not None:
            of_summary(summary, record)
        if own is not None:
            own(self, record, body)
        if of_shadow is not None and (shadow.phase is not Phase.ENDED or kind in AFTER_THE_END):
            of_shadow(shadow, record, body)

    def pass_over(self, records: int, at: float) -> None:
        """Take note of records that were not fed, because they change nothing else.

        Args:
            records: read so far, fed or not.
            at: time of the last of them.
        """
        self.summary.records = records
        self.summary.at = self.shadow.at = at

    @property
    def at(self) -> float:
        """Time of the last record."""
        return self.summary.at

    def pace(self) -> float | None:
        """Return the mean seconds between the last commits of this start; None until there are enough."""
        times = self.commit_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) >= PACE_NEEDED else None

    def _fault(self, record: Item, message: str, learner: int | None = None) -> Fault:
        return Fault(record.at, self.shadow.step + 1, message, learner)

    def _mark(
        self, record: Item, kind: str, text: str, learner: int | None = None, step: int | None = None
    ) -> None:
        if self.history is not None:
            shadow = self.shadow
            # A push may name any round at all.
            if step is None or (step > shadow.step and not shadow.rounds.holds(step)):
                step = shadow.step + 1
            self.history.mark(record.at, step, kind, text, learner)

    def _header(self, record: Item, header: Header) -> None:
        self.wall = header.wall_clock, record.at

    def _joined(self, record: Item, joined: ev.LearnerJoined) -> None:
        self._mark(record, "join", f"learner {joined.learner} joined", joined.learner)

    def _left(self, record: Item, left: ev.LearnerLeft) -> None:
        if left.learner in self.summary.learners:
            self._mark(record, "leave", f"learner {left.learner} left: {left.reason}", left.learner)

    def _refused(self, record: Item, refused: de.LearnerRefused) -> None:
        known = refused.learner if refused.learner in self.shadow.seats else None
        self.refused_at[None, refused.reason] = record.at
        self._mark(record, "refused", refused.why, known)

    def _resumed(self, record: Item, resumed: ev.SessionResumed) -> None:
        """Begin anew: commits above its step are superseded, and so is what was unusual about them."""
        self.wall = resumed.wall_clock, record.at
        if self.history is not None:
            self.history.mark(record.at, resumed.step + 1, "restart", self._started_again(resumed), None)
        versions = self.shadow.versions
        self.committed_at = {
            mark.fragment: self.committed_at[mark.fragment]
            for mark in resumed.fragments
            if mark.fragment in self.committed_at and versions.get(mark.fragment) == mark.version
        }
        if self.written is not None and self.written.step != resumed.step:
            self.written = None
        self.commit_times.clear()
        self.norms.clear()
        self.agreement.resume(resumed.step)
        self.spike = self.bad_push = self.bad_merge = self.pool = self.disk = None
        for seat in self.shadow.seats.values():
            seat.missed_in_a_row = 0

    def _started_again(self, resumed: ev.SessionResumed) -> str:
        """Return what a start found: how the one before ended, from where it goes on, and what is lost."""
        code, step, last = self.shadow.exit_code, resumed.step, self.shadow.step
        ended = "without an exit code" if code is None else f"with exit code {code}"
        lost = (
            "none"
            if last <= step
            else f"that of round {last}"
            if last == step + 1
            else f"{step + 1} to {last}"
        )
        return (
            f"start {len(self.summary.restarts) + 1}: the one before ended {ended}; "
            f"resumed from step {step}; commits taken back: {lost}"
        )

    def _ending(self, record: Item, ending: de.SessionEnding) -> None:
        if ending.phase == "stop":
            self._mark(record, "stop", ending.why)

    def _ended(self, record: Item, ended: de.SessionEnded) -> None:
        self._mark(record, "ended", f"exit code {ended.exit_code}: {ended.why}")

    def _poisoned(self, record: Item, poisoned: ev.SvdPoolPoisoned) -> None:
        self.pool = self._fault(record, poisoned.message)
        self._mark(record, "pool", f"the SVD pool failed: {poisoned.message}")

    def _push_refused(self, record: Item, refused: de.PushRefused) -> None:
        if refused.reason == "non_finite":
            self.bad_push = self._fault(record, refused.why, refused.learner)
        self.refused_at[refused.learner, refused.reason] = record.at
        self._mark(record, "push_refused", refused.why, refused.learner, refused.step)

    def _grace(self, record: Item, grace: de.GraceOpened) -> None:
        if self.history is not None:
            self.history.grace(grace.grace_seconds)

    def _discarded(self, record: Item, discarded: de.AttemptDiscarded) -> None:
        if discarded.reason in ("not_finite", "merge_failed"):
            self.bad_merge = self._fault(record, discarded.why)
        self._mark(record, "retry", discarded.why, step=discarded.step)

    def _committed(self, record: Item, commit: de.RoundCommitted) -> None:
        shadow = self.shadow
        self.committed_at[commit.fragment] = record.at
        self.commit_times.append(record.at)
        for responder in commit.responders:
            seat = shadow.seats[responder.learner]
            seat.staleness, seat.missed_in_a_row = responder.staleness, 0
        for learner in commit.missed:
            shadow.seats[learner].missed_in_a_row += 1
        if not commit.no_op:
            self._weigh(record.at, commit)
            self.agreement.committed(record.at, commit)
        if self.history is not None and self.summary.stands(record.seq, commit.step):
            round_ = shadow.rounds.find(commit.step, commit.attempt)
            if round_ is not None:
                self.history.committed(record.at, round_, commit, shadow.seats)

    def _weigh(self, at: float, commit: de.RoundCommitted) -> None:
        """Compare a merged gradient's norm with the median of the ones before."""
        norm = commit.gradient_norm
        if len(self.norms) >= NORMS_NEEDED:
            # Sorting a few numbers for each commit is no cost beside reading its line.
            median = sorted(self.norms)[len(self.norms) // 2]
            if norm > NORM_SPIKE_TIMES * median > 0.0:
                self.spike = Spike(commit.step, at, norm, median)
        self.norms.append(norm)

    def _written(self, record: Item, written: ev.CheckpointWritten) -> None:
        if self.shadow.writing == written.step:
            self.written = written

    def _checkpoint_failed(self, record: Item, failed: ev.CheckpointFailed) -> None:
        self.disk = self._fault(record, f"the checkpoint of step {failed.step} failed: {failed.message}")
        self._mark(record, "checkpoint", self.disk.message)


_HANDLERS: dict[str, Callable[[Board, Item, Any], None]] = {
    HEADER_KIND: Board._header,
    ev.LearnerJoined.kind: Board._joined,
    ev.LearnerLeft.kind: Board._left,
    ev.SessionResumed.kind: Board._resumed,
    ev.SvdPoolPoisoned.kind: Board._poisoned,
    ev.CheckpointWritten.kind: Board._written,
    ev.CheckpointFailed.kind: Board._checkpoint_failed,
    de.LearnerRefused.kind: Board._refused,
    de.SessionEnding.kind: Board._ending,
    de.SessionEnded.kind: Board._ended,
    de.PushRefused.kind: Board._push_refused,
    de.GraceOpened.kind: Board._grace,
    de.AttemptDiscarded.kind: Board._discarded,
    de.RoundCommitted.kind: Board._committed,
}
"""What is done here with a record of each kind, before the shadow takes it."""

_ROUTES = {
    kind: (Summary.HANDLERS.get(kind), _HANDLERS.get(kind), Shadow.HANDLERS.get(kind))
    for kind in {*Summary.HANDLERS, *_HANDLERS, *Shadow.HANDLERS}
}
"""Who takes a record of each kind, in this order."""

WANTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ROUTES, EVERYTHING),
    ev.Heartbeat.kind: ("learner", "generation", "local_step"),
    ev.PushOffered.kind: (
        *("learner", "generation", "step", "attempt", "local_step", "c_steps", "c_tokens", "payload_bytes"),
    ),
    ev.MergeFinished.kind: ("step", "attempt", "finite"),
    ev.CheckpointWritten.kind: ("step", "written_bytes", "seconds"),
    de.AttemptOpened.kind: (
        *("step", "fragment", "attempt", "members", "quorum", "base_version", "deadline", "sweep"),
    ),
    de.PushAccepted.kind: ("learner", "step", "attempt"),
    de.GraceOpened.kind: ("step", "attempt", "grace_seconds", "deadline"),
    de.AttemptSealed.kind: ("step", "attempt"),
    de.MergeOrdered.kind: ("step", "attempt"),
    de.CommitOrdered.kind: ("step", "attempt"),
    de.RoundCommitted.kind: (
        *("step", "fragment", "attempt", "responders", "missed", "left_out", "quorum_seconds"),
        *("merge_seconds", "gradient_norm", "no_op", "delta_cosine", "norm_ratio", "offset_ratio"),
    ),
    de.CheckpointOrdered.kind: ("step",),
    de.BroadcastOrdered.kind: ("fragments",),
}
"""What the fold asks for of the records of each kind: of those that come in every round, only the fields it
uses. ``because`` of these is None, so none of them may be one that takes an event back."""
del WANTED[HEADER_KIND]  # always read
