"""Decisions: orders of the coordinator, each with the sentence that explains it.

``why`` is that sentence; status and logs print it. A decision whose class says ``durable`` is acted upon
only after its record has been fsynced, any other at once.

The classes have no slots: a run makes millions of them, and a frozen class with slots takes twice as long.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from yeto.core.later import later
from yeto.core.values import FragmentVersionRef, Member, Responder, SessionTerms, Weighted


@frozen(kw_only=True, slots=False)
class Decision:
    """Base of all decisions."""

    kind: ClassVar[str] = ""
    durable: ClassVar[bool] = False
    why: str


@frozen(kw_only=True, slots=False)
class SessionOpened(Decision):
    """Learner 0's HELLO (or a checkpoint) fixes the terms of the session."""

    kind: ClassVar[str] = "session_opened"
    terms: SessionTerms


@frozen(kw_only=True, slots=False)
class SessionReleased(Decision):
    """The generation that fixed a provisional session is gone; the next learner 0 decides anew."""

    kind: ClassVar[str] = "session_released"
    learner: int
    generation: str


@frozen(kw_only=True, slots=False)
class LearnerRefused(Decision):
    """Close this group. With ``permanent`` an ERROR carries ``why``; without, it just closes."""

    kind: ClassVar[str] = "learner_refused"
    learner: int
    generation: str
    reason: str
    """``session_differs``, ``learner_out_of_range``, ``generation_reused``, ``superseded``,
    ``non_finite``, ``init_not_finite``, ``budget_differs`` or ``ended``. A ``generation_reused`` closes the
    connection that said it, never the live group that really drew the number."""
    field: str | None = None
    """The term that differs."""
    permanent: bool = True


@frozen(kw_only=True, slots=False)
class RoundsStarted(Decision):
    """Everything is initialised and enough learners are there."""

    kind: ClassVar[str] = "rounds_started"
    step: int
    """The first round to open."""
    learners: tuple[int, ...]
    outer: str | None = later()
    """Kind of outer step in force: ``stock``, ``direct`` or ``normalised``; None where the settings are of a
    time when there was only stock."""


@frozen(kw_only=True, slots=False)
class AttemptOpened(Decision):
    """Pull fragment p for round t from every frozen member."""

    kind: ClassVar[str] = "attempt_opened"
    step: int
    fragment: int
    attempt: int
    members: tuple[Member, ...]
    quorum: int
    base_version: int
    deadline: float
    sweep: bool


@frozen(kw_only=True, slots=False)
class PushAdmitted(Decision):
    """Take a buffer for this upload."""

    kind: ClassVar[str] = "push_admitted"
    learner: int
    generation: str
    step: int
    attempt: int
    staleness: int


@frozen(kw_only=True, slots=False)
class PushAccepted(Decision):
    """The push counts as this member's answer."""

    kind: ClassVar[str] = "push_accepted"
    learner: int
    generation: str
    step: int
    attempt: int


@frozen(kw_only=True, slots=False)
class PushRefused(Decision):
    """Drop this push; with ``resend`` send the fragment and the same PULL once more."""

    kind: ClassVar[str] = "push_refused"
    learner: int
    generation: str
    fragment: int
    step: int
    attempt: int
    reason: str
    """``out_of_round``, ``unexpected_member``, ``future_base``, ``stale_base``, ``duplicate``,
    ``no_work`` or ``non_finite``."""
    declined: bool
    resend: bool


@frozen(kw_only=True, slots=False)
class QuorumReached(Decision):
    """The K-th answer is in."""

    kind: ClassVar[str] = "quorum_reached"
    step: int
    attempt: int
    quorum_seconds: float


@frozen(kw_only=True, slots=False)
class GraceOpened(Decision):
    """Wait a little for stragglers; every smoothed term of the formula is here."""

    kind: ClassVar[str] = "grace_opened"
    step: int
    attempt: int
    grace_seconds: float
    gamma: float
    tau: float
    xi_step: float | None
    xi_quorum: float | None
    xi_sync: float | None
    cap: float
    deadline: float


@frozen(kw_only=True, slots=False)
class AttemptSealed(Decision):
    """Nothing more is taken into this attempt."""

    kind: ClassVar[str] = "attempt_sealed"
    step: int
    fragment: int
    attempt: int
    responders: tuple[Weighted, ...]
    missed: tuple[int, ...]
    left_out: tuple[int, ...]
    """Answered, but left out by the outlier guard or after a non-finite merge."""


@frozen(kw_only=True, slots=False)
class AttemptDiscarded(Decision):
    """Free the attempt's buffers; its partial answers are thrown away."""

    kind: ClassVar[str] = "attempt_discarded"
    step: int
    attempt: int
    reason: str
    """``quorum_timeout``, ``unreachable``, ``not_finite``, ``merge_failed``, ``stopping`` or ``budget``."""
    lost: tuple[int, ...]
    """Learners whose accepted answer goes with it."""
    retry_at: float | None


@frozen(kw_only=True, slots=False)
class MergeOrdered(Decision):
    """Reduce these pushes, in this order, with these weights."""

    kind: ClassVar[str] = "merge_ordered"
    step: int
    fragment: int
    attempt: int
    responders: tuple[Weighted, ...]
    plain_average: bool
    """Weighted average for every tensor, whatever the layout's mode (closing sweep, or direct outer step)."""
    momentum_scale: float | None = later()
    """What makes the momentum buffer the mean that pushes are corrected against; None: 1 - outer momentum."""


@frozen(kw_only=True, slots=False)
class CommitOrdered(Decision):
    """Compute the outer step of round t; its turn has come."""

    kind: ClassVar[str] = "commit_ordered"
    durable: ClassVar[bool] = True
    step: int
    fragment: int
    attempt: int
    lr: float
    momentum: float
    sweep: bool
    """Closing sweep: the momentum buffer is neither used nor changed."""
    no_op: bool
    """All weights are 0: the version moves, parameters and momentum do not."""


@frozen(kw_only=True, slots=False)
class RoundCommitted(Decision):
    """Round t is committed: version[p] = t."""

    kind: ClassVar[str] = "merge"
    durable: ClassVar[bool] = True
    step: int
    fragment: int
    attempt: int
    base_version: int
    version: int
    quorum: int
    members: tuple[int, ...]
    responders: tuple[Responder, ...]
    missed: tuple[int, ...]
    left_out: tuple[int, ...]
    quorum_seconds: float
    grace_seconds: float | None
    merge_seconds: float
    sync_seconds: float | None
    """Raw sample of xi_sync that this round gave; None while its checkpoint is still being written."""
    gradient_norm: float
    params_digest: str
    momentum_digest: str
    no_op: bool
    delta_cosine: float | None = later()
    """As ``merge_finished`` reported it; None when it is not known."""
    norm_ratio: float | None = later()
    """As ``merge_finished`` reported it; None when it is not known."""
    offset_ratio: float | None = later()
    """As ``outer_step_applied`` reported it; None when it is not known."""


@frozen(kw_only=True, slots=False)
class CheckpointOrdered(Decision):
    """Write a checkpoint of the state as committed at this step."""

    kind: ClassVar[str] = "checkpoint_ordered"
    durable: ClassVar[bool] = True
    step: int
    final: bool
    """No round follows in this process."""
    finish_target: int | None = None


@frozen(kw_only=True, slots=False)
class BroadcastOrdered(Decision):
    """Send these fragments at these versions to these learners."""

    kind: ClassVar[str] = "broadcast_ordered"
    durable: ClassVar[bool] = True
    fragments: tuple[FragmentVersionRef, ...]
    to: tuple[Member, ...]


@frozen(kw_only=True, slots=False)
class FinalCutOrdered(Decision):
    """Send every fragment as exact f32 and the manifest to these learners."""

    kind: ClassVar[str] = "final_cut_ordered"
    durable: ClassVar[bool] = True
    step: int
    versions: tuple[int, ...]
    to: tuple[Member, ...]
    awaited: tuple[int, ...]
    """Learners whose ACK is still missing."""


@frozen(kw_only=True, slots=False)
class LearnerReleased(Decision):
    """Send SHUTDOWN: this learner's part is done."""

    kind: ClassVar[str] = "learner_released"
    durable: ClassVar[bool] = True
    learner: int
    generation: str


@frozen(kw_only=True, slots=False)
class SessionEnding(Decision):
    """No round opens any more; what follows is the terminal checkpoint and the final cut, or a stop."""

    kind: ClassVar[str] = "session_finalising"
    phase: str
    """``final``, ``budget`` or ``stop``."""

    @property
    def drains_pool(self) -> bool:
        """Whether the SVD pool is let finish. A stop waits for no matrix: the pool dies with the process."""
        return self.phase != "stop"


@frozen(kw_only=True, slots=False)
class SessionEnded(Decision):
    """The syncer's process ends with this exit code; with ``mark_final`` the marker is written first.

    It precedes the ``learner_released`` decisions of the same event, so that the marker is there before
    any learner hears that the run is over.
    """

    kind: ClassVar[str] = "session_ended"
    durable: ClassVar[bool] = True
    exit_code: int
    step: int
    mark_final: bool


@frozen(kw_only=True, slots=False)
class Ignored(Decision):
    """The event came too late, or twice, to mean anything."""

    kind: ClassVar[str] = "ignored"
    event: str
    reason: str


DECISIONS: dict[str, type[Decision]] = {
    cls.kind: cls
    for cls in (
        SessionOpened,
        SessionReleased,
        LearnerRefused,
        RoundsStarted,
        AttemptOpened,
        PushAdmitted,
        PushAccepted,
        PushRefused,
        QuorumReached,
        GraceOpened,
        AttemptSealed,
        AttemptDiscarded,
        MergeOrdered,
        CommitOrdered,
        RoundCommitted,
        CheckpointOrdered,
        BroadcastOrdered,
        FinalCutOrdered,
        LearnerReleased,
        SessionEnding,
        SessionEnded,
        Ignored,
    )
}
"""Every decision class by its kind on the tape."""
