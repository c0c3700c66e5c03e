"""A sweep as a picture: one panel for each measure, one line for each combination of the other flags.

Lines differ in colour, dashes and markers at once, so they can be told apart on paper without colour. The
colours are Okabe and Ito's, which also hold for readers who do not see all of them. The same sweep gives the
same file, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yeto.errors import ConfigError
from yeto.sim.cases import MEASURES, Case

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (
    "goodput",
    "participation",
    "merged_share",
    "merges_per_hour",
    "mean_staleness",
    "egress_cost_per_learner",
)
"""Keys of the measures that are drawn, row by row."""
COLUMNS = 3
FORMATS: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None},
}
"""How a file's name may end, and what is not written into such a file: it would differ from run to run."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))

LOG_RATIO = 16.0
"""From this ratio of largest to smallest on, an axis of positive values is logarithmic."""

STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    # Names of the parts inside the file; by default they are drawn at random.
    "svg.hashsalt": "yeto",
}


def check_plot(path: Path) -> None:
    """Raise ConfigError if a picture could not be drawn there; before the long work, not after it."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"--plot {path}: the name must end with {', '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot draws with matplotlib, which is not installed: pip install 'yeto[plot]'")


def plot_cases(path: Path, cases: Sequence[Case], price: float) -> None:
    """Draw the cases of a sweep; the first swept flag is the horizontal axis."""
    import matplotlib
    from matplotlib.figure import Figure

    (axis, *others) = cases[0].values
    lines: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        lines.setdefault(tuple(case.values[flag] for flag in others), []).append(case)
    places, is_number = _places(cases, axis)
    measures = [next(one for one in MEASURES if one.key == key) for key in PANELS]
    rows = math.ceil(len(measures) / COLUMNS)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 2.1 * rows + (0.5 if others else 0.2)), layout="constrained")
        panels = figure.subplots(rows, COLUMNS, sharex=True, squeeze=False)
        for panel, measure in zip(panels.flat, measures, strict=True):
            for number, (values, line) in enumerate(lines.items()):
                label = ", ".join(f"--{flag} {value}" for flag, value in zip(others, values, strict=True))
                points = [(places[case.values[axis]], *case.spread(measure, price)) for case in line]
                _draw(panel, sorted(points), measure.scale, number, label)
            panel.set_ylabel(measure.label)
        for panel in panels[-1]:
            panel.set_xlabel(f"--{axis}")
        _scale(panels[0][0], places, is_number)
        if others:
            handles, labels = panels[0][0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        try:
            figure.savefig(path, dpi=200, metadata=FORMATS[path.suffix])
        except OSError as error:
            raise ConfigError(f"--plot {path}: {error.strerror}") from error


def _places(cases: Sequence[Case], axis: str) -> tuple[dict[str, float], bool]:
    """Return where each value of the axis stands, and whether that is its number."""
    texts = list(dict.fromkeys(case.values[axis] for case in cases))
    try:
        return {text: float(text) for text in texts}, True
    except ValueError:
        return {text: float(place) for place, text in enumerate(texts)}, False


def _draw(
    panel: Axes,
    points: Sequence[tuple[float, float, float | None]],
    scale: float,
    number: int,
    label: str,
) -> None:
    """Draw the line of that number through points of place, mean and deviation."""
    places, means, deviations = zip(*points, strict=True)
    panel.errorbar(
        places,
        [mean * scale for mean in means],
        yerr=None if None in deviations else [deviation * scale for deviation in deviations],
        color=COLOURS[number % len(COLOURS)],
        marker=MARKERS[number % len(MARKERS)],
        # Hollow, so that what lies below is seen where lines meet.
        markerfacecolor="none",
        linestyle=DASHES[number % len(DASHES)],
        capsize=2.5,
        label=label,
    )


def _scale(panel: Axes, places: dict[str, float], is_number: bool) -> None:
    """Scale the shared horizontal axis and put a tick at each value."""
    values = list(places.values())
    if is_number and min(values) > 0 and max(values) / min(values) >= LOG_RATIO:
        panel.set_xscale("log")
    panel.set_xticks(values, labels=list(places), minor=False)
    panel.minorticks_off()
