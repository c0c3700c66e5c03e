"""Every setting of a learner that is not the task's own, as one frozen object."""

from __future__ import annotations

import math
from pathlib import Path

from attrs import field, frozen

from yeto.errors import ConfigError
from yeto.link.dial import Target
from yeto.link.tls import TlsContext

NO_SYNCER = "none"
"""``--syncer none``: the same loop with nobody to merge with; the synchronous baseline."""

RANK_TIMEOUT_SECONDS = 1200.0
"""How long the ranks of an island wait for one that lives and does not come: more than it takes to read a
large model from a slow disk or to save it there, less than anybody wants to pay for idle accelerators."""

RANK_TIMEOUT_SECONDS_MIN = 180.0
"""While the head waits for the syncer the others hear of it twice a minute."""

CARRY = "carry"
"""``--merge-alpha carry``: a broadcast takes out of the local weights what was pushed, and keeps the rest."""


@frozen(kw_only=True)
class LearnerConfig:
    """How one learner trains and whom it exchanges fragments with."""

    syncer: str
    """``HOST:PORT``, ``[V6]:PORT``, ``@FILE`` holding one of these, or ``none``."""
    learner_id: int = 0
    num_learners: int = 1
    output_dir: Path
    """Where the global result is saved, and ``unmerged-<learner>/`` when there is none."""

    # What both ends must agree on.
    fragments: int = 8
    fragment_pattern: str = "binpack"
    matrix_merge: str = "rda"
    wire_dtype: str = "bf16"

    # The link.
    wan_streams: int = 4
    auth_key: bytes | None = field(default=None, repr=False)
    tls: TlsContext | None = field(default=None, repr=False)
    """Every stream is TLS when it is given."""
    tls_server_name: str | None = None
    """What the syncer's certificate must be for; ``None``: the host in ``syncer``."""
    first_connect_seconds: float = 900.0
    """How long the first connection is tried for; a fleet's machines start minutes apart."""
    give_up_seconds: float = 3600.0
    """How long a lost connection is tried for: an idle paid accelerator is worse than an error."""
    send_manifest: bool = True
    profile: bytes | None = None
    """Hash of the syncer's settings that this learner insists on; ``None`` states none."""

    # The exchange.
    merge_alpha: float | str = 0.5
    """Share of the local weights that survives a broadcast, in [0, 1), or ``carry``; see ``FragmentBook``."""
    q4_error_feedback: bool = True
    budget_steps: int | None = None

    # The inner loop.
    unit: str = "tokens"
    """What the rows are counted in, for people."""
    inner_lr: float = 3e-4
    weight_decay: float = 0.01
    warmup_steps: int = 10
    lr_schedule: str = "constant"
    clip_norm: float = 1.0
    grad_accum: int = 1
    max_local_steps: int | None = None
    eval_every: int = 0
    torch_threads: int | None = None
    rank_timeout_seconds: float = RANK_TIMEOUT_SECONDS
    """How long a rank may keep the others of its island waiting."""

    # What outlives the process.
    state_dir: Path | None = None
    """This learner's own folder, to go on from after its process is gone."""
    state_every: int = 100
    """Optimizer steps between two savings."""

    # What the user sees.
    log_jsonl: Path | None = None
    tensorboard: Path | None = None
    """Curves go to ``learner-<id>/`` in this folder, for TensorBoard."""
    wandb: str | None = None
    """Curves go to this project of Weights & Biases."""

    def __attrs_post_init__(self) -> None:
        checks: tuple[tuple[bool, str], ...] = (
            (self.num_learners >= 1, f"--num-learners {self.num_learners}: need at least 1"),
            (
                0 <= self.learner_id < self.num_learners,
                f"--learner-id {self.learner_id} is out of range: --num-learners {self.num_learners} "
                f"allows 0 to {self.num_learners - 1}",
            ),
            (self.fragments >= 1, f"--fragments {self.fragments}: need at least 1"),
            (0 <= self.wan_streams <= 256, f"--wan-streams {self.wan_streams}: must lie in 0..256"),
            (
                self.merge_alpha == CARRY
                if isinstance(self.merge_alpha, str)
                else 0.0 <= self.merge_alpha < 1.0,
                f"--merge-alpha {self.merge_alpha}: must lie in [0, 1), where 0 overwrites the local "
                "weights, or be carry",
            ),
            (self.state_every >= 1, f"--state-every {self.state_every}: need at least 1"),
            (
                RANK_TIMEOUT_SECONDS_MIN <= self.rank_timeout_seconds < math.inf,
                f"--rank-timeout {self.rank_timeout_seconds:g}: need at least {RANK_TIMEOUT_SECONDS_MIN:g} s",
            ),
            (self.grad_accum >= 1, f"--grad-accum {self.grad_accum}: need at least 1"),
            (self.warmup_steps >= 0, f"--warmup-steps {self.warmup_steps}: must not be negative"),
            (self.eval_every >= 0, f"--eval-every {self.eval_every}: must not be negative; 0 turns it off"),
            (
                self.max_local_steps is None or self.max_local_steps >= 1,
                f"--max-local-steps {self.max_local_steps}: need at least 1",
            ),
            (
                self.budget_steps is None or self.budget_steps >= 1,
                f"--learner-budget-steps {self.budget_steps}: need at least 1",
            ),
            (
                self.torch_threads is None or self.torch_threads >= 1,
                f"--torch-threads {self.torch_threads}: need at least 1",
            ),
            (
                math.isfinite(self.inner_lr) and self.inner_lr > 0,
                f"--inner-lr {self.inner_lr}: must be a finite number above 0",
            ),
            (
                self.lr_schedule != "cosine" or self.planned_steps is not None,
                "--lr-schedule cosine needs --max-local-steps (or --learner-budget-steps): the step at which "
                "the rate reaches its end",
            ),
            (
                self.max_local_steps is None
                or self.budget_steps is None
                or self.max_local_steps >= self.budget_steps,
                f"--max-local-steps {self.max_local_steps} ends before "
                f"--learner-budget-steps {self.budget_steps}",
            ),
            (
                self.has_syncer or self.max_local_steps is not None,
                "--syncer none needs --max-local-steps: nobody else says when to stop",
            ),
            (
                self.has_syncer or self.budget_steps is None,
                "--learner-budget-steps belongs to a run with a syncer; use --max-local-steps",
            ),
        )
        for good, message in checks:
            if not good:
                raise ConfigError(message)
        if self.has_syncer:
            Target.parse(self.syncer)
        for flag, value in (
            ("--weight-decay", self.weight_decay),
            ("--clip-norm", self.clip_norm),
            ("--give-up-after", self.give_up_seconds),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{flag} {value}: must be finite and not negative")
        for flag, text, allowed in (
            ("--fragment-pattern", self.fragment_pattern, ("binpack", "strided")),
            ("--matrix-merge", self.matrix_merge, ("rda", "iso")),
            ("--wire-dtype", self.wire_dtype, ("f32", "bf16", "q4")),
            ("--lr-schedule", self.lr_schedule, ("constant", "cosine")),
        ):
            if text not in allowed:
                raise ConfigError(f"{flag} {text}: must be one of {', '.join(allowed)}")

    @property
    def has_syncer(self) -> bool:
        """Whether there is anybody to exchange fragments with."""
        return self.syncer != NO_SYNCER

    @property
    def planned_steps(self) -> int | None:
        """Local steps after which this learner has done its own; None leaves it to the syncer."""
        return self.budget_steps if self.max_local_steps is None else self.max_local_steps

    @property
    def carries(self) -> bool:
        """Whether ``--merge-alpha carry`` was asked for."""
        return self.merge_alpha == CARRY

    @property
    def owes_residuals(self) -> bool:
        """Whether what quantisation takes from a push is added to a later one."""
        return self.wire_dtype == "q4" and self.q4_error_feedback and not self.carries

    @property
    def unmerged_dir(self) -> Path:
        """Where the local weights go when the run ends without a global result."""
        return self.output_dir / f"unmerged-{self.learner_id}"
