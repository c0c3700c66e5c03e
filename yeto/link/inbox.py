"""The inbox: bulk messages of one group on their way from the sockets into their owners' buffers.

All readers of a group share one inbox, because the slices of a message arrive over all streams. For each
message its owner is asked once, as soon as the head is known, whether it wants it and where to; then the
bytes go from socket to buffer without another copy. A message nobody wants costs no memory.

**Slices that overtake their message's first one** are kept within a bound. When that is reached, the reader
of such a slice waits for the first slice, which is on another stream: TCP then slows the peer down, where an
error would end an honest group whose one stream stalled for a moment. A peer that sends each stream's slices
in order cannot bring this to a standstill (of the slices not yet read, the one that comes first in the
peer's order is never an early one). If all readers wait nevertheless, the order cannot be followed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import numpy as np
import trio
from attrs import frozen

from yeto.errors import ProtocolError
from yeto.link.errors import LinkClosed
from yeto.link.framing import FrameStream
from yeto.wire.frames import FrameHeader, MessageType
from yeto.wire.legality import Legality, TensorSizes
from yeto.wire.messages import TENSOR_HEADS, ChunkHeader, TensorHead
from yeto.wire.striping import Assembler, Buffer, Inner, Slot, tensor_bytes, tensor_view

Admit: TypeAlias = Callable[[MessageType, TensorHead, int], Awaitable[Buffer | None]]
"""Asked once per message: type, head, bytes of its tensor -> a buffer of that size, or None to drop it.

May wait (for memory, for the coordinator's answer); the stream waits with it. Raises ``ProtocolError`` for a
message that the session does not allow, which ends the group.
"""

Deliver: TypeAlias = Callable[[MessageType, TensorHead, Buffer], Awaitable[None]]
"""Told once per wanted message, when it is complete; gets the buffer that `Admit` returned."""


@frozen(kw_only=True)
class Progress:
    """How much of a wanted message has arrived."""

    head: TensorHead
    received_bytes: int


class Inbox:
    """Receives the bulk messages of one group; shared by the readers of all its streams."""

    def __init__(
        self,
        assembler: Assembler,
        sizes: TensorSizes,
        admit: Admit,
        deliver: Deliver,
        *,
        num_streams: int,
    ) -> None:
        """Join the assembler of a group with the owner of its messages.

        Args:
            assembler: Of this group and direction.
            sizes: The session's tensor sizes; a message of another size ends the group, wanted or not.
            admit: Decides where a message goes.
            deliver: Takes a complete message.
            num_streams: S, the data streams; 0 when the control stream carries slices.
        """
        self._assembler = assembler
        self._sizes = sizes
        self._admit = admit
        self._deliver = deliver
        self._readers = max(num_streams, 1)
        self._waiting = trio.lowlevel.ParkingLot()

    @property
    def progress(self) -> tuple[Progress, ...]:
        """The wanted messages under way, to whole slices."""
        return tuple(
            Progress(head=message.head, received_bytes=message.received_bytes)
            for message in self._assembler.partials
            if message.buffer is not None and message.head is not None
        )

    async def receive(self, stream: FrameStream, header: FrameHeader) -> None:
        """Receive one frame whose header was read and is legal on this stream: a CHUNK, or a plain message.

        Raises:
            LinkClosed: The connection ended.
            ProtocolError: The frame breaks a rule of striping, of its message, or of the owner.
        """
        if header.type is MessageType.CHUNK:
            await self._receive_chunk(stream, header)
        else:
            await self._receive_plain(stream, header)

    async def _receive_chunk(self, stream: FrameStream, header: FrameHeader) -> None:
        chunk = ChunkHeader.decode(await stream.read_exact(min(header.length, ChunkHeader.BYTES), "a CHUNK"))
        slot = self._assembler.claim(chunk, header.length - ChunkHeader.BYTES)
        if slot.is_first:
            inner = self._assembler.open(slot, await stream.read_header())
            head = await self._read_head(stream, inner)
            self._assembler.decide(slot, head, await self._admit(inner.type, head, inner.tensor_bytes))
            self._waiting.unpark_all()
        else:
            await self._wait_for_room(slot)
        target = self._assembler.target(slot)
        if target is None:
            await stream.discard(tensor_bytes(slot))
        else:
            await stream.read_into(target, "a slice")
        done = self._assembler.filled(slot)
        self._waiting.unpark_all()
        if done is not None and done.buffer is not None:
            await self._deliver(done.type, done.head, done.buffer)

    async def _receive_plain(self, stream: FrameStream, header: FrameHeader) -> None:
        inner = self._assembler.examine(header)
        head = await self._read_head(stream, inner)
        buffer = await self._admit(inner.type, head, inner.tensor_bytes)
        if buffer is None:
            await stream.discard(inner.tensor_bytes)
            return
        await stream.read_into(tensor_view(inner, buffer), inner.type.name)
        await self._deliver(inner.type, head, buffer)

    async def _read_head(self, stream: FrameStream, inner: Inner) -> TensorHead:
        head = TENSOR_HEADS[inner.type].decode(await stream.read_exact(inner.head_bytes, inner.type.name))
        self._sizes.expect(head, inner.tensor_bytes)
        return head

    async def _wait_for_room(self, slot: Slot) -> None:
        while not self._assembler.has_room(slot):
            if len(self._waiting) + 1 >= self._readers:
                raise ProtocolError(
                    f"every stream waits for the first slice of a message, {self._assembler.early_bytes} "
                    "bytes of later slices are held"
                )
            await self._waiting.park()


async def receive_bulk(stream: FrameStream, inbox: Inbox, legal: Legality) -> None:
    """Read one data stream for as long as the group lives.

    Args:
        stream: A data stream, after DATA_HELLO.
        inbox: Of the group.
        legal: What may arrive on a data stream on this side.

    Raises:
        LinkClosed: The connection ended; the only way to return.
        ProtocolError: As `Inbox.receive`, or a frame that is not legal here.
    """
    while True:
        header = await stream.read_header()
        legal.check(header)
        await inbox.receive(stream, header)


def new_buffer(size: int) -> memoryview:
    """Return a writable buffer for a tensor, without touching its memory.

    A ``bytearray`` of a few hundred MiB is filled with zeros on the spot, for which every task of the event
    loop would wait.

    Raises:
        LinkClosed: there is no memory for it, which is the end of the group that the tensor comes from: a
            layout can claim terabytes, and everybody else has room.
    """
    try:
        return np.empty(size, dtype=np.uint8).data
    except MemoryError as error:
        raise LinkClosed(f"no memory for a tensor of {size} bytes") from error
