"""Codec bf16: the upper half of an f32, rounded to nearest, ties to even.

The dtype of broadcasts, and of pushes unless the session says otherwise: eight bits of exponent keep the
range of f32, so small deltas survive, at half the bytes. Rounding adds half a unit of the last kept bit and
one more bit if that bit is odd, then drops the lower half; a carry into the exponent is right, up to
infinity. NaN must not take part (a carry could turn it into -0), so it is cut and marked quiet instead.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from yeto.wire.tensorbytes import (
    BLOCK_ELEMENTS,
    Payload,
    Values,
    as_values,
    destination,
    payload_bytes,
)

NAME: Final = "bf16"

_HALF_UNIT: Final = np.uint32(0x7FFF)
_QUIET: Final = np.uint32(0x0040)
_SIXTEEN: Final = np.uint32(16)
_ONE: Final = np.uint32(1)


def encoded_size(numel: int) -> int:
    """Return the bytes that ``numel`` elements take."""
    return 2 * numel


def encode(values: Values) -> bytes:
    """Return the rounded elements, two bytes each.

    Args:
        values: 1-D; converted to f32 when they are of another type. NaN stays NaN, infinities stay.
    """
    source = as_values(values)
    out = bytearray(encoded_size(source.size))
    encode_into(source, out)
    return bytes(out)


def encode_into(values: Values, out: bytearray | memoryview) -> None:
    """Write what ``encode`` returns into ``out``, which has exactly that size."""
    source = as_values(values)
    target = np.frombuffer(payload_bytes(out, encoded_size(source.size), NAME), dtype="<u2")
    for start in range(0, source.size, BLOCK_ELEMENTS):
        block = source[start : start + BLOCK_ELEMENTS]
        bits = block.view(np.uint32)
        rounded = bits >> _SIXTEEN
        rounded &= _ONE
        rounded += _HALF_UNIT
        rounded += bits
        rounded >>= _SIXTEEN
        nan = np.isnan(block)
        if nan.any():
            rounded[nan] = (bits[nan] >> _SIXTEEN) | _QUIET
        target[start : start + BLOCK_ELEMENTS] = rounded


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
    halves = np.frombuffer(payload_bytes(data, encoded_size(numel), NAME), dtype="<u2")
    target = destination(out, numel)
    bits = target.view(np.uint32)
    for start in range(0, numel, BLOCK_ELEMENTS):
        block = bits[start : start + BLOCK_ELEMENTS]
        block[:] = halves[start : start + BLOCK_ELEMENTS]
        block <<= _SIXTEEN
    return target
