"""The one contract between the training loop and whatever is being trained.

The loop knows tensors, counts and optimizer steps. What a row is, how a loss is computed and what a saved
result looks like belongs to the task. A causal language model and a diffusion model plug in behind the same
seven methods; the loop never asks which one it holds.

The rule of the counts: a task never divides. ``loss`` is a *sum* over ``Batch.targets`` units (target tokens,
predicted elements), and the loop divides the sum of a whole accumulation group by the group's exact count.
A mean of means would weigh short batches too much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import field, frozen
from torch import nn


@frozen(kw_only=True)
class Batch:
    """One micro batch, with the two counts the loop needs."""

    inputs: Any = field(repr=False)
    """What the task's own ``loss`` understands; opaque to the loop."""
    targets: int
    """Units the summed loss is divided by: weighted target tokens, or predicted elements. May be 0."""
    tokens: int
    """Raw units trained on: packed tokens including those without a loss, or samples."""
    position: Any = field(default=None, repr=False)
    """Where the data goes on behind this batch: what JSON can hold, understood by ``Task.batches`` alone."""


@frozen(kw_only=True)
class Evaluation:
    """The outcome of one pass over the held-out rows."""

    loss_sum: float
    """Summed loss over all targets (nats for a language model)."""
    targets: int
    """Number of targets in the sum; 0 only in one rank's part."""
    rows: int
    """Held-out rows of the whole island."""

    @property
    def loss(self) -> float:
        """Mean loss per target."""
        return self.loss_sum / self.targets


class Task(Protocol):
    """A model with its data. Every method is called on the training thread only."""

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return every trained parameter under its canonical name, each of dtype float32.

        Names are full dotted names without the pieces that wrappers add. The parameters are the live ones:
        the loop optimises them and overwrites their data with what it receives. Their values right after
        construction must depend on the configuration and the root seed only, never on the learner.
        """
        ...

    def binding(self) -> Mapping[str, Any]:
        """Return what all learners of a run must share, as JSON without floats and without paths.

        Model identity, tuning, adapter rank, alpha and targets, root seed, number of learners.
        """
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return facts for people and for export, as JSON: model name, trainable share, dtype, device."""
        ...

    def batches(self, start: Any = None) -> Iterator[Batch]:
        """Yield micro batches for ever; called once. The order depends on configuration and seed only.

        Args:
            start: the ``position`` of a batch that an earlier process got; the first one here is the batch
                behind it. None begins at the beginning.

        Raises:
            ConfigError: the position belongs to other rows or to other settings.
        """
        ...

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss of ``batch`` summed over its targets: a differentiable scalar, float32."""
        ...

    def evaluate(self) -> Evaluation | None:
        """Measure the current weights on the held-out rows, without gradients; None when there are none.

        All ranks of an island call it together. Each returns the sums over a part of its own, and all parts
        are the whole; which one goes where is the task's to say.

        Leaves the model in training mode and draws nothing from the random state training uses.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the current trained weights into ``folder`` in the form users of the model load."""
        ...
