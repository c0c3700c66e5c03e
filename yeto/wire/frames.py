"""Frames: 13 bytes that say what follows and how long it is, before anything is allocated for it.

Every message on every stream is one frame: ``magic u32 | type u8 | length u64 | payload``, little-endian.
The header alone decides whether a frame is welcome (see ``yeto.wire.legality``), so a peer that claims
a petabyte costs 13 bytes of reading and nothing else. Lengths are 64 bits wide everywhere: a fragment may be
larger than 4 GiB, and no message has a smaller limit hidden in its format.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, TypeAlias

from attrs import frozen

from yeto.errors import ProtocolError

BytesLike: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes that a decoder may read; a memoryview has items of one byte."""

PROTOCOL_VERSION: Final = 4
"""Stated by HELLO and DATA_HELLO; the two ends speak the same version or not at all."""

MAGIC: Final = 0xD170C0DE
"""First four bytes of every frame: a stream that lost its place is noticed at the next header."""

HEADER_BYTES: Final = 13

SLICE_BYTES: Final = 4 * 1024 * 1024
"""Size of a CHUNK's slice: large enough that its 37 bytes of headers cost nothing, small enough that a
heartbeat waits behind at most one of them and that a lost stream loses little."""

WAN_STREAMS_MAX: Final = 256
"""Data streams of one group; beyond this the sockets cost the syncer more than they gain anybody."""

_HEADER = struct.Struct("<IBQ")


class MessageType(IntEnum):
    """What a frame carries; the numbers are wire values."""

    HELLO = 1
    INIT_PARAMS = 2
    PULL_REQ = 3
    PUSH_FRAGMENT = 4
    BCAST_FRAGMENT = 5
    HEARTBEAT = 6
    SHUTDOWN = 7
    DATA_HELLO = 8
    CHUNK = 9
    ERROR = 10
    FINAL_MANIFEST = 11
    FINAL_ACK = 12
    FINAL_FRAGMENT = 13
    BUDGET_DONE = 14
    MANIFEST = 15


_TYPES: Final = {int(kind): kind for kind in MessageType}


@frozen
class FrameHeader:
    """A decoded frame header."""

    type: MessageType
    length: int
    """Payload bytes that follow the header, in [0, 2**64)."""


def encode_header(type: MessageType, length: int) -> bytes:
    """Return the 13 bytes that precede a payload of ``length`` bytes."""
    return _HEADER.pack(MAGIC, type, length)


def decode_header(data: BytesLike) -> FrameHeader:
    """Read a frame header.

    The length is not judged here: what is legal depends on who reads where, see ``Legality.check``.

    Args:
        data: exactly ``HEADER_BYTES`` bytes.

    Raises:
        ProtocolError: another length, another magic, or a type this protocol does not have.
    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"frame header: {len(data)} bytes instead of {HEADER_BYTES}")
    magic, number, length = _HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"frame header: magic {magic:#010x} instead of {MAGIC:#010x}; not a Yeto peer?")
    kind = _TYPES.get(number)
    if kind is None:
        raise ProtocolError(f"frame header: unknown message type {number}")
    return FrameHeader(kind, length)
