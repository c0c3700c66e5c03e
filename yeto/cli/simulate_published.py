"""``yeto simulate --published``: published goodput and ours, cell by cell. A check as well as a table."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from yeto.sim.published import (
    CHIPS,
    RMS_POINTS_MAX,
    ROWS,
    Cell,
    Speeds,
    published_speeds,
    published_table,
    rms_error,
)
from yeto.sim.table import print_json

SPEED_POINTS_MAX = 1.5
"""Largest error of a figure on different speeds, in percentage points, that still counts as agreement."""


def print_published(seed: int, *, as_json: bool) -> int:
    """Print every published figure beside ours; return 1 when they do not agree, else 0."""
    cells, speeds = published_table(seed), published_speeds(seed)
    rms = rms_error(cells)
    agrees = rms <= RMS_POINTS_MAX and all(abs(one.error) <= SPEED_POINTS_MAX for one in speeds)
    if as_json:
        print_json(_json(seed, cells, speeds, rms))
        return 0 if agrees else 1
    print("Goodput in percent, one interruption of a chip a year (arXiv 2604.21428, Table 1):")
    Console().print(_table(cells))
    least = min(cell.uptime for cell in cells if cell.row.num_learners >= 4)
    print(f"rms error of the 25 elastic cells: {rms:.2f} points (to reach: at most {RMS_POINTS_MAX})")
    print(f"uptime (some learner trains) with 4 learners or more: at least {least:.1f} % (paper: about 100)")
    print("\n4 + 4 learners 18 % apart in speed, 10 % jitter; the coordinator itself:")
    for one in speeds:
        print(f"  {one.name:<18} goodput {one.goodput:5.1f} %, paper {one.paper:3d}, error {one.error:+.1f}")
    return 0 if agrees else 1


def _table(cells: tuple[Cell, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("chips", no_wrap=True)
    table.add_column("")
    for num_chips in CHIPS:
        table.add_column(_chips(num_chips), justify="right", no_wrap=True)
    for row in ROWS:
        mine = [cell for cell in cells if cell.row is row]
        table.add_row(row.name, "paper", *(f"{cell.paper}  " for cell in mine))
        table.add_row("", "model", *(f"{cell.goodput:.1f}" for cell in mine))
        table.add_row("", "error", *(f"{cell.error:+.1f}" for cell in mine), end_section=row is not ROWS[-1])
    return table


def _chips(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1_000_000 else f"{count // 1000}k"


def _json(seed: int, cells: tuple[Cell, ...], speeds: tuple[Speeds, ...], rms: float) -> dict[str, object]:
    return {
        "seed": seed,
        "rms_points": rms,
        "rms_points_max": RMS_POINTS_MAX,
        "cells": [
            {
                "row": cell.row.name,
                "num_learners": cell.row.num_learners,
                "elastic": cell.row.elastic,
                "num_chips": cell.num_chips,
                "paper": cell.paper,
                "goodput": cell.goodput,
                "error": cell.error,
                "uptime": cell.uptime,
            }
            for cell in cells
        ],
        "speeds": [
            {"name": one.name, "paper": one.paper, "goodput": one.goodput, "error": one.error}
            for one in speeds
        ],
    }
