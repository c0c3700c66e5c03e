"""What the simulator says of a plan: the coordinator itself, with learners as fast as the plan's islands.

The rule: whoever reads the figures can make them again. The simulation is that of a ``yeto simulate`` line,
which is printed beside it, and all that the line does not say is a default of that command.
"""

from __future__ import annotations

import math
from fractions import Fraction

from attrs import evolve, frozen

from yeto.cli.simulate_flags import (
    MEGABIT_BYTES,
    WIRE_BYTES,
    FleetFlags,
    LearnerFlags,
    LengthFlags,
    WireFlags,
)
from yeto.cli.simulate_setup import Setup
from yeto.fleet.memory import Training
from yeto.fleet.plan import Part, Plan
from yeto.sim import simulate

LEARNER_STEPS = 40_000
"""Inner steps of all learners together that are simulated: some seconds of a core."""
LONGEST_SECONDS = 86_400.0
STEP_SECONDS_MIN = 0.5
"""A quicker step takes more micro batches: exchanges are counted in steps."""
REPAIR_MINUTES = 10.0
"""From a preemption until the island trains again."""
LINK_MBPS = LearnerFlags().up_mbps
"""Links of the islands, in megabits a second."""
EGRESS_PRICE = 0.09
"""Dollars a GB, as ``yeto simulate`` has it."""
FORWARD_BACKWARD = {"full": 6, "lora": 4}
"""Operations for each active parameter and token; frozen weights need no gradient."""


@frozen(kw_only=True)
class Prediction:
    """What a simulation of a plan measured."""

    command: str
    """The line that gives the same."""
    simulated_seconds: float
    goodput: float
    """Share of the islands' steps that was taken."""
    uptime: float
    """Share of the time with a quorum training."""
    merged_share: float
    """Share of the trained tokens that a merge has."""
    tokens_per_second: float
    """Trained by all islands together."""
    egress_gb_per_hour: float
    egress_cost_per_hour: float


def predict(plan: Plan, training: Training) -> Prediction:
    """Simulate a plan's fleet, with the same seed every time."""
    learners = [_learner(part, training) for part in plan.parts]
    steps_a_second = sum(part.islands / one.step for part, one in zip(plan.parts, learners, strict=True))
    parameters = max(1, round(training.trained_parameters))
    # Before the first step what is trained goes to the syncer, and from there to everybody.
    start = 2 * parameters * WIRE_BYTES["bf16"][0] / (LINK_MBPS * MEGABIT_BYTES)
    seconds = math.ceil(min(LONGEST_SECONDS, start + LEARNER_STEPS / steps_a_second))
    texts = tuple(one.text for one in learners)
    setup = evolve(
        Setup.default(),
        length=LengthFlags(duration=float(seconds)),
        fleet=FleetFlags(learner=texts),
        wire=WireFlags(parameters=float(parameters)),
    )
    result = simulate(setup.config(seed=0))
    hours = result.seconds / 3600
    gigabytes = sum(one.sent_bytes + one.received_bytes for one in result.learners) * 1e-9
    words = " ".join(f'--learner "{text}"' for text in texts)
    return Prediction(
        command=f"yeto simulate {words} --parameters {parameters} --duration {seconds}",
        simulated_seconds=result.seconds,
        goodput=result.goodput,
        uptime=result.uptime,
        merged_share=result.merged_share,
        tokens_per_second=sum(one.tokens for one in result.learners) / result.seconds,
        egress_gb_per_hour=gigabytes / hours,
        egress_cost_per_hour=gigabytes / hours * EGRESS_PRICE,
    )


@frozen(kw_only=True)
class _Learner:
    step: float
    """Seconds."""
    text: str
    """As ``--learner`` has it."""


def _learner(part: Part, training: Training) -> _Learner:
    """Return the learner that an island of a part is."""
    shape = part.shape
    tokens = training.seq_len * training.micro_batch_size * shape.gpus
    operations = FORWARD_BACKWARD[training.tuning] * training.model.active_gb * 1e9 / 2
    step = tokens * operations / float(shape.gpus * Fraction(shape.offer.gpu.tflops) * shape.mfu * 10**12)
    micro_batches = max(1, math.ceil(STEP_SECONDS_MIN / step))
    step = float(f"{step * micro_batches:.4g}")
    # Up and away in the ratio that makes its share of the time; away is what a repair takes.
    up_hours = float(shape.goodput / (1 - shape.goodput)) * REPAIR_MINUTES / 60
    return _Learner(
        step=step,
        text=(
            f"count={part.islands},step-seconds={step!r},tokens-per-step={tokens * micro_batches},"
            f"mean-up-hours={up_hours:.4g},repair-minutes={REPAIR_MINUTES:g}"
        ),
    )
