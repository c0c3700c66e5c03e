"""What is kept of a comparison, and how it goes on after whatever ended it.

``config.json`` says what is compared; ``results.jsonl`` has one line for each run that is over, appended and
fsynced before the next begins. A run without a line is begun anew, in an empty folder: nothing that is
finished is repeated, and nothing that is half done is believed. One process works in a folder at a time: a
second would empty the folders of the runs that the first is at.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from attrs import asdict, field, frozen

from comparing.processes import RunFailed
from yeto.errors import ConfigError

FORMAT = 1
"""Version of ``config.json``, ``results.jsonl`` and ``summary.json``."""

BASE = "base"


@frozen(kw_only=True)
class Result:
    """One run that is over."""

    name: str
    """``base``, ``baseline-mN``, or an arm's."""
    seed: int | None
    """None for the untrained model."""
    devices: int
    """M x G; 0 for the untrained model."""
    steps: int
    """Optimizer steps of each device."""
    loss: float
    """Held-out cross-entropy per target token."""
    scored_targets: int
    scored_rows: int
    tokens: int = 0
    """Raw tokens trained on, all devices together."""
    targets: tuple[int, ...] = field(default=(), repr=False)
    """Target tokens of each step, all devices together."""
    curve: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    """(raw tokens, training loss per target)."""
    training_seconds: float = 0.0
    seconds: float = 0.0
    """Of the whole run, with starts, export and scoring."""
    before_finish: float | None = None
    """Held-out cross-entropy of the checkpoint at the cut-off, where that was asked for."""
    in_flight_steps: float | None = None
    measured: dict[str, Any] | None = None
    """Figures of the tape; see :class:`comparing.measured.Measured`."""

    @property
    def key(self) -> tuple[str, int | None]:
        """What names it."""
        return self.name, self.seed


class Folder:
    """The folder of a comparison."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = path / "results.jsonl"
        self._config = path / "config.json"
        self._lock: int | None = None

    def run(self, name: str, seed: int | None) -> Path:
        """Return the folder of one run."""
        return self.path / "runs" / (name if seed is None else f"{name}-seed{seed}")

    def begin(self, config: dict[str, Any], *, resume: bool) -> list[Result]:
        """Write what is compared, or find it there; return the runs that are over.

        Arms, seeds and jobs may differ from those of before: they are more, or fewer, of the same. What
        decides a figure may not.

        Raises:
            ConfigError: the folder holds another comparison, or one although none was to be gone on with; a
                process works in it; what stands in it is damaged.
            OSError: it cannot be written.
        """
        if resume and not self._config.exists():
            raise ConfigError(f"--resume: there is no comparison in --output-dir {self.path}")
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--output-dir {self.path} is no folder; name another")
        self.path.mkdir(parents=True, exist_ok=True)
        self._take()
        if self._config.exists():
            if not resume:
                raise ConfigError(
                    f"--output-dir {self.path} holds a comparison; go on with it (--resume) or name another"
                )
            before = self._before()
            self._check(before, config)
            # Arms that are left out this time still say what their finished runs were.
            config = {**config, "arms": {**before["arms"], **config["arms"]}}
        done = list(self._read())
        write_json(self._config, {"format": FORMAT, **config})
        return done

    def _take(self) -> None:
        """Keep others out of the folder until this process ends."""
        if self._lock is not None:
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"--output-dir {self.path}: another comparison is at work in it; wait for it or name another"
            ) from None
        self._lock = descriptor

    def _before(self) -> dict[str, Any]:
        """Return what was compared in this folder."""
        try:
            before = json.loads(self._config.read_bytes())
        except ValueError:
            before = None
        if type(before) is dict and before.get("format", FORMAT) != FORMAT:
            raise ConfigError(
                f"{self._config} has format {before['format']}, not {FORMAT}; name another folder"
            )
        if type(before) is not dict or not all(type(before.get(name)) is dict for name in ("recipe", "arms")):
            raise ConfigError(
                f"{self._config} is damaged, so nobody can say what the results beside it are of; "
                "name another --output-dir"
            )
        return before

    def _check(self, before: dict[str, Any], config: dict[str, Any]) -> None:
        old, new = before["recipe"], config["recipe"]
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                raise ConfigError(
                    f"--resume: {name} was {old.get(name)} and is {new.get(name)} now; what was measured "
                    "before could not be compared with what would be"
                )
        for name in before["arms"].keys() & config["arms"].keys():
            if before["arms"][name] != config["arms"][name]:
                raise ConfigError(f"--resume: the arm {name} means something else now")

    def _read(self) -> Iterator[Result]:
        """Yield what is there; a last line that was cut off is removed, its run was not over."""
        if not self.results.exists():
            return
        content = self.results.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with self.results.open("r+b") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                yield _from_json(json.loads(line))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{self.results}: line {number} is damaged; delete it, and its run is done again"
                ) from error

    def keep(self, result: Result) -> None:
        """Append a run that is over; it is on the disk afterwards.

        Raises:
            RunFailed: a loss of it is no number.
            OSError: it cannot be written; nothing of it stands there.
        """
        try:
            line = json.dumps(asdict(result), allow_nan=False) + "\n"
        except ValueError as error:
            raise RunFailed("a loss of it is not finite: it diverged; try a smaller --inner-lr") from error
        with self.results.open("ab", buffering=0) as file:
            before, rest = file.tell(), memoryview(line.encode())
            try:
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                # Or the next one would be appended to the half of this.
                file.truncate(before)
                raise


def write_json(path: Path, content: Any) -> None:
    """Replace a file of JSON in one step."""
    replace_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replace a file in one step."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _from_json(fields: dict[str, Any]) -> Result:
    """Return the result of a line.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is none.
    """
    fields["targets"] = tuple(fields["targets"])
    fields["curve"] = tuple((int(tokens), float(loss)) for tokens, loss in fields["curve"])
    result = Result(**fields)
    counts = (result.devices, result.steps, result.scored_targets, result.scored_rows, result.tokens)
    if not all(type(count) is int and count >= 0 for count in (*counts, *result.targets)):
        raise ValueError("a count is none")
    if type(result.name) is not str or type(result.seed) not in (int, NoneType):
        raise TypeError("it is nobody's")
    # NaN is above nothing.
    if not (type(result.loss) is float and 0.0 < result.loss < math.inf):
        raise ValueError("its loss is none")
    return result
