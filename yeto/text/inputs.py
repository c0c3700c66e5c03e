"""What is done with a task's model, template and rows before anything is loaded or started for them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from yeto.errors import ConfigError
from yeto.text.config import TextConfig
from yeto.text.formats import chat_reader
from yeto.text.template_files import check_template
from yeto.tuning.identity import check_model
from yeto.tuning.rows import Cursor, open_source

HALVES: Final = "backslashreplace"
"""How half a character, in a column that nothing reads, gets into a file: as JSON spells it, ``\\ud800``."""


def check_inputs(config: TextConfig) -> None:
    """Refuse a wrong name or format here, where it is one line, and not in a process that was started for it.

    Raises:
        ConfigError: model, template or rows are not there, or cannot be what they are named as.
        DataError: the first row cannot be used.
    """
    check_template(check_model(config.model, config.model_revision), config)
    read = chat_reader(config)
    for flag, name in (("--data", config.data), ("--eval-data", config.eval_data)):
        if name is not None:
            source = open_source(name, revision=config.data_revision, flag=flag)
            # A wrong format is wrong in the first row; all of them may be many.
            for row in islice(source.rows(Cursor()), 1):
                read(row)


def hold_out(config: TextConfig, folder: Path) -> tuple[Path, Path]:
    """Split a data source: its last ``--eval-rows`` rows are held out, the others are for training.

    Every row passes here, so a wrong one is found before anything is started, and named as it was given.

    Args:
        config: names the source and how many rows to hold out.
        folder: where ``train.jsonl`` and ``heldout.jsonl`` are written.

    Raises:
        ConfigError: there is no such source, or it would have no row left to train on.
        DataError: a row cannot be read, or is no chat.
    """
    assert config.data is not None
    source = open_source(config.data, revision=config.data_revision)
    folder.mkdir(parents=True, exist_ok=True)
    train, heldout = folder / "train.jsonl", folder / "heldout.jsonl"
    tail: deque[Mapping[str, Any]] = deque()
    kept = 0
    read = chat_reader(config)
    with train.open("w", encoding="utf-8", errors=HALVES) as file:
        for row in source.rows(Cursor()):
            read(row)
            tail.append(row.value)
            if len(tail) > config.eval_rows:
                file.write(_line(tail.popleft()))
                kept += 1
    if kept == 0:
        fewer = f"give --eval-rows {max(len(tail) // 4, 1)}, or " if len(tail) > 1 else ""
        raise ConfigError(
            f"--data {config.data}: {len(tail)} rows, and --eval-rows {config.eval_rows} would hold out "
            f"all of them; {fewer}name other rows with --eval-data"
        )
    heldout.write_text("".join(_line(row) for row in tail), encoding="utf-8", errors=HALVES)
    return train, heldout


def _line(row: Mapping[str, Any]) -> str:
    # Dates and the like, which parquet knows and JSON does not, are never read by a chat format.
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"
