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
    hasher = blake3()
    for buffer in buffers:
        if isinstance(buffer, np.ndarray):
            hasher.update(np.ascontiguousarray(buffer).reshape(-1).view(np.uint8).data)
        else:
            hasher.update(buffer)
    return hasher.digest(length=DIGEST_BYTES).hex()
