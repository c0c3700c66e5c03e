"""The two pictures of a report: how far each arm is from its synchronous group, and the way there."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comparing.results import Result

AVAILABLE = find_spec("matplotlib") is not None
"""Whether the extra ``plot`` is installed."""


def draw(summary: dict[str, Any], results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw both into a folder; return the files, none where there is nothing to show."""
    import matplotlib

    matplotlib.use("agg")
    lines = [line for line in summary["arms"] if line["pairs"]]
    if not lines:
        return []
    return [_losses(lines, folder / "losses.png"), _curves(lines, results, folder / "curves.png")]


def _losses(lines: list[dict[str, Any]], path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.35 * len(lines)), layout="constrained")
    for row, line in enumerate(lines):
        percents = [pair["percent"] for pair in line["pairs"]]
        axes.plot(percents, [row] * len(percents), "o", color="tab:blue", alpha=0.5)
        axes.plot([line["percent"]], [row], "|", color="black", markersize=14, markeredgewidth=2)
    axes.axvline(0.0, color="gray", linewidth=1)
    axes.set_yticks(range(len(lines)), [line["name"] for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlabel("held-out loss over the synchronous group, % (a dot for each seed, a bar for the mean)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _curves(lines: list[dict[str, Any]], results: Sequence[Result], path: Path) -> Path:
    """Draw the training loss, averaged over the seeds, of the arms and of their synchronous groups."""
    from matplotlib import pyplot

    names = list(dict.fromkeys([line["baseline"] for line in lines] + [line["name"] for line in lines]))
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for number, name in enumerate(names):
        curve = _mean_curve([result for result in results if result.name == name])
        if not curve:
            continue
        # Colours come again after ten; a line of another kind tells them apart.
        style: dict[str, Any] = {"linewidth": 1, "linestyle": ("-", "--", ":")[number // 10 % 3]}
        if name.startswith("baseline"):
            style = {"linewidth": 2, "color": "black"}
        axes.plot(*zip(*curve, strict=True), label=name, **style)
    axes.set_xlabel("raw tokens, all devices together")
    axes.set_ylabel("training loss per target token")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _mean_curve(results: Sequence[Result]) -> list[tuple[int, float]]:
    points: defaultdict[int, list[float]] = defaultdict(list)
    for result in results:
        for tokens, loss in result.curve:
            points[tokens].append(loss)
    return [(tokens, statistics.fmean(losses)) for tokens, losses in sorted(points.items())]
