"""Tables of simulations: one line for each case of a sweep, or one case explained line by line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from yeto.sim.account import Fate
from yeto.sim.cases import MEASURES, Case, Measure
from yeto.sim.config import SimResult
from yeto.sim.sweep import Run

PAPER_WIDTH = 500
"""Characters of a line where nothing is cut: more than any table here needs."""
LEARNER_HEADINGS = (
    *("learner", "stepping\n%", "steps", "tokens", "merges", "staleness\nsteps"),
    *("sent\nGB", "received\nGB"),
)
_WHY = {
    Fate.LOCAL: "only in a learner's own weights at the end",
    Fate.BETWEEN: "trained after a push and before its broadcast; --merge-alpha carry keeps it",
    Fate.UNASKED: "in no push before the next broadcast",
    Fate.MISSED_SEAL: "pushed, and the round was sealed without it",
    Fate.DISCARDED: "its attempt was discarded",
    Fate.REFUSED: "its push was refused",
    Fate.LEFT_OUT: "pushed, and left out of the merge",
    Fate.LINK_LOST: "the connection ended before its push arrived",
    Fate.SYNCER_LOST: "its push was with the syncer when that went down",
    Fate.SUPERSEDED: "merged, and taken back by a resume from an older checkpoint",
    Fate.ROLLED_BACK: "its learner went back to an older version",
    Fate.FROZEN: "in weights that a budget froze",
    Fate.DIED: "its learner died before the push",
}
"""Why trained tokens are in no merge, for people."""


def print_cases(cases: Sequence[Case], price: float, *, file: Any = None) -> None:
    """Print one line for each case; on a narrow terminal several tables, one below the other."""
    console = _console(file)
    shown: list[Measure] = []
    for measure in MEASURES:
        if shown and _width(_case_table(cases, [*shown, measure], price)) > console.width:
            console.print(_case_table(cases, shown, price))
            shown = []
        shown.append(measure)
    console.print(_case_table(cases, shown, price))


def _case_table(cases: Sequence[Case], measures: Sequence[Measure], price: float) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for flag in cases[0].values:
        table.add_column(flag.replace("-", "\n"), justify="right", no_wrap=True, style="bold")
    for measure in measures:
        table.add_column(f"{measure.name}\n{measure.unit}", justify="right", no_wrap=True)
    for case in cases:
        table.add_row(*case.values.values(), *(_cell(case, measure, price) for measure in measures))
    return table


def print_case(case: Case, price: float, *, file: Any = None) -> None:
    """Print one case: a line for each measure with what it means, lost tokens, a line for each learner."""
    console = _console(file)
    table = _plain_table()
    for measure in MEASURES:
        table.add_row(measure.label, _cell(case, measure, price), measure.text)
    console.print(table)
    if len(case.runs) == 1:
        (run,) = case.runs.values()
        if run.result.exit_code is not None:
            console.print(f"The session ended with exit code {run.result.exit_code}.", highlight=False)
        console.print(_lost_table(run))
        console.print(_learner_table(run.result))


def _plain_table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    return table


def _lost_table(run: Run) -> Table:
    """Return which share of the trained tokens no merge holds, and why; the most first."""
    lost: Counter[str] = Counter()
    for one in run.result.learners:
        lost.update(one.lost_tokens)
    trained = sum(one.tokens for one in run.result.learners) * run.config.num_fragments
    table = _plain_table()
    for fate, tokens in lost.most_common():
        name = f"not merged: {fate.replace('_', ' ').replace(':', ': ')} (%)"
        table.add_row(name, f"{100 * tokens / trained:.1f}", _WHY[Fate(fate.partition(":")[0])])
    return table


def _learner_table(result: SimResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in LEARNER_HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in result.learners:
        table.add_row(
            str(one.learner),
            f"{one.stepping_share * 100:.1f}",
            f"{one.steps:,}",
            f"{one.tokens:,}",
            f"{one.merges:,}",
            f"{one.mean_staleness:.2f}",
            f"{one.sent_bytes * 1e-9:,.2f}",
            f"{one.received_bytes * 1e-9:,.2f}",
        )
    return table


def _cell(case: Case, measure: Measure, price: float) -> str:
    mean, deviation = case.spread(measure, price)
    shown = measure.show(mean)
    return shown if deviation is None else f"{shown} ±{measure.show(deviation)}"


def _console(file: Any) -> Console:
    console = Console(file=file)
    if not console.is_terminal:
        # A file has no edge to fold lines at.
        console.width = PAPER_WIDTH
    return console


def _width(table: Table) -> int:
    return Console(width=PAPER_WIDTH).measure(table).maximum


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))
