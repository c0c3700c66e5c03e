"""What the tensor codecs share: sizes are checked before anything is allocated."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from yeto.errors import ProtocolError

Values: TypeAlias = NDArray[np.float32]
"""Decoded elements: 1-D f32."""

Payload: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]
"""Encoded elements: contiguous bytes."""

BLOCK_ELEMENTS = 1 << 16
"""Elements that codecs work on at a time: intermediate arrays stay in the cache instead of in memory."""


def as_values(values: Values) -> Values:
    """Return ``values`` as contiguous 1-D f32.

    Raises:
        ValueError: they have another number of dimensions.
    """
    array = np.ascontiguousarray(values, dtype=np.float32)
    if np.ndim(values) != 1:
        raise ValueError(f"a codec takes 1-D values, these have {np.ndim(values)} dimensions")
    return array


def payload_bytes(data: Payload, size: int, codec: str) -> memoryview:
    """Return ``data`` as a view of exactly ``size`` bytes.

    Raises:
        ProtocolError: it has another size.
    """
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if view.nbytes != size:
        raise ProtocolError(f"{codec} tensor: {view.nbytes} bytes instead of {size}")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def destination(out: Values | None, numel: int) -> Values:
    """Return ``out``, or a new array of ``numel`` elements.

    Raises:
        ValueError: ``out`` is not 1-D f32 of that size; a bug of the caller.
    """
    if out is None:
        return np.empty(numel, dtype=np.float32)
    if out.shape != (numel,) or out.dtype != np.float32:
        raise ValueError(f"out is {out.dtype}{out.shape}, wanted float32({numel},)")
    return out
