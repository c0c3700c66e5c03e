"""The figure of merit: cross-entropy of a result on the held-out rows, in a process of its own.

Of an arm it is the syncer's checkpoint that is exported and scored, never what a learner has; of a
synchronous group its own result, which is the only one there is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attrs import frozen

from comparing.processes import family
from yeto.text.config import TextConfig


@frozen(kw_only=True)
class Score:
    """Held-out loss of one result."""

    loss_sum: float
    """Cross-entropy in nats, summed over the targets."""
    targets: int
    rows: int

    @property
    def loss(self) -> float:
        """Cross-entropy per target token."""
        return self.loss_sum / self.targets


async def score(
    config: TextConfig, folder: Path, result: Path | None, checkpoint: Path | None = None, *, threads: int
) -> Score:
    """Score a result, or the untrained model.

    Args:
        config: names model and held-out rows.
        folder: for the log, and for the figure on its way here.
        result: adapter or model folder; None for the model as it is.
        checkpoint: export this to ``result`` first.
        threads: of the process.

    Raises:
        RunFailed: it cannot be exported or scored.
    """
    figure = folder / "score.json"
    async with family() as children:
        child = await children.start(
            "scoring", folder / "scoring.log", score_to, config, result, checkpoint, figure, threads
        )
        await child.succeed()
    return Score(**json.loads(figure.read_text(encoding="utf-8")))


def score_to(
    config: TextConfig, result: Path | None, checkpoint: Path | None, figure: Path, threads: int
) -> None:
    """Export, score and write the figure; what the process does."""
    import torch

    from yeto.text.evaluate import heldout_loss
    from yeto.text.export import export

    torch.set_num_threads(threads)
    if checkpoint is not None:
        assert result is not None
        # What a run published is scored, and not what an export makes of it.
        export(
            checkpoint,
            config.model,
            result,
            overwrite=True,
            lookahead="keep",
            say=lambda line: print(line, flush=True),
        )
    if result is None or config.tuning == "lora":
        found = heldout_loss(config.model, result, config)
    else:
        found = heldout_loss(str(result), None, config)
    _write(figure, {"loss_sum": found.loss_sum, "targets": found.targets, "rows": found.rows})


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
