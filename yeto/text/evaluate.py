"""Held-out loss: each row by itself, every target once.

Rows are neither packed nor cut short: a row longer than ``seq_len`` is scored in windows of it, shorter ones
are padded on the right, where a causal model cannot see. So the figure does not depend on packing, on the
order of rows or on the batch size, and base and tuned models are compared like for like.

The ranks of an island deal the batches out among themselves. Which rows share a batch does not depend on how
many ranks there are, so the sums over all of them are those that one rank would find.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from peft import PeftModel

from yeto.errors import DataError
from yeto.learner.task import Evaluation
from yeto.text.config import TextConfig
from yeto.text.lora import quiet
from yeto.text.loss import summed_cross_entropy
from yeto.text.masks import Encoded
from yeto.text.model import load_base, require_vocabulary
from yeto.text.stream import encoder_of
from yeto.text.tokenizer import load_tokenizer
from yeto.tuning.devices import choose_device, compute_in
from yeto.tuning.rows import Cursor, open_source

BATCH_TOKENS = 4096
"""Padded tokens of one forward pass."""


def heldout_rows(config: TextConfig, tokenizer: Any) -> list[Encoded]:
    """Tokenize the first ``--eval-rows`` rows of ``--eval-data``.

    Raises:
        DataError: a row cannot be used, or none of them has a target.
    """
    assert config.eval_data is not None
    encoder = encoder_of(config, tokenizer)
    source = open_source(config.eval_data, revision=config.data_revision, flag="--eval-data")
    rows = list(encoder.each(islice(source.rows(Cursor()), config.eval_rows)))
    if not any(row.weights[1:].any() for row in rows):
        raise DataError(f"--eval-data {config.eval_data}: {len(rows)} rows without a supervised token")
    return rows


def heldout_loss(model: str, adapter: Path | None, config: TextConfig) -> Evaluation:
    """Score a model, or a model with an adapter folder, on the held-out rows of a configuration.

    The tokenizer is the configuration's, so base and tuned models are scored on the same tokens; on a CPU
    everything is float32.

    Args:
        model: folder or Hugging Face id; need not be the configuration's model.
        adapter: a PEFT adapter folder, or None.
        config: says which rows, and how they are read.

    Raises:
        ConfigError: the model does not load.
        DataError: a held-out row cannot be used, by the model either, or none of them has a target.
    """
    rows = heldout_rows(config, load_tokenizer(config))
    device = choose_device(config.device)
    revision = config.model_revision if model == config.model else None
    scored = evolve(config, model=model, model_revision=revision)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    module = load_base(scored, dtype)
    require_vocabulary(module, [row.ids for row in rows], model)
    if adapter is not None:
        with quiet():
            module = PeftModel.from_pretrained(module, str(adapter))
    module.to(device)
    return evaluate_rows(module, rows, seq_len=config.seq_len, device=device, compute_dtype=dtype)


def evaluate_rows(
    module: Any,
    rows: Sequence[Encoded],
    *,
    seq_len: int,
    device: torch.device,
    compute_dtype: torch.dtype,
    rank: int = 0,
    num_ranks: int = 1,
    is_sharded: bool = False,
) -> Evaluation:
    """Return the summed loss of a model over rows; leaves its mode and the random state as they were.

    Args:
        module: the model.
        rows: all of them, on every rank.
        seq_len: longest window.
        device: of the model.
        compute_dtype: of its matrix products.
        rank: scores its part of the batches only; ``rows`` of the result counts all.
        num_ranks: of the island.
        is_sharded: a pass takes all ranks, so all must take equally many.
    """
    windows = [window for row in rows for window in _windows(row, seq_len)]
    # Equal lengths side by side need little padding.
    windows.sort(key=lambda window: -len(window.ids))
    training = module.training
    module.eval()
    batches = list(_batches(windows))
    own = batches[rank::num_ranks]
    idle = -(-len(batches) // num_ranks) - len(own) if is_sharded else 0
    losses, targets = [], 0
    try:
        with torch.no_grad(), compute_in(compute_dtype, device):
            for batch in own + batches[:1] * idle:
                ids = _padded([window.ids for window in batch]).to(device)
                weights = _padded([window.weights for window in batch]).to(device)
                losses.append(float(summed_cross_entropy(module, ids, weights, None)))
                targets += int(weights.sum()) if len(losses) <= len(own) else 0
    finally:
        module.train(training)
    # Exactly, so that it does not matter who has which part.
    return Evaluation(loss_sum=math.fsum(losses[: len(own)]), targets=targets, rows=len(rows))


def _windows(row: Encoded, seq_len: int) -> Iterator[Encoded]:
    for start in range(0, len(row.ids), seq_len):
        weights = row.weights[start : start + seq_len].copy()
        weights[:1] = 0
        if weights.any():
            yield Encoded(ids=row.ids[start : start + seq_len], weights=weights)


def _batches(windows: list[Encoded]) -> Iterator[list[Encoded]]:
    """Cut windows, longest first, into batches whose padded size is bounded."""
    start = 0
    while start < len(windows):
        count = max(1, BATCH_TOKENS // len(windows[start].ids))
        yield windows[start : start + count]
        start += count


def _padded(rows: list[np.ndarray]) -> torch.Tensor:
    """Stack rows of different lengths, zeros on the right; int64, shape (rows, longest)."""
    result = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for place, row in enumerate(rows):
        result[place, : len(row)] = row
    return torch.from_numpy(result)
