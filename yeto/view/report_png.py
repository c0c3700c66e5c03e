"""The plots of a report as pictures, for a paper or a chat: the same numbers, drawn by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yeto.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0b6cbd", "#c24d0a", "#0a8560", "#a0468a", "#9c7200", "#3c92b8", "#7b5a3c", "#62707e")
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")
PHASES = {
    "earlier_seconds": ("earlier attempts", "#c01c28"),
    "gather_seconds": ("gathering", "#3d7fc4"),
    "grace_seconds": ("waiting after the quorum", "#c78a00"),
    "merge_seconds": ("merging", "#2b9a6e"),
    "turn_seconds": ("waiting for earlier rounds", "#8d7fb8"),
    "commit_seconds": ("outer step", "#c8528b"),
}
PARTS = {
    "merged": ("merged", "#3d7fc4"),
    "left_out": ("came, but was left out", "#c78a00"),
    "refused": ("its push was refused", "#7a4fb5"),
    "missed": ("did not answer", "#c01c28"),
}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e2e6e9",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    # A log may have any name, and a dollar sign in it begins no formula.
    "text.parse_math": False,
}

Data = dict[str, Any]
Painter = Callable[["Axes", Data], bool]


def check_folder(folder: Path) -> None:
    """Raise ConfigError if pictures could not be drawn there; before the long work, not after it."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--png draws with matplotlib, which is not installed: pip install 'yeto[plot]'")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--png {folder}: is a file; name a folder")
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"--png {folder}: there is no folder {folder.absolute().parent}")
    if folder.exists() and not os.access(folder, os.W_OK):
        raise ConfigError(f"--png {folder}: there is no permission to write there")


def draw(data: Data, folder: Path) -> Iterator[Path]:
    """Draw what there is to see, one file each, over what an earlier report drew; yield the paths.

    Args:
        data: what :func:`yeto.view.report.read_data` returns.
        folder: made if it is not there.

    Raises:
        ConfigError: a file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    try:
        folder.mkdir(exist_ok=True)
        for name, (title, paint) in _PLOTS.items():
            with matplotlib.rc_context(STYLE):
                figure = Figure(figsize=(8, 3.2), layout="constrained")
                axes = figure.subplots()
                if not paint(axes, data):
                    continue
                axes.set_title(title)
                axes.set_xlabel("round")
                path = folder / f"{name}.png"
                figure.savefig(path, dpi=150, metadata={"Software": None})
            yield path
    except OSError as error:
        raise ConfigError(f"--png {folder}: cannot be written: {error.strerror}") from error


def _numbers(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _phases(axes: Axes, data: Data) -> bool:
    run = data["history"]["run"]
    if not run["step"]:
        return False
    columns = [[value or 0.0 for value in run["series"][name]["mean"]] for name in PHASES]
    axes.stackplot(
        run["step"],
        *columns,
        labels=[label for label, _ in PHASES.values()],
        colors=[colour for _, colour in PHASES.values()],
    )
    axes.set_ylabel("seconds")
    axes.legend(ncols=3, frameon=False, fontsize=8)
    return True


def _participation(axes: Axes, data: Data) -> bool:
    table = data["history"]["learners"]
    learners = table["by_learner"]
    if not table["step"] or not learners:
        return False
    for row, counts in enumerate(one["counts"] for one in learners.values()):
        bottom = [row - 0.4] * len(table["step"])
        # Those refused are counted among the missed, too.
        silent = [missed - many for missed, many in zip(counts["missed"], counts["refused"], strict=True)]
        for part, (name, colour) in PARTS.items():
            shown = silent if part == "missed" else counts[part]
            heights = [
                0.8 * many / max(1, rounds) for many, rounds in zip(shown, table["rounds"], strict=True)
            ]
            label = name if row == 0 else None
            width = table["width"]
            axes.bar(
                table["step"], heights, width, bottom, align="edge", color=colour, linewidth=0, label=label
            )
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_yticks(range(len(learners)), [f"learner {name}" for name in learners])
    axes.grid(False)
    axes.invert_yaxis()
    figure = axes.get_figure(root=True)
    assert figure is not None, "the axes were made on one"
    figure.legend(ncols=4, frameon=False, fontsize=8, loc="outside lower right")
    return True


def _banded(series: str, label: str) -> Painter:
    def paint(axes: Axes, data: Data) -> bool:
        run = data["history"]["run"]
        column = run["series"][series]
        if all(value is None for value in column["mean"]):
            return False
        axes.plot(run["step"], _numbers(column["mean"]), color=COLOURS[0])
        if "min" in column:
            low, high = _numbers(column["min"]), _numbers(column["max"])
            axes.fill_between(run["step"], low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
        axes.set_ylabel(label)
        return True

    return paint


def _agreement(axes: Axes, data: Data) -> bool:
    run, drawn = data["history"]["run"], 0
    for name, label in AGREEMENT.items():
        values = run["series"][name]["mean"]
        if any(value is not None for value in values):
            axes.plot(run["step"], _numbers(values), label=label, **_stroke(drawn))
            drawn += 1
    _legend(axes, drawn)
    return drawn > 0


def _contributions(axes: Axes, data: Data) -> bool:
    table = data["history"]["learners"]
    shares, names = [], []
    for name, learner in table["by_learner"].items():
        values, merged = learner["series"]["contribution"]["mean"], learner["counts"]["merged"]
        if any(value is not None for value in values):
            # A learner counts 0 where it was not in the merge.
            parts = zip(values, merged, table["rounds"], strict=True)
            shares.append([(value or 0.0) * many / max(1, rounds) for value, many, rounds in parts])
            names.append(f"learner {name}")
    if shares:
        colours = [COLOURS[index % len(COLOURS)] for index in range(len(shares))]
        axes.stackplot(table["step"], *shares, labels=names, colors=colours, step="mid")
        # Upon the areas, so it needs a ground of its own.
        axes.legend(ncols=4, fontsize=8, framealpha=0.85, edgecolor="none")
    axes.set_ylabel("share of a merge")
    return bool(shares)


def _by_learner(series: str, label: str) -> Painter:
    def paint(axes: Axes, data: Data) -> bool:
        table = data["history"]["learners"]
        drawn = 0
        for name, learner in table["by_learner"].items():
            values = learner["series"][series]["mean"]
            if any(value is not None for value in values):
                axes.plot(table["step"], _numbers(values), label=f"learner {name}", **_stroke(drawn))
                drawn += 1
        axes.set_ylabel(label)
        _legend(axes, drawn)
        return drawn > 0

    return paint


def _loss(axes: Axes, data: Data) -> bool:
    for index, curve in enumerate(data["loss"]):
        axes.plot(curve["step"], curve["loss"], label=curve["name"], **_stroke(index))
    axes.set_ylabel("loss per target")
    _legend(axes, len(data["loss"]))
    return bool(data["loss"])


def _stroke(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index // len(COLOURS) % len(DASHES)]}


def _legend(axes: Axes, lines: int) -> None:
    if lines:
        axes.legend(ncols=min(lines, 4), frameon=False, fontsize=8)


AGREEMENT = {
    "delta_cosine": "cosine between deltas",
    "norm_ratio": "merged / average",
    "offset_ratio": "published ahead by",
}

_PLOTS: dict[str, tuple[str, Painter]] = {
    "time": ("What are rounds made of?", _phases),
    "participation": ("Who took part in which round?", _participation),
    "contribution": ("Whose work is in the model?", _contributions),
    "pace": ("How fast does each learner step?", _by_learner("steps_per_second", "steps/s")),
    "staleness": ("How stale is what is merged?", _by_learner("staleness", "rounds")),
    "loss": ("Does the loss fall?", _loss),
    "gradient": ("Are the merged gradients steady?", _banded("gradient_norm", "norm")),
    "agreement": ("Do the learners agree? Is the published model ahead of them?", _agreement),
    "cosine": ("Do the deltas point where the momentum does?", _by_learner("cosine", "cosine")),
}
"""By file name: the question that is its title, and what draws the answer or says that there is none."""
