"""Frames on a Trio stream: the one place where sockets, TLS and the tests' memory streams look alike.

Two rules. **What arrives goes where it belongs in one step**: small things (headers, heads, control messages)
come through a small read-ahead buffer, so that a tiny message costs one system call; tensor bytes behind them
are read from the socket into the caller's memory. **A stream that lost its place is closed**: a send that is
cancelled or fails half-way leaves a partial frame, after which nothing on that stream makes sense.

Everything that ends the connection from outside is `LinkClosed`; ``ProtocolError`` is kept for peers that
sent what they must not. Time limits are the caller's cancel scopes.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Awaitable
from typing import Final, TypeVar

import trio

from yeto.hosts import with_port
from yeto.link import direct
from yeto.link.errors import LinkClosed
from yeto.link.tls import TlsStream
from yeto.link.traffic import Traffic
from yeto.wire.frames import HEADER_BYTES, FrameHeader, MessageType, decode_header, encode_header

T = TypeVar("T")

READ_AHEAD_BYTES: Final = 16 * 1024
"""Most that is read beyond what was asked for: a tiny fragment's whole message, and less than half a percent
of a slice, which is copied once more than it had to be."""

JOIN_BYTES: Final = 16 * 1024
"""Payloads up to this size are joined with their header into one packet; larger ones are sent in place."""

DISCARD_BYTES: Final = 64 * 1024
"""Size of the scratch that unwanted bytes are read into."""

KEEPALIVE_IDLE_SECONDS: Final = 5
KEEPALIVE_INTERVAL_SECONDS: Final = 5
KEEPALIVE_PROBES: Final = 3
"""A peer that vanished without a word is noticed after 5 + 3 * 5 s of silence."""

USER_TIMEOUT_SECONDS: Final = 20
"""The same for bytes that were sent and are not acknowledged, which keep-alive does not see."""

NOT_SENT_BYTES: Final = 1024 * 1024
"""A writer is woken when fewer bytes than this wait in the kernel. Trio's own 16 KiB would wake it for every
16 KiB; with this much a slice goes out in a few calls, and a control message still waits for little."""

HUNG_UP: Final = getattr(select, "POLLRDHUP", 0)
"""What Linux tells of a socket whose peer has closed it, also when there is much to be read before."""

PROBE_SECONDS: Final = 0.1
"""Most that `FrameStream.ended` waits for a TLS record of which a part has arrived."""


class FrameStream:
    """One stream of frames. One task may read it and one may write it at a time.

    Attributes:
        traffic: Where its bytes are counted, see `count_in`.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        """Wrap a connected stream, inside ``trio.run``."""
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._tls = stream if isinstance(stream, TlsStream) else None
        # Read-ahead: the bytes _ahead[_start:] were received and not yet asked for.
        self._ahead = b""
        self._start = 0
        self._scratch: memoryview | None = None
        self._waiting_since: float | None = None
        # What whoever finds the stream closed is told.
        self._end = LinkClosed("the connection was closed on this side")
        self.traffic = Traffic()

    @property
    def stream(self) -> trio.abc.Stream:
        """The wrapped stream."""
        return self._stream

    @property
    def peer(self) -> str:
        """Address of the peer, ``HOST:PORT``; ``?`` when there is none or it is gone."""
        raw = underlying_socket(self._stream)
        if raw is None:
            return "?"
        try:
            host, port = raw.getpeername()[:2]
        except (OSError, ValueError):
            return "?"
        return with_port(host, port)

    @property
    def silent_seconds(self) -> float:
        """How long the read under way has been waiting for the peer's next byte; 0 when none is under way.

        Time that the reader spends on what it has read is not the peer's silence.
        """
        return 0.0 if self._waiting_since is None else trio.current_time() - self._waiting_since

    def count_in(self, traffic: Traffic) -> None:
        """Count there from now on; what was counted so far goes there too."""
        traffic.add(self.traffic)
        self.traffic = traffic

    async def read_header(self) -> FrameHeader:
        """Read a frame's 13 bytes. What is legal here is the caller's to check, before it reads on.

        Raises:
            LinkClosed: The connection ended, between frames or in the header.
            ProtocolError: Not a frame header.
        """
        return decode_header(await self.read_exact(HEADER_BYTES, "a frame header"))

    async def read_exact(self, size: int, what: str = "a frame") -> bytes:
        """Read exactly so many bytes, for small things whose size was checked.

        Raises:
            LinkClosed: The connection ended; the message names `what` if that was in the middle of it.
        """
        if len(self._ahead) - self._start >= size:
            # No checkpoint: the read-ahead is soon used up, and then the socket is one.
            self._start += size
            return self._ahead[self._start - size : self._start]
        if size > READ_AHEAD_BYTES:
            whole = bytearray(size)
            await self.read_into(memoryview(whole), what)
            return bytes(whole)
        while (have := len(self._ahead) - self._start) < size:
            more = await self._receive(READ_AHEAD_BYTES)
            if not more:
                raise LinkClosed(_ended(have, size, what))
            self._ahead = self._ahead[self._start :] + more
            self._start = 0
        self._start = size
        return self._ahead[:size]

    async def read_into(self, view: memoryview, what: str = "a frame") -> None:
        """Fill the view; but for what was read ahead, its bytes are received or decrypted straight into it.

        Raises:
            LinkClosed: The connection ended.
        """
        filled = min(len(view), len(self._ahead) - self._start)
        view[:filled] = self._ahead[self._start : self._start + filled]
        self._start += filled
        while filled < len(view):
            got = await self._receive_into(view[filled:])
            if not got:
                raise LinkClosed(_ended(filled, len(view), what))
            filled += got

    async def discard(self, size: int) -> None:
        """Read so many bytes and throw them away.

        Raises:
            LinkClosed: The connection ended.
        """
        if self._scratch is None:
            self._scratch = memoryview(bytearray(DISCARD_BYTES))
        while size:
            piece = min(size, DISCARD_BYTES)
            await self.read_into(self._scratch[:piece])
            size -= piece

    async def send(self, kind: MessageType, *parts: bytes | memoryview) -> None:
        """Send one frame whose payload is the parts, one after the other.

        A large payload's last part is sent from where it lies, not copied. Cancelled or failed, the send
        closes the stream.

        Raises:
            LinkClosed: The connection ended.
        """
        length = sum(map(len, parts))
        header = encode_header(kind, length)
        try:
            if length <= JOIN_BYTES:
                await self._send_all(b"".join((header, *parts)))
            else:
                await self._send_all(b"".join((header, *parts[:-1])))
                await self._send_all(parts[-1])
            self.traffic.sent += HEADER_BYTES + length
        except trio.ClosedResourceError:
            raise self._end from None
        except (trio.BrokenResourceError, OSError) as error:
            # Before it is closed: whoever reads it wakes up then, and may be the first to say why.
            self._end = self._failure("sending", error)
            await self.close()
            raise self._end from error
        except BaseException:
            await self.close()
            raise

    async def ended(self) -> bool:
        """Whether the peer's end of the stream has arrived, however much before it is still unread.

        Looks without waiting for bytes that are not here yet; what precedes the end is kept for the next
        reads. Where the system does not tell, an end behind more than the read-ahead is not seen; nor is one
        on a stream without a socket.
        """
        raw = underlying_socket(self._stream)
        if raw is None:
            return False
        if _polled(raw) & HUNG_UP:
            return True
        while (have := len(self._ahead) - self._start) < READ_AHEAD_BYTES and _polled(raw):
            more = None
            with trio.move_on_after(PROBE_SECONDS):
                try:
                    more = await self._receive(READ_AHEAD_BYTES - have)
                except LinkClosed:
                    return True
            if more is None:
                return False
            if not more:
                return True
            self._ahead = self._ahead[self._start :] + more
            self._start = 0
        return False

    async def close(self) -> None:
        """Close at once, whatever is under way; safe to call again, and while cancelled."""
        # Shielded, although it does not block: the caller's cancellation would otherwise come out of here
        # and keep it from closing its other streams.
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self._stream)

    async def close_after_peer(self, linger_seconds: float) -> None:
        """End the stream so that the peer surely gets what was sent last, then close.

        To close a socket while the peer still sends makes the kernel drop what we sent and it has not
        read, such as the ERROR that explains the end. So: say that nothing follows, and read the peer's
        bytes away until it hangs up, for at most so many seconds.
        """
        try:
            with trio.move_on_after(linger_seconds):
                if isinstance(self._stream, trio.abc.HalfCloseableStream):
                    await self._stream.send_eof()
                while await self._receive(DISCARD_BYTES):
                    pass
        except (LinkClosed, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it has hung up, which is all that was waited for
        finally:
            await self.close()

    async def _send_all(self, data: bytes | memoryview) -> None:
        if self._socket is None:
            await self._stream.send_all(data)
        else:
            await direct.send_all(self._socket, data)

    async def _receive(self, most: int) -> bytes:
        if self._socket is None:
            data = bytes(await self._waiting(self._stream.receive_some(most)))
        else:
            data = await self._waiting(direct.receive(self._socket, most))
        self.traffic.received += len(data)
        return data

    async def _receive_into(self, view: memoryview) -> int:
        if self._socket is not None:
            got = await self._waiting(direct.receive_into(self._socket, view))
        elif self._tls is not None:
            got = await self._waiting(self._tls.receive_into(view))
        else:
            data = await self._receive(len(view))
            view[: len(data)] = data
            return len(data)
        self.traffic.received += got
        return got

    async def _waiting(self, read: Awaitable[T]) -> T:
        """Time a read, and say in our words how it failed."""
        self._waiting_since = trio.current_time()
        try:
            return await read
        except trio.ClosedResourceError:
            raise self._end from None
        except (trio.BrokenResourceError, OSError) as error:
            raise self._failure("receiving", error) from error
        finally:
            self._waiting_since = None

    def _failure(self, what: str, error: Exception) -> LinkClosed:
        """Return how a failure ends the link: LinkRefused when it is the peer's late verdict on our TLS."""
        if self._tls is not None and isinstance(error, trio.BrokenResourceError):
            refused = self._tls.refusal(error)
            if refused is not None:
                return refused
        return LinkClosed(f"{what} failed: {_cause(error)}")


def set_socket_options(stream: trio.abc.Stream) -> None:
    """Make a TCP stream, or the one under a TLS stream, prompt to send and quick to notice a dead peer.

    No delay, few wake-ups per slice, keep-alive after 5 s every 5 s for 3 times, and 20 s for unacknowledged
    bytes, as far as the system has these options. Streams without a socket are left alone.
    """
    raw = underlying_socket(stream)
    if raw is None or raw.family not in (socket.AF_INET, socket.AF_INET6):
        return
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for names, value in (
        # The second name is what macOS calls it.
        (("TCP_KEEPIDLE", "TCP_KEEPALIVE"), KEEPALIVE_IDLE_SECONDS),
        (("TCP_KEEPINTVL",), KEEPALIVE_INTERVAL_SECONDS),
        (("TCP_KEEPCNT",), KEEPALIVE_PROBES),
        (("TCP_USER_TIMEOUT",), USER_TIMEOUT_SECONDS * 1000),
        (("TCP_NOTSENT_LOWAT",), NOT_SENT_BYTES),
    ):
        option = next((getattr(socket, name) for name in names if hasattr(socket, name)), None)
        if option is not None:
            raw.setsockopt(socket.IPPROTO_TCP, option, value)


def underlying_socket(stream: trio.abc.Stream) -> trio.socket.SocketType | None:
    """Return the socket that carries a stream, also through TLS; None for streams without one."""
    if isinstance(stream, TlsStream):
        stream = stream.raw
    return stream.socket if isinstance(stream, trio.SocketStream) else None


def _polled(raw: trio.socket.SocketType) -> int:
    """Return what there is to know of a socket's receiving side now; 0 when it has nothing."""
    poll = select.poll()
    poll.register(raw.fileno(), select.POLLIN | HUNG_UP)
    return sum(event for _, event in poll.poll(0))


def _ended(have: int, wanted: int, what: str) -> str:
    if have:
        return f"the peer closed the connection in the middle of {what} ({have} of {wanted} bytes)"
    return "the peer closed the connection"


def _cause(error: BaseException) -> str:
    """Return what the system said, which Trio keeps as the cause."""
    return str(error.__cause__ or error) or type(error).__name__
