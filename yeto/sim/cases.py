"""What a simulation is judged by: its measures, its cases, and the files that hold them.

A case is one combination of swept flags, simulated with one or several seeds. What is said of it is the mean
over the seeds, and the standard deviation when there are several.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from yeto.errors import ConfigError
from yeto.sim.config import SimResult
from yeto.sim.sweep import Run


@frozen(kw_only=True)
class Measure:
    """One number of a simulation."""

    key: str
    """Its name for programs; the unit is in it, shares go from 0 to 1."""
    name: str
    unit: str
    """Its name for people, and what it is shown in."""
    text: str
    """What it means."""
    scale: float = 1.0
    """From the unit of the key to that of the heading."""
    digits: int = 1
    of: Callable[[Run, float], float]
    """Takes the run, and the price of a gigabyte."""

    @property
    def label(self) -> str:
        """Name and unit, on one line."""
        return f"{self.name} ({self.unit})"

    def show(self, value: float) -> str:
        """Return a value as people read it."""
        return f"{value * self.scale:,.{self.digits}f}"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _sent(result: SimResult) -> float:
    return _mean([one.sent_bytes for one in result.learners])


def _received(result: SimResult) -> float:
    return _mean([one.received_bytes for one in result.learners])


MEASURES = (
    Measure(
        key="goodput",
        name="goodput",
        unit="%",
        text="inner steps done, of those that the fleet could do without a pause or a failure",
        scale=100.0,
        of=lambda run, price: run.result.goodput,
    ),
    Measure(
        key="uptime",
        name="uptime",
        unit="%",
        text="time in which at least a quorum of learners was training",
        scale=100.0,
        of=lambda run, price: run.result.uptime,
    ),
    Measure(
        key="merges_per_hour",
        name="merges",
        unit="1/h",
        text="rounds committed; each merges one fragment",
        of=lambda run, price: run.result.merges_per_hour,
    ),
    Measure(
        key="model_merges_per_hour",
        name="models",
        unit="1/h",
        text="merges of the whole model: of every fragment once",
        of=lambda run, price: run.result.merges_per_hour / run.config.num_fragments,
    ),
    Measure(
        key="participation",
        name="participation",
        unit="%",
        text="members of a round whose push was merged",
        scale=100.0,
        of=lambda run, price: run.result.participation,
    ),
    Measure(
        key="mean_staleness",
        name="staleness",
        unit="steps",
        text="global steps that a merged push was behind",
        digits=2,
        of=lambda run, price: run.result.mean_staleness,
    ),
    Measure(
        key="merged_share",
        name="merged",
        unit="%",
        text="trained tokens that were merged, counted for each fragment",
        scale=100.0,
        of=lambda run, price: run.result.merged_share,
    ),
    Measure(
        key="sent_bytes_per_learner",
        name="sent",
        unit="GB",
        text="bytes that a learner sent",
        scale=1e-9,
        digits=2,
        of=lambda run, price: _sent(run.result),
    ),
    Measure(
        key="received_bytes_per_learner",
        name="received",
        unit="GB",
        text="bytes that a learner received",
        scale=1e-9,
        digits=2,
        of=lambda run, price: _received(run.result),
    ),
    Measure(
        key="egress_cost_per_learner",
        name="egress",
        unit="$",
        text="price of both, for a learner",
        digits=2,
        of=lambda run, price: (_sent(run.result) + _received(run.result)) * 1e-9 * price,
    ),
    Measure(
        key="simulated_seconds",
        name="simulated",
        unit="h",
        text="simulated time",
        scale=1 / 3600.0,
        of=lambda run, price: run.result.seconds,
    ),
    Measure(
        key="wall_seconds",
        name="wall",
        unit="s",
        text="time that the simulation took on this machine",
        of=lambda run, price: run.wall_seconds,
    ),
)


@frozen(kw_only=True)
class Case:
    """One combination of swept flags, and its runs, each with another seed."""

    values: Mapping[str, str]
    """Swept flags, without dashes, and their values as they were typed."""
    runs: Mapping[int, Run]
    """By seed. Fewer than asked for when the work was interrupted."""

    def spread(self, measure: Measure, price: float) -> tuple[float, float | None]:
        """Return mean and standard deviation over the seeds; of a single one there is no deviation."""
        samples = [measure.of(run, price) for run in self.runs.values()]
        return _mean(samples), statistics.stdev(samples) if len(samples) > 1 else None


def cases_json(cases: Sequence[Case], price: float) -> dict[str, Any]:
    """Return everything that was measured, for programs."""
    return {
        "egress_cost_per_gb": price,
        "cases": [
            {
                "sweep": dict(case.values),
                **_numbers(case, price),
                "runs": [
                    {"seed": seed, "wall_seconds": run.wall_seconds, **attrs.asdict(run.result)}
                    for seed, run in case.runs.items()
                ],
            }
            for case in cases
        ],
    }


def _numbers(case: Case, price: float) -> dict[str, Any]:
    spreads = {measure.key: case.spread(measure, price) for measure in MEASURES}
    return {
        "mean": {key: mean for key, (mean, _) in spreads.items()},
        "standard_deviation": {key: deviation for key, (_, deviation) in spreads.items()},
    }


def write_csv(path: Path, cases: Sequence[Case], price: float) -> None:
    """Write one line for each case.

    The wall time is left out, so that the same simulations give the same file.
    """
    measures = [measure for measure in MEASURES if measure.key != "wall_seconds"]
    names = [f"{measure.key}{suffix}" for measure in measures for suffix in ("", "_sd")]
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*cases[0].values, "seeds", *names])
            for case in cases:
                spreads = [case.spread(measure, price) for measure in measures]
                numbers = [number for spread in spreads for number in spread]
                writer.writerow([*case.values.values(), len(case.runs), *numbers])
    except OSError as error:
        raise ConfigError(f"--csv {path}: {error.strerror}") from error
