"""The digest of tensors: BLAKE3, its first 16 bytes, as hex.

Parameters and momentum are digested as little-endian f32 in layout order, pushes as their wire bytes. It
tells two states apart; it protects nothing, which is what the HELLO's mac is for.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from yeto.wire.frames import BytesLike

DIGEST_BYTES: Final = 16


def digest(*buffers: BytesLike | NDArray[Any]) -> str:
    """Return 32 hex digits over the buffers, as if they were one.

    Args:
        buffers: contiguous; arrays are taken as their bytes, so f32 arrays must be little-endian.
    """
    running = RunningDigest()
    for buffer in buffers:
        running.update(buffer)
    return running.hex()


class RunningDigest:
    """A digest that is fed piece by piece, in order."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._hasher = blake3()

    def update(self, buffer: BytesLike | NDArray[Any]) -> None:
        """Take the next bytes; large ones without the interpreter's lock."""
        if isinstance(buffer, np.ndarray):
            buffer = np.ascontiguousarray(buffer).reshape(-1).view(np.uint8).data
        self._hasher.update(buffer)

    def hex(self) -> str:
        """Return 32 hex digits over what was taken so far."""
        return self._hasher.digest(length=DIGEST_BYTES).hex()
