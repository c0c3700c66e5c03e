"""Where each tensor lies in its fragment's flat vector.

A fragment on the wire, in the store and in a checkpoint is one vector: its tensors flattened row by row and
laid end to end in layout order. These are the cuts; whoever holds tensors does the copying.
"""

from __future__ import annotations

from attrs import frozen

from yeto.wire.layout import FragmentLayout, TensorSpec


@frozen(kw_only=True)
class TensorSlice:
    """One tensor's elements in the flat vector: ``start`` up to, not including, ``stop``."""

    tensor: TensorSpec
    start: int
    stop: int


def tensor_slices(fragment: FragmentLayout) -> tuple[TensorSlice, ...]:
    """Return the slices of a fragment, which cover its vector once and in order."""
    slices = []
    start = 0
    for tensor in fragment.tensors:
        stop = start + tensor.numel
        slices.append(TensorSlice(tensor=tensor, start=start, stop=stop))
        start = stop
    return tuple(slices)
