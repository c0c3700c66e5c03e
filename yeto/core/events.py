"""Events: facts from outside, in the past tense. The only input of the coordinator.

Each class has a written-down ``kind``, which is its name on the tape for ever. ``at`` is seconds since the
session began, monotonic over restarts, rounded to a microsecond before it gets here.

Like those of decisions, the classes have no slots: that halves the price of making one.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from yeto.core.config import CoreConfig
from yeto.core.later import later
from yeto.core.values import FragmentMark, LedgerEntry, OuterMark, SessionTerms


@frozen(kw_only=True, slots=False)
class Event:
    """Base of all events."""

    kind: ClassVar[str] = ""
    at: float


@frozen(kw_only=True, slots=False)
class SessionResumed(Event):
    """The syncer started from a checkpoint; carries everything the state is rebuilt from."""

    kind: ClassVar[str] = "session_resumed"
    wall_clock: str
    config: CoreConfig
    terms: SessionTerms
    step: int
    fragments: tuple[FragmentMark, ...]
    ledger: tuple[LedgerEntry, ...]
    checkpoint_seq: int | None
    """Tape sequence number of the checkpoint's ``checkpoint_ordered`` record; None on a new tape."""
    awaited: tuple[int, ...] = ()
    """Learner ids that the final cut of this very step still had to hear from."""
    acked: tuple[int, ...] = ()
    finish_target: int | None = None
    """Target step that the first budget finish recorded."""
    outer_marks: tuple[OuterMark, ...] | None = later()
    """Counters of the outer step in fragment order; None for a checkpoint that has none."""


@frozen(kw_only=True, slots=False)
class HelloReceived(Event):
    """An authenticated, well-formed HELLO arrived."""

    kind: ClassVar[str] = "hello_received"
    learner: int
    generation: str
    address: str
    terms: SessionTerms


@frozen(kw_only=True, slots=False)
class LearnerJoined(Event):
    """All 1+S sockets of a group are attached."""

    kind: ClassVar[str] = "learner_joined"
    learner: int
    generation: str


@frozen(kw_only=True, slots=False)
class LearnerLeft(Event):
    """A group ended, for whatever reason; also one that never completed."""

    kind: ClassVar[str] = "learner_left"
    learner: int
    generation: str
    reason: str


@frozen(kw_only=True, slots=False)
class FragmentInitialised(Event):
    """Learner 0 sent the initial value of one fragment."""

    kind: ClassVar[str] = "fragment_initialised"
    learner: int
    generation: str
    fragment: int
    digest: str
    finite: bool


@frozen(kw_only=True, slots=False)
class PushOffered(Event):
    """The header of a push arrived; no buffer was taken yet."""

    kind: ClassVar[str] = "push_offered"
    learner: int
    generation: str
    fragment: int
    step: int
    attempt: int
    base_version: int
    local_step: int
    c_steps: int
    c_tokens: int
    payload_bytes: int


@frozen(kw_only=True, slots=False)
class UploadProgress(Event):
    """An admitted upload advanced; told at most once a minute."""

    kind: ClassVar[str] = "upload_progress"
    learner: int
    generation: str
    step: int
    attempt: int
    received_bytes: int


@frozen(kw_only=True, slots=False)
class PushReceived(Event):
    """An admitted push is here whole and was examined."""

    kind: ClassVar[str] = "push_received"
    learner: int
    generation: str
    fragment: int
    step: int
    attempt: int
    payload_bytes: int
    digest: str
    finite: bool
    norm: float | None
    """L2 norm of the delta; None when it is not finite."""
    cosine_to_momentum: float | None
    """None when either vector is (nearly) zero or the push is not finite."""


@frozen(kw_only=True, slots=False)
class Heartbeat(Event):
    """A learner's local step advanced."""

    kind: ClassVar[str] = "heartbeat"
    learner: int
    generation: str
    local_step: int


@frozen(kw_only=True, slots=False)
class QuorumDeadlinePassed(Event):
    """The quorum deadline of an attempt passed."""

    kind: ClassVar[str] = "quorum_deadline_passed"
    step: int
    attempt: int


@frozen(kw_only=True, slots=False)
class GraceElapsed(Event):
    """The grace of an attempt elapsed."""

    kind: ClassVar[str] = "grace_elapsed"
    step: int
    attempt: int


@frozen(kw_only=True, slots=False)
class GateOpened(Event):
    """The throttle lets the next round open."""

    kind: ClassVar[str] = "gate_opened"
    step: int
    """The round that may open."""


@frozen(kw_only=True, slots=False)
class FirstEstimateDeadlinePassed(Event):
    """No step-time estimate came in time; rounds open without one."""

    kind: ClassVar[str] = "first_estimate_deadline_passed"


@frozen(kw_only=True, slots=False)
class RetryDue(Event):
    """A discarded round may be attempted again."""

    kind: ClassVar[str] = "retry_due"
    step: int
    attempt: int
    """The attempt that was discarded."""


@frozen(kw_only=True, slots=False)
class StartTimeoutPassed(Event):
    """``--start-timeout-s`` passed before the rounds started."""

    kind: ClassVar[str] = "start_timeout_passed"


@frozen(kw_only=True, slots=False)
class FinalAckTimeoutPassed(Event):
    """``--final-ack-timeout-s`` passed after the final cut."""

    kind: ClassVar[str] = "final_ack_timeout_passed"


@frozen(kw_only=True, slots=False)
class StopDeadlinePassed(Event):
    """The stop budget, or the shorter gathering part of it, is used up."""

    kind: ClassVar[str] = "stop_deadline_passed"


@frozen(kw_only=True, slots=False)
class BudgetWaitPassed(Event):
    """A configured learner without an accepted budget report was away too long."""

    kind: ClassVar[str] = "budget_wait_passed"


@frozen(kw_only=True, slots=False)
class SvdPoolDrained(Event):
    """The pool has no queued and no running job."""

    kind: ClassVar[str] = "svd_pool_drained"


@frozen(kw_only=True, slots=False)
class SvdPoolPoisoned(Event):
    """The pool failed for good."""

    kind: ClassVar[str] = "svd_pool_poisoned"
    message: str


@frozen(kw_only=True, slots=False)
class MergeFinished(Event):
    """The merged outer gradient of an attempt is ready."""

    kind: ClassVar[str] = "merge_finished"
    step: int
    attempt: int
    finite: bool
    gradient_norm: float | None
    corrected: tuple[int, ...]
    """Learner ids whose delta the correction really changed."""
    seconds: float
    delta_cosine: float | None = later()
    """Mean, over all pairs of merged pushes, of the cosine between the two; None below two that have one."""
    norm_ratio: float | None = later()
    """Norm of the merged gradient beside that of the weighted average of the pushes; None when that is 0."""


@frozen(kw_only=True, slots=False)
class MergeFailed(Event):
    """The merge of an attempt could not be computed."""

    kind: ClassVar[str] = "merge_failed"
    step: int
    attempt: int
    message: str


@frozen(kw_only=True, slots=False)
class OuterStepApplied(Event):
    """The outer step of an ordered commit was computed; when finite it is in the store."""

    kind: ClassVar[str] = "outer_step_applied"
    step: int
    attempt: int
    finite: bool
    params_digest: str | None
    momentum_digest: str | None
    seconds: float
    offset_ratio: float | None = later()
    """Distance of the new parameters from the mean of the learners', beside the norm of the weighted average
    of the pushes; None when that is 0, or nothing was merged."""


@frozen(kw_only=True, slots=False)
class CheckpointWritten(Event):
    """A checkpoint is durable."""

    kind: ClassVar[str] = "checkpoint_written"
    step: int
    written_bytes: int
    seconds: float


@frozen(kw_only=True, slots=False)
class CheckpointFailed(Event):
    """A checkpoint could not be made durable."""

    kind: ClassVar[str] = "checkpoint_failed"
    step: int
    message: str


@frozen(kw_only=True, slots=False)
class FinalAckReceived(Event):
    """A learner holds the final cut."""

    kind: ClassVar[str] = "final_ack_received"
    learner: int
    generation: str
    step: int


@frozen(kw_only=True, slots=False)
class BudgetReported(Event):
    """A learner froze after its budget of local steps."""

    kind: ClassVar[str] = "budget_reported"
    learner: int
    generation: str
    local_steps: int


@frozen(kw_only=True, slots=False)
class StopRequested(Event):
    """A signal asked the syncer to stop."""

    kind: ClassVar[str] = "stop_requested"
    signal: str


EVENTS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        SessionResumed,
        HelloReceived,
        LearnerJoined,
        LearnerLeft,
        FragmentInitialised,
        PushOffered,
        UploadProgress,
        PushReceived,
        Heartbeat,
        QuorumDeadlinePassed,
        GraceElapsed,
        GateOpened,
        FirstEstimateDeadlinePassed,
        RetryDue,
        StartTimeoutPassed,
        FinalAckTimeoutPassed,
        StopDeadlinePassed,
        BudgetWaitPassed,
        SvdPoolDrained,
        SvdPoolPoisoned,
        MergeFinished,
        MergeFailed,
        OuterStepApplied,
        CheckpointWritten,
        CheckpointFailed,
        FinalAckReceived,
        BudgetReported,
        StopRequested,
    )
}
"""Every event class by its kind on the tape."""
