"""The model of a learner: loaded, frozen or not, adapted, placed, and ready for one kind of step.

The rule of the dtypes: what is trained is float32, always; updates of a fine-tuning run are smaller than the
spacing of bfloat16 and would round to nothing. What is frozen may be bfloat16, and on accelerators it is.

The rule of the seeds: everything random about the *model* comes from the root seed alone and is drawn on the
CPU, so every learner and every rank builds the same adapter; everything random about *training* comes from
root + learner + M * rank afterwards.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from yeto.errors import ConfigError, DataError
from yeto.text.config import TextConfig
from yeto.text.lora import EMBEDDING_TARGETS, LoraTargets, add_adapter, beneath, find_targets, quiet
from yeto.text.loss import summed_cross_entropy
from yeto.tuning.devices import choose_device, compute_in
from yeto.tuning.hub import cause_of
from yeto.tuning.identity import ModelIdentity, fetched_commit, identify
from yeto.tuning.lora import canonical_name
from yeto.tuning.shard import shard_model

logger = logging.getLogger(__name__)

PROBE_LIMIT = 64
"""Largest micro batch that the probe tries; more blocks a step are accumulation's work."""


@frozen(kw_only=True)
class LoadedModel:
    """A model that is ready to train."""

    module: Any = field(repr=False)
    """The model itself, with adapters if there are any, in training mode."""
    identity: ModelIdentity
    device: torch.device
    compute_dtype: torch.dtype
    """What matrix products run in: bfloat16 (by autocast) or float32."""
    targets: LoraTargets | None
    """Modules with an adapter; None when everything is trained."""

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by canonical name, in the model's order; all float32."""
        named = {
            canonical_name(name): parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }
        assert all(parameter.dtype == torch.float32 for parameter in named.values())
        return named

    def autocast(self) -> torch.autocast:
        """Return the context in which a forward pass runs in the compute dtype."""
        return compute_in(self.compute_dtype, self.device)

    def describe(self) -> dict[str, Any]:
        """Return facts for people."""
        trained = sum(parameter.numel() for parameter in self.trainable_parameters().values())
        total = sum(parameter.numel() for parameter in self.module.parameters())
        return {
            "parameters": total,
            "trainable_parameters": trained,
            "trainable_percent": round(100.0 * trained / total, 4),
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            "device": str(self.device),
        }


def load_base(config: TextConfig, dtype: torch.dtype | str, *, revision: str | None = None) -> Any:
    """Load the base model's weights on the CPU.

    Args:
        config: names the model.
        dtype: of the weights, or ``auto`` for the one they are stored in.
        revision: a commit that overrides the configuration's revision.

    Raises:
        ConfigError: ``--model`` does not load as a causal language model.
    """
    revision = revision or config.model_revision
    commit = fetched_commit(config.model, revision, weights=True)
    if not sys.stderr.isatty():
        # The library's bar is for people; in a log file it is noise.
        disable_progress_bar()
    try:
        with quiet():
            return AutoModelForCausalLM.from_pretrained(
                config.model,
                revision=commit or revision,
                trust_remote_code=config.trust_remote_code,
                local_files_only=commit is not None and not config.trust_remote_code,
                dtype=dtype,
            )
    except Exception as error:
        raise ConfigError(
            f"--model {config.model}: does not load as a language model: {cause_of(error)}"
        ) from error


def load_model(config: TextConfig) -> LoadedModel:
    """Build the model that a configuration describes, ready to train.

    Seeds the global random state: the root seed before building, the training seed afterwards.

    Raises:
        ConfigError: the model does not load, or a setting does not fit it.
    """
    device = choose_device(config.device)
    wants_bf16 = config.base_dtype == "bf16" or (config.base_dtype == "auto" and device.type != "cpu")
    compute_dtype = torch.bfloat16 if wants_bf16 else torch.float32
    identity = identify(config.model, config.model_revision)
    torch.manual_seed(config.seed)
    # Full tuning trains the weights themselves, so they are the float32 masters.
    module = load_base(
        config, compute_dtype if config.tuning == "lora" else torch.float32, revision=identity.commit
    )
    targets = None
    if config.tuning == "lora":
        targets = find_targets(module, config.lora_targets)
        module = add_adapter(
            module,
            targets.names,
            r=config.lora_r,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
            commit=identity.commit,
        )
        _say_skipped_experts(targets)
        _say_base_layers(targets)
    else:
        module.requires_grad_(True)
    _set_checkpointing(module, config.gradient_checkpointing, device)
    if config.is_sharded:
        # From the CPU, so that no accelerator ever has to hold the whole model.
        shard_model(module, device)
    else:
        module.to(device)
    module.train()
    torch.manual_seed(config.seed + config.learner_id + config.num_learners * config.rank)
    loaded = LoadedModel(
        module=module, identity=identity, device=device, compute_dtype=compute_dtype, targets=targets
    )
    _require_room(loaded, config.seq_len)
    if config.packing == "documents" and documents_leak(loaded):
        raise ConfigError(
            f"--packing documents: {type(beneath(module)).__name__} lets a document see the one "
            "before it in a block, because it does not keep position ids apart; use --packing plain"
        )
    return loaded


def documents_leak(loaded: LoadedModel) -> bool:
    """Tell whether, with positions that fall back to 0, a document still sees the one before it.

    Measured, not looked up: two blocks differ in their first document only, and the logits of the second
    document must not. Masked keys weigh exactly zero in a softmax, so any real difference is a leak.
    """
    module = loaded.module
    size = module.get_input_embeddings().weight.shape[0]
    first, other, second = [0, 1, 2, 3], [4, 5, 6, 7], [3, 1, 2, 0]
    ids = torch.tensor([first + second, other + second], device=loaded.device) % size
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2, device=loaded.device)
    module.eval()
    with torch.no_grad(), loaded.autocast():
        logits = module(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 4:].float()
    module.train()
    difference = (logits[0] - logits[1]).abs().max()
    return bool(difference > 1e-5 * logits.abs().max())


def require_vocabulary(module: Any, rows: Iterable[np.ndarray], model: str) -> None:
    """Refuse tokens that a model has no embedding of, before they are looked up.

    Args:
        module: the model.
        rows: token ids.
        model: its name, for the message.

    Raises:
        DataError: naming the highest of them.
    """
    size = module.get_input_embeddings().weight.shape[0]
    highest = max((int(ids.max()) for ids in rows if len(ids)), default=0)
    if highest >= size:
        raise DataError(
            f"--model {model}: its tokenizer gives token {highest}, but the model has only {size}; the two "
            "do not belong together"
        )


def probe_micro_batch(step: Callable[[int], None], limit: int = PROBE_LIMIT) -> int:
    """Return the largest power of two, up to ``limit``, for which ``step`` does not run out of memory.

    Args:
        step: runs forward and backward on that many blocks.
        limit: not exceeded.

    Raises:
        ConfigError: not even one block fits.
    """
    best = 0
    size = 1
    while size <= limit:
        try:
            step(size)
        except torch.OutOfMemoryError:
            break
        best = size
        size *= 2
    torch.cuda.empty_cache()
    if best == 0:
        raise ConfigError(
            "--micro-batch-size auto: not even one block fits on this device; lower --seq-len, or use "
            "--gradient-checkpointing on"
        )
    return best


def _require_room(loaded: LoadedModel, seq_len: int) -> None:
    """Refuse blocks that are longer than what a model takes.

    Tried, not looked up: most models compute positions and go beyond what they state, some look them up.

    Raises:
        ConfigError: so it is.
    """
    module, base = loaded.module, beneath(loaded.module)
    settings = base.config.get_text_config()
    stated = getattr(settings, "max_position_embeddings", None) or getattr(settings, "max_seq_len", None)
    if stated is None or seq_len <= stated:
        return
    ids = torch.zeros(1, seq_len, dtype=torch.int64, device=loaded.device)
    module.eval()
    try:
        with torch.no_grad(), loaded.autocast():
            summed_cross_entropy(module, ids, torch.zeros_like(ids), None)
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--seq-len {seq_len}: {type(base).__name__} takes no more than {stated} tokens; lower it to that"
        ) from error
    finally:
        module.train()


def _say_skipped_experts(targets: LoraTargets) -> None:
    if targets.skipped_expert_parameters:
        logger.warning(
            "LoRA leaves %s parameters of expert weights as they are; only %s are trained",
            f"{targets.skipped_expert_parameters:,}",
            ", ".join(targets.names),
        )


def _say_base_layers(targets: LoraTargets) -> None:
    adapted = sorted({name.rpartition(".")[2] for name in targets.modules}.intersection(EMBEDDING_TARGETS))
    if adapted:
        logger.warning(
            "an adapter on %s is saved together with that layer itself, which not every server loads; "
            "yeto-export --merged makes a model that all of them load",
            " and ".join(adapted),
        )


def _set_checkpointing(module: Any, wanted: str, device: torch.device) -> None:
    base = beneath(module)
    if wanted == "off" or (wanted == "auto" and device.type == "cpu"):
        return
    if not base.supports_gradient_checkpointing:
        if wanted == "on":
            raise ConfigError(
                f"--gradient-checkpointing on: {type(base).__name__} does not support it; say off"
            )
        return
    # Renamed in transformers; without gradients at the inputs, layers behind frozen ones would not train.
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable()
    base.enable_input_require_grads()
