"""What is kept of a comparison, and how it goes on after whatever ended it.

``config.json`` says what is compared; ``results.jsonl`` has one line for each run that is over, appended and
fsynced before the next begins. A run without a line is begun anew, in an empty folder: nothing that is
finished is repeated, and nothing that is half done is believed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

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

    def run(self, name: str, seed: int | None) -> Path:
        """Return the folder of one run."""
        return self.path / "runs" / (name if seed is None else f"{name}-seed{seed}")

    def begin(self, config: dict[str, Any], *, resume: bool) -> list[Result]:
        """Write what is compared, or find it there; return the runs that are over.

        Arms, seeds and jobs may differ from those of before: they are more, or fewer, of the same. What
        decides a figure may not.

        Raises:
            ConfigError: the folder holds another comparison, or one although none was to be gone on with.
        """
        if self._config.exists():
            if not resume:
                raise ConfigError(
                    f"--output-dir {self.path} holds a comparison; go on with it (--resume) or name another"
                )
            self._check(json.loads(self._config.read_text(encoding="utf-8")), config)
        elif resume:
            raise ConfigError(f"--resume: there is no comparison in --output-dir {self.path}")
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self._config, {"format": FORMAT, **config})
        return list(self._read())

    def _check(self, before: dict[str, Any], config: dict[str, Any]) -> None:
        if before.get("format") != FORMAT:
            raise ConfigError(f"{self._config} has format {before.get('format')}, not {FORMAT}")
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
        for line in whole.splitlines():
            yield _from_json(json.loads(line))

    def keep(self, result: Result) -> None:
        """Append a run that is over; it is on the disk afterwards."""
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def write_json(path: Path, content: Any) -> None:
    """Replace a file of JSON in one step."""
    replace_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replace a file in one step."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _from_json(fields: dict[str, Any]) -> Result:
    fields["targets"] = tuple(fields["targets"])
    fields["curve"] = tuple((tokens, loss) for tokens, loss in fields["curve"])
    return Result(**fields)
