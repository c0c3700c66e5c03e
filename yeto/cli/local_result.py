"""After a local run: what the result is worth on the held-out rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from yeto.learner.task import Evaluation
    from yeto.text.config import TextConfig


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
