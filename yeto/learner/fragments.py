"""The live parameters, seen as fragments.

This is the only place where the model's tensors are read or written on behalf of the network, and it runs on
the training thread only. A snapshot is a copy: whoever encodes it must not see a half-finished optimizer
step. On CUDA the copy goes to pinned host memory without waiting for the device; the one who needs the values
waits, beside training.

Parameters may be held in parts by the ranks of an island. Then all ranks take part in a snapshot, and each
blends its own part of what was received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import nn

from yeto.errors import ConfigError
from yeto.learner.exchanged import Values
from yeto.learner.sharded import is_sharded, own, own_part, whole
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
            [(piece, parameters[piece.tensor.name]) for piece in fragment.slices()]
            for fragment in layout.fragments
        ]
        self._numels = [fragment.numel for fragment in layout.fragments]
        self.is_sharded = is_sharded(parameters.values())
        """Whether a snapshot needs every rank."""
        self.device = next(iter(parameters.values())).device
        """Where received values are wanted."""

    def numel(self, fragment: int) -> int:
        """Return the number of elements of a fragment."""
        return self._numels[fragment]

    def snapshot(self, fragment: int) -> Snapshot:
        """Copy the local weights of a fragment to the host."""
        on_cuda = self.device.type == "cuda"
        host = torch.empty(self._numels[fragment], dtype=torch.float32, pin_memory=on_cuda)
        for piece, parameter in self._fragments[fragment]:
            host[piece.start : piece.stop].copy_(whole(parameter).reshape(-1), non_blocking=on_cuda)
        if not on_cuda:
            return Snapshot(values=host, arrived=_already)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Of the fragment's device, which need not be the thread's current one.
        copied.record(torch.cuda.current_stream(self.device))
        return Snapshot(values=host, arrived=copied.synchronize)

    def contribute(self, fragment: int) -> None:
        """Give this rank's part of the snapshot that another rank takes."""
        for _, parameter in self._fragments[fragment]:
            whole(parameter)

    def blend(self, fragment: int, received: Values | torch.Tensor, alpha: float) -> None:
        """Set ``local = alpha * local + (1 - alpha) * received``, in float32.

        Args:
            fragment: number of the fragment.
            received: 1-D float32 of the fragment's size.
            alpha: share of the local weights in [0, 1]; 0 copies ``received`` exactly, 1 changes nothing.
        """
        if alpha == 1.0:
            return
        with torch.no_grad():
            for local, values in self._beside(fragment, received):
                if alpha == 0.0:
                    local.copy_(values)
                else:
                    local.mul_(alpha).add_(values, alpha=1.0 - alpha)

    def add(self, fragment: int, values: Values | torch.Tensor, scale: float) -> None:
        """Set ``local = local + scale * values``, in float32.

        Args:
            fragment: number of the fragment.
            values: 1-D float32 of the fragment's size.
            scale: 1 adds and -1 subtracts exactly as float32 does.
        """
        with torch.no_grad():
            for local, part in self._beside(fragment, values):
                local.add_(part, alpha=scale)

    def _beside(
        self, fragment: int, values: Values | torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what this rank holds of each tensor, with its part of ``values`` on the same device."""
        source = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
        for piece, parameter in self._fragments[fragment]:
            part = own_part(parameter, source[piece.start : piece.stop].view(parameter.shape))
            yield own(parameter), part.to(parameter.device)


def is_finite(values: Values) -> bool:
    """Whether every value is a number; received ones that are not never reach the weights."""
    return bool(np.isfinite(values).all())


def _already() -> None:
    """Nothing to wait for: a copy on the host is there when the call returns."""
