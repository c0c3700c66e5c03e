"""What the kernels read: a received payload, or a tensor. The bytes stay where they are."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from torch import Tensor

from yeto.errors import MergeError
from yeto.merge.kernels import BF16, F32, Q4
from yeto.wire.codecs import by_name
from yeto.wire.tensorbytes import Payload

_KINDS = {"f32": F32, "bf16": BF16, "q4": Q4}
_ALIGNMENTS = {F32: 4, BF16: 2, Q4: 4}


@frozen(eq=False)
class Source:
    """Where the elements of a fragment are, and how they are encoded."""

    kind: int
    address: int
    owner: object
    """Keeps the memory alive."""


def of_payload(payload: Payload, dtype: str, numel: int) -> Source:
    """Return the source of an encoded fragment.

    Args:
        payload: exactly the encoded size of ``numel`` elements.
        dtype: ``f32``, ``bf16`` or ``q4``.
        numel: elements of the fragment.

    Raises:
        MergeError: ``payload`` has another size.
    """
    array = np.frombuffer(payload, dtype=np.uint8)
    expected = by_name(dtype).encoded_size(numel)
    if array.size != expected:
        raise MergeError(f"a {dtype} push of {numel} elements has {array.size} bytes instead of {expected}")
    kind = _KINDS[dtype]
    if array.ctypes.data % _ALIGNMENTS[kind]:
        array = array.copy()  # a slice of something; a buffer that was received into is aligned
    return Source(kind, array.ctypes.data, array)


def of_tensor(tensor: Tensor) -> Source:
    """Return the source of an f32 tensor, taken as flat."""
    flat = flatten(tensor)
    return Source(F32, flat.data_ptr(), flat)


def flatten(tensor: Tensor) -> Tensor:
    """Return a tensor as 1-D and contiguous; a copy only if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1)
