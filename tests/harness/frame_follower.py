"""Where in a byte stream of the protocol one is: the frames that pass, told while they pass.

A follower changes nothing and checks nothing. It holds back the beginning of a frame until it can say what
the frame is, and lets everything else through at once. What is not the protocol (TLS, nonsense) passes as
bytes that belong to no frame.
"""

import struct
from collections.abc import Iterator

from attrs import define, frozen

from yeto.wire.frames import HEADER_BYTES, MAGIC, MessageType

KINDS = {int(kind): kind for kind in MessageType}
CHUNK_HEAD_BYTES = 24
HEAD_BYTES = 24
"""So much of a payload is shown: every field by which tests tell messages apart."""


@frozen(kw_only=True, eq=False)
class Frame:
    """A frame whose first bytes have arrived."""

    kind: MessageType
    """Its type; of a slice that begins a message, the message's."""
    size: int
    """Bytes of the frame, its header included."""
    head: bytes
    """First bytes of the payload, of the inner one when the frame begins a message in slices."""

    def numbers(self, layout: str) -> tuple[int, ...]:
        """Return the first fields of the payload, by their struct codes."""
        return struct.unpack_from("<" + layout, self.head)


@frozen(eq=False)
class Piece:
    """Bytes that pass, all of one frame or of none."""

    data: bytes
    frame: Frame | None
    offset: int
    """Where in its frame the piece begins."""
    position: int
    """Where in its stream the piece begins."""

    @property
    def begins_frame(self) -> bool:
        return self.frame is not None and self.offset == 0


@define
class Follower:
    """Follows one direction of one connection."""

    _held: bytes = b""
    _position: int = 0
    _frame: Frame | None = None
    _left: int = 0
    """Bytes of the present frame that have not passed."""
    _is_lost: bool = False
    """Whether the bytes are not the protocol."""

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Take what has arrived; yield what may pass."""
        self._held += data
        while self._held:
            if self._is_lost:
                yield self._take(len(self._held))
            elif self._left:
                yield self._take(min(self._left, len(self._held)))
            elif not self._begin():
                return

    def rest(self) -> bytes:
        """Return what was held back, at the end of the stream."""
        held, self._held = self._held, b""
        return held

    def _take(self, size: int) -> Piece:
        data, self._held = self._held[:size], self._held[size:]
        offset = 0 if self._frame is None else self._frame.size - self._left
        piece = Piece(data, self._frame, offset, self._position)
        self._position += size
        self._left = max(0, self._left - size)
        if not self._left:
            self._frame = None
        return piece

    def _begin(self) -> bool:
        """Recognise the next frame; False when too little of it is here."""
        if len(self._held) < HEADER_BYTES:
            return False
        kind, length, known = self._header(self._held)
        if not known:
            self._is_lost = True
            return True
        start = HEADER_BYTES
        if kind is MessageType.CHUNK:
            start += CHUNK_HEAD_BYTES
            if len(self._held) < start:
                return False
            (offset,) = struct.unpack_from("<Q", self._held, start - 8)
            if offset == 0:
                if len(self._held) < start + HEADER_BYTES:
                    return False
                inner, _, known = self._header(self._held[start:])
                kind, start = (inner, start + HEADER_BYTES) if known else (kind, start)
        end = min(start + HEAD_BYTES, HEADER_BYTES + length)
        if len(self._held) < end:
            return False
        self._frame = Frame(kind=kind, size=HEADER_BYTES + length, head=self._held[start:end])
        self._left = self._frame.size
        return True

    @staticmethod
    def _header(data: bytes) -> tuple[MessageType, int, bool]:
        magic, number, length = struct.unpack_from("<IBQ", data)
        if magic != MAGIC or number not in KINDS:
            return MessageType.ERROR, 0, False
        return KINDS[number], length, True
