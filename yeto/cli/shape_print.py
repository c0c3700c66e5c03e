"""A plan on a terminal, and as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import asdict
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

from yeto.cli.shape_simulate import EGRESS_PRICE, LINK_MBPS, Prediction
from yeto.fleet.gpus import GPUS
from yeto.fleet.grammar import join_islands
from yeto.fleet.memory import NODES_MAX, Training
from yeto.fleet.plan import Answer, Plan
from yeto.fleet.shapes import Limits, Rejected, Shape
from yeto.fleet.value import HEAD_PRICE, PRICE_MARGIN

TYPICAL_COUNT = 8
"""GPUs of the machines whose least number is printed beside the formula."""
PAPER_WIDTH = 500
"""Characters of a line where nothing is cut."""
HEAD_MEMORY_GB = 16
"""Main memory that a machine of the head's price has; a plan that needs more says so."""
FOLDED = ("where", "reason", "memory of a GPU")
"""Columns that a narrow terminal folds."""
NOT_TAKEN_MAX = 10
"""Shapes that fit and are not taken which a terminal shows; JSON has all."""


def launch_line(plan: Plan, training: Training) -> str:
    """Return the command that launches a plan."""
    words = ["yeto", "launch", "--gpu", join_islands(plan.islands), "--model", training.model.hf_id]
    words += ["--data", "DATA", "--output", "OUTPUT"]
    if training.tuning != "lora":
        words += ["--tuning", training.tuning]
    elif training.lora_r != 16:
        words += ["--lora-r", str(training.lora_r)]
    if training.seq_len != 2048:
        words += ["--seq-len", str(training.seq_len)]
    words += ["--micro-batch-size", str(training.micro_batch_size)]
    if any(island.ranks > 1 for island in plan.islands):
        words += ["--shard", "fsdp"]
    if plan.on_demand:
        words += ["--on-demand", ",".join(map(str, plan.on_demand))]
    return shlex.join(words)


# -- for people ---------------------------------------------------------------------------------------


def print_answer(
    answer: Answer, training: Training, limits: Limits, prediction: Prediction | None, *, file: Any = None
) -> None:
    """Print the plan with its reasons, and every shape that was turned away."""
    console = Console(file=file)
    if not console.is_terminal:
        console.width = PAPER_WIDTH

    def say(text: str = "") -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    model = training.model
    say(f"{model.hf_id}: {model.weights_gb:.4g} GB of weights in bf16 ({model.source}), {training.tuning}")
    say(f"memory of a GPU: {training.formula}")
    say(f"of machines with {TYPICAL_COUNT} GPUs an island needs at least {_least_islands(training)}")
    if model.hidden_size is None:
        say("its hidden size is not known and taken to be 4096; --hidden-size says it")
    plan = answer.plan
    if plan is not None:
        console.print(_plan_table(plan, training))
        _say_plan(say, plan, training, prediction)
    others = [shape for shape in answer.shapes if plan is None or shape not in _taken(plan)]
    if others:
        say()
        say("These would fit, too" + (":" if plan is None else ", and are not in the best plan:"))
        console.print(_others_table(others[:NOT_TAKEN_MAX]))
        if len(others) > NOT_TAKEN_MAX:
            say(f"and {len(others) - NOT_TAKEN_MAX} more (--json has all)")
    if answer.rejected:
        say()
        say("Turned away:")
        console.print(_rejected_table(answer.rejected))


def _least_islands(training: Training) -> str:
    """Return how many GPUs of each size an island needs, where machines have the typical count."""
    words = []
    for memory_gb, gpu in sorted({gpu.memory_gb: gpu for gpu in GPUS if gpu.has_bf16}.items()):
        nodes = training.smallest_nodes(TYPICAL_COUNT, gpu)
        if nodes is not None:
            words.append(f"{nodes * TYPICAL_COUNT} x {memory_gb:g} GB")
    return ", or ".join(words) or f"more than {NODES_MAX} of them, of any size"


def _say_plan(say: Any, plan: Plan, training: Training, prediction: Prediction | None) -> None:
    margin, head_cost = float(PRICE_MARGIN - 1), float(HEAD_PRICE)
    say(
        f"${float(plan.cost):,.2f} an hour: offers with {margin:.0%} margin, and ${head_cost:.2f} for the "
        f"head. {float(plan.tflops):,.1f} TFLOPS reach the model, "
        f"${float(plan.cost / plan.tflops) * 1000:.2f} an hour for 1,000 of them."
    )
    for binding in plan.binding or ("nothing: every offer is used up",):
        say(f"binding: {binding}")
    head = training.head_memory_gb(len(plan.islands))
    say(
        f"main memory: {training.host_memory_gb:.1f} GB on each island's first machine for anchors and "
        f"copies, {head:.1f} GB on the head for the syncer's"
    )
    if head > HEAD_MEMORY_GB:
        say(
            f"  a head of ${head_cost:.2f} has about {HEAD_MEMORY_GB} GB: take a larger one, which costs more"
        )
    if prediction is not None:
        one = prediction
        whole = float(plan.cost) + one.egress_cost_per_hour
        say(
            f"simulated for {one.simulated_seconds / 3600:.1f} h on links of {LINK_MBPS:g} Mbit/s: goodput "
            f"{one.goodput:.1%}, uptime {one.uptime:.1%}, {one.merged_share:.1%} of the tokens merged, "
            f"{one.tokens_per_second:,.0f} tokens/s; egress {one.egress_gb_per_hour:,.2f} GB an hour, "
            f"${one.egress_cost_per_hour:,.2f} at ${EGRESS_PRICE:.2f} a GB; with that, which "
            f"is not in the cost, an hour is ${whole:,.2f}"
        )
        if not one.tokens_per_second:
            say("  nothing is trained by then: to exchange the whole model takes longer on such links")
        say(f"  {one.command}")
    say()
    say(launch_line(plan, training))


def _table(*columns: str, right: Iterable[int] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, column in enumerate(columns):
        is_prose = column in FOLDED
        justify: JustifyMethod = "right" if place in right else "left"
        table.add_column(column, justify=justify, no_wrap=not is_prose, overflow="fold")
    return table


def _plan_table(plan: Plan, training: Training) -> Table:
    table = _table(
        *("islands", "shape", "market", "$/h\neach", "MFU", "goodput", "TFLOPS\neach", "memory of a GPU"),
        right=(0, 3, 4, 5, 6),
    )
    for part in plan.parts:
        shape = part.shape
        table.add_row(
            str(part.islands),
            *_row(shape),
            training.arithmetic(shape.gpus, shape.offer.gpu),
        )
    return table


def _others_table(shapes: Sequence[Shape]) -> Table:
    table = _table("shape", "market", "$/h\neach", "MFU", "goodput", "TFLOPS\neach", right=(2, 3, 4, 5))
    for shape in shapes:
        table.add_row(*_row(shape))
    return table


def _row(shape: Shape) -> tuple[str, ...]:
    return (
        str(shape.island),
        _market(shape.offer.is_spot),
        f"{float(shape.cost):,.2f}",
        f"{float(shape.mfu):.2f}",
        f"{float(shape.goodput):.3g}",
        f"{float(shape.tflops):,.1f}",
    )


def _rejected_table(rejected: Sequence[Rejected]) -> Table:
    """Return a line for each machine and reason, with all places where it is offered."""
    table = _table("shape", "where", "market", "reason")
    places: dict[tuple[str, str, str], list[str]] = {}
    for one in rejected:
        island = one.island
        nodes = f"{island.nodes}x" if island.nodes > 1 else ""
        shape = f"{nodes}{island.count}x{island.gpu.name.lower()}"
        place = f"{island.cloud} {island.region}" if island.region else island.cloud
        places.setdefault((shape, _market(one.is_spot), one.reason), []).append(place)
    for (shape, market, reason), where in places.items():
        table.add_row(shape, ", ".join(where), market, reason)
    return table


def _taken(plan: Plan) -> list[Shape]:
    return [part.shape for part in plan.parts]


def _market(is_spot: bool) -> str:
    return "spot" if is_spot else "on demand"


# -- for programs -------------------------------------------------------------------------------------


def print_json(
    answer: Answer, training: Training, limits: Limits, prediction: Prediction | None, *, file: Any = None
) -> None:
    """Print all of it as JSON; dollars are an hour's."""
    print(json.dumps(answer_json(answer, training, limits, prediction), indent=2), file=file)


def answer_json(
    answer: Answer, training: Training, limits: Limits, prediction: Prediction | None
) -> dict[str, Any]:
    """Return all of it as values of JSON."""
    plan = answer.plan
    return {
        "model": asdict(training.model),
        "training": {
            "tuning": training.tuning,
            "seq_len": training.seq_len,
            "micro_batch_size": training.micro_batch_size,
            "memory_formula": training.formula,
            "memory_factor": training.factor,
            "trained_parameters": round(training.trained_parameters),
            "host_memory_gb": training.host_memory_gb,
        },
        "limits": {
            "budget": None if limits.budget is None else float(limits.budget),
            "flops": None if limits.flops is None else float(limits.flops),
            "max_islands": limits.max_islands,
            "max_per_offer": limits.max_per_offer,
        },
        "plan": None if plan is None else _plan_json(plan, training),
        "why_none": answer.why_none,
        "simulated": None if prediction is None else asdict(prediction),
        "shapes": [_shape_json(shape, training) for shape in answer.shapes],
        "rejected": [
            {"island": str(one.island), "spot": one.is_spot, "reason": one.reason} for one in answer.rejected
        ],
    }


def _plan_json(plan: Plan, training: Training) -> dict[str, Any]:
    return {
        "parts": [{"islands": part.islands, **_shape_json(part.shape, training)} for part in plan.parts],
        "gpu": join_islands(plan.islands),
        "tflops": float(plan.tflops),
        "cost": float(plan.cost),
        "head_cost": float(HEAD_PRICE),
        "head_memory_gb": training.head_memory_gb(len(plan.islands)),
        "binding": list(plan.binding),
        "launch": launch_line(plan, training),
    }


def _shape_json(shape: Shape, training: Training) -> dict[str, Any]:
    offer = shape.offer
    return {
        "island": str(shape.island),
        "cloud": offer.cloud,
        "region": offer.region,
        "gpu": offer.gpu.name,
        "nodes": shape.nodes,
        "count": offer.count,
        "spot": offer.is_spot,
        "price": float(offer.price),
        "cost": float(shape.cost),
        "mfu": float(shape.mfu),
        "goodput": float(shape.goodput),
        "tflops": float(shape.tflops),
        "memory": training.arithmetic(shape.gpus, offer.gpu),
    }
