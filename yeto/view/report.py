"""A report: one page that holds everything itself, made of a tape and, for the loss, of learners' logs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attrs import frozen

from yeto.errors import ConfigError, TapeError
from yeto.tape import open_tape, printable
from yeto.view.follow import Watcher
from yeto.view.history import history_json
from yeto.view.json import moment_json
from yeto.view.logs import JsonLog
from yeto.view.page import whole_page

LOSS_POINTS = 600
"""Of each learner's curve."""
SLICE_SECONDS = 0.2
"""Between two looks at how far the reading is."""

_ID = re.compile(r"(\d+)(?!.*\d)")


@frozen(kw_only=True)
class LossCurve:
    """The loss that one learner logged, by the round that was committed when it did."""

    name: str
    step: tuple[int, ...]
    loss: tuple[float, ...]
    """Mean over the steps of each place, per target."""

    def to_json(self) -> dict[str, Any]:
        """Return it as the page takes it."""
        return {
            "name": self.name,
            "step": list(self.step),
            "loss": [float(f"{one:.6g}") for one in self.loss],
        }


def read_data(
    tape: Path, logs: Sequence[Path], *, progress: Callable[[float], None] = lambda share: None
) -> dict[str, Any]:
    """Fold a tape into what a report shows, as plain JSON values.

    Args:
        tape: it may still be written.
        logs: learners' JSON logs (--log-jsonl).
        progress: told now and then which share of the tape is read.

    Raises:
        YetoError: the tape is missing, empty or damaged, or a log cannot be read.
    """
    open_tape(tape).close()
    watcher = Watcher(tape, history=True)
    size = max(1, tape.stat().st_size)
    while True:
        watcher.look(within=SLICE_SECONDS)
        if not watcher.behind:
            break
        progress(min(1.0, watcher.done_bytes / size))
    moment = watcher.moment()
    if moment is None:
        raise TapeError(f"{tape}: holds no record: its run has not begun")
    assert watcher.history is not None, "it was asked for"
    return {
        "moment": moment_json(moment),
        "history": history_json(watcher.history),
        "loss": [curve.to_json() for curve in map(read_loss, logs) if curve.step],
        "made": {"tape": tape.name, "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")},
    }


def read_loss(path: Path) -> LossCurve:
    """Return the loss curve of a learner's log.

    Raises:
        ConfigError: it cannot be read.
    """
    sums: dict[int, tuple[float, int]] = {}
    for entry in _entries(path):
        step, loss = entry.get("global_step"), entry.get("loss")
        if entry.get("kind") == "step" and isinstance(step, int) and isinstance(loss, int | float):
            total, count = sums.get(step, (0.0, 0))
            sums[step] = total + loss, count + 1
    width = max(1, -(-len(sums) // LOSS_POINTS))
    steps = sorted(sums)
    points = [steps[begin : begin + width] for begin in range(0, len(steps), width)]
    means = (sum(sums[step][0] for step in one) / sum(sums[step][1] for step in one) for one in points)
    found = _ID.search(path.stem)
    name = f"learner {int(found[1])}" if found else printable(path.stem)
    return LossCurve(name=name, step=tuple(one[0] for one in points), loss=tuple(means))


def _entries(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        path.stat()  # whoever follows a log waits for one that is not there
        yield from JsonLog(path).poll()
    except OSError as error:
        raise ConfigError(f"--log-jsonl {path}: {error.strerror}") from error


def write_page(output: Path, data: dict[str, Any]) -> int:
    """Write a report so that whoever sees the file sees all of it; return its size in bytes.

    Raises:
        ConfigError: it cannot be written.
    """
    content = whole_page(data).encode()
    aside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        try:
            with aside.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(output)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"-o {output}: cannot be written: {error.strerror}") from error
    return len(content)
