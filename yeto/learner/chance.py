"""All chance that training draws from, taken down and put back.

Dropout draws from torch's generator of the device; a task may draw from Python's and NumPy's. A learner
that goes on from saved state must draw what it would have drawn. A step that is interrupted puts back
torch's alone: taking down the others costs a tenth of a millisecond, and no loss of ours draws from them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from numpy.typing import NDArray


@frozen(kw_only=True, eq=False)
class Chance:
    """The state of every generator; the arrays are copies."""

    python: tuple[Any, ...] = field(repr=False)
    """What ``random.getstate`` gives."""
    numpy: tuple[Any, ...] = field(repr=False)
    """What ``np.random.get_state`` gives: name, 624 words, position, and a Gaussian that is left over."""
    torch_states: tuple[NDArray[np.uint8], ...] = field(repr=False)
    """The CPU's generator, then one for each accelerator that is used, by their numbers."""

    @classmethod
    def now(cls, devices: Sequence[torch.device] = ()) -> Chance:
        """Take down the present state; ``devices`` are the accelerators whose generators are used."""
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(),  # type: ignore[arg-type]
            torch_states=tuple(state.numpy() for state in torch_state(devices)),
        )

    def put_back(self, devices: Sequence[torch.device] = ()) -> None:
        """Set every generator to this state; an accelerator that was not there before is left as it is."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        put_back_torch([torch.from_numpy(state) for state in self.torch_states], devices)


def torch_state(devices: Sequence[torch.device] = ()) -> list[torch.Tensor]:
    """Take down torch's generators only: the CPU's, then those of ``devices``."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def put_back_torch(states: Sequence[torch.Tensor], devices: Sequence[torch.device] = ()) -> None:
    """Set torch's generators to what ``torch_state`` gave."""
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=False):
        torch.cuda.set_rng_state(state, device)


def accelerators(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """Return the CUDA devices that tensors lie on, by number."""
    return tuple(sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=lambda one: one.index))
