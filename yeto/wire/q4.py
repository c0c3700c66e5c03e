"""Codec q4: four bits an element, for pushes only (E3M0, Streaming DiLoCo arXiv 2501.18512 sec. 2.4).

A block is 256 elements: one f32 scale, the block's largest magnitude, then 128 bytes with two elements
each, the first in the low nibble. A nibble is a sign bit (8) and a level: level 0 is zero, level L stands for
``2**(L - 7) * scale``. The level of x is ``round_half_even(log2(|x| / scale)) + 7`` in f32, clamped to 0..7.

Two ends must agree on the level bit for bit, and logarithms differ in their last bit between math libraries.
So none is taken: the ratio, which IEEE division fixes, is compared with the smallest f32 whose correctly
rounded logarithm reaches each level. Those seven numbers are near 2**(L - 7.5); they are not exactly there
because f32 logarithms coarsen with their size and the tie at .5 goes to the even level.

Zero blocks, subnormals and -0.0 need no special path: a zero scale is replaced by one for the division
only. A NaN or infinity in a block becomes its scale, so it cannot hide: decoding refuses it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from yeto.wire.errors import NonFiniteError
from yeto.wire.tensorbytes import (
    BLOCK_ELEMENTS,
    Payload,
    Values,
    as_values,
    destination,
    payload_bytes,
)

NAME: Final = "q4"
BLOCK_NUMEL: Final = 256
"""Elements of a block."""

_CODE_BYTES: Final = BLOCK_NUMEL // 2
_BLOCK_BYTES: Final = 4 + _CODE_BYTES
_CHUNK_BLOCKS: Final = BLOCK_ELEMENTS // BLOCK_NUMEL

# Bit patterns of the smallest ratio of levels 1 to 7.
_LEVEL_FLOORS: Final = np.array(
    [0x3C3504F2, 0x3CB504F6, 0x3D3504F2, 0x3DB504F5, 0x3E3504F3, 0x3EB504F4, 0x3F3504F3], dtype=np.uint32
).view(np.float32)

_BLOCK: Final = np.dtype([("scale", "<f4"), ("codes", "u1", (_CODE_BYTES,))])


def _pair_table() -> NDArray[np.uint64]:
    """Return the two f32 factors of each code byte, as one 8-byte item so that decoding is one look-up."""
    magnitudes = np.concatenate([[0.0], np.exp2(np.arange(-6, 1))]).astype(np.float32)
    factors = np.concatenate([magnitudes, [np.float32(0.0)], -magnitudes[1:]]).astype(np.float32)
    codes = np.arange(256)
    return np.stack([factors[codes & 15], factors[codes >> 4]], axis=1).view(np.uint64).reshape(-1)


_PAIRS: Final = _pair_table()


def encoded_size(numel: int) -> int:
    """Return the bytes that ``numel`` elements take: 132 for each block of 256, the last one padded."""
    return -(-numel // BLOCK_NUMEL) * _BLOCK_BYTES


def encode(values: Values) -> bytes:
    """Return the quantised elements.

    Args:
        values: 1-D; converted to f32 when they are of another type.
    """
    source = as_values(values)
    out = bytearray(encoded_size(source.size))
    encode_into(source, out)
    return bytes(out)


def encode_into(values: Values, out: bytearray | memoryview) -> None:
    """Write what ``encode`` returns into ``out``, which has exactly that size."""
    source = as_values(values)
    blocks = np.frombuffer(payload_bytes(out, encoded_size(source.size), NAME), dtype=_BLOCK)
    whole = source.size // BLOCK_NUMEL
    for first in range(0, whole, _CHUNK_BLOCKS):
        last = min(first + _CHUNK_BLOCKS, whole)
        rows = source[first * BLOCK_NUMEL : last * BLOCK_NUMEL].reshape(-1, BLOCK_NUMEL)
        _encode_rows(rows, blocks[first:last])
    if whole < blocks.size:
        padded = np.zeros((1, BLOCK_NUMEL), dtype=np.float32)
        padded[0, : source.size - whole * BLOCK_NUMEL] = source[whole * BLOCK_NUMEL :]
        _encode_rows(padded, blocks[whole:])


def decode(data: Payload, numel: int, out: Values | None = None) -> Values:
    """Return ``numel`` elements as a new array, or in ``out``.

    Args:
        data: exactly ``encoded_size(numel)`` bytes.
        numel: number of elements.
        out: 1-D f32 of that size to write to; untouched when this raises.

    Raises:
        ProtocolError: ``data`` has another size.
        NonFiniteError: a scale is NaN, infinite or negative; the sender's delta was not finite.
    """
    blocks = np.frombuffer(payload_bytes(data, encoded_size(numel), NAME), dtype=_BLOCK)
    return _decode_blocks(blocks, numel, out)


def _encode_rows(rows: Values, blocks: NDArray[np.void]) -> None:
    magnitudes = np.abs(rows)
    scales = magnitudes.max(axis=1)
    blocks["scale"] = scales
    scales[scales == 0] = 1
    # Tiny beside huge underflows, and infinity by infinity is invalid: both are level 0, neither is news.
    with np.errstate(under="ignore", invalid="ignore"):
        magnitudes /= scales[:, None]
    nibbles = np.zeros(rows.shape, dtype=np.uint8)
    for floor in _LEVEL_FLOORS:
        nibbles += magnitudes >= floor
    nibbles |= ((rows < 0) & (nibbles > 0)).view(np.uint8) << np.uint8(3)
    blocks["codes"] = nibbles[:, 0::2] | (nibbles[:, 1::2] << np.uint8(4))


def _decode_blocks(blocks: NDArray[np.void], numel: int, out: Values | None) -> Values:
    scales = blocks["scale"]
    bad = ~(np.isfinite(scales) & (scales >= 0))
    if bad.any():
        block = int(np.flatnonzero(bad)[0])
        raise NonFiniteError(f"q4 tensor: scale of block {block} is {scales[block]}, not a finite magnitude")
    target = destination(out, numel)
    whole = numel // BLOCK_NUMEL
    # A subnormal scale times 2**-6 may underflow to zero, which is its value then.
    with np.errstate(under="ignore"):
        for first in range(0, whole, _CHUNK_BLOCKS):
            last = min(first + _CHUNK_BLOCKS, whole)
            rows = target[first * BLOCK_NUMEL : last * BLOCK_NUMEL].reshape(-1, BLOCK_NUMEL)
            _PAIRS.take(blocks["codes"][first:last], out=rows.view(np.uint64), mode="clip")
            rows *= scales[first:last, None]
        if whole < blocks.size:
            factors = _PAIRS.take(blocks["codes"][whole]).view(np.float32)
            target[whole * BLOCK_NUMEL :] = (factors * scales[whole])[: numel - whole * BLOCK_NUMEL]
    return target
