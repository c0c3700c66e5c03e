"""What a tensor must be before anything is computed with it."""

from __future__ import annotations

import torch
from torch import Tensor

from yeto.errors import MergeError


def require_f32(name: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """Check the dtype of a tensor, and its shape against another's.

    Raises:
        MergeError: naming the tensor and both sides.
    """
    if tensor.dtype != torch.float32:
        raise MergeError(f"{name} is {tensor.dtype}; the merge takes torch.float32")
    if like is not None and tensor.shape != like.shape:
        raise MergeError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(like.shape)}")
