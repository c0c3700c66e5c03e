"""A moment on a terminal, as tables that are redrawn, or as text where nothing can be redrawn.

What is shown is made once, as lines and grids of cells; a terminal gets them as tables, a file as aligned
text. A narrow screen gets fewer columns, never torn ones, and whoever is waited for is shown first when there
are more learners than lines. Text of a tape may come from a peer, so nothing of it reaches a terminal that
could steer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from yeto.storage import rate_text
from yeto.tape import printable
from yeto.view.model import FragmentMoment, LearnerMoment, Moment, Wait, known_of_somebody
from yeto.view.units import ago, duration, fine, number, size

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

NEEDS_LINK = ("waiting", "training", "frozen")
"""What learners say of themselves when a missing link is worth a word: before and after there is none."""

FRAGMENTS_SHOWN = 16
LEARNERS_SHOWN = 8
"""In the one line; a table has as many as there is room for."""
REFUSALS_SHOWN = 8


@frozen
class Grid:
    """Cells under the names of their columns, the first of which says what a row is about."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0
    """Rows left out."""


@frozen
class Column:
    """A column of learners: how wide a screen has to be for it."""

    name: str
    least_width: int
    field: str = ""
    """What of a learner it shows, where that may be known of nobody; then there is no such column."""


COLUMNS = (
    Column("learner", 0),
    Column("state", 0),
    Column("step", 48),
    Column("steps/s", 104),
    Column("tokens/s", 114),
    Column("loss", 122, "loss"),
    Column("merges", 0),
    Column("share", 72),
    Column("stale", 80),
    Column("missed", 88),
    Column("in", 144),
    Column("out", 144, "bytes_out"),
    Column("last answer", 132),
    Column("waited for", 60),
)
"""With the least width at which it fits beside all that need no more, as wide as their cells usually are."""


def headline(moment: Moment) -> str:
    """Return one line: rounds done and time left, or what else is going on."""
    start = f"round {moment.step}/{moment.total_steps}"
    if moment.phase != "running":
        return f"{start}, {waited(moment.wait, moment.now)}"
    left = "unknown" if moment.eta_seconds is None else duration(moment.eta_seconds)
    return f"{start}, time left {left}"


def waited(wait: Wait, now: float) -> str:
    """Return what is waited for, and since when."""
    since = "" if wait.since is None else f" (for {duration(max(0.0, now - wait.since))} so far)"
    return printable(wait.sentence) + since


def plain_line(moment: Moment) -> str:
    """Return the line that is printed now and then where nothing can be redrawn."""
    parts = [headline(moment)]
    if moment.phase == "running":
        parts.append(printable(moment.wait.sentence))
    for learner in moment.learners[:LEARNERS_SHOWN]:
        loss = "" if learner.loss is None else f" loss {learner.loss:.3f}"
        step = "" if learner.local_step is None else f", step {learner.local_step}"
        parts.append(
            f"learner {learner.learner}: {state_of(learner)}{step}{loss}, {number(learner.merges, 'merge')}"
        )
    more = len(moment.learners) - LEARNERS_SHOWN
    if more > 0:
        parts.append(f"{more} more learners")
    parts += [f"{alert.severity}: {printable(alert.sentence)}" for alert in moment.alerts]
    return " | ".join(parts)


def state_of(learner: LearnerMoment) -> str:
    """Return what a learner is doing, by its own word where there is one."""
    if learner.phase is None:
        return learner.link
    if learner.phase in NEEDS_LINK and learner.link != "connected":
        return f"{learner.phase}, {'no link' if learner.link in ('away', 'expected') else learner.link}"
    return learner.phase


def facts(moment: Moment) -> list[tuple[str, str]]:
    """Return what is known of the run, as names and sentences."""
    session, checkpoint, now = moment.session, moment.checkpoint, moment.now
    fragments = "not opened yet"
    if session.num_fragments is not None:
        fragments = f"{session.num_fragments} fragments in {session.dtype}"
    rounds = f"{moment.step} of {moment.total_steps} committed"
    if moment.no_ops:
        rounds += f", {moment.no_ops} without effect"
    if moment.superseded:
        rounds += f", {moment.superseded} more superseded by a restart"
    left = "unknown" if moment.eta_seconds is None else duration(moment.eta_seconds)
    pace = "unknown" if moment.merges_per_hour is None else f"{moment.merges_per_hour:,.1f}"
    saved = "none"
    if checkpoint.step is not None:
        saved = f"step {checkpoint.step}"
        if checkpoint.at is not None and checkpoint.seconds is not None:
            saved += (
                f", {ago(checkpoint.at, now)}, {size(checkpoint.written_bytes)} in {checkpoint.seconds:.2f} s"
            )
    if checkpoint.writing is not None:
        saved += f"; step {checkpoint.writing} is being written"
    discarded = ", ".join(f"{printable(reason)} {count}" for reason, count in moment.discarded.items())
    attempts = f"{moment.attempts} opened, {sum(moment.discarded.values())} discarded"
    writer = {
        "running": "the syncer is running",
        "ended": "the session has ended",
        "gone": "no process on this machine writes it",
        "unknown": "whether it is being written is not known",
    }[moment.writer]
    restarts = "" if not session.restarts else f", {number(session.restarts, 'restart')}"
    return [
        (
            "session",
            printable(f"{session.session_id}, Yeto {session.software_version}, {session.wall_clock}"),
        ),
        ("", f"{session.num_learners} learners, quorum {session.quorum}, {fragments}"),
        *([] if session.outer is None else [("", f"outer step {session.outer}")]),
        (moment.phase, waited(moment.wait, now)),
        ("rounds", rounds),
        ("pace", f"{pace} merges/h, time left {left}, last commit {ago(moment.last_commit_at, now)}"),
        ("attempts", attempts + (f" ({discarded})" if discarded else "")),
        (
            "mean",
            f"quorum {fine(moment.quorum_seconds_mean)}, grace {fine(moment.grace_seconds_mean)} "
            f"(at most {fine(session.grace_cap_seconds)}), merge {fine(moment.merge_seconds_mean)}",
        ),
        *_agreement(moment),
        ("checkpoint", saved),
        ("fragments", _fragments(moment)),
        (
            "tape",
            f"{number(session.records, 'record')}{restarts}; the last at {moment.at:.1f} s, {writer}"
            + (f", {duration(moment.silent_seconds)} ago" if moment.silent_seconds >= 1.0 else ""),
        ),
    ]


def _agreement(moment: Moment) -> list[tuple[str, str]]:
    """Return what the merges told of the learners; nothing where none did."""
    told = moment.agreement
    if not told.rounds:
        return []
    newest = [
        f"{one.fragment}: {_agreed(one)}"
        for one in moment.fragments[:FRAGMENTS_SHOWN]
        if (one.delta_cosine, one.norm_ratio, one.offset_ratio) != (None, None, None)
    ]
    more = len(moment.fragments) - FRAGMENTS_SHOWN
    return [
        (
            "agreement",
            f"cosine between deltas {_plain(told.delta_cosine)}, merged {_plain(told.norm_ratio)} times the "
            f"average, published {_plain(told.offset_ratio)} average deltas from the learners' mean "
            f"(last {number(told.rounds, 'round')})",
        ),
        ("", "newest by fragment: " + ", ".join(newest + ([f"{more} more"] if more > 0 else []))),
    ]


def _agreed(one: FragmentMoment) -> str:
    return " / ".join(_plain(value) for value in (one.delta_cosine, one.norm_ratio, one.offset_ratio))


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def learner_grid(moment: Moment, width: int, rows_max: int | None = None) -> Grid:
    """Return the learners; those that are waited for or not linked first where there is no room for all."""
    columns = [
        column.name
        for column in COLUMNS
        if width >= column.least_width and known_of_somebody(moment.learners, column.field)
    ]
    shown: Sequence[LearnerMoment] = moment.learners
    if rows_max is not None and len(shown) > rows_max:
        whom = set(moment.wait.whom)
        urgent = sorted(
            shown,
            key=lambda one: (one.learner not in whom, one.waited_since is None, one.link == "connected"),
        )
        shown = sorted(urgent[:rows_max], key=lambda one: one.learner)
    rows = []
    for learner in shown:
        cells = _cells(learner, moment.now)
        rows.append(tuple(cells[name] for name in columns))
    return Grid(tuple(columns), tuple(rows), len(moment.learners) - len(rows))


def round_grid(moment: Moment, width: int) -> Grid:
    """Return the open rounds."""
    wide = width >= 60
    rows = []
    for one in moment.rounds:
        # The sentence begins with the round's number, which stands in the first column.
        sentence = waited(one.wait, moment.now).partition(": ")[2]
        counts = f"{len(one.answered)} of {len(one.members)}, quorum {one.quorum}"
        middle = (f"{one.attempt}", f"{one.fragment}", counts) if wide else ()
        rows.append((f"{one.step}", *middle, sentence))
    columns = ("attempt", "fragment", "answers") if wide else ()
    return Grid(("round", *columns, "phase"), tuple(rows))


def warnings(moment: Moment) -> list[str]:
    """Return alerts and refusals as sentences."""
    lines = [
        printable(f"{alert.severity}: {alert.sentence}; {alert.remedy} (since {alert.since:.1f} s)")
        for alert in moment.alerts
    ]
    for refusal in moment.refusals[:REFUSALS_SHOWN]:
        who = "connection" if refusal.learner is None else f"learner {refusal.learner}, {refusal.what}"
        times = "once" if refusal.count == 1 else f"{refusal.count} times, the last"
        lines.append(printable(f"refused {who}: {refusal.reason}, {times} in record {refusal.seq}"))
    more = len(moment.refusals) - REFUSALS_SHOWN
    if more > 0:
        lines.append(f"{more} more sorts of refusals")
    return lines


def text(moment: Moment, width: int = 1000) -> str:
    """Return a whole moment as lines of text."""
    lines = [f"{name:<11} {value}".rstrip() for name, value in facts(moment)]
    grids = [learner_grid(moment, width)]
    if moment.rounds:
        grids.append(round_grid(moment, width))
    for grid in grids:
        lines += ["", *_aligned(grid)]
    problems = warnings(moment)
    return "\n".join(lines + ([""] if problems else []) + problems)


def screen(moment: Moment, width: int, height: int) -> Group:
    """Return a whole moment for a terminal of this size."""
    from rich.console import Group
    from rich.text import Text

    lines: list[Text | Table] = []
    for name, value in facts(moment):
        line = Text(f"{name:<11} ", style="bold")
        line.append(value, style="not bold")
        lines.append(line)
    problems = [
        Text(problem, style="red" if "critical" in problem else "yellow") for problem in warnings(moment)
    ]
    # Heads and margins of two tables, and lines that are folded, take about twelve lines.
    rows_max = max(4, height - len(lines) - len(problems) - len(moment.rounds) - 12)
    lines.append(_table(learner_grid(moment, width, rows_max)))
    if moment.rounds:
        lines.append(_table(round_grid(moment, width)))
    return Group(*lines, *problems)


def _cells(learner: LearnerMoment, now: float) -> dict[str, str]:
    state = state_of(learner)
    if learner.link != "connected" and learner.link_since is not None:
        state += f" {duration(max(0.0, now - learner.link_since))}"
    what = learner.waited_for.partition(" attempt")[0]
    if learner.waited_since is not None:
        what += f", {duration(max(0.0, now - learner.waited_since))}"
    stale = "-" if learner.staleness is None else str(learner.staleness)
    return {
        "learner": str(learner.learner),
        "state": printable(state),
        "step": "-" if learner.local_step is None else str(learner.local_step),
        "steps/s": "-" if learner.steps_per_second is None else f"{learner.steps_per_second:.2f}",
        "tokens/s": "-" if learner.tokens_per_second is None else rate_text(learner.tokens_per_second),
        "loss": "-" if learner.loss is None else f"{learner.loss:.3f}",
        "merges": str(learner.merges),
        "share": "-" if learner.contribution is None else f"{learner.contribution:.1%}",
        "stale": stale,
        "missed": str(learner.missed),
        "in": size(learner.bytes_in),
        "out": size(learner.bytes_out),
        "last answer": ago(learner.answered_at, now),
        "waited for": what or "-",
    }


def _fragments(moment: Moment) -> str:
    shown = [
        f"{one.fragment}: v{one.version}"
        + ("" if one.committed_at is None else f" {duration(max(0.0, moment.now - one.committed_at))}")
        for one in moment.fragments[:FRAGMENTS_SHOWN]
    ]
    more = len(moment.fragments) - FRAGMENTS_SHOWN
    return ", ".join(shown + ([f"{more} more"] if more > 0 else [])) or "none"


def _aligned(grid: Grid) -> list[str]:
    table = [grid.columns, *grid.rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return lines + ([f"and {grid.more} more"] if grid.more else [])


def _table(grid: Grid) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    caption = f"and {grid.more} more" if grid.more else None
    table = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in grid.columns:
        last = name == grid.columns[-1]
        table.add_column(name, overflow="fold" if last else "ellipsis", no_wrap=not last)
    for row in grid.rows:
        table.add_row(*map(Text, row))
    return table
