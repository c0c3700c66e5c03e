"""Summed cross-entropy over the targets of a block, at the cost of the targets and not of the block.

The rule: the sum is exact, the mean is somebody else's. Micro batches, ranks and accumulation steps have
different numbers of targets; only sums can be put together again.

A vocabulary is large and a chat block has loss on a fraction of its tokens, so logits are made only for
positions that predict a target, and turned to float32 only a chunk at a time.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from yeto.text.lora import beneath

CHUNK_TARGETS = 1024
"""Targets whose float32 logits exist at one time: 0.6 GB at a vocabulary of 150,000."""


def summed_cross_entropy(
    model: Any, ids: Tensor, weights: Tensor, positions: Tensor | None, **options: Any
) -> Tensor:
    """Return the cross-entropy (nats) summed over the weighted targets.

    Args:
        model: causal language model; called without a cache and without an attention mask.
        ids: token ids, int64, shape (batch, length).
        weights: 1 where the token is a target of the token before it, shape (batch, length); column 0 is
            never a target.
        positions: position ids, int64, shape (batch, length); where they fall back, a document begins that
            sees nothing before itself. None numbers every row from 0.
        options: passed to the model.

    Returns:
        A scalar, float32; 0 if nothing is weighted.
    """
    wanted = weights[:, 1:] > 0
    columns = wanted.any(dim=0).nonzero().squeeze(1)
    if positions is not None:
        options["position_ids"] = positions
    if keeps_logits(model):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=columns, **options).logits
    else:
        logits = model(input_ids=ids, use_cache=False, **options).logits[:, columns]
    chosen = wanted[:, columns]
    targets = ids[:, 1:][:, columns][chosen]
    # Selecting copies; with one row every kept position is wanted and a view will do.
    flat = logits.flatten(0, 1) if logits.shape[0] == 1 else logits[chosen]
    # Begins with a zero that depends on the model, so that a block without targets has (zero) gradients.
    total: Tensor = flat[:0].float().sum()
    for start in range(0, len(flat), CHUNK_TARGETS):
        piece, target = flat[start : start + CHUNK_TARGETS], targets[start : start + CHUNK_TARGETS]
        if len(flat) > CHUNK_TARGETS and torch.is_grad_enabled():
            part: Tensor = checkpoint(_summed, piece, target, use_reentrant=False)
        else:
            part = _summed(piece, target)
        total = total + part
    return total


def keeps_logits(model: Any) -> bool:
    """Tell whether a model can be asked for the logits of some positions only."""
    return "logits_to_keep" in inspect.signature(beneath(model).forward).parameters


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")
