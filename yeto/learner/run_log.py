"""The log of a learner that programs read (``--log-jsonl``).

It has one JSON object a line, written at once, and never a NaN (null stands for one). ``at``
is Unix time in seconds. Fields by ``kind``:

* ``phase``: ``phase`` is ``loading``, ``waiting``, ``training``, ``frozen``, ``saving`` or ``finishing``;
* ``link``: ``link`` is ``connecting``, ``up`` or ``down``; ``detail`` says why or with whom;
* ``step``: ``local_step``, ``global_step``, ``loss`` (per target), ``targets`` of the step, ``tokens`` since
  the start, ``tokens_per_second``, ``learning_rate``, ``gradient_norm``, ``merges``, ``staleness``, ``link``;
* ``broadcast``: ``fragment``, ``version``, ``taken`` (``overwrote``, ``blended``, ``carried``,
  ``rolled_back``, ``unchanged``, ``ignored``), ``merges``, ``global_step``, ``local_step``;
* ``push``: ``fragment``, ``step`` (the round), ``attempt``, ``base_version``, ``staleness``, ``c_steps``,
  ``c_tokens``, ``local_step``;
* ``eval``: ``loss`` (per target), ``targets``, ``rows``, ``local_step``, ``global_step``;
* ``notice``: ``text``;
* ``exit``: ``code``, ``reason``, ``local_step``, ``global_step``, ``merges``, ``tokens``, ``empty_groups``,
  ``seconds`` (per section of the training thread, ``unaccounted`` and ``total`` among them).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from yeto.errors import ConfigError


class RunLog:
    """A file of JSON lines, appended to; without a path it takes everything and keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        """Open the log.

        Raises:
            ConfigError: it cannot be opened.
        """
        self._file: TextIO | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--log-jsonl {path}: {error.strerror}") from error

    def write(self, kind: str, fields: Mapping[str, Any]) -> str | None:
        """Append a record; return what to tell a person if the log ends here."""
        if self._file is None:
            return None
        record = {"kind": kind, "at": round(time.time(), 6)} | {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            # A full disk is no reason to lose a training.
            self.close()
            return f"--log-jsonl ends here: {error.strerror}; training goes on"
        return None

    def close(self) -> None:
        """Close the file; what could not be written was told when it happened."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
