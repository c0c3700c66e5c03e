"""Held-out loss: each row at the same noise levels and with the same noise, whoever looks.

The noise belongs to the figure and not to chance: it is drawn from a fixed seed and the row's number, so base
and tuned pipeline, one learner and another, one step and the next are compared like for like. Every row is a
batch of its own, so nothing depends on what else is held out, and ranks deal the rows out among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from attrs import evolve
from torch import Tensor

from yeto.diffusion.adapter_files import load_adapters
from yeto.diffusion.config import DiffusionConfig
from yeto.diffusion.loader import heldout_examples
from yeto.diffusion.loss import summed_error
from yeto.diffusion.model import Denoisers, load_frozen
from yeto.diffusion.samples import Samples, prepared
from yeto.diffusion.values import Encoders, RowNeeds
from yeto.learner.task import Evaluation

EVAL_LEVELS: Final = 8
"""Noise levels at which a row is scored, spread over all there are."""
EVAL_SAMPLES: Final = 4
"""Of them in one forward pass: always as many, so that the figure does not depend on the batch size."""
_SEED: Final = 0x9E3779B1
"""Any number, but always this one: learners and runs are compared at the same noise."""


def heldout_samples(config: DiffusionConfig, needs: RowNeeds, encoders: Encoders) -> list[Samples]:
    """Read and encode the first ``--eval-rows`` rows of ``--eval-data``; one row in each.

    Raises:
        ConfigError: they cannot be opened.
        DataError: one of them cannot be used, or there is none.
    """
    return [prepared(encoders, [example]) for example in heldout_examples(config, needs)]


def heldout_loss(model: str, adapters: Path | None, config: DiffusionConfig) -> Evaluation:
    """Score a pipeline, or a pipeline with exported adapters, on the held-out rows of a configuration.

    Args:
        model: folder or Hugging Face id; need not be the configuration's.
        adapters: folder with a folder for each denoiser, as export and learners write it; None for the bare
            pipeline.
        config: says which rows, how they are read, and what an error counts.

    Raises:
        ConfigError: the pipeline or the adapters do not load.
        DataError: a held-out row cannot be used, or there is none.
    """
    revision = config.model_revision if model == config.model else None
    found, pipeline, encoders = load_frozen(evolve(config, model=model, model_revision=revision))
    if adapters is not None:
        load_adapters(pipeline, adapters, found.denoisers)
    denoisers = Denoisers(found, pipeline)
    rows = heldout_samples(config, denoisers.needs, encoders)
    return evaluate_rows(denoisers, rows, weighting=config.loss_weighting)


def evaluate_rows(
    denoisers: Denoisers, rows: Sequence[Samples], *, weighting: str, rank: int = 0, num_ranks: int = 1
) -> Evaluation:
    """Return the summed error over held-out rows; leaves modes and the random state as they were.

    Args:
        denoisers: of one pipeline.
        rows: all of them, on every rank; one row in each.
        weighting: what an error at a level counts.
        rank: scores its part of the rows only; ``rows`` of the result counts all.
        num_ranks: of the island.
    """
    modules = list(denoisers.modules.values())
    modes = [module.training for module in modules]
    losses, targets = [], 0
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            for number in range(rank, len(rows), num_ranks):
                for samples, level, noise in _levels(rows[number], number, denoisers.schedule.train_steps):
                    losses.append(float(summed_error(denoisers, samples, level, noise, weighting=weighting)))
                    targets += samples.latents.numel()
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.train(mode)
    # Exactly, so that it does not matter who has which part.
    return Evaluation(loss_sum=math.fsum(losses), targets=targets, rows=len(rows))


def _levels(row: Samples, number: int, steps: int) -> Iterator[tuple[Samples, Tensor, Tensor]]:
    """Yield a row at its noise levels, with its own noise, a few at a time."""
    chance = torch.Generator().manual_seed(_SEED + number)
    # One level in each stretch of equal length: an estimate with less spread than as many drawn at will.
    place = (torch.arange(EVAL_LEVELS) + torch.rand(EVAL_LEVELS, generator=chance)) / EVAL_LEVELS
    levels = (place * steps).long().clamp(max=steps - 1)
    for level in torch.split(levels, EVAL_SAMPLES):
        count = len(level)
        latents = row.latents.expand(count, *row.latents.shape[1:])
        noise = torch.randn(latents.shape, generator=chance)
        repeated = Samples(
            latents=latents, conditioning=row.conditioning * count, origins=row.origins * count
        )
        yield repeated, level, noise
