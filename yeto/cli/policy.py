"""The flags that the coordinator decides by: the same for a run and for the simulation of one.

Annotations are values here, not text: the class that goes on from this one is in another module.
"""

from typing import Annotated, Literal

from attrs import frozen
from cyclopts import Group, Parameter

from yeto.core import CoreConfig
from yeto.errors import ConfigError

BEST_OUTER = "direct"
"""What ``--outer auto`` stands for: what did best at every pace and size (docs/LM_BENCHMARK.md). It is
settled here, so that no new tape leaves anything to be chosen (`yeto.core.outer`)."""


# All headings of a syncer's help, in their order.
FLEET = Group.create_ordered("Syncer: learners and quorum")
ROUNDS = Group.create_ordered("Syncer: rounds")
MERGES = Group.create_ordered("Syncer: merges")
ENDING = Group.create_ordered("Syncer: checkpoint, tape and end")
ISO = Group.create_ordered("Syncer: isotropic merges")
DOOR = Group.create_ordered("Syncer: connections")
WATCHING = Group.create_ordered("Syncer: dashboard and log")


def explained(group: Group, text: str) -> Parameter:
    """Return what the help says of a flag, and under which heading."""
    return Parameter(group=group, help=text)


@frozen(kw_only=True)
class PolicyFlags:
    """Every flag of the coordinator. Durations are seconds unless the name says otherwise."""

    learners: Annotated[
        int,
        explained(FLEET, "How many learners take part (M); their ids are 0 to M-1. Each trains on its own."),
    ]
    total_steps: Annotated[
        int,
        explained(
            ROUNDS,
            "Global steps after which the run ends. One global step merges one fragment, so a run of R "
            "merges of the whole model takes R times --fragments steps.",
        ),
    ]
    wait_for: Annotated[
        int | None,
        explained(
            FLEET,
            "Learners that must be there before the first round. Default: all; after --resume the quorum.",
        ),
    ] = None
    start_timeout_s: Annotated[
        float,
        explained(FLEET, "After so long begin with the quorum, or give up when even that is not there."),
    ] = 3600.0
    quorum: Annotated[
        int | None,
        explained(
            FLEET,
            "Least number of learners in a merge (K). Default: all of one or two learners, else more than "
            "half. With 1, learners that are apart in speed merge alone by turns, which trains worse.",
        ),
    ] = None
    quorum_timeout_s: Annotated[
        float, explained(FLEET, "A round that has not reached its quorum after so long is tried again.")
    ] = 900.0
    final_ack_timeout_s: Annotated[
        float | None,
        explained(
            FLEET,
            "How long learners have to say that they hold the final result. Default: --quorum-timeout-s.",
        ),
    ] = None
    grace_ms: Annotated[
        float,
        explained(
            ROUNDS,
            "Most that stragglers get after the quorum, in milliseconds; the actual grace adapts below it.",
        ),
    ] = 1000.0
    grace_gamma: Annotated[
        float, explained(ROUNDS, "Share of the fleet's compute slack that is given as grace.")
    ] = 0.8
    grace_tau: Annotated[
        float,
        explained(
            ROUNDS, "How much slack --grace-gamma is a share of, in inner steps of the slowest learner."
        ),
    ] = 2.0
    pipeline: Annotated[
        int,
        explained(ROUNDS, "Rounds that may be open at a time, on different fragments; hides the network."),
    ] = 2
    sync_interval_steps: Annotated[
        float,
        explained(
            ROUNDS, "Inner steps between two merges of the same fragment (H); 0 merges as often as it can."
        ),
    ] = 24.0
    min_round_interval_ms: Annotated[
        float,
        explained(ROUNDS, "Least time between two openings of rounds, in milliseconds, whatever H asks for."),
    ] = 0.0
    delta_correction: Annotated[
        Literal["heloco", "heloco-all", "none"],
        explained(MERGES, "Turn pushes that oppose the momentum: only stale ones (heloco), all, or none."),
    ] = "heloco"
    outer: Annotated[
        Literal["stock", "direct", "normalised", "auto"] | None,
        explained(
            MERGES,
            "How merged gradients are applied. direct: each fragment becomes the average of its learners'; "
            "let them have --merge-alpha carry. stock: Nesterov momentum, learning rate 0.7, momentum 0.9. "
            "normalised: a momentum that warms up and does not lengthen the step. auto: what did best where "
            "it was measured, which is direct today. Default: auto, or stock where --outer-lr, "
            "--outer-momentum, --iso-backend or --iso-worker-devices is given.",
        ),
    ] = None
    outer_lr: Annotated[
        float | None,
        explained(MERGES, "Learning rate of the outer step. Default: 0.7 with --outer stock, else 1."),
    ] = None
    outer_momentum: Annotated[
        float | None,
        explained(MERGES, "Momentum of the outer step; 0 is plain SGD. Default: 0.9; 0 with --outer direct."),
    ] = None
    outer_normalised: Annotated[
        bool, Parameter(group=MERGES, help="The same as --outer normalised.", negative=(), show_default=False)
    ] = False
    closing_sweep: Annotated[
        Literal["plain", "off"],
        explained(
            MERGES,
            "plain: the last merge of each fragment is an average, so that the result is a point that "
            "was trained, not one the momentum looked ahead to.",
        ),
    ] = "plain"
    learner_weight: Annotated[
        Literal["tokens2-over-steps", "equal"],
        explained(
            MERGES, "How much a learner's push counts: by its tokens squared over its steps, or all the same."
        ),
    ] = "tokens2-over-steps"
    max_base_lag: Annotated[
        int | None,
        explained(ROUNDS, "Refuse pushes whose base is older than so many global steps. Default: take all."),
    ] = None
    max_norm_ratio: Annotated[
        float | None,
        explained(
            MERGES, "Leave out pushes whose norm is above so many times the median. Default: leave out none."
        ),
    ] = None
    checkpoint_every: Annotated[
        int,
        explained(
            ENDING,
            "Merges between two checkpoints; each costs one fragment. 0: only at the start and the end.",
        ),
    ] = 1
    mark_final_checkpoint: Annotated[
        bool,
        Parameter(
            group=ENDING,
            help="Write a .final file beside the checkpoint once all learners hold it.",
            negative=(),
        ),
    ] = False
    stop_budget_s: Annotated[
        float,
        explained(ENDING, "After a signal, how long merges under way may take before they are dropped."),
    ] = 20.0
    learner_budget_steps: Annotated[
        int | None, explained(ENDING, "End when every learner has taken so many local steps, for benchmarks.")
    ] = None
    budget_finish: Annotated[
        bool,
        Parameter(
            group=ENDING,
            help="After such an end, with --resume: merge every fragment once more and finish.",
            negative=(),
        ),
    ] = False

    def core_config(self) -> CoreConfig:
        """Return the policy that these flags stand for; what is out of range is not looked for yet.

        Raises:
            ConfigError: two flags contradict each other.
        """
        quorum = self.quorum
        if quorum is None:
            quorum = self.learners if self.learners <= 2 else self.learners // 2 + 1
        ack_timeout = self.final_ack_timeout_s
        return CoreConfig(
            num_learners=self.learners,
            total_steps=self.total_steps,
            quorum=quorum,
            wait_for=self.learners if self.wait_for is None else self.wait_for,
            start_timeout_seconds=self.start_timeout_s,
            quorum_timeout_seconds=self.quorum_timeout_s,
            final_ack_timeout_seconds=self.quorum_timeout_s if ack_timeout is None else ack_timeout,
            grace_cap_seconds=self.grace_ms / 1000.0,
            grace_gamma=self.grace_gamma,
            grace_tau=self.grace_tau,
            pipeline=self.pipeline,
            sync_interval_steps=self.sync_interval_steps,
            min_round_interval_seconds=self.min_round_interval_ms / 1000.0,
            closing_sweep=self.closing_sweep,
            learner_weight=self.learner_weight,
            delta_correction=self.delta_correction,
            outer=self._outer(),
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
            max_base_lag=self.max_base_lag,
            max_norm_ratio=self.max_norm_ratio,
            checkpoint_every=self.checkpoint_every,
            mark_final_checkpoint=self.mark_final_checkpoint,
            stop_budget_seconds=self.stop_budget_s,
            learner_budget_steps=self.learner_budget_steps,
            budget_finish=self.budget_finish,
        )

    def _outer(self) -> str:
        if self.outer_normalised:
            if self.outer not in (None, "normalised"):
                raise ConfigError(f"--outer {self.outer} and --outer-normalised: give one of them")
            return "normalised"
        outer = self.outer or ("stock" if self.means_stock else "auto")
        return BEST_OUTER if outer == "auto" else outer

    @property
    def means_stock(self) -> bool:
        """Whether what else is given makes sense with the stock outer step, and not with the average."""
        return self.outer_lr is not None or self.outer_momentum is not None
