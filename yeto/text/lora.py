"""Low-rank adapters: which modules get one, and what their tensors are called.

The rule of the names: the canonical name of an adapter tensor is the key PEFT itself gives it in a saved
adapter. Then a checkpoint's tensors *are* an adapter file, and nothing can be lost in translation. A live
parameter differs from it by the pieces wrappers add and by the adapter's own name, ``default``.

The rule of the targets: what is asked for must be there. A target that matches nothing, an output head whose
weight is also the input embedding (an adapter would change one view of it and not the other), expert
weights that no adapter reaches: said or refused, before an hour of training.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from yeto.errors import ConfigError
from yeto.tuning.lora import ADAPTER, matches

EMBEDDING_TARGETS = ("embed_tokens", "lm_head")
"""Targets for which PEFT also saves the base layer."""
_MOE_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@frozen(kw_only=True)
class LoraTargets:
    """The modules that get an adapter."""

    names: tuple[str, ...]
    """Sorted: suffixes that match exactly these modules, else their full names; PEFT takes either."""
    modules: tuple[str, ...]
    """Full names of the matched modules."""
    skipped_expert_parameters: int
    """Elements of expert weights without an adapter."""


def find_targets(model: nn.Module, wanted: str) -> LoraTargets:
    """Find the modules that ``--lora-targets`` means in a base model.

    Args:
        model: a causal language model of transformers, without adapters.
        wanted: ``auto`` (attention on mixture-of-experts models, every linear layer otherwise),
            ``attention``, ``all-linear``, or a comma-separated list of module names or suffixes.

    Raises:
        ConfigError: a name matches nothing, or a module that cannot have a sound adapter.
    """
    linear = _linear_modules(model)
    attention = [name for name in linear if any("attn" in p or "attention" in p for p in name.split("."))]
    if wanted == "auto":
        wanted = "attention" if _has_experts(model) and attention else "all-linear"
    if wanted == "all-linear":
        modules = linear
    elif wanted == "attention":
        modules = attention
        if not modules:
            raise ConfigError(
                "--lora-targets attention: no linear layer of this model has attention in its name; name the "
                f"layers instead, from: {', '.join(_suffixes(linear))}"
            )
    else:
        modules = _listed(model, wanted, linear)
    _refuse_tied_head(model, modules)
    return LoraTargets(
        names=_shortest_names(model, modules),
        modules=tuple(modules),
        skipped_expert_parameters=_expert_parameters(model, modules),
    )


def add_adapter(
    model: nn.Module,
    targets: tuple[str, ...],
    *,
    r: int,
    alpha: int,
    dropout: float = 0.0,
    commit: str | None = None,
) -> PeftModel:
    """Freeze a base model and give it float32 adapters; draws their A matrices from the global RNG.

    Args:
        model: the base.
        targets: which of its layers get one.
        r: rank.
        alpha: scale times rank.
        dropout: of what goes into an adapter.
        commit: of a base of the hub; who loads a saved adapter gets that one, not what its branch points to.

    Raises:
        ConfigError: PEFT cannot put an adapter on one of the targets.
    """
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(targets),
        revision=commit,
        # GPT-2 keeps its weights transposed, in layers of a kind of their own.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    linear = _suffixes(_linear_modules(model))
    with quiet():
        try:
            adapted = get_peft_model(model, config, adapter_name=ADAPTER)
        except ValueError as error:
            cause = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"--lora-targets: {cause}; name layers that can have an adapter, from: {', '.join(linear)}"
            ) from error
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
    return adapted


def save_adapter(model: PeftModel, folder: str, state: dict[str, torch.Tensor] | None = None) -> None:
    """Write an adapter folder by PEFT's own save, without its question to the hub about the vocabulary.

    Args:
        model: with the adapter.
        folder: is made if it is not there.
        state: tensors by name instead of the model's own.
    """
    targets = tuple(model.peft_config[ADAPTER].target_modules or ())
    with quiet():
        model.save_pretrained(folder, save_embedding_layers=saves_base_layers(targets), state_dict=state)


def saves_base_layers(targets: tuple[str, ...]) -> bool:
    """Tell whether an adapter folder has frozen base layers in it: those of adapted embeddings."""
    return bool(set(targets).intersection(EMBEDDING_TARGETS))


def beneath(model: Any) -> Any:
    """Return the model of transformers itself, with adapters in it or not."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what PEFT and transformers warn each other about; a user can do nothing about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


def _linear_modules(model: nn.Module) -> list[str]:
    """Return the names of all linear layers but the output head."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]


def _listed(model: nn.Module, wanted: str, linear: list[str]) -> list[str]:
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if not names:
        raise ConfigError("--lora-targets is empty; use auto, attention, all-linear or module names")
    modules = dict(model.named_modules())
    found: list[str] = []
    for name in names:
        meant = [module for module in modules if matches(module, name)]
        unfit = [m for m in meant if not isinstance(modules[m], nn.Linear | Conv1D | nn.Embedding)]
        if not meant or unfit:
            problem = f"{unfit[0]} is no linear layer" if unfit else "matches no module"
            raise ConfigError(
                f"--lora-targets {name}: {problem}; linear layers here: {', '.join(_suffixes(linear))}"
            )
        found += meant
    return sorted(set(found), key=list(modules).index)


def _refuse_tied_head(model: nn.Module, modules: list[str]) -> None:
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if head is None or embedding is None or head.weight is not embedding.weight:
        return
    for name in modules:
        if model.get_submodule(name) in (head, embedding):
            raise ConfigError(
                f"--lora-targets {name}: this model's output head and input embedding are one tensor, and an "
                "adapter would change only one of the two; leave it out, or use --tuning full"
            )


def _has_experts(model: nn.Module) -> bool:
    config: Any = getattr(model, "config", None)
    if any((getattr(config, name, None) or 0) > 0 for name in _MOE_COUNTS):
        return True
    return any("experts" in name.split(".") for name, _ in model.named_modules())


def _expert_parameters(model: nn.Module, modules: list[str]) -> int:
    reached = {f"{module}.weight" for module in modules}
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "experts" in name.split(".") and name not in reached and parameter.ndim >= 2
    )


def _shortest_names(model: nn.Module, modules: list[str]) -> tuple[str, ...]:
    """Return sorted suffixes that match exactly these modules, else their full names; PEFT takes either."""
    short = _suffixes(modules)
    matched = {name for name, _ in model.named_modules() if any(matches(name, suffix) for suffix in short)}
    return tuple(sorted(short if matched == set(modules) else modules))


def _suffixes(modules: list[str]) -> list[str]:
    """Return the last pieces of module names, each once, sorted."""
    return sorted({name.rpartition(".")[2] for name in modules})
