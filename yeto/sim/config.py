"""What is simulated: a fleet, its network, its syncer and their faults. All of it data.

Times are seconds, rates are bytes a second, probabilities lie in [0, 1]. A mean time of None means never.
"""

from __future__ import annotations

import math

from attrs import Factory, frozen

from yeto.core import CoreConfig
from yeto.core.config import FRAGMENTS_MAX
from yeto.errors import ConfigError


@frozen(kw_only=True)
class LearnerSpec:
    """One learner: an island of machines and its link to the syncer."""

    step_seconds: float = 1.0
    """One inner step, on average."""
    step_jitter: float = 0.05
    """Standard deviation of one inner step, as a share of it."""
    phase_jitter: float = 0.0
    """Standard deviation of the pace of a whole stretch between two broadcasts, as a share of it."""
    tokens_per_step: int = 8192
    up_rate: float = 12.5e6
    down_rate: float = 12.5e6
    latency_seconds: float = 0.05
    """One way."""
    latency_jitter: float = 0.2
    """Standard deviation of the latency, as a share of it."""
    mean_up_seconds: float | None = None
    """Mean time to a failure (or preemption) that stops training."""
    mean_repair_seconds: float = 600.0
    keeps_state: float = 0.0
    """How likely a repaired learner goes on from its saved state instead of from nothing."""
    state_every_steps: int = 100
    mean_link_seconds: float | None = None
    """Mean time to a loss of the connection alone; training goes on."""
    mean_outage_seconds: float = 5.0
    joins_at: float = 0.0
    leaves_at: float | None = None
    lockstep: bool = False
    """Waits, without training, from each answer until the round's broadcast: synchronous training."""


@frozen(kw_only=True)
class SyncerSpec:
    """The syncer's machine."""

    up_rate: float = 125e6
    down_rate: float = 125e6
    merge_seconds: float = 0.1
    outer_seconds: float = 0.05
    fsync_seconds: float = 0.005
    checkpoint_seconds: float = 0.1
    mean_up_seconds: float | None = None
    """Mean time to a crash. The tape is cut at any byte behind what was durable."""
    mean_restart_seconds: float = 30.0
    older_checkpoint: float = 0.0
    """How likely a restart finds the newest checkpoint unusable and takes the one before; not once a final
    cut was sent, since whoever has taken that has left."""
    queue_seconds: float = 0.0
    """Longest time that a fact waits for its turn: what was decided meanwhile makes it late."""
    pool_seconds: float = 0.1
    """How long the SVD pool takes to drain, when there is one."""


@frozen(kw_only=True)
class Faults:
    """What goes wrong with single messages and jobs."""

    not_finite: float = 0.0
    """How likely a push holds NaN."""
    duplicate: float = 0.0
    """How likely a push is offered twice."""
    broken_upload: float = 0.0
    """How likely the connection ends in the middle of an upload."""
    late: float = 0.0
    """How likely a message (either way) takes ``late_seconds`` more; pulls then overtake broadcasts."""
    late_seconds: float = 5.0
    half_open: float = 0.0
    """How likely a lost connection is noticed by the learner only: the syncer sees the next HELLO first."""
    merge_failed: float = 0.0
    merge_not_finite: float = 0.0
    outer_not_finite: float = 0.0
    checkpoint_failed: float = 0.0
    until_seconds: float | None = None
    """From this moment on nothing goes wrong any more, here or with machines and links."""


@frozen(kw_only=True)
class Operator:
    """What people and supervisors do to the syncer."""

    stops_at: tuple[float, ...] = ()
    """When the syncer is told to stop."""
    restarts_after: tuple[int, ...] = (4,)
    """Exit codes after which it is started again, with --resume-or-start."""
    restarts_max: int = 100
    """How often that is done; crashes do not count."""
    budget_finish: bool = False
    """Whether the session that a learner budget cut off is finished by one more start."""


@frozen(kw_only=True)
class SimConfig:
    """One simulation. The same configuration and seed give the same tape, byte for byte."""

    core: CoreConfig
    learners: tuple[LearnerSpec, ...]
    num_fragments: int = 8
    push_bytes: int = 4 << 20
    """Wire bytes of one push of one fragment."""
    broadcast_bytes: int = 4 << 20
    """Wire bytes of one broadcast of one fragment."""
    merge_alpha: float = 0.5
    carries: bool = False
    """Whether learners carry unpushed work over a merge (``--merge-alpha carry``)."""
    syncer: SyncerSpec = SyncerSpec()
    faults: Faults = Faults()
    operator: Operator = Operator()
    seed: int = 0
    until_seconds: float | None = None
    """Stop looking at this moment of the simulated clock; None runs to the end of the session."""

    def validated(self) -> SimConfig:
        """Return self, or raise ConfigError naming what is out of range."""
        self.core.validated()
        if len(self.learners) != self.core.num_learners:
            raise ConfigError(f"{len(self.learners)} learners described, --learners {self.core.num_learners}")
        for name, value in (("--fragments", self.num_fragments), ("push bytes", self.push_bytes)):
            if value < 1:
                raise ConfigError(f"{name} {value}: need at least 1")
        if self.num_fragments > FRAGMENTS_MAX:
            raise ConfigError(f"--fragments {self.num_fragments}: can be at most {FRAGMENTS_MAX}")
        if self.core.learner_budget_steps is not None and any(spec.lockstep for spec in self.learners):
            raise ConfigError("--lockstep with --learner-budget-steps: a round that is cut off never answers")
        if self.until_seconds is not None and not (
            math.isfinite(self.until_seconds) and self.until_seconds > 0
        ):
            raise ConfigError(f"--duration {self.until_seconds}: must be a finite number above 0")
        return self


@frozen(kw_only=True)
class LearnerResult:
    """What one learner did, and what became of it."""

    learner: int
    stepping_share: float
    """Share of the simulated time in which it took inner steps."""
    steps: int
    tokens: int
    merges: int
    merged_tokens: int
    lost_tokens: dict[str, int] = Factory(dict)
    """Tokens that no commit contains, by where they were lost (:class:`yeto.sim.account.Fate`)."""
    sent_bytes: int
    received_bytes: int
    mean_staleness: float


@frozen(kw_only=True)
class SimResult:
    """What a simulation measured."""

    seconds: float
    step: int
    """Rounds committed."""
    exit_code: int | None
    """None when it was cut off by ``until_seconds``."""
    events: int
    records: int
    goodput: float
    """Inner steps done / inner steps that the fleet could have done without any pause or failure."""
    uptime: float
    """Share of the time in which at least K learners were training: alive, with every anchor, not frozen by a
    budget and without the final cut. A lockstep learner that waits counts as training."""
    merges_per_hour: float
    """Rounds committed for each simulated hour, those that a resume took back not counted."""
    participation: float
    """Mean share of an attempt's frozen members that were merged."""
    merged_share: float
    """Tokens in commits / tokens trained, counted once for each fragment."""
    mean_staleness: float
    """Global steps by which the anchors of merged pushes were behind, on average."""
    mean_quorum_seconds: float
    """From the opening of a committed attempt to its K-th answer, on average."""
    mean_grace_seconds: float
    """Length of the grace, on average over the commits that opened one."""
    attempts: int
    """Attempts opened, whatever became of them."""
    discarded: int
    learners: tuple[LearnerResult, ...]
