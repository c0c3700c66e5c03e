"""What learners say of themselves: the JSON logs of a run on this machine, followed line by line.

The tape knows rounds, merges and staleness; loss is known to the learners only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import define

from yeto.view.model import LearnerLive

NUMBER_MAX = 1e300
"""No learner has such a loss, and sums of a few of them are still finite."""
LOSS_SMOOTHING = 0.1
"""Weight of a new sample in the loss shown: single steps are too noisy to compare learners by."""


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
            if os.fstat(file.fileno()).st_size < self._done:
                self._done = 0  # the run has begun another log in its place
            file.seek(self._done)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._done += len(line)
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
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
            self.local_step = int(_number(entry.get("local_step")) or 0)
            self.tokens_per_second = _number(entry.get("tokens_per_second"))
            loss = _number(entry.get("loss"))
            if loss is not None:
                self.loss = loss if self.loss is None else self.loss + LOSS_SMOOTHING * (loss - self.loss)


def _number(value: object) -> float | None:
    """Return a number that can be shown; None for anything else, such as the NaN of another writer."""
    # The comparison holds for no NaN, and lets no number through that a float cannot hold.
    return value if isinstance(value, int | float) and abs(value) <= NUMBER_MAX else None


class LogFolder:
    """The logs ``learner-N.jsonl`` of a folder, as ``yeto run --role local`` has them beside its tape."""

    def __init__(self, folder: Path) -> None:
        """Begin at the first line of every log; neither folder nor logs need be there yet."""
        self._folder = folder
        self._logs: dict[int, JsonLog] = {}
        self._pulses: dict[int, LearnerPulse] = {}

    def look(self, num_learners: int) -> Mapping[int, LearnerLive]:
        """Return what the learners that have a log say by now."""
        for learner in range(num_learners):
            if learner not in self._logs:
                path = self._folder / f"learner-{learner}.jsonl"
                if not path.exists():
                    continue
                self._logs[learner], self._pulses[learner] = JsonLog(path), LearnerPulse()
            # What cannot be read now says nothing now; the tape does not need it.
            with suppress(OSError):
                for entry in self._logs[learner].poll():
                    self._pulses[learner].feed(entry)
        return {
            learner: LearnerLive(
                phase=pulse.phase,
                loss=pulse.loss,
                local_step=pulse.local_step or None,
                tokens_per_second=pulse.tokens_per_second,
            )
            for learner, pulse in self._pulses.items()
        }
