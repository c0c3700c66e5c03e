"""Causal-LM fine-tuning as a task of the learner's loop: the parts of this package put together."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import nn

from yeto.errors import ConfigError
from yeto.learner.task import Batch, Evaluation
from yeto.text.compiled import as_written, compile_model, compiler_told
from yeto.text.config import TextConfig
from yeto.text.evaluate import evaluate_rows, heldout_rows
from yeto.text.formats import chat_reader
from yeto.text.loader import BlockLoader, LoaderState
from yeto.text.lora import save_adapter, saves_base_layers
from yeto.text.loss import summed_cross_entropy
from yeto.text.masks import ChatEncoder, Encoded, highlight
from yeto.text.model import LoadedModel, load_model, probe_micro_batch, require_vocabulary
from yeto.text.packing import Block, PackingCounts
from yeto.text.position import Positions
from yeto.text.stream import encoder_of, nothing_left
from yeto.text.tokenizer import load_tokenizer
from yeto.tuning.position import row_digest
from yeto.tuning.rows import Cursor, open_source
from yeto.tuning.shard import least, whole_state
from yeto.tuning.share import share_of

logger = logging.getLogger(__name__)


@frozen(kw_only=True)
class MicroBatch:
    """Stacked blocks on the CPU; every tensor is int64 of shape (blocks, seq_len)."""

    ids: torch.Tensor = field(repr=False)
    weights: torch.Tensor = field(repr=False)
    positions: torch.Tensor | None = field(repr=False)
    """None when tokens run on from one document into the next."""


class TextTask:
    """A language model with its rows; satisfies :class:`yeto.learner.task.Task`."""

    def __init__(
        self,
        config: TextConfig,
        model: LoadedModel,
        tokenizer: Any,
        heldout: list[Encoded] | None = None,
        *,
        first_row: str = "",
    ) -> None:
        """Take the parts; :func:`build_task` makes them.

        Args:
            config: settings.
            model: ready to train.
            tokenizer: the model's, with the template to use.
            heldout: tokenized rows of ``--eval-data``; None when there are none.
            first_row: digest of the first row of this share.
        """
        self.config = config
        self._positions = Positions(config, first_row)
        self._model = model
        self._tokenizer = tokenizer
        self._heldout = heldout
        self._micro_batch_size = config.micro_batch_size

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by canonical name (an adapter's: PEFT's key in a saved one)."""
        return self._model.trainable_parameters()

    def binding(self) -> dict[str, Any]:
        """Return model identity, tuning, adapter settings, seed, number of learners, and a replaced template.

        Who replaces the model's template trains another language: learners have to agree on it, and an export
        that knows nothing but the checkpoint has to save it.
        """
        config = self.config
        binding: dict[str, Any] = {
            "model": self._model.identity.binding(),
            "tuning": config.tuning,
            "seed": config.seed,
            "num_learners": config.num_learners,
        }
        if self._model.targets is not None:
            binding["lora"] = {
                "r": config.lora_r,
                "alpha": config.lora_alpha,
                "targets": list(self._model.targets.names),
            }
        if config.replaces_template:
            binding["chat_template"] = self._tokenizer.chat_template
        return binding

    def describe(self) -> dict[str, Any]:
        """Return facts for people: model, tuning, trainable share, dtype, device."""
        return {
            "task": "text",
            "model": self.config.model,
            "tuning": self.config.tuning,
            **self._model.describe(),
        }

    def batches(self, start: Any = None) -> Iterator[Batch]:
        """Yield micro batches for ever, from the position behind an earlier batch if there is one.

        Raises:
            ConfigError: ``start`` belongs to other rows or settings.
            DataError: a row cannot be used, or there is nothing to train on.
        """
        state = None
        if start is not None:
            state = self._positions.from_json(start)
            self._micro_batch_size = self._micro_batch_size or start["micro_batch_size"]
        # Here and not with the first batch, because the ranks of an island choose it together.
        size = self._chosen_micro_batch_size()
        if self.config.is_compiled:
            self._compile(size)
        return self._batches(state, size)

    def _batches(self, state: LoaderState | None, size: int) -> Iterator[Batch]:
        loader = BlockLoader(self.config, self._tokenizer, state)
        blocks = iter(loader)
        while taken := list(islice(blocks, size)):
            # The loader may have more blocks ready; its state is that behind the last one it gave out.
            yield self._batch(taken, self._positions.to_json(loader.state, size))

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy in nats summed over the batch's targets, float32."""
        inputs: MicroBatch = batch.inputs
        device = self._model.device
        positions = inputs.positions
        with self._model.autocast(), self._compiler_told():
            return summed_cross_entropy(
                self._model.module,
                inputs.ids.to(device, non_blocking=True),
                inputs.weights.to(device, non_blocking=True),
                None if positions is None else positions.to(device, non_blocking=True),
            )

    def evaluate(self) -> Evaluation | None:
        """Score this rank's part of the held-out rows; None without ``--eval-data``."""
        if self._heldout is None:
            return None
        with as_written() if self.config.is_compiled else nullcontext():
            return evaluate_rows(
                self._model.module,
                self._heldout,
                seq_len=self.config.seq_len,
                device=self._model.device,
                compute_dtype=self._model.compute_dtype,
                rank=self.config.rank,
                num_ranks=self.config.num_ranks,
                is_sharded=self.config.is_sharded,
            )

    def save(self, folder: Path) -> None:
        """Write the current weights as a PEFT adapter or as a model folder, with the tokenizer.

        The ranks of a sharded model put it together first; the head writes.
        """
        config, module = self.config, self._model.module
        state = None
        if config.is_sharded:
            # PEFT takes what belongs to the adapter, and that is what is trained but for an embedding's base.
            trained_only = self._model.targets is not None and not saves_base_layers(
                self._model.targets.names
            )
            state = whole_state(module, trained_only=trained_only, keep=config.rank == 0)
        if config.rank != 0:
            return
        if self._model.targets is not None:
            save_adapter(module, str(folder), state)
        else:
            module.save_pretrained(folder, state_dict=state)
        self._tokenizer.save_pretrained(folder)

    def _batch(self, blocks: list[Block], position: Any = None) -> Batch:
        require_vocabulary(self._model.module, [block.ids for block in blocks], self.config.model)
        ids = _stacked([block.ids for block in blocks])
        weights = _stacked([block.weights for block in blocks])
        documents = self.config.packing == "documents"
        positions = _stacked([block.positions for block in blocks]) if documents else None
        return Batch(
            inputs=MicroBatch(ids=ids, weights=weights, positions=positions),
            targets=int(weights.sum()),
            tokens=ids.numel(),
            position=position,
        )

    def _chosen_micro_batch_size(self) -> int:
        if self._micro_batch_size is None:
            device = self._model.device
            if device.type == "cuda":
                if self.config.is_sharded:
                    raise ConfigError(
                        "--micro-batch-size auto does not go with --shard fsdp: a rank that ran out of "
                        "memory would leave the others waiting; give a number"
                    )
                # What the probe draws for dropout must not move training's own chance.
                with torch.random.fork_rng(devices=[device]):
                    self._micro_batch_size = probe_micro_batch(self._try_step)
                if self.config.num_ranks > 1:
                    self._micro_batch_size = least(self._micro_batch_size)
            else:
                self._micro_batch_size = 1
            logger.info("micro batch: %d blocks of %d tokens", self._micro_batch_size, self.config.seq_len)
        return self._micro_batch_size

    def _compiler_told(self) -> AbstractContextManager[None]:
        return compiler_told() if self.config.is_compiled else nullcontext()

    def _compile(self, size: int) -> None:
        """Compile, and take one step that changes nothing: what a compiler cannot do shows at the start."""
        device = self._model.device
        compile_model(self._model.module)
        logger.info("compiling the model, which may take minutes")
        devices = [device] if device.type == "cuda" else []
        with self._compiler_told(), torch.random.fork_rng(devices=devices):
            self._try_step(size)

    def _try_step(self, size: int) -> None:
        """Run one step of the worst case: every token a target."""
        length = self.config.seq_len
        weights = np.ones(length, dtype=np.uint8)
        weights[0] = 0
        block = Block(
            ids=np.zeros(length, dtype=np.int32),
            weights=weights,
            positions=np.arange(length, dtype=np.int32),
        )
        try:
            self.loss(self._batch([block] * size)).backward()  # type: ignore[no-untyped-call]
        finally:
            self._model.module.zero_grad(set_to_none=True)


def build_task(config: TextConfig) -> TextTask:
    """Load tokenizer and model; say what is trained; print ``--mask-report`` rows to stderr.

    What can be wrong is looked for in the order of its price: names first, then the first row and the
    held-out rows, the model last. Nobody should wait for other learners to hear of a row without a reply.

    Raises:
        ConfigError: there is no ``--data``, the model does not load, or a setting does not fit it.
        DataError: the first row of this share, a held-out row or one of the mask report cannot be used.
    """
    if config.data is None:
        raise ConfigError("--data is missing: name the rows to train on")
    source = open_source(config.data, revision=config.data_revision)
    if config.eval_data is not None:
        open_source(config.eval_data, revision=config.data_revision, flag="--eval-data")
    tokenizer = load_tokenizer(config)
    encode = encoder_of(config, tokenizer)
    first = next(source.rows(Cursor(), share_of(config).rows()), None)
    if first is None:
        raise nothing_left(config, PackingCounts())
    encode(first)
    first_row = row_digest(first)
    heldout = None if config.eval_data is None else heldout_rows(config, tokenizer)
    if config.mask_report and config.rank == 0:
        for text in mask_report(config, tokenizer):
            print(text, file=sys.stderr)
    model = load_model(config)
    if heldout is not None:
        require_vocabulary(model.module, [row.ids for row in heldout], config.model)
    task = TextTask(config, model, tokenizer, heldout, first_row=first_row)
    if model.targets is not None:
        logger.info(
            "LoRA r=%d alpha=%d on %d modules: %s",
            config.lora_r,
            config.lora_alpha,
            len(model.targets.modules),
            ", ".join(model.targets.names),
        )
    return task


def mask_report(config: TextConfig, tokenizer: Any) -> Iterator[str]:
    """Yield the first ``--mask-report`` rows as text, supervised stretches marked.

    Raises:
        DataError: the rows cannot be opened, or one of them cannot be used.
    """
    assert config.data is not None, "build_task refuses a configuration without rows"
    encoder = ChatEncoder(tokenizer, train_on=config.train_on, mask_mode=config.assistant_mask_mode)
    read = chat_reader(config)
    rows = open_source(config.data, revision=config.data_revision).rows(Cursor())
    for row in islice(rows, config.mask_report):
        encoded = encoder.encode(read(row))
        heading = f"--- {row.origin}: {int(encoded.weights.sum())} of {len(encoded.ids)} tokens supervised"
        yield _shown(f"{heading}\n{highlight(encoder, encoded)}")


def _shown(text: str) -> str:
    """Return text with everything escaped but line breaks that a terminal would act upon or cannot show."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def _stacked(arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays).astype(np.int64))
