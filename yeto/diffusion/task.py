"""Diffusion fine-tuning as a task of the learner's loop: the parts of this package put together.

What the loop counts: a target is an element of a prediction, a token is a sample. The loss is the summed
squared error, so that batches of different shapes can be put together by the loop, which divides.

Chance is drawn on the CPU from the state that the loop saves and restores, so a run that goes on after a
restart, or computes elsewhere, draws what it would have drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from yeto.diffusion.adapter_files import write_adapter
from yeto.diffusion.config import DiffusionConfig
from yeto.diffusion.evaluate import evaluate_rows, heldout_samples
from yeto.diffusion.extra import require_diffusers
from yeto.diffusion.loader import ExampleLoader, first_row
from yeto.diffusion.loss import summed_error
from yeto.diffusion.model import LoadedPipeline, load_pipeline
from yeto.diffusion.samples import Samples, prepared
from yeto.diffusion.values import RowNeeds
from yeto.errors import ConfigError
from yeto.learner.task import Batch, Evaluation
from yeto.tuning.rows import open_source

logger = logging.getLogger(__name__)


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
            samples = prepared(self._model.encoders, loaded.examples)
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
        return summed_error(
            self._model.denoisers, samples, level, noise, weighting=self.config.loss_weighting
        )

    def evaluate(self) -> Evaluation | None:
        """Score this rank's part of the held-out rows; None without ``--eval-data``."""
        if self._heldout is None:
            return None
        return evaluate_rows(
            self._model.denoisers,
            self._heldout,
            weighting=self.config.loss_weighting,
            rank=self.config.rank,
            num_ranks=self.config.num_ranks,
        )

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
                kind=self._model.found.kind,
                r=self.config.lora_r,
                alpha=self.config.lora_alpha,
                targets=names,
            )


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
        heldout = heldout_samples(config, model.denoisers.needs, model.encoders)
    return DiffusionTask(config, model, heldout)
