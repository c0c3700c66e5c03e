"""Codec f32: little-endian IEEE 754 single precision, nothing lost.

Used when the session dtype is f32, and for every tensor of the final cut, whatever the session dtype.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from yeto.wire.tensorbytes import Payload, Values, as_values, destination, payload_bytes

NAME: Final = "f32"


def encoded_size(numel: int) -> int:
    """Return the bytes that ``numel`` elements take."""
    return 4 * numel


def encode(values: Values) -> bytes:
    """Return the elements' bytes.

    Args:
        values: 1-D; converted to f32 when they are of another type.
    """
    return as_values(values).astype("<f4", copy=False).tobytes()


def encode_into(values: Values, out: bytearray | memoryview) -> None:
    """Write what ``encode`` returns into ``out``, which has exactly that size."""
    source = as_values(values)
    target = np.frombuffer(payload_bytes(out, encoded_size(source.size), NAME), dtype="<f4")
    target[:] = source


def decode(data: Payload, numel: int, out: Values | None = None) -> Values:
    """Return ``numel`` elements as a new array, or in ``out``.

    NaN and infinities come out as they are: whether they are welcome is the receiver's business.

    Args:
        data: exactly ``encoded_size(numel)`` bytes.
        numel: number of elements.
        out: 1-D f32 of that size to write to.

    Raises:
        ProtocolError: ``data`` has another size.
    """
    view = payload_bytes(data, encoded_size(numel), NAME)
    target = destination(out, numel)
    target[:] = np.frombuffer(view, dtype="<f4")
    return target
