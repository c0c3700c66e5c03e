"""The outbox: everything that waits to be sent to one peer, bounded, with only the newest of each fragment.

`put` never waits: a peer that reads slowly, or not at all, costs others nothing. What waits is bounded twice.
Per fragment only the newest version waits: a message of which nothing was sent is replaced by a newer one
and the peer skips what it could not have used. And in bytes: when more waits than may wait, the outbox
fails, which ends the group and nothing else. The tensors are views of memory that all outboxes share; an
outbox never copies one, but it keeps alive what it holds.

Control messages go their own way. They are few and small, go out in the order they were put, and never wait
for bulk: with data streams they have the control stream for themselves, without they go between two slices.

**Order of bulk messages.** A message is started by the stream whose turn it is, which at once sends its first
slice; the other slices are assigned to the following streams. So a message that was not started was not even
prepared, ids are given at the first slice, and a first slice is under way before all others of its message.
Versions of one fragment ascend; a message that would go back is not taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Final, TypeAlias

import trio
from attrs import define, frozen

from yeto.link.errors import LinkClosed, LinkOverflow
from yeto.link.framing import FrameStream
from yeto.wire.frames import MessageType, encode_header
from yeto.wire.messages import TensorHead
from yeto.wire.striping import Slice, Striper

CONTROL_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bound of the control messages that wait: the largest (a training manifest, 1 MiB) and 100,000 small ones.
They wait only while the peer does not read."""

STARTED_MAX: Final = 32
"""Messages that may be under way at a time: half of what a receiver must be able to assemble, because what
was written may still be on its way."""

Order: TypeAlias = tuple[int, ...]
"""What makes a message of a fragment newer: compared as a tuple."""


@frozen(kw_only=True)
class Control:
    """A control message that waits."""

    type: MessageType
    payload: bytes


@frozen(kw_only=True)
class Bulk:
    """A bulk message that waits or is under way: an inner frame in two pieces."""

    prefix: bytes
    """Inner frame header and head."""
    tensor: memoryview
    """One byte an item, read-only, shared."""

    @property
    def total(self) -> int:
        """Bytes of the complete inner frame."""
        return len(self.prefix) + len(self.tensor)


@define
class _Started:
    """A bulk message under way: how many of its slices are not sent yet."""

    message: Bulk
    slices_left: int


class Outbox:
    """What waits for one group of streams. Its methods are for tasks of one event loop, not for threads."""

    def __init__(
        self, num_streams: int, *, bytes_max: int, control_bytes_max: int = CONTROL_BYTES_MAX
    ) -> None:
        """Start empty.

        Args:
            num_streams: S, the data streams; 0 sends bulk on the control stream.
            bytes_max: Bound of the bulk messages that wait or are under way, in bytes. All fragments twice,
                once waiting and once under way, are what an honest slow peer can hold; a bound above that
                never ends such a group.
            control_bytes_max: Bound of the control messages that wait.
        """
        self.num_streams = num_streams
        self._bytes_max = bytes_max
        self._control_bytes_max = control_bytes_max
        self._striper = Striper(max(num_streams, 1))
        self._waiting: dict[tuple[MessageType, int], Bulk] = {}
        self._newest: dict[tuple[MessageType, int], Order] = {}
        self._started: dict[int, _Started] = {}
        self._assigned: list[deque[Slice]] = [deque() for _ in range(max(num_streams, 1))]
        self._bytes = 0
        # Control messages by key; one without a key to be replaced by is its own key.
        self._control: dict[Hashable, Control] = {}
        self._control_bytes = 0
        self._control_under_way = 0
        self._failure: LinkClosed | None = None
        self._bulk_stopped = False
        # Each task waits in a place of its own: a message wakes the one writer that has something to do, not
        # all of them, which for a tiny message costs more than sending it.
        self._places = [trio.lowlevel.ParkingLot() for _ in range(max(num_streams, 1))]
        self._control_place = trio.lowlevel.ParkingLot() if num_streams else self._places[0]
        self._flush_place = trio.lowlevel.ParkingLot()
        self._failure_place = trio.lowlevel.ParkingLot()

    @property
    def bytes_held(self) -> int:
        """Bytes of bulk messages that wait or are under way."""
        return self._bytes

    @property
    def is_closed(self) -> bool:
        """Whether nothing will be sent any more."""
        return self._failure is not None

    def put(self, head: TensorHead, tensor: memoryview, *, order: Order) -> bool:
        """Have a bulk message sent, unless a newer one of its type and fragment was put before.

        Args:
            head: The message's head; says its type and fragment.
            tensor: The tensor's bytes as they go on the wire, contiguous. Shared, and not to be changed as
                long as the group lives.
            order: Ascends from message to message of a type and fragment: ``(version,)`` of a broadcast;
                ``(step, attempt, base_version)`` of a push.

        Returns:
            Whether it was taken. False when it is not newer than one put before, and when the outbox is
            closed or thereby fails; the group that it belongs to then ends with the reason.
        """
        key = (head.TYPE, head.fragment)
        if self._bulk_stopped or (key in self._newest and order <= self._newest[key]):
            return False
        data = as_bytes(tensor).toreadonly()
        head_bytes = head.encode()
        prefix = encode_header(head.TYPE, len(head_bytes) + len(data)) + head_bytes
        message = Bulk(prefix=prefix, tensor=data)
        replaced = self._waiting.get(key)
        held = self._bytes + message.total - (replaced.total if replaced else 0)
        if held > self._bytes_max:
            self.fail(
                LinkOverflow(f"the peer does not read: {held} bytes wait, at most {self._bytes_max} may wait")
            )
            return False
        self._bytes = held
        self._newest[key] = order
        # A replaced message's place in the queue stays, or a fragment could wait for ever.
        self._waiting[key] = message
        self._wake_next()
        return True

    def put_control(self, kind: MessageType, payload: bytes, *, replaces: Hashable = None) -> bool:
        """Have a control message sent, before any bulk that was not started.

        Args:
            kind: Its type.
            payload: Its payload.
            replaces: When given, a waiting message put with an equal value is replaced by this one, at the
                end of the queue: heartbeats, and pulls of one fragment.

        Returns:
            Whether it was taken; False when the outbox is closed or thereby fails.
        """
        if self._failure is not None:
            return False
        key = (kind, replaces) if replaces is not None else object()
        replaced = self._control.pop(key, None)
        if replaced is not None:
            self._control_bytes -= len(replaced.payload)
        if self._control_bytes + len(payload) > self._control_bytes_max:
            self.fail(
                LinkOverflow(f"the peer does not read: {self._control_bytes} bytes of control messages wait")
            )
            return False
        self._control[key] = Control(type=kind, payload=payload)
        self._control_bytes += len(payload)
        self._control_place.unpark_all()
        return True

    def fail(self, reason: LinkClosed) -> None:
        """Close the outbox: what waits is dropped, puts are refused, the writers end with the reason."""
        if self._failure is None:
            self._failure = reason
            self._control.clear()
            self.stop_bulk()
            self._started.clear()
            self._bytes = 0
            for place in (*self._places, self._control_place, self._flush_place, self._failure_place):
                place.unpark_all()

    def stop_bulk(self) -> None:
        """Start no more bulk messages and send no more slices; control messages still go out."""
        self._bulk_stopped = True
        self._waiting.clear()
        for assigned in self._assigned:
            assigned.clear()

    async def failed(self) -> None:
        """Wait until the outbox fails, and raise why. A writer stuck in a send would not notice."""
        while self._failure is None:
            await self._failure_place.park()
        raise self._failure

    async def control_flushed(self) -> None:
        """Wait until every control message that was put is handed to the system.

        Raises:
            LinkClosed: The outbox failed.
        """
        while self._control or self._control_under_way:
            if self._failure is not None:
                raise self._failure
            await self._flush_place.park()

    async def take(self, *, control: bool, stream: int | None) -> Control | Slice:
        """Wait for the next thing a writer has to send; it reports back with `sent`.

        Args:
            control: Whether control messages go on this writer's socket; they come first.
            stream: Index of the writer's socket among those that carry slices, None when it carries none.

        Raises:
            LinkClosed: The outbox failed.
        """
        place = self._control_place if stream is None else self._places[stream]
        while self._failure is None:
            if control and self._control:
                key = next(iter(self._control))
                taken = self._control.pop(key)
                self._control_bytes -= len(taken.payload)
                self._control_under_way += 1
                return taken
            if stream is not None:
                if not self._assigned[stream]:
                    self._start(stream)
                if self._assigned[stream]:
                    return self._assigned[stream].popleft()
            await place.park()
        raise self._failure

    def sent(self, item: Control | Slice) -> None:
        """Take note that what `take` gave is sent."""
        if isinstance(item, Control):
            self._control_under_way -= 1
            self._flush_place.unpark_all()
        else:
            started = self._started.get(item.chunk.message_id)
            if started is None:
                return  # the outbox failed while the slice was being sent
            started.slices_left -= 1
            if not started.slices_left:
                del self._started[item.chunk.message_id]
                self._bytes -= started.message.total
                self._wake_next()

    def pieces(self, item: Slice) -> tuple[bytes, memoryview]:
        """Return a slice's bytes: what of the inner frame's header and head lies in it, and of the tensor."""
        message = self._started[item.chunk.message_id].message
        start = item.chunk.offset - len(message.prefix)
        if item.chunk.offset:
            return b"", message.tensor[start : start + item.size]
        return message.prefix, message.tensor[: start + item.size]

    def _start(self, stream: int) -> None:
        """Start the message that waits longest, if it is this stream's turn and one more may be started."""
        if stream != self._striper.turn or not self._waiting or len(self._started) >= STARTED_MAX:
            return
        message = self._waiting.pop(next(iter(self._waiting)))
        slices = self._striper.slices(message.total)
        self._started[slices[0].chunk.message_id] = _Started(message, len(slices))
        for piece in slices:
            self._assigned[piece.stream].append(piece)
            if piece.stream != stream:
                self._places[piece.stream].unpark_all()
        self._wake_next()

    def _wake_next(self) -> None:
        """Wake the writer whose turn it is, if there is a message to start; it looks whether it may."""
        if self._waiting:
            self._places[self._striper.turn].unpark_all()


async def write_control(stream: FrameStream, outbox: Outbox) -> None:
    """Write the control stream for as long as the group lives: one task.

    Raises:
        LinkClosed: The connection ended, or the outbox failed; the only way to return.
    """
    index = None if outbox.num_streams else 0
    while True:
        await _write(stream, outbox, await outbox.take(control=True, stream=index))


async def write_bulk(stream: FrameStream, outbox: Outbox, index: int) -> None:
    """Write one data stream for as long as the group lives: one task for each.

    Args:
        stream: The data stream.
        outbox: Of the group.
        index: 0 to S-1, which of the group's data streams this is.

    Raises:
        LinkClosed: The connection ended, or the outbox failed; the only way to return.
    """
    while True:
        await _write(stream, outbox, await outbox.take(control=False, stream=index))


async def _write(stream: FrameStream, outbox: Outbox, item: Control | Slice) -> None:
    if isinstance(item, Control):
        await stream.send(item.type, item.payload)
    else:
        prefix, tensor = outbox.pieces(item)
        await stream.send(MessageType.CHUNK, item.chunk.encode(), prefix, tensor)
    outbox.sent(item)


def as_bytes(buffer: bytearray | memoryview | bytes) -> memoryview:
    """Return a view of contiguous memory with items of one byte, whatever they were."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")
