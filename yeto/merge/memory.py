"""Memory for fragment versions: that of versions which nobody holds any more, taken again.

A commit makes three arrays of the fragment's size and lets three old ones go. Memory fresh from the system is
cleared on first touch, page by page, which takes longer than the outer step that fills it. So the memory of
the last ``IDLE`` large arrays that were let go is kept, no more than one commit takes.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yeto.merge.kernels import Floats, Halves

IDLE: Final = 3
"""Arrays kept: parameters, momentum and the encoding of one version."""
SMALL: Final = 1 << 20
"""Bytes below which the system's allocator is as good."""
WASTE: Final = 1.25
"""An array may be this much larger than what is asked for: fragments are nearly, not exactly, of one size."""
LINE: Final = 64
"""Bytes of a cache line. Where arrays begin with one, no load of a whole vector register touches two."""

_idle: deque[NDArray[np.uint8]] = deque(maxlen=IDLE)
_choosing = threading.Lock()


class _Lease:
    """Owns memory on behalf of all arrays and tensors made from it, and gives it back after the last one."""

    _home = _idle
    """When the interpreter ends, arrays may outlive the names of this module."""

    def __init__(self, memory: NDArray[np.uint8], size: int) -> None:
        self._memory = memory
        self.__array_interface__: dict[str, Any] = memory[:size].__array_interface__

    def __del__(self) -> None:
        self._home.append(self._memory)  # in any thread, at any moment: so without the lock


def empty_floats(numel: int) -> Tensor:
    """Return a 1-D f32 tensor of unspecified content."""
    floats: Floats = _empty(4 * numel).view(np.float32)
    return torch.from_numpy(floats)


def empty_halves(numel: int) -> Halves:
    """Return a 1-D array of unspecified content, two bytes an element."""
    return _empty(2 * numel).view(np.uint16)


def _empty(size: int) -> NDArray[np.uint8]:
    if size < SMALL:
        return np.empty(size, dtype=np.uint8)
    memory = _reuse(size)
    if memory is None:
        memory = np.empty(size + LINE, dtype=np.uint8)
        memory = memory[-memory.ctypes.data % LINE :][:size]
    return np.asarray(_Lease(memory, size))


def _reuse(size: int) -> NDArray[np.uint8] | None:
    with _choosing:
        for _ in range(len(_idle)):
            try:
                memory = _idle.popleft()
            except IndexError:
                return None
            if size <= memory.nbytes <= WASTE * size:
                return memory
            _idle.append(memory)
    return None
