"""One moment of a run, as every face shows it: the terminal, the report, the dashboard, the metrics.

Nothing here computes. A moment is made by :mod:`yeto.view.present` from the fold of a tape's records, and
from what only a running machine knows; that part is None where nobody told it. All times are seconds since
the session began, the tape's ``at``; a None says that it is not known, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import field, frozen

FORMAT = 1
"""Version of the JSON that these types become. A key is added without a new one, never renamed or removed."""


@frozen(kw_only=True)
class LearnerLive:
    """What a learner says of itself, or a running syncer knows of it; None where nobody told."""

    phase: str | None = None
    loss: float | None = None
    local_step: int | None = None
    tokens_per_second: float | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None


@frozen(kw_only=True)
class Live:
    """What only a running machine knows, beside the tape."""

    learners: Mapping[int, LearnerLive] = field(factory=dict)
    disk_free_bytes: int | None = None


@frozen(kw_only=True)
class SessionFacts:
    """Which run this is, and what it was last started with."""

    session_id: str
    software_version: str
    wall_clock: str
    """When the session began, ISO 8601 with offset."""
    num_learners: int
    quorum: int
    num_fragments: int | None
    """None until learner 0 or a checkpoint has said it."""
    dtype: str | None
    outer: str | None
    """The outer step in force, its numbers, and why it was chosen; None until the fragments are known."""
    pipeline: int
    checkpoint_every: int
    grace_cap_seconds: float
    records: int
    restarts: int
    exit_code: int | None
    """None while the session has not ended."""


@frozen(kw_only=True)
class Wait:
    """What the session, or one round, waits for."""

    sentence: str
    """The coordinator's own, as its log has it."""
    whom: tuple[int, ...] = ()
    """Learners that it waits for; none where it waits for a disk, a merge or the time."""
    since: float | None = None
    """When that wait began; None where nothing is waited for."""
    until: float | None = None
    """When the wait ends at the latest; None where nothing bounds it."""


@frozen(kw_only=True)
class LearnerMoment:
    """One learner, now."""

    learner: int
    link: str
    """``expected`` (never came so far), ``connected``, ``away``, ``refused`` (for good) or ``released``."""
    link_since: float | None
    """When it came, left or was refused last."""
    link_why: str
    """Why it left or was refused; empty while it is connected."""
    local_step: int | None
    steps_per_second: float | None
    """Smoothed, as the coordinator sees it."""
    tokens_per_second: float | None
    merges: int
    c_steps: int
    c_tokens: int
    """Merges, steps and tokens of the ledger."""
    contribution: float | None
    """Mean share in the standing commits of this tape that moved anything, in [0, 1]."""
    missed: int
    """Standing commits that it was a member of but gave nothing to."""
    missed_in_a_row: int
    left_out: int
    joins: int
    leaves: int
    staleness: int | None
    """Of its last merged push, in global steps."""
    staleness_mean: float | None
    bytes_in: int | None
    """Of all pushes that it announced, over all starts; at a running syncer, all it sent since this start."""
    bytes_out: int | None
    """All that was sent to it since this start; only a running syncer knows it."""
    answered_at: float | None
    """When its last push was accepted."""
    reported_at: float | None
    """When its local step last advanced."""
    waited_since: float | None
    """Since when an open attempt waits for it; None where none does."""
    waited_for: str
    """What is waited for, such as ``round 12 attempt 1``; empty where nothing is."""
    phase: str | None = None
    """What it says of itself in its log, where that can be read."""
    loss: float | None = None
    """Per target, smoothed; from its log."""


NOT_ON_A_TAPE = ("loss", "bytes_out")
"""Fields of a learner that only its log or a running syncer tells."""


def known_of_somebody(learners: Sequence[LearnerMoment], field: str) -> bool:
    """Whether a field is worth a column: not where nobody can know it."""
    return field not in NOT_ON_A_TAPE or any(getattr(one, field) is not None for one in learners)


@frozen(kw_only=True)
class FragmentMoment:
    """One fragment, now."""

    fragment: int
    version: int
    """The global step at which it was last committed; 0 is the initial value."""
    committed_at: float | None
    """None where no commit of it is on this tape."""
    broadcast: int | None
    """The version last sent to learners; None before the first."""
    delta_cosine: float | None = None
    """These three as its last commit told them; None where it did not."""
    norm_ratio: float | None = None
    offset_ratio: float | None = None


@frozen(kw_only=True)
class AgreementMoment:
    """Means over the last commits of this start that told them, 8 at most; None where none did."""

    rounds: int = 0
    delta_cosine: float | None = None
    """Mean cosine between the deltas of two learners."""
    norm_ratio: float | None = None
    """Norm of the merged gradient beside that of the average."""
    offset_ratio: float | None = None
    """Distance of the published parameters from the learners' mean, in lengths of the average."""


@frozen(kw_only=True)
class RoundMoment:
    """One open round, now."""

    step: int
    fragment: int
    attempt: int
    phase: str
    """``gathering``, ``grace``, ``merging``, ``merged`` (waits for its turn), ``committing`` or ``retry``."""
    wait: Wait
    opened_at: float
    """Of the present attempt."""
    quorum: int
    sweep: bool
    members: tuple[int, ...]
    answered: tuple[int, ...]
    gone: tuple[int, ...]
    """Members that declined or went away."""
    owing: tuple[int, ...]


@frozen(kw_only=True)
class CheckpointMoment:
    """The newest durable checkpoint, and the one under way."""

    step: int | None = None
    at: float | None = None
    """None where it was written before this tape began."""
    written_bytes: int | None = None
    seconds: float | None = None
    writing: int | None = None
    """Step of the one that is being written."""


@frozen(kw_only=True)
class RefusalMoment:
    """Refusals of one sort."""

    what: str
    """``push`` or ``connection``."""
    reason: str
    learner: int | None
    """None for connections: the id may be a stranger's and anything at all."""
    count: int
    seq: int
    """Record of the last one."""
    why: str
    at: float | None = None
    """When the last one was."""


@frozen(kw_only=True)
class Alert:
    """Something that a person should look at, as data."""

    kind: str
    """One of :data:`yeto.view.alerts.KINDS`."""
    subject: str
    """What it is about, such as ``learner 1`` or ``round 12``; kind and subject together name an alert."""
    severity: str
    """``warning`` or ``critical``."""
    since: float
    sentence: str
    """What is wrong, with numbers."""
    remedy: str
    value: float | None = None
    threshold: float | None = None
    learner: int | None = None
    step: int | None = None


@frozen(kw_only=True)
class Moment:
    """Everything about a run at one time."""

    at: float
    """Of the last record."""
    now: float
    """The time this is a moment of: later than ``at`` while the run goes on."""
    silent_seconds: float
    """How long there was no record: ``now - at``."""
    writer: str
    """``running``, ``ended``, ``gone`` (no process of this machine writes the tape) or ``unknown``."""
    session: SessionFacts
    phase: str
    """The coordinator's: provisional, waiting, running, budget, draining, finalising, stopping or ended."""
    wait: Wait
    step: int
    """Committed global step."""
    total_steps: int
    committed: int
    """Commits of this tape that stand."""
    superseded: int
    """Commits that a restart took back."""
    no_ops: int
    attempts: int
    """Opened, of all rounds."""
    discarded: dict[str, int]
    """Attempts by the reason why they were discarded."""
    eta_seconds: float | None
    """Time the remaining rounds take at the present pace; None while that is unknown."""
    merges_per_hour: float | None
    """At the present pace."""
    last_commit_at: float | None
    staleness: dict[int, int]
    """Merged pushes of standing commits by their staleness."""
    grace_seconds_mean: float | None
    quorum_seconds_mean: float | None
    merge_seconds_mean: float | None
    checkpoint: CheckpointMoment
    learners: tuple[LearnerMoment, ...]
    fragments: tuple[FragmentMoment, ...]
    rounds: tuple[RoundMoment, ...]
    """Open rounds in ascending step."""
    refusals: tuple[RefusalMoment, ...]
    alerts: tuple[Alert, ...]
    disk_free_bytes: int | None = None
    """Where the checkpoint goes; only known on the machine itself."""
    agreement: AgreementMoment = AgreementMoment()
