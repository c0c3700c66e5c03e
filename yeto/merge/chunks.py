"""How every pass over a tensor is made: in chunks that fit a core's cache, in an order fixed by the sizes.

Two rules make a result the same bits for any number of threads:

- Element by element, only operations that IEEE 754 rounds once (copy, multiply, fused multiply-add): where a
  thread's share begins and ends then leaves no trace.
- Sums never use a library reduction, whose order depends on threads and on the width of the vector unit.
  ``ProductSum`` keeps one f64 sum for each *position* in a chunk and folds those positions in halves at the
  end. The product of two f32 numbers is exact in f64, so each of its additions is rounded once as well.

f64 also makes norms safe: the square of the largest f32 is 1e77, of the smallest 1e-90. A sum of squares
is finite exactly if every element is, so one pass gives both the norm and the verdict.

A chunk has 32,768 elements, the largest number for which torch never starts its own threads; parallelism is
the caller's, over pushes and fragments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from yeto.errors import MergeError
from yeto.wire.codecs import by_name
from yeto.wire.digest import digest
from yeto.wire.tensorbytes import Payload, Values

CHUNK: Final = 32768
"""Elements of a chunk: 128 KiB in f32, 256 KiB in f64."""

_WIDE: Final = 2.0**100
_STEP: Final = 2.0**64


def chunk_bounds(numel: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each chunk of ``numel`` elements, in ascending order."""
    for start in range(0, numel, CHUNK):
        yield start, min(start + CHUNK, numel)


class ProductSum:
    """The f64 sum of products of two f32 tensors, fed chunk by chunk."""

    def __init__(self, numel: int = CHUNK) -> None:
        """Begin at 0.

        Args:
            numel: elements of the largest tensor that will be summed. It never changes a sum; a tensor of a
                few elements need not pay for clearing the positions of a whole chunk.
        """
        self._lanes = torch.zeros(min(numel, CHUNK), dtype=torch.float64)
        # The same memory. A fold is a handful of tiny additions, which cost torch several times their work.
        self._folded = self._lanes.numpy()
        self._used = 0

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add the products of two 1-D f64 tensors (widened f32) of at most ``CHUNK`` elements."""
        count = left.numel()
        self._lanes[:count].addcmul_(left, right)
        self._used = max(self._used, count)

    def take(self) -> float:
        """Return the sum so far and begin anew at 0."""
        lanes, count = self._folded, self._used
        if not count:
            return 0.0
        with np.errstate(invalid="ignore"):  # infinities of both signs make a NaN, which is the answer
            while count > 1:
                half = (count + 1) // 2
                lanes[: count - half] += lanes[half:count]
                count = half
        total = float(lanes[0])
        lanes[: self._used] = 0.0
        self._used = 0
        return total


class Source(Protocol):
    """Something that gives f32 elements, a chunk at a time."""

    def chunk(self, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop``; valid until the next call, not to be written to."""
        ...


class TensorSource:
    """A tensor in memory, flattened."""

    def __init__(self, tensor: Tensor) -> None:
        self._flat = tensor.detach().reshape(-1)

    def chunk(self, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop`` without a copy."""
        return self._flat[start:stop]


class PayloadSource:
    """A fragment as it came from the wire, decoded a chunk at a time into one small buffer."""

    def __init__(self, payload: Payload, dtype: str, numel: int) -> None:
        """Take the encoded fragment.

        Args:
            payload: exactly the encoded size of ``numel`` elements; kept, not copied.
            dtype: ``f32``, ``bf16`` or ``q4``.
            numel: elements of the whole fragment.

        Raises:
            MergeError: ``payload`` has another size.
        """
        self._codec = by_name(dtype)
        self._payload = payload
        self._numel = numel
        size = payload.nbytes if isinstance(payload, np.ndarray | memoryview) else len(payload)
        if size != self._codec.encoded_size(numel):
            raise MergeError(
                f"a {dtype} push of {numel} elements has {size} bytes "
                f"instead of {self._codec.encoded_size(numel)}"
            )
        # A range that does not begin and end on a block of the codec is decoded with what surrounds it.
        room = min(CHUNK, numel) + 2 * self._codec.ALIGNMENT
        self._buffer: Values = np.empty(room, dtype=np.float32)
        self._tensor = torch.from_numpy(self._buffer)

    def chunk(self, start: int, stop: int) -> Tensor:
        """Decode elements ``start`` to ``stop``.

        Raises:
            NonFiniteError: the encoding itself says that a value is not finite (q4 scales).
        """
        alignment = self._codec.ALIGNMENT
        first = start - start % alignment
        last = min(stop + -stop % alignment, self._numel)
        self._codec.decode_range(self._payload, self._numel, first, last, out=self._buffer[: last - first])
        return self._tensor[start - first : stop - first]


def combine(out: Tensor, offset: int, terms: list[tuple[Source, float]]) -> float:
    """Write the sum of ``coefficient * source`` to ``out`` and return its sum of squares.

    The one accumulation pass of the merge: f32, in the order of ``terms``, no temporary larger than a chunk.

    Args:
        out: 1-D f32, overwritten.
        offset: where in the sources ``out`` begins.
        terms: sources with their coefficients; without any, ``out`` becomes 0.
    """
    sums, wide = ProductSum(out.numel()), wide_buffer(out.numel())
    if not terms:
        out.zero_()
        return 0.0
    split = [(source, *split_power(coefficient)) for source, coefficient in terms]
    for start, stop in chunk_bounds(out.numel()):
        target = out[start:stop]
        for index, (source, power, coefficient) in enumerate(split):
            elements = source.chunk(offset + start, offset + stop)
            if power != 1.0:
                elements = elements * power
            if index == 0:
                torch.mul(elements, coefficient, out=target)
            else:
                target.add_(elements, alpha=coefficient)
        squares = widen(target, wide)
        sums.add(squares, squares)
    return sums.take()


def rescale(out: Tensor, factor: float) -> float:
    """Multiply ``out`` (1-D f32) by ``factor`` in place and return its sum of squares."""
    return combine(out, 0, [(TensorSource(out), factor)])


def split_power(coefficient: float) -> tuple[float, float]:
    """Return a power of two and a rest, both within f32's comfort, whose product is ``coefficient``.

    One over the norm of a subnormal tensor does not fit f32; applied in two steps it need not. Multiplying
    by the power is exact unless the element is negligible beside the norm it was divided by.
    """
    if coefficient == 0.0 or 1.0 / _WIDE <= abs(coefficient) <= _WIDE or not math.isfinite(coefficient):
        return 1.0, coefficient
    return (_STEP, coefficient / _STEP) if abs(coefficient) > _WIDE else (1.0 / _STEP, coefficient * _STEP)


def wide_buffer(numel: int) -> Tensor:
    """Return an f64 buffer for `widen`: large enough for every chunk of a tensor of ``numel`` elements."""
    return torch.empty(min(numel, CHUNK), dtype=torch.float64)


def widen(chunk: Tensor, buffer: Tensor) -> Tensor:
    """Return ``chunk`` (1-D f32) as f64, in the first elements of ``buffer``."""
    return buffer[: chunk.numel()].copy_(chunk)


def product_sum(left: Tensor, right: Tensor) -> float:
    """Return the f64 sum of products of two f32 tensors of one shape."""
    x, y = left.detach().reshape(-1), right.detach().reshape(-1)
    sums = ProductSum(x.numel())
    wide_x, wide_y = wide_buffer(x.numel()), wide_buffer(x.numel())
    for start, stop in chunk_bounds(x.numel()):
        sums.add(widen(x[start:stop], wide_x), widen(y[start:stop], wide_y))
    return sums.take()


def norm(tensor: Tensor) -> float:
    """Return the L2 norm of an f32 tensor in f64; NaN or infinity exactly if an element is not finite."""
    return math.sqrt(product_sum(tensor, tensor))


def is_finite(tensor: Tensor) -> bool:
    """Return whether every element of an f32 tensor is a finite number."""
    flat = tensor.detach().reshape(-1)
    for start, stop in chunk_bounds(flat.numel()):
        low, high = torch.aminmax(flat[start:stop])  # both are NaN if any element is
        if not (math.isfinite(low) and math.isfinite(high)):
            return False
    return True


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of an f32 tensor: 32 hex digits over its little-endian bytes, in its own order."""
    array = cast(Values, tensor.detach().contiguous().reshape(-1).numpy())
    return digest(array.astype("<f4", copy=False))


def require_f32(name: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """Check the dtype of a tensor, and its shape against another's.

    Raises:
        MergeError: naming the tensor and both sides.
    """
    if tensor.dtype != torch.float32:
        raise MergeError(f"{name} is {tensor.dtype}; the merge takes torch.float32")
    if like is not None and tensor.shape != like.shape:
        raise MergeError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(like.shape)}")
