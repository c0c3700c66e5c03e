"""The live parameters, seen as fragments.

This is the only place where the model's tensors are read or written on behalf of the network, and it runs on
the training thread only. A snapshot is a copy: whoever encodes it must not see a half-finished optimizer
step. On CUDA the copy goes to pinned host memory without waiting for the device; the one who needs the values
waits, beside training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import nn

from yeto.errors import ConfigError
from yeto.learner.anchors import Values
from yeto.wire.layout import Layout


@frozen(kw_only=True, eq=False)
class Snapshot:
    """A copy of one fragment's local weights, perhaps still on its way from the device."""

    _values: torch.Tensor = field(repr=False)
    _arrived: Callable[[], Any]

    def values(self) -> Values:
        """Return the values, 1-D float32, once they have arrived; blocks beside training."""
        self._arrived()
        array: Values = self._values.numpy()
        return array


def named_shapes(parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, and refuse what cannot be trained in small steps.

    Raises:
        ConfigError: there is nothing to train, or a parameter is not float32 (an update of a lower precision
            weight often rounds to nothing).
    """
    if not parameters:
        raise ConfigError("the model has no trainable parameter; check --tuning and --lora-targets")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ConfigError(f"trainable parameter {name} is {parameter.dtype}; trainables must be float32")
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


class LiveFragments:
    """Reads and writes the parameters of a model, one fragment at a time, in layout order."""

    def __init__(self, layout: Layout, parameters: Mapping[str, nn.Parameter]) -> None:
        """Bind every tensor of ``layout`` to the parameter of its name."""
        self._fragments = [
            [parameters[spec.name] for spec in fragment.tensors] for fragment in layout.fragments
        ]
        self._numels = [fragment.numel for fragment in layout.fragments]

    def snapshot(self, fragment: int) -> Snapshot:
        """Copy the local weights of a fragment to the host."""
        parameters = self._fragments[fragment]
        on_cuda = any(parameter.is_cuda for parameter in parameters)
        host = torch.empty(self._numels[fragment], dtype=torch.float32, pin_memory=on_cuda)
        offset = 0
        for parameter in parameters:
            end = offset + parameter.numel()
            host[offset:end].copy_(parameter.detach().reshape(-1), non_blocking=on_cuda)
            offset = end
        if not on_cuda:
            return Snapshot(values=host, arrived=_already)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return Snapshot(values=host, arrived=copied.synchronize)

    def blend(self, fragment: int, received: Values, alpha: float) -> None:
        """Set ``local = alpha * local + (1 - alpha) * received``, in float32.

        Args:
            fragment: number of the fragment.
            received: 1-D float32 of the fragment's size.
            alpha: share of the local weights in [0, 1]; 0 copies ``received`` exactly, 1 changes nothing.
        """
        if alpha == 1.0:
            return
        source = torch.from_numpy(received)
        offset = 0
        with torch.no_grad():
            for parameter in self._fragments[fragment]:
                end = offset + parameter.numel()
                values = source[offset:end].view(parameter.shape).to(parameter.device)
                if alpha == 0.0:
                    parameter.copy_(values)
                else:
                    parameter.mul_(alpha).add_(values, alpha=1.0 - alpha)
                offset = end


def is_finite(values: Values) -> bool:
    """Whether every value is a number; received ones that are not never reach the weights."""
    return bool(np.isfinite(values).all())


def _already() -> None:
    """Nothing to wait for: a copy on the host is there when the call returns."""
