"""Parameters that an island's ranks hold in parts (``--shard fsdp``), and those they hold whole.

A sharded parameter is a DTensor over one mesh dimension, cut along its first dimension as FSDP cuts it. Its
shape, its name and so its place in the layout are the whole parameter's. To put the parts together takes all
ranks, at the same time and in the same order; to take one's part out of whole values takes nobody else.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, Shard


def is_sharded(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any of the tensors is held in parts, so that all ranks must take part in using them."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, on every rank; all ranks call this together."""
    detached = tensor.detach()
    if not isinstance(detached, DTensor):
        return detached
    return detached.full_tensor()


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: a view, for reading and writing."""
    detached = tensor.detach()
    if not isinstance(detached, DTensor):
        return detached
    return detached.to_local()


def own_part(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the part of whole ``values`` that belongs into ``own(tensor)``.

    Args:
        tensor: a parameter.
        values: of the whole parameter's shape.
    """
    if not isinstance(tensor, DTensor):
        return values
    (placement,) = tensor.placements
    assert isinstance(placement, Shard), "FSDP shards; it replicates over several mesh dimensions only"
    parts = values.chunk(tensor.device_mesh.size(), placement.dim)
    rank = tensor.device_mesh.get_local_rank()
    # There are fewer parts than ranks when the dimension is shorter.
    return parts[rank] if rank < len(parts) else values.narrow(placement.dim, 0, 0)


def in_parts_like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return whole ``values`` held as ``tensor`` is: this rank's part, if that is in parts.

    Args:
        tensor: a parameter.
        values: of its shape; of another shape (a count beside it), they are returned as they are.
    """
    if not isinstance(tensor, DTensor) or values.shape != tensor.shape:
        return values
    return DTensor.from_local(
        own_part(tensor, values).to(own(tensor).device, copy=True),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
