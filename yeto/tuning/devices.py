"""Where a model is computed, and in which precision."""

from __future__ import annotations

import torch

from yeto.errors import ConfigError


def compute_in(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Return the context in which matrix products run in ``dtype``, float32 or bfloat16."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype != torch.float32)


def choose_device(wanted: str) -> torch.device:
    """Return the device that ``--device`` means; ``auto`` is CUDA where there is one.

    Raises:
        ConfigError: there is no such device.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"--device {wanted!r} is no device; say auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {wanted}: this machine has no usable CUDA device; say --device cpu")
    return device
