"""The layout fingerprint: 32 bytes that two ends share only if they mean the same tensors.

Equal sizes can belong to other tensors, so the hash takes names, full shapes, modes and the order, each
with its length before it: no two layouts write the same bytes. It is public; anybody can compute it.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

from yeto.wire.layout import Layout

_DOMAIN: Final = b"yeto-layout-v1\0"


def layout_fingerprint(layout: Layout) -> bytes:
    """Return SHA-256 over the layout's canonical bytes.

    The bytes: the domain prefix, P u32, per fragment mode u8 and T u32, per tensor the name's length u32 and
    its UTF-8, numel u64, ndim u32 and the dims as u64, all little-endian.
    """
    digest = hashlib.sha256(_DOMAIN)
    digest.update(struct.pack("<I", len(layout.fragments)))
    for fragment in layout.fragments:
        digest.update(struct.pack("<BI", fragment.mode, len(fragment.tensors)))
        for tensor in fragment.tensors:
            name = tensor.name.encode()
            rank = len(tensor.shape)
            digest.update(struct.pack("<I", len(name)))
            digest.update(name)
            digest.update(struct.pack(f"<QI{rank}Q", tensor.numel, rank, *tensor.shape))
    return digest.digest()
