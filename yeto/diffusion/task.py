"""Diffusion fine-tuning as a task of the learner's loop: the parts of this package put together.

What the loop counts: a target is an element of a prediction, a token is a sample. The loss is the summed
squared error, so that batches of different shapes can be put together by the loop, which divides.

Chance is drawn on the CPU from the state that the loop saves and restores, so a run that goes on after a
restart, or computes elsewhere, draws what it would have drawn.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from attrs import field, frozen
from torch import Tensor, nn

from yeto.diffusion.adapter_files import write_adapter
from yeto.diffusion.asking import NotTaken
from yeto.diffusion.config import DiffusionConfig
from yeto.diffusion.extra import require_diffusers
from yeto.diffusion.loader import ExampleLoader, first_row, heldout_examples
from yeto.diffusion.model import LoadedPipeline, load_pipeline
from yeto.diffusion.values import Conditioning, Example, RowNeeds
from yeto.errors import ConfigError, DataError
from yeto.learner.task import Batch, Evaluation
from yeto.tuning.rows import open_source

logger = logging.getLogger(__name__)

EVAL_LEVELS: Final = 8
"""Noise levels at which a held-out row is scored, spread over all there are."""
EVAL_SAMPLES: Final = 4
"""Of them in one forward pass: always as many, so that the figure does not depend on the batch size."""
_EVAL_SEED: Final = 0x9E3779B1
"""The noise of held-out rows is the same in every run: it belongs to the figure, and not to chance."""


@frozen(kw_only=True)
class Samples:
    """Rows ready for the denoiser, on the CPU."""

    latents: Tensor = field(repr=False)
    """Float32 of shape (n, channels, height, width)."""
    conditioning: tuple[Conditioning, ...] = field(repr=False)
    origins: tuple[str, ...]
    """Where the rows stand, for messages."""


class DiffusionTask:
    """A pipeline with its rows; satisfies :class:`yeto.learner.task.Task`."""

    def __init__(
        self, config: DiffusionConfig, model: LoadedPipeline, heldout: Sequence[Samples] | None = None
    ) -> None:
        """Take the parts; :func:`build_task` makes them.

        Args:
            config: settings.
            model: ready to train.
            heldout: rows of ``--eval-data``, one in each; None when there are none.
        """
        self.config = config
        self._model = model
        self._schedule = model.denoisers.schedule
        self._heldout = heldout

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by canonical name (``transformer.….lora_A.weight``)."""
        return self._model.trainable_parameters()

    def binding(self) -> dict[str, Any]:
        """Return task, pipeline, adapter settings, seed and number of learners."""
        config = self.config
        return {
            "task": "diffusion",
            "model": self._model.found.identity.binding(),
            "tuning": config.tuning,
            "seed": config.seed,
            "num_learners": config.num_learners,
            "lora": {
                "r": config.lora_r,
                "alpha": config.lora_alpha,
                "targets": {part: list(names) for part, names in self._model.targets.items()},
            },
        }

    def describe(self) -> dict[str, Any]:
        """Return facts for people: pipeline, denoisers, trainable share, dtype, device."""
        return {
            "task": "diffusion",
            "model": self.config.model,
            "tuning": self.config.tuning,
            "loss_weighting": self.config.loss_weighting,
            **self._model.describe(),
        }

    def batches(self, start: Any = None) -> Iterator[Batch]:
        """Yield micro batches for ever, from the position behind an earlier batch if there is one.

        Raises:
            ConfigError: ``start`` belongs to other rows or settings.
            DataError: a row cannot be used.
        """
        # Here and not with the first batch, so that a wrong position is refused at once.
        return self._batches(ExampleLoader(self.config, self._model.denoisers.needs, start))

    def _batches(self, loader: ExampleLoader) -> Iterator[Batch]:
        for loaded in loader:
            samples = prepared(self._model, loaded.examples)
            yield Batch(
                inputs=samples,
                targets=samples.latents.numel(),
                tokens=len(samples.origins),
                position=loaded.position,
            )

    def loss(self, batch: Batch) -> Tensor:
        """Return the weighted squared error summed over the batch's elements, float32."""
        samples: Samples = batch.inputs
        level = torch.randint(self._schedule.train_steps, (len(samples.origins),))
        noise = torch.randn(samples.latents.shape)
        return self._error(samples, level, noise)

    def evaluate(self) -> Evaluation | None:
        """Score this rank's part of the held-out rows; None without ``--eval-data``."""
        if self._heldout is None:
            return None
        modules = self._model.denoisers.modules.values()
        modes = [module.training for module in modules]
        losses, targets = [], 0
        for module in modules:
            module.eval()
        try:
            with torch.no_grad():
                for number in range(self.config.rank, len(self._heldout), self.config.num_ranks):
                    for samples, level, noise in self._levels(number, self._heldout[number]):
                        losses.append(float(self._error(samples, level, noise)))
                        targets += samples.latents.numel()
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.train(mode)
        # Exactly, so that it does not matter who has which part.
        return Evaluation(loss_sum=math.fsum(losses), targets=targets, rows=len(self._heldout))

    def save(self, folder: Path) -> None:
        """Write the current weights as one adapter folder for each denoiser; the head of an island writes."""
        if self.config.rank != 0:
            return
        tensors: dict[str, Tensor] = dict(self.trainable_parameters())
        for part, names in self._model.targets.items():
            write_adapter(
                folder / part,
                part,
                tensors,
                r=self.config.lora_r,
                alpha=self.config.lora_alpha,
                targets=names,
            )

    def _levels(self, number: int, row: Samples) -> Iterator[tuple[Samples, Tensor, Tensor]]:
        """Yield one held-out row at its noise levels, with its own noise, a few at a time."""
        chance = torch.Generator().manual_seed(_EVAL_SEED + number)
        # One level in each stretch of equal length: an estimate with less spread than as many drawn at will.
        place = (torch.arange(EVAL_LEVELS) + torch.rand(EVAL_LEVELS, generator=chance)) / EVAL_LEVELS
        levels = (place * self._schedule.train_steps).long().clamp(max=self._schedule.train_steps - 1)
        for level in torch.split(levels, EVAL_SAMPLES):
            count = len(level)
            latents = row.latents.expand(count, *row.latents.shape[1:])
            noise = torch.randn(latents.shape, generator=chance)
            yield (
                Samples(latents=latents, conditioning=row.conditioning * count, origins=row.origins * count),
                level,
                noise,
            )

    def _error(self, samples: Samples, level: Tensor, noise: Tensor) -> Tensor:
        schedule, denoisers = self._schedule, self._model.denoisers
        device = self._model.device
        noisy = schedule.noised(samples.latents, noise, level)
        target = schedule.target(samples.latents, noise, level).to(device)
        weights = schedule.weights(level, self.config.loss_weighting).to(device)
        timesteps = schedule.timesteps[level]
        parts = [denoisers.part_at(float(timestep)) for timestep in timesteps]
        total = torch.zeros((), device=device)
        for part, module in denoisers.modules.items():
            rows = [row for row, own in enumerate(parts) if own == part]
            if not rows:
                # Of two denoisers one may have nothing to do: then its gradients are zero, and not missing.
                trained = [one for one in module.parameters() if one.requires_grad]
                total = total + sum(((one * 0.0).sum() for one in trained), torch.zeros((), device=device))
                continue
            try:
                said = denoisers.predict(
                    part, noisy[rows], timesteps[rows], [samples.conditioning[row] for row in rows]
                )
            except NotTaken as error:
                raise DataError(f"{samples.origins[rows[0]]}: {error}") from error
            errors = (said - target[rows]).square().flatten(1).sum(dim=1)
            total = total + (errors * weights[rows]).sum()
        return total


def build_task(config: DiffusionConfig) -> DiffusionTask:
    """Load pipeline and rows; say what is trained.

    What can be wrong is looked for in the order of its price: names first, then the first row, the pipeline,
    and the held-out rows last, because they take its encoders.

    Raises:
        ConfigError: there is no ``--data``, the pipeline does not load, or a setting does not fit it.
        DataError: the first row of this share or a held-out row cannot be used.
    """
    require_diffusers()
    if config.data is None:
        raise ConfigError("--data is missing: name the rows to train on")
    if config.eval_data is not None:
        open_source(config.eval_data, revision=config.data_revision, flag="--eval-data")
    first_row(config, RowNeeds())
    model = load_pipeline(config)
    logger.info(
        "LoRA r=%d alpha=%d on %s of %s, which predicts %s",
        config.lora_r,
        config.lora_alpha,
        "; ".join(f"{part}: {', '.join(names)}" for part, names in model.targets.items()),
        model.found.kind,
        model.denoisers.schedule.prediction,
    )
    heldout = None
    if config.eval_data is not None:
        examples = heldout_examples(config, model.denoisers.needs)
        heldout = [prepared(model, [example]) for example in examples]
    return DiffusionTask(config, model, heldout)


def prepared(model: LoadedPipeline, examples: Sequence[Example]) -> Samples:
    """Encode what is not cached of rows of one shape.

    Raises:
        DataError: latents or embeddings of a row are not finite.
    """
    latents, conditioning = [], []
    for example in examples:
        latent, heeded = example.latents, example.conditioning
        if latent is None:
            assert example.pixels is not None, "a row has an image or its latents"
            latent = model.encoders.latents(example.pixels.unsqueeze(0))[0]
        if heeded is None:
            assert example.prompt is not None, "a row has a prompt or its embeddings"
            heeded = model.encoders.conditioning([example.prompt])[0]
        made = {"latents": latent, "prompt_embeds": heeded.prompt_embeds, "pooled": heeded.pooled}
        for what, tensor in made.items():
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                raise DataError(
                    f"{example.origin}: its {what} are not finite numbers; cache the row anew or leave it out"
                )
        latents.append(latent)
        conditioning.append(heeded)
    return Samples(
        latents=torch.stack(latents),
        conditioning=tuple(conditioning),
        origins=tuple(example.origin for example in examples),
    )
