"""``yeto shape``: which islands to rent, for a budget or for a speed.

Composes what others know: the size of the model, the offers, the best plan, and what the simulator says of
it. Limits are checked before anything is looked up or solved.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from attrs import frozen
from cyclopts import Group, Parameter

from yeto.cli.common import sigterm_unwinds
from yeto.errors import ConfigError

if TYPE_CHECKING:
    from yeto.fleet.memory import Training
    from yeto.fleet.offers import Offer
    from yeto.fleet.plan import Answer
    from yeto.fleet.shapes import Limits

NO_PLAN = 1
"""Exit code when no plan keeps the limits."""
AMOUNT_MAX = 10**9
"""Of dollars and TFLOPS: no fleet comes near it."""


@Parameter(name="*", group=Group("What is trained", sort_key=0))
@frozen(kw_only=True)
class TrainingFlags:
    """The model, and what its training holds in memory."""

    model: str
    """An alias (gemma4, deepseek4flash, qwen3-8b, …), a Hugging Face id, or a local model folder."""
    weights_gb: float | None = None
    """Size of all weights in bf16, in GB: twice the billions of parameters. Default: looked up."""
    hidden_size: int | None = None
    """The model's hidden size. Default: looked up, else 4096."""
    tuning: Literal["lora", "full"] = "lora"
    """lora trains small adapters, full everything, in 8 times the memory."""
    lora_r: int = 16
    """Rank of the adapters."""
    seq_len: int = 2048
    """Tokens of a row."""
    micro_batch_size: int = 1
    """Rows that one accelerator takes at a time."""


@Parameter(name="*", group=Group("Limits", sort_key=1))
@frozen(kw_only=True)
class LimitFlags:
    """What the plan has to keep."""

    budget: float | None = None
    """Dollars an hour for everything, $0.40 of them for the head: the fastest plan within it."""
    flops: float | None = None
    """TFLOPS that reach the model: the cheapest plan that has them. Instead of --budget."""
    max_islands: int = 16
    """Most islands."""
    max_per_offer: int | None = None
    """Most islands of one offer, so that one preemption does not take them all. Default: no limit."""


@Parameter(name="*", group=Group("Offers and output", sort_key=2))
@frozen(kw_only=True)
class OutputFlags:
    """Where offers come from, and what is printed."""

    offers: Path | None = None
    """CSV file: cloud, region, gpu, count, price, spot, quota, score. Default: SkyPilot's catalogue."""
    simulate: bool = True
    """Say what the simulator thinks of the plan; takes some seconds."""
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False
    """Print JSON on stdout, and nothing else."""


def shape_command(
    *,
    training: TrainingFlags,
    limits: LimitFlags = LimitFlags(),
    output: OutputFlags = OutputFlags(),
) -> int:
    """Choose the islands to rent: the fastest fleet for a budget, or the cheapest for a speed."""
    from yeto.cli.shape_print import print_answer, print_json

    answer, wanted, checked = find_plan(training, limits, output.offers)
    prediction = None
    if answer.plan is not None and output.simulate:
        from yeto.cli.shape_simulate import predict

        with sigterm_unwinds():
            prediction = predict(answer.plan, wanted)
    show = print_json if output.as_json else print_answer
    show(answer, wanted, checked, prediction)
    if answer.plan is None:
        print(f"yeto: no plan: {answer.why_none}", file=sys.stderr)
        return NO_PLAN
    return 0


def find_plan(
    training: TrainingFlags, limits: LimitFlags, offers: Path | None
) -> tuple[Answer, Training, Limits]:
    """Return the best plan, or why there is none, with what it was made for.

    Raises:
        ConfigError: a flag is impossible, the model's size is unknown, or there are no offers.
    """
    from yeto.fleet.memory import Training
    from yeto.fleet.models import model_size
    from yeto.fleet.plan import make_plan
    from yeto.fleet.shapes import Limits

    checked = Limits(
        budget=_exact("--budget", limits.budget),
        flops=_exact("--flops", limits.flops),
        max_islands=limits.max_islands,
        max_per_offer=limits.max_per_offer,
    ).validated()
    wanted = Training(
        model=model_size(training.model, weights_gb=training.weights_gb, hidden_size=training.hidden_size),
        tuning=training.tuning,
        lora_r=training.lora_r,
        seq_len=training.seq_len,
        micro_batch_size=training.micro_batch_size,
    ).validated()
    return make_plan(wanted, _offers(offers), checked), wanted, checked


def _exact(flag: str, value: float | None) -> Fraction | None:
    """Return a number as it was typed: 23.4, and not the double beside it."""
    if value is None:
        return None
    if not 0 < value < AMOUNT_MAX:
        raise ConfigError(f"{flag} {value}: must be above 0 and below {AMOUNT_MAX:,}")
    return Fraction(repr(value))


def _offers(path: Path | None) -> tuple[Offer, ...]:
    if path is not None:
        from yeto.fleet.offers import read_offers

        return read_offers(path)
    from yeto.fleet.catalogue import catalogue_offers

    offers, missing = catalogue_offers()
    for cloud, reason in missing.items():
        print(f"yeto: without {cloud}: {reason}", file=sys.stderr)
    return offers
