"""The live view of a run on this machine: the tape's fold beside what each learner logs.

The tape knows rounds, merges and staleness; loss and speed are known to the learners only, whose JSON logs
are followed line by line. On a terminal one table is redrawn in place; elsewhere a line is printed every few
seconds and whenever something happens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define

from yeto.view.run import LearnerView, RunView

if TYPE_CHECKING:
    from rich.table import Table

LOSS_SMOOTHING = 0.1
"""Weight of a new sample in the loss shown: single steps are too noisy to compare learners by."""


NEEDS_LINK = ("waiting", "training", "frozen")
"""Phases in which a missing link is worth a word: before and after there is none."""


class JsonLog:
    """Follows a learner's JSON log; a line that is still being written waits for the next look."""

    def __init__(self, path: Path) -> None:
        """Begin at the log's first line; the file need not be there yet."""
        self._path = path
        self._done = 0

    def poll(self) -> Iterator[Mapping[str, Any]]:
        """Yield the objects of the lines that became whole since the last look."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._done)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._done += len(line)
                try:
                    entry = json.loads(line)
                except ValueError:
                    # The log is for eyes; a line cut by a kill is not worth an error.
                    continue
                if isinstance(entry, dict):
                    yield entry


@define
class LearnerPulse:
    """What a learner says of itself."""

    phase: str = "starting"
    local_step: int = 0
    loss: float | None = None
    """Per target, smoothed."""
    tokens_per_second: float | None = None

    def feed(self, entry: Mapping[str, Any]) -> None:
        """Take the next line of its log; kinds and values it does not know are passed over."""
        if entry.get("kind") == "phase":
            self.phase = str(entry.get("phase"))
        elif entry.get("kind") == "exit":
            self.phase = "done" if entry.get("code") == 0 else f"ended with code {entry.get('code')}"
        elif entry.get("kind") == "step":
            self.local_step = int(entry.get("local_step") or 0)
            self.tokens_per_second = entry.get("tokens_per_second")
            loss = entry.get("loss")
            if isinstance(loss, int | float):
                self.loss = loss if self.loss is None else self.loss + LOSS_SMOOTHING * (loss - self.loss)


def headline(run: RunView) -> str:
    """Return one line: rounds done and time left, or what else is going on."""
    total = "?" if run.total_steps is None else run.total_steps
    left = run.seconds_left()
    if run.phase != "rounds":
        return f"round {run.step}/{total}, {run.why or 'starting'}"
    return f"round {run.step}/{total}, " + ("time left unknown" if left is None else f"{duration(left)} left")


def plain_line(run: RunView, pulses: Mapping[int, LearnerPulse]) -> str:
    """Return the line that is printed where nothing can be redrawn."""
    parts = [headline(run)]
    for learner, pulse in sorted(pulses.items()):
        loss = "" if pulse.loss is None else f" loss {pulse.loss:.3f}"
        view = run.learner(learner)
        parts.append(
            f"learner {learner}: {_state(view, pulse)}, step {pulse.local_step}{loss}, {view.merges} merges"
        )
    return " | ".join(parts)


def table(run: RunView, pulses: Mapping[int, LearnerPulse]) -> Table:
    """Return the table that is redrawn on a terminal."""
    from rich.table import Table

    result = Table(
        title=headline(run),
        title_justify="left",
        title_style="",
        caption=run.why,
        caption_justify="left",
    )
    result.add_column("learner")
    for column in ("state", "local step", "loss", "tokens/s", "merges", "staleness", "contribution"):
        result.add_column(column, justify="right")
    for learner, pulse in sorted(pulses.items()):
        view = run.learner(learner)
        share = run.contribution(learner)
        result.add_row(
            str(learner),
            _state(view, pulse),
            str(pulse.local_step),
            "-" if pulse.loss is None else f"{pulse.loss:.3f}",
            "-" if pulse.tokens_per_second is None else f"{pulse.tokens_per_second:,.0f}",
            str(view.merges),
            "-" if view.staleness is None else str(view.staleness),
            "-" if share is None else f"{share:.0%}",
        )
    return result


def duration(seconds: float) -> str:
    """Return a time span for people, to the second."""
    return str(timedelta(seconds=round(seconds)))


def _state(view: LearnerView, pulse: LearnerPulse) -> str:
    return f"{pulse.phase}, no link" if pulse.phase in NEEDS_LINK and not view.linked else pulse.phase
