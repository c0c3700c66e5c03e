"""The settings the coordinator decides by: all of them data, none of them read from anywhere else."""

from __future__ import annotations

import math

from attrs import frozen

from yeto.core.later import later
from yeto.errors import ConfigError

LEARNERS_MAX = 1 << 16
"""Learners of a run: far more than anybody has, and few enough that a list of them is nothing."""
FRAGMENTS_MAX = 1 << 16
"""The same of fragments; a HELLO may state fewer still."""


@frozen(kw_only=True)
class CoreConfig:
    """Policy of one run. Durations are seconds; counts are plain integers.

    The tape's header carries this whole object, and ``session_resumed`` carries it again, because an
    operator may change what is allowed to change between two starts.
    """

    num_learners: int
    """M, the configured learners; ids are 0..M-1."""
    total_steps: int
    """Global steps (rounds to commit) after which the final cut follows."""
    quorum: int
    """K, the least number of distinct learners in a commit."""
    wait_for: int
    """Learners that must be there before the first round opens."""
    num_fragments: int | None = None
    """P when the operator fixes it; ``None`` takes it from learner 0's HELLO."""
    start_timeout_seconds: float = 3600.0
    quorum_timeout_seconds: float = 900.0
    final_ack_timeout_seconds: float = 900.0
    grace_cap_seconds: float = 1.0
    grace_gamma: float = 0.8
    grace_tau: float = 2.0
    pipeline: int = 2
    sync_interval_steps: float = 24.0
    """H, inner steps between two merges of one fragment; 0 turns the throttle off."""
    min_round_interval_seconds: float = 0.0
    closing_sweep: str = "plain"
    """``plain`` or ``off``."""
    learner_weight: str = "tokens2-over-steps"
    """``tokens2-over-steps`` or ``equal``."""
    delta_correction: str = "heloco"
    """``heloco`` (stale pushes), ``heloco-all`` or ``none``."""
    outer_lr: float | None = None
    """``None`` is that of the kind ``outer``."""
    outer_momentum: float | None = None
    """``None`` is that of the kind ``outer``."""
    max_base_lag: int | None = None
    """Pushes staler than this many global steps are refused; ``None`` admits any."""
    max_norm_ratio: float | None = None
    """Outlier guard: norms above this multiple of the lower median are left out; ``None`` is off."""
    checkpoint_every: int = 1
    """Commits between checkpoints; 0 writes only step 0 and the end."""
    mark_final_checkpoint: bool = False
    stop_budget_seconds: float = 20.0
    learner_budget_steps: int | None = None
    """N of the learner-budget protocol; ``None`` is an ordinary run."""
    budget_finish: bool = False
    """This start is the finish of a budget cut-off: exactly P more rounds at full quorum."""
    require_profile: str | None = None
    """Hex profile that learners must state; ``None`` does not ask."""
    svd_pool: bool = False
    """Whether a terminal checkpoint must wait for ``svd_pool_drained``."""
    outer: str = later("stock")
    """Kind of outer step (see :mod:`yeto.core.outer`): ``stock``, ``direct`` or ``normalised``; on tapes of
    earlier days ``auto``, too."""

    def validated(self) -> CoreConfig:
        """Return self, or raise ConfigError naming the flag that is out of range."""
        checks: tuple[tuple[bool, str], ...] = (
            (self.num_learners >= 1, f"--learners {self.num_learners}: need at least 1"),
            (
                self.num_learners <= LEARNERS_MAX,
                f"--learners {self.num_learners}: can be at most {LEARNERS_MAX}",
            ),
            (self.total_steps >= 1, f"--total-steps {self.total_steps}: need at least 1"),
            (
                1 <= self.quorum <= self.num_learners,
                f"--quorum {self.quorum}: must lie between 1 and --learners {self.num_learners}",
            ),
            (
                self.quorum <= self.wait_for <= self.num_learners,
                f"--wait-for {self.wait_for}: must lie between --quorum {self.quorum} "
                f"and --learners {self.num_learners}",
            ),
            (
                # With 0 an attempt would be discarded at the moment it opens, for ever.
                self.quorum_timeout_seconds > 0,
                f"--quorum-timeout-s {self.quorum_timeout_seconds:g}: must be above 0",
            ),
            (self.checkpoint_every >= 0, f"--checkpoint-every {self.checkpoint_every}: must not be negative"),
            (
                self.learner_budget_steps is None or self.learner_budget_steps >= 1,
                f"--learner-budget-steps {self.learner_budget_steps}: need at least 1",
            ),
            (
                self.max_base_lag is None or self.max_base_lag >= 0,
                f"--max-base-lag {self.max_base_lag}: must not be negative",
            ),
            (
                self.max_norm_ratio is None
                or (math.isfinite(self.max_norm_ratio) and self.max_norm_ratio > 1),
                f"--max-norm-ratio {self.max_norm_ratio}: must be a finite number above 1",
            ),
            (
                self.outer_lr is None or (math.isfinite(self.outer_lr) and self.outer_lr > 0),
                f"--outer-lr {self.outer_lr}: must be a finite number above 0",
            ),
            (
                self.outer_momentum is None or 0 <= self.outer_momentum < 1,
                f"--outer-momentum {self.outer_momentum}: must lie in [0, 1)",
            ),
        )
        for good, message in checks:
            if not good:
                raise ConfigError(message)
        for flag, value in (
            ("--start-timeout-s", self.start_timeout_seconds),
            ("--quorum-timeout-s", self.quorum_timeout_seconds),
            ("--final-ack-timeout-s", self.final_ack_timeout_seconds),
            ("--grace-ms", self.grace_cap_seconds * 1000.0),
            ("--grace-gamma", self.grace_gamma),
            ("--grace-tau", self.grace_tau),
            ("--sync-interval-steps", self.sync_interval_steps),
            ("--min-round-interval-ms", self.min_round_interval_seconds * 1000.0),
            ("--stop-budget-s", self.stop_budget_seconds),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{flag} {value}: must be finite and not negative")
        for flag, text, allowed in (
            ("--outer", self.outer, ("stock", "direct", "normalised", "auto")),
            ("--closing-sweep", self.closing_sweep, ("plain", "off")),
            ("--learner-weight", self.learner_weight, ("tokens2-over-steps", "equal")),
            ("--delta-correction", self.delta_correction, ("heloco", "heloco-all", "none")),
        ):
            if text not in allowed:
                raise ConfigError(f"{flag} {text}: must be one of {', '.join(allowed)}")
        return self
