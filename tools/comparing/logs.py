"""What the learners' own logs say of a run: tokens and targets of every step, the loss on the way, time."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from comparing.processes import RunFailed

CURVE_POINTS = 64
"""Points of a loss curve that are kept: more than a plot of many arms can show apart."""


@frozen(kw_only=True)
class Trained:
    """What all learners of one run trained on, together."""

    tokens: int
    """Raw tokens."""
    targets: tuple[int, ...]
    """Target tokens of each step, summed over the learners."""
    seconds: float
    """From the first learner's start of training to the last one's last step."""
    curve: tuple[tuple[int, float], ...]
    """(raw tokens so far, training loss per target since the point before)."""
    in_flight_steps: float | None
    """Median steps that a learner takes between a push and the merge of it; None without a merge."""


def read_logs(paths: Sequence[Path]) -> Trained:
    """Return what the logs of all learners of a run say together.

    Raises:
        RunFailed: the learners took different numbers of steps, or none.
    """
    logs = [list(_records(path)) for path in paths]
    steps = [[record for record in log if record["kind"] == "step"] for log in logs]
    counts = [len(log) for log in steps]
    if min(counts) != max(counts) or not counts[0]:
        raise RunFailed(f"the learners took {', '.join(map(str, counts))} steps")
    together = [
        (
            sum(record["targets"] for record in same),
            sum(record["loss"] * record["targets"] for record in same),
        )
        for same in zip(*steps, strict=True)
    ]
    tokens = sum(log[-1]["tokens"] for log in steps)
    return Trained(
        tokens=tokens,
        targets=tuple(targets for targets, _ in together),
        seconds=max(log[-1]["at"] for log in steps) - min(_training_since(log) for log in logs),
        curve=_curve(together, tokens),
        in_flight_steps=_in_flight(logs),
    )


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _training_since(log: list[dict[str, Any]]) -> float:
    phases = [record["at"] for record in log if record["kind"] == "phase" and record["phase"] == "training"]
    return float(phases[0])


def _curve(steps: list[tuple[int, float]], tokens: int) -> tuple[tuple[int, float], ...]:
    """Average the loss over equal stretches of steps, each weighted by its targets."""
    points = []
    stretches = min(CURVE_POINTS, len(steps))
    for number in range(stretches):
        begin, end = (len(steps) * place // stretches for place in (number, number + 1))
        targets = sum(step[0] for step in steps[begin:end])
        loss = sum(step[1] for step in steps[begin:end]) / targets
        points.append((round(tokens * end / len(steps)), loss))
    return tuple(points)


def _in_flight(logs: list[list[dict[str, Any]]]) -> float | None:
    """Match each push with the broadcast of the round that it was for."""
    waits = []
    for log in logs:
        pushed: dict[tuple[int, int], int] = {}
        for record in log:
            if record["kind"] == "push":
                pushed[record["fragment"], record["step"]] = record["local_step"]
            elif record["kind"] == "broadcast":
                at = pushed.pop((record["fragment"], record["version"]), None)
                waits += [] if at is None else [record["local_step"] - at]
    return statistics.median(waits) if waits else None
