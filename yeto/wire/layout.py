"""The layout: which named tensors make up which fragment, in which order, and how they are merged.

Both ends hold the same layout or refuse each other: its fingerprint goes into every HELLO. On the wire, in
the store and in a checkpoint a fragment is one vector: its tensors, flattened row by row and laid end to end
in this order.
"""

from __future__ import annotations

import math
from enum import IntEnum

from attrs import frozen


class MergeMode(IntEnum):
    """How the tensors of a fragment are reduced; the numbers are wire values."""

    AVG = 0
    RDA = 1
    ISO = 2


@frozen(kw_only=True)
class TensorSpec:
    """One named tensor of a fragment."""

    name: str
    """Full dotted parameter name, wrapper pieces stripped; empty when only HELLO's sizes are known."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)


@frozen(kw_only=True)
class TensorSlice:
    """One tensor's elements in its fragment's vector: ``start`` up to, not including, ``stop``."""

    tensor: TensorSpec
    start: int
    stop: int


@frozen(kw_only=True)
class FragmentLayout:
    """The tensors of one fragment, in wire order."""

    mode: MergeMode
    tensors: tuple[TensorSpec, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the whole fragment."""
        return sum(tensor.numel for tensor in self.tensors)

    def slices(self) -> tuple[TensorSlice, ...]:
        """Return where each tensor lies in the vector; together they cover it once and in order."""
        slices = []
        start = 0
        for tensor in self.tensors:
            stop = start + tensor.numel
            slices.append(TensorSlice(tensor=tensor, start=start, stop=stop))
            start = stop
        return tuple(slices)


@frozen(kw_only=True)
class Layout:
    """All fragments of a session; fragment p is ``fragments[p]``."""

    fragments: tuple[FragmentLayout, ...]
