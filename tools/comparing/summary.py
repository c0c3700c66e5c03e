"""Pairs and spreads: every arm beside the synchronous group of its own size and seed, over all seeds.

A pair counts only if both sides trained on the same tokens: as many raw tokens, and in every step as many
target tokens, which other rows or another order would hardly give.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import asdict, frozen

from comparing.results import BASE, FORMAT, Result
from comparing.settings import Arm


@frozen(kw_only=True)
class Pair:
    """An arm and its baseline, of one seed."""

    seed: int
    loss: float
    baseline: float
    percent: float
    """How much more loss the arm has, in percent of the baseline's."""
    before_finish_percent: float | None
    """The same for the checkpoint of the cut-off."""


@frozen(kw_only=True)
class Line:
    """An arm over all its seeds."""

    name: str
    what: str
    baseline: str
    pairs: tuple[Pair, ...]
    invalid: tuple[str, ...]
    """Why a run does not count; its seed is in no figure here."""
    loss: float | None
    """Mean over the pairs; None without any, as are all that follow."""
    percent: float | None
    percent_least: float | None
    percent_most: float | None
    percent_deviation: float | None
    """Sample standard deviation; None with fewer than two pairs."""
    before_finish_percent: float | None
    measured: dict[str, float]
    """Means over the pairs of what was measured on the tape and in the logs."""


def summarise(results: Iterable[Result], arms: Sequence[Arm]) -> dict[str, Any]:
    """Return everything the report says, as plain JSON."""
    found = {result.key: result for result in results}
    base = found.get((BASE, None))
    lines = [_line(arm, found) for arm in arms]
    baselines = sorted({line.baseline for line in lines})
    return {
        "format": FORMAT,
        "base": None if base is None else _scored(base),
        "baselines": {
            name: {str(result.seed): _scored(result) for result in _of(name, found)} for name in baselines
        },
        "arms": [asdict(line) for line in lines],
    }


def differs(arm: Result, baseline: Result) -> str | None:
    """Return in what the tokens of two runs differ; None if they are a pair."""
    if arm.tokens != baseline.tokens:
        return f"{arm.tokens:,} raw tokens, the baseline {baseline.tokens:,}"
    for step, (own, other) in enumerate(zip(arm.targets, baseline.targets, strict=False)):
        if own != other:
            return f"{own} target tokens in step {step + 1}, the baseline {other}"
    if len(arm.targets) != len(baseline.targets):
        return f"{len(arm.targets)} steps, the baseline {len(baseline.targets)}"
    if arm.scored_targets != baseline.scored_targets:
        return f"scored on {arm.scored_targets} target tokens, the baseline on {baseline.scored_targets}"
    return None


def percent_over(loss: float, baseline: float) -> float:
    """Return how much more a loss is than another, in percent."""
    return 100.0 * (loss / baseline - 1.0)


def perplexity(loss: float) -> float:
    """Return the perplexity of a cross-entropy in nats; infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700.0 else math.inf


def _of(name: str, found: dict[tuple[str, int | None], Result]) -> list[Result]:
    return sorted((r for r in found.values() if r.name == name), key=lambda result: result.seed or 0)


def _scored(result: Result) -> dict[str, Any]:
    return {
        "loss": result.loss,
        "tokens": result.tokens,
        "targets": sum(result.targets),
        "scored_targets": result.scored_targets,
        "scored_rows": result.scored_rows,
        "training_seconds": result.training_seconds,
    }


def _line(arm: Arm, found: dict[tuple[str, int | None], Result]) -> Line:
    pairs, invalid, valid = [], [], []
    for result in _of(arm.name, found):
        assert result.seed is not None, "arms have seeds"
        baseline = found.get((arm.baseline, result.seed))
        why = "its baseline is missing" if baseline is None else differs(result, baseline)
        if why is not None or baseline is None:
            invalid.append(f"seed {result.seed}: {why}")
            continue
        before = result.before_finish
        pairs.append(
            Pair(
                seed=result.seed,
                loss=result.loss,
                baseline=baseline.loss,
                percent=percent_over(result.loss, baseline.loss),
                before_finish_percent=None if before is None else percent_over(before, baseline.loss),
            )
        )
        valid.append(result)
    percents = [pair.percent for pair in pairs]
    befores = [pair.before_finish_percent for pair in pairs if pair.before_finish_percent is not None]
    return Line(
        name=arm.name,
        what=arm.what,
        baseline=arm.baseline,
        pairs=tuple(pairs),
        invalid=tuple(invalid),
        loss=statistics.fmean(pair.loss for pair in pairs) if pairs else None,
        percent=statistics.fmean(percents) if pairs else None,
        percent_least=min(percents, default=None),
        percent_most=max(percents, default=None),
        percent_deviation=statistics.stdev(percents) if len(percents) > 1 else None,
        before_finish_percent=statistics.fmean(befores) if befores else None,
        measured=_means([_figures(result) for result in valid]),
    )


def _figures(result: Result) -> dict[str, float | None]:
    targets = sum(result.targets)
    return {
        **(result.measured or {}),
        "in_flight_steps": result.in_flight_steps,
        "target_density": targets / result.tokens if result.tokens else None,
        "training_seconds": result.training_seconds,
        "tokens_per_second": result.tokens / result.training_seconds if result.training_seconds else None,
        "seconds": result.seconds,
    }


def _means(figures: list[dict[str, float | None]]) -> dict[str, float]:
    """Return the mean of each figure over the runs that have it."""
    means = {}
    for name in figures[0] if figures else ():
        known = [value for each in figures if (value := each.get(name)) is not None]
        if known:
            means[name] = statistics.fmean(known)
    return means
