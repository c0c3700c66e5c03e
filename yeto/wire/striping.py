"""Striping: a complete inner frame cut into 4 MiB slices over several streams, and put together again.

The rule on the sending side: slices lie on 4 MiB boundaries and go to the streams in turn; the turn goes on
from one message to the next, so that many small messages spread as evenly as one large one. A message gets
its id when it is started, hence ids ascend from 0 within a group and direction.

The rule on the receiving side: **a peer's claim never costs memory**. Offset, size, total and id are checked
before anything is kept; a buffer is taken only when the first slice has shown what the message is and its
receiver has said that it wants it; then every slice is read straight into that buffer. A message that nobody
wants is read and thrown away. Slices may arrive in any order over any stream, hence also before the first
one: those wait in buffers of their own, within a byte bound of the group.

Nothing here reads or writes a socket. For one CHUNK the reader goes through these calls::

    slot = assembler.claim(chunk, size)             # legal? then this slice is ours to fill
    if slot.is_first:
        inner = assembler.open(slot, header)        # what is it? legal here, and of this length?
        assembler.decide(slot, head, buffer)        # wanted: the buffer to fill; unwanted: None
    view = assembler.target(slot)                   # where the remaining bytes go; None: throw them away
    done = assembler.filled(slot)                   # the message, when this was its last missing slice
"""

from __future__ import annotations

from typing import Final, TypeAlias

from attrs import define, field, frozen

from yeto.errors import ProtocolError
from yeto.wire.frames import HEADER_BYTES, SLICE_BYTES, FrameHeader, MessageType
from yeto.wire.legality import Legality
from yeto.wire.messages import TENSOR_HEADS, ChunkHeader, TensorHead

PARTIALS_MAX: Final = 64
"""Messages of one group and direction that may be incomplete at a time; a fixed number of the protocol."""

EARLY_BYTES_MAX: Final = 8 * SLICE_BYTES
"""What slices that overtook their message's first one may hold, per group: two for each of the usual four
streams. More would only let a peer that never sends a first slice hold more of our memory."""

ID_WINDOW: Final = 4096
"""How far a message id may lie above the lowest incomplete one: far more than a conflating sender can have
under way, and the most that the set of completed ids can grow to."""

Buffer: TypeAlias = bytearray | memoryview
"""What a tensor is received into: writable, contiguous, of exactly the tensor's size."""


@frozen(kw_only=True)
class Slice:
    """One CHUNK to send: the bytes of the inner frame at ``chunk.offset``, on a stream."""

    stream: int
    """Index among the streams that carry slices, from 0."""
    chunk: ChunkHeader

    @property
    def size(self) -> int:
        """Bytes of the slice itself."""
        return self.chunk.slice_bytes


class Striper:
    """The sending side's bookkeeping of one group and direction: message ids and whose turn it is."""

    def __init__(self, num_streams: int) -> None:
        """Start at message 0 on stream 0.

        Args:
            num_streams: How many streams carry slices, at least 1 (the control stream counts when there
                are no data streams).
        """
        if num_streams < 1:
            raise ValueError(f"a message needs a stream to go on, not {num_streams}")
        self._num_streams = num_streams
        self._next_id = 0
        self._turn = 0

    @property
    def turn(self) -> int:
        """Index of the stream that the next message's first slice goes to."""
        return self._turn

    def slices(self, total: int) -> tuple[Slice, ...]:
        """Start a message: give it the next id and its slices their streams.

        Args:
            total: Bytes of the complete inner frame, header included.

        Returns:
            The slices in ascending order of offset.
        """
        message_id = self._next_id
        self._next_id += 1
        cut = []
        for offset in range(0, total, SLICE_BYTES):
            chunk = ChunkHeader(message_id=message_id, total=total, offset=offset)
            cut.append(Slice(stream=self._turn, chunk=chunk))
            self._turn = (self._turn + 1) % self._num_streams
        return tuple(cut)


@frozen(kw_only=True)
class Inner:
    """What a bulk frame's header says: its type, and how its payload divides into head and tensor."""

    type: MessageType
    head_bytes: int
    tensor_bytes: int


@frozen(kw_only=True)
class Received:
    """A message that is complete."""

    type: MessageType
    head: TensorHead
    """The message's decoded head, as it was given to `Assembler.decide`."""
    buffer: Buffer | None
    """The tensor; None when nobody wanted the message and it was thrown away."""


@define(kw_only=True, eq=False)
class Partial:
    """A message of which some slices are still missing. Read-only for everyone but the assembler."""

    message_id: int
    total: int
    inner: Inner | None = None
    head: TensorHead | None = None
    buffer: Buffer | None = None
    decided: bool = False
    received_bytes: int = 0
    """Bytes of the inner frame in slices that are complete."""
    _view: memoryview | None = None
    _claimed: set[int] = field(factory=set)
    _early: list[Slot] = field(factory=list)


@define(kw_only=True, eq=False)
class Slot:
    """One slice that its reader is filling. Read-only for everyone but the assembler."""

    message: Partial
    offset: int
    size: int
    _early: bytearray | None = None

    @property
    def is_first(self) -> bool:
        """Whether this slice starts with the inner frame's header and head."""
        return self.offset == 0


class Assembler:
    """The receiving side's bookkeeping of one group and direction.

    Every method that raises `ProtocolError` leaves the group unusable: its reader has to end it.
    """

    def __init__(self, legal: Legality, *, early_bytes_max: int = EARLY_BYTES_MAX) -> None:
        """Start with no message.

        Args:
            legal: What may be cut into slices in this direction, with the lengths it may have.
            early_bytes_max: Bound of the bytes that wait for their message's first slice.
        """
        self._legal = legal
        self._total_max = HEADER_BYTES + max(legal.most.values())
        self._early_bytes_max = early_bytes_max
        self._early_bytes = 0
        self._partials: dict[int, Partial] = {}
        self._lowest_incomplete = 0
        # Completed ids above the lowest incomplete one; ID_WINDOW bounds it.
        self._completed: set[int] = set()

    @property
    def partials(self) -> tuple[Partial, ...]:
        """Messages under way, in the order they began."""
        return tuple(self._partials.values())

    @property
    def early_bytes(self) -> int:
        """Bytes taken for slices whose message is not decided yet."""
        return self._early_bytes

    def claim(self, chunk: ChunkHeader, size: int) -> Slot:
        """Check a slice against everything known of its message, and mark it as being filled.

        Args:
            chunk: The decoded head of the CHUNK.
            size: Bytes of the slice itself.

        Raises:
            ProtocolError: The slice is out of place, already there, or of a message that cannot be.
        """
        number, total, offset = chunk.message_id, chunk.total, chunk.offset
        if total > self._total_max:
            raise ProtocolError(
                f"message {number} claims {total} bytes, the largest that is legal here has {self._total_max}"
            )
        if size != chunk.slice_bytes:
            raise ProtocolError(
                f"slice of {size} bytes at offset {offset} of message {number} ({total} bytes) must have "
                f"{chunk.slice_bytes} bytes"
            )
        message = self._partials.get(number)
        if message is None:
            message = self._begin(number, total)
        if message.total != total:
            raise ProtocolError(
                f"message {number} claims {total} bytes after it claimed {message.total} bytes"
            )
        index = offset // SLICE_BYTES
        if index in message._claimed:
            raise ProtocolError(f"slice at offset {offset} of message {number} was sent twice")
        message._claimed.add(index)
        return Slot(message=message, offset=offset, size=size)

    def examine(self, header: FrameHeader) -> Inner:
        """Check the header of a bulk frame, whether inside a CHUNK or plain.

        Raises:
            ProtocolError: Not a bulk message that is legal here (a CHUNK never is), or of a length that it
                cannot have.
        """
        self._legal.check(header)
        head_bytes = TENSOR_HEADS[header.type].BYTES
        return Inner(type=header.type, head_bytes=head_bytes, tensor_bytes=header.length - head_bytes)

    def open(self, slot: Slot, header: FrameHeader) -> Inner:
        """Take in the inner header, which the first slice starts with.

        Returns:
            What the message is. Its head follows in the slice.

        Raises:
            ProtocolError: As `examine`, or the inner length does not fit the slices' total.
        """
        inner = self.examine(header)
        if HEADER_BYTES + header.length != slot.message.total:
            raise ProtocolError(
                f"{header.type.name} of {header.length} bytes does not fit its slices' total of "
                f"{slot.message.total} bytes"
            )
        slot.message.inner = inner
        return inner

    def decide(self, slot: Slot, head: TensorHead, buffer: Buffer | None) -> None:
        """Say where the opened message goes; slices that overtook the first one are moved there now.

        Args:
            slot: The first slice, after `open`.
            head: The decoded head; comes back in `Received`.
            buffer: To be filled with the tensor, of exactly its size; None throws the message away.

        Raises:
            ProtocolError: The tensor is not of the buffer's size.
        """
        message = slot.message
        assert message.inner is not None, "decide comes after open"
        if buffer is not None:
            message._view = tensor_view(message.inner, buffer)
            message.buffer = buffer
        message.head = head
        message.decided = True
        for early in message._early:
            self._settle(early)
        message._early.clear()

    def has_room(self, slot: Slot) -> bool:
        """Whether `target` can give this slot a place now.

        False only for a slice that came before its message was decided, when the bound on such slices is
        reached. The reader then waits for the decision; if nobody is left who could bring it, the peer's
        order cannot be followed.
        """
        early = not (slot.is_first or slot.message.decided)
        return not early or self._early_bytes + slot.size <= self._early_bytes_max

    def target(self, slot: Slot) -> memoryview | None:
        """Return where the slice's tensor bytes have to be read to.

        For the first slice these are the bytes behind the head. Its message has to be decided.

        Returns:
            A view of exactly the bytes to read, or None when as many bytes are to be thrown away
            (`tensor_bytes` counts them).

        Raises:
            ProtocolError: The slice came before its message's first one and the bound is reached.
        """
        message = slot.message
        if message.decided:
            return self._destination(slot)
        assert not slot.is_first, "a first slice is decided before it is filled"
        if not self.has_room(slot):
            raise ProtocolError(
                f"slices that came before the first one of their message hold {self._early_bytes} bytes, "
                f"{slot.size} more would pass the bound of {self._early_bytes_max} bytes"
            )
        self._early_bytes += slot.size
        slot._early = bytearray(slot.size)
        return memoryview(slot._early)

    def filled(self, slot: Slot) -> Received | None:
        """Take note that all bytes of the slice are read.

        Returns:
            The message, when this was its last missing slice.
        """
        message = slot.message
        message.received_bytes += slot.size
        if slot._early is not None:
            if message.decided:
                self._settle(slot)
            else:
                message._early.append(slot)
        if message.received_bytes < message.total:
            return None
        assert message.inner is not None, "the first slice was opened"
        assert message.head is not None, "the first slice was decided"
        self._forget(message.message_id)
        if message._view is not None:
            message._view.release()
        return Received(type=message.inner.type, head=message.head, buffer=message.buffer)

    def _begin(self, number: int, total: int) -> Partial:
        if number < self._lowest_incomplete or number in self._completed:
            raise ProtocolError(f"message {number} was already complete")
        if number >= self._lowest_incomplete + ID_WINDOW:
            raise ProtocolError(
                f"message {number} is too far ahead of message {self._lowest_incomplete}, which is incomplete"
            )
        if len(self._partials) >= PARTIALS_MAX:
            raise ProtocolError(f"message {number} would be incomplete message {PARTIALS_MAX + 1}")
        message = Partial(message_id=number, total=total)
        self._partials[number] = message
        return message

    def _forget(self, number: int) -> None:
        del self._partials[number]
        self._completed.add(number)
        while self._lowest_incomplete in self._completed:
            self._completed.remove(self._lowest_incomplete)
            self._lowest_incomplete += 1

    def _destination(self, slot: Slot) -> memoryview | None:
        message = slot.message
        if message._view is None:
            return None
        end = slot.offset + slot.size - prefix_bytes(message)
        return message._view[end - tensor_bytes(slot) : end]

    def _settle(self, slot: Slot) -> None:
        """Move an early slice, read in full, to its place; free what it held."""
        assert slot._early is not None
        place = self._destination(slot)
        if place is not None:
            place[:] = slot._early
        self._early_bytes -= slot.size
        slot._early = None


def prefix_bytes(message: Partial) -> int:
    """Return how many bytes of an opened message come before its tensor: header and head."""
    assert message.inner is not None
    return HEADER_BYTES + message.inner.head_bytes


def tensor_bytes(slot: Slot) -> int:
    """Return how many bytes of a slice belong to the tensor; of a first slice only after `Assembler.open`."""
    return slot.size - (prefix_bytes(slot.message) if slot.is_first else 0)


def tensor_view(inner: Inner, buffer: Buffer) -> memoryview:
    """Return the bytes of a buffer that a message's tensor fills exactly.

    Raises:
        ProtocolError: The peer's tensor is of another size than its receiver expects.
    """
    view = memoryview(buffer).cast("B")
    if inner.tensor_bytes != len(view):
        raise ProtocolError(
            f"{inner.type.name} carries a tensor of {inner.tensor_bytes} bytes where {len(view)} are expected"
        )
    return view
