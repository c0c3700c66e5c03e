"""Before and after a local run: rows held out from training, and what the result is worth on them."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from yeto.errors import ConfigError

if TYPE_CHECKING:
    from yeto.learner.task import Evaluation
    from yeto.text.config import TextConfig


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
    from yeto.text.formats import chat_reader
    from yeto.tuning.rows import Cursor, open_source

    assert config.data is not None
    source = open_source(config.data, revision=config.data_revision)
    folder.mkdir(parents=True, exist_ok=True)
    train, heldout = folder / "train.jsonl", folder / "heldout.jsonl"
    tail: deque[Mapping[str, Any]] = deque()
    kept = 0
    read = chat_reader(config)
    with train.open("w", encoding="utf-8") as file:
        for row in source.rows(Cursor()):
            read(row)
            tail.append(row.value)
            if len(tail) > config.eval_rows:
                file.write(_line(tail.popleft()))
                kept += 1
    if kept == 0:
        raise ConfigError(
            f"--data {config.data}: {len(tail)} rows, and --eval-rows {config.eval_rows} would hold out "
            "all of them; lower --eval-rows or name other rows with --eval-data"
        )
    heldout.write_text("".join(_line(row) for row in tail), encoding="utf-8")
    return train, heldout


def _line(row: Mapping[str, Any]) -> str:
    # Dates and the like, which parquet knows and JSON does not, are never read by a chat format.
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"


def score(config: TextConfig, result: Path) -> tuple[Evaluation, Evaluation]:
    """Return the held-out loss of the base model and of the exported result.

    Args:
        config: the learners' settings, with ``eval_data``.
        result: the exported folder: a PEFT adapter (LoRA) or a whole model (full tuning).
    """
    from yeto.text.evaluate import heldout_loss

    config = attrs.evolve(config, learner_id=0)
    base = heldout_loss(config.model, None, config)
    if config.tuning == "lora":
        return base, heldout_loss(config.model, result, config)
    return base, heldout_loss(str(result), None, config)


def print_scores(base: Evaluation, tuned: Evaluation) -> None:
    """Print base and result side by side: cross-entropy per supervised token, and perplexity."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{base.rows} held-out rows, {base.targets} supervised tokens", title_justify="left")
    table.add_column("model")
    table.add_column("cross-entropy", justify="right")
    table.add_column("perplexity", justify="right")
    for name, outcome in (("base", base), ("fine-tuned", tuned)):
        table.add_row(name, f"{outcome.loss:.4f}", f"{math.exp(min(outcome.loss, 700.0)):,.2f}")
    Console().print(table)
    if tuned.loss >= base.loss:
        print("the fine-tuned model is not better on these rows: train longer, or try another --inner-lr")
