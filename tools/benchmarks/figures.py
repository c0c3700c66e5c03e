"""Figures: a measured value, its peer of the same run, their ratio, and what is aimed at.

A target that is missed is printed like one that is reached. Nothing here fails because of a slow machine:
whether a figure is good enough is for people to judge.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

from attrs import asdict, frozen
from rich import box
from rich.console import Console
from rich.table import Table

Number = int | float

PIPE_WIDTH = 130


@frozen(kw_only=True)
class Peer:
    """What a figure is held against."""

    name: str
    value: float
    """In the figure's unit."""


@frozen(kw_only=True)
class Target:
    """What a figure should reach."""

    sense: Literal["at least", "at most"]
    number: float
    of: Literal["value", "ratio"]


@frozen(kw_only=True)
class Figure:
    """One measured quantity."""

    key: str
    """Its name for programs; says the unit."""
    name: str
    """Its name for people."""
    unit: str
    value: float
    """Median of the samples."""
    low: float
    high: float
    """Least and greatest sample."""
    samples: int
    peer: Peer | None = None
    ratio: float | None = None
    """Value over peer; with paired samples the median of the pairs' ratios."""
    target: Target | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        number = self.value if self.target.of == "value" else self.ratio
        assert number is not None, f"{self.key}: a target of a ratio needs a peer"
        return (
            number >= self.target.number if self.target.sense == "at least" else number <= self.target.number
        )


@frozen(kw_only=True)
class Report:
    """What one benchmark found."""

    benchmark: str
    what: str
    """One sentence: what was measured, in which seconds."""
    settings: dict[str, Number]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    """What is missing, and why."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values; figures by their key."""
        return {
            "benchmark": self.benchmark,
            "what": self.what,
            "settings": self.settings,
            "figures": {
                figure.key: {**asdict(figure, filter=lambda a, _: a.name != "key"), "reached": figure.reached}
                for figure in self.figures
            },
            "notes": list(self.notes),
        }


def figure_of(
    key: str,
    name: str,
    unit: str,
    values: Sequence[float],
    *,
    peer: str | None = None,
    peer_values: Sequence[float] = (),
    target: Target | None = None,
) -> Figure:
    """Make a figure from samples.

    Args:
        key: name for programs.
        name: name for people.
        unit: of values and peer values.
        values: the samples, at least one.
        peer: name of the peer; None for a figure that stands alone.
        peer_values: one for each sample, measured beside it.
        target: what to reach.
    """
    ratio = None
    if peer is not None:
        ratio = median(ours / theirs for ours, theirs in zip(values, peer_values, strict=True))
    return Figure(
        key=key,
        name=name,
        unit=unit,
        value=median(values),
        low=min(values),
        high=max(values),
        samples=len(values),
        peer=None if peer is None else Peer(name=peer, value=median(peer_values)),
        ratio=ratio,
        target=target,
    )


def machine() -> dict[str, Any]:
    """Return what is worth knowing of this machine beside any figure."""
    return {
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "processor": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def as_json(reports: Sequence[Report], at_start: dict[str, Any]) -> str:
    """Return reports as one JSON document."""
    document = {"machine": at_start, "benchmarks": {report.benchmark: report.to_json() for report in reports}}
    return json.dumps(document, indent=2, allow_nan=False)


def print_machine(at_start: dict[str, Any]) -> None:
    """Print what was found out about this machine."""
    _console().print(
        f"{at_start['cores']} cores ({at_start['processor']}), load {at_start['load_1m']} at the start, "
        f"Python {at_start['python']}"
    )


def print_table(report: Report) -> None:
    """Print a report as a table."""
    settings = ", ".join(f"{name} {value:,}" for name, value in report.settings.items())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("figure")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("range", justify="right", no_wrap=True)
    table.add_column("beside it")
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    for figure in report.figures:
        table.add_row(*_row(figure))
    _console().print(f"\n{report.benchmark}: {report.what}\n({settings})", table)
    for note in report.notes:
        _console().print(note, markup=False)


def _console() -> Console:
    # A pipe or a file has no width of its own, and rich would take 80 for it.
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _row(figure: Figure) -> tuple[str, ...]:
    peer = figure.peer
    return (
        figure.name,
        f"{_shown(figure.value)} {figure.unit}",
        f"{_shown(figure.low)} .. {_shown(figure.high)}" if figure.samples > 1 else "",
        "" if peer is None else f"{_shown(peer.value)} {peer.name}",
        "" if figure.ratio is None else _shown(figure.ratio),
        _verdict(figure),
    )


def _verdict(figure: Figure) -> str:
    target = figure.target
    if target is None:
        return ""
    of = "ratio " if target.of == "ratio" else ""
    sign = "≥" if target.sense == "at least" else "≤"
    return f"{of}{sign} {_shown(target.number)}: {'reached' if figure.reached else 'missed'}"


def _shown(number: float) -> str:
    """Return a number with three significant digits, without an exponent."""
    if abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"
