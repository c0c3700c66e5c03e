"""A model in parts: FSDP2 (``fully_shard``) over the ranks of an island, and its weights put together again.

Each transformer block is a unit that is gathered when its turn comes and let go afterwards; the rest
(embeddings, head, norms) is the unit of the whole model. Parameters keep their names and their whole shapes,
so an island that shards has the layout and the fingerprint of any other.

Everything here is done by all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from yeto.layout.names import LAYER_PIECES, check_wrapped_names, strip_wrappers


def shard_model(module: nn.Module, device: torch.device) -> None:
    """Replace a model's parameters by this rank's parts of them, on its device.

    Args:
        module: built alike on every rank, on the CPU or the device.
        device: this rank's.

    Raises:
        ConfigError: the parameters have other names than before, so that the island would have a layout of
            its own.
    """
    plain = [strip_wrappers(name) for name, _ in module.named_parameters()]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in transformer_blocks(module):
        fully_shard(block, mesh=mesh)
    # By default the last unit stays whole until the backward pass: without one, after an evaluation, a model
    # would go on with weights that are older than a blend.
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    check_wrapped_names(plain, [name for name, _ in module.named_parameters()])


def transformer_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the numbered blocks of a model, outermost only: ``….layers.0``, ``….h.0`` and their like."""
    blocks: list[nn.Module] = []
    inside: tuple[str, ...] = ()
    for name, child in module.named_modules():
        path, _, own = name.rpartition(".")
        if own.isdigit() and path.rpartition(".")[2] in LAYER_PIECES and not name.startswith(inside):
            blocks.append(child)
            inside = (*inside, f"{name}.")
    return blocks


def whole_state(module: nn.Module, *, trained_only: bool, keep: bool) -> dict[str, torch.Tensor] | None:
    """Put the state of a sharded model together on the CPU.

    Args:
        module: the model.
        trained_only: leave frozen weights out.
        keep: whether this rank wants it; all ranks gather, but need not hold it.

    Returns:
        The state by name, tied tensors as one; None if it is not to be kept, or nothing is in parts.
    """
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    if not any(isinstance(tensor, DTensor) for tensor in state.values()):
        return None
    whole: dict[int, torch.Tensor] = {}
    for tensor in _distinct(state):
        if trained_only and not tensor.requires_grad:
            continue
        gathered = tensor.detach()
        if isinstance(gathered, DTensor):
            gathered = gathered.full_tensor()
        if keep:
            whole[id(tensor)] = gathered.to("cpu")
    if not keep:
        return None
    return {name: whole[id(tensor)] for name, tensor in state.items() if id(tensor) in whole}


def least(number: int) -> int:
    """Return the least of all ranks' numbers."""
    value = torch.tensor([number])
    dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value)


def _distinct(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield each tensor once, in an order that is the same on every rank."""
    seen: set[int] = set()
    for tensor in state.values():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor
