"""TLS 1.3 under the frames: one stream class around Trio's, and how its failures are told.

Trio's ``SSLStream`` does the work. Two things it does not offer are reached through what the standard
library lets one override, ``SSLContext.wrap_bio`` and ``SSLContext.sslobject_class``:

* **Decrypting into the caller's memory.** ``receive_some`` makes an object of every record (16 KiB) and goes
  once through the event loop for it. Here one call decrypts every record that has arrived, to where the bytes
  belong. The ciphertext still takes two steps (socket, then OpenSSL's buffer), which is what remains of "no
  copy" under TLS.
* **The alert.** When a handshake fails, OpenSSL has written the alert that says why, and Trio drops it. It is
  sent here, so that the other side can name the reason instead of an end out of the blue.

A missing close_notify is an end like any other (what HTTPS does, too): our frames state their lengths, an end
in the middle of one is seen as such, and an end between two means "dial again", whoever caused it.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import Any, Final

import trio

from yeto.link.errors import LinkClosed, LinkRefused
from yeto.link.tls_words import explain, openssl_words

RECORD_BYTES: Final = 16 * 1024
"""Most plaintext in a TLS record: to ask for more at a time only costs memory."""

RECEIVE_BYTES: Final = 128 * 1024
"""Ciphertext taken from the socket at a time: what OpenSSL's receive buffer of a stream grows to."""

SEND_BYTES: Final = 256 * 1024
"""Plaintext encrypted at a time: what OpenSSL's send buffer of a stream grows to (it never shrinks), and how
long the event loop waits (0.1 ms). A slice of 4 MiB at once would be both sixteen times over."""

ALERT_SECONDS: Final = 1.0
"""Longest time that is spent on telling a peer why its handshake failed."""


class TlsObject(ssl.SSLObject):
    """OpenSSL's end of one connection; reads into ``target`` when there is one."""

    outgoing: ssl.MemoryBIO
    """What is to be sent."""
    target: memoryview | None = None
    """Memory to decrypt into, for the next read."""
    _failed: ssl.SSLError | None = None

    def read(self, len: int = RECORD_BYTES, buffer: Any = None) -> Any:
        """Return at most ``len`` bytes, or fill ``target`` with all that is here and return its filled part.

        Raises:
            ssl.SSLError: also ``SSLWantReadError``, when nothing is here.
        """
        if self.target is None:
            return super().read(len)
        if self._failed is not None:
            raise self._failed
        view, filled = self.target, 0
        try:
            while filled < view.nbytes:
                got: Any = super().read(view.nbytes - filled, view[filled:])  # a count, as there is a buffer
                if not got:
                    break
                filled += got
        except ssl.SSLError as error:
            if not filled:
                raise
            if not isinstance(error, ssl.SSLWantReadError):
                # What came before it is good. OpenSSL would not say it twice.
                self._failed = error
        return view[:filled]


class TlsContext(ssl.SSLContext):
    """A context whose connections are `TlsObject` with their sending side in reach."""

    sslobject_class = TlsObject
    newest: TlsObject
    """Of the connection that was made last."""

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **settings: Any
    ) -> ssl.SSLObject:
        """Make the end of a connection; called by Trio."""
        made = super().wrap_bio(incoming, outgoing, *args, **settings)
        assert isinstance(made, TlsObject)
        made.outgoing = outgoing
        self.newest = made
        return made


class _Transport(trio.abc.Stream):
    """A socket that is asked for more at a time than Trio's TLS would ask it for."""

    def __init__(self, raw: trio.SocketStream) -> None:
        self.raw = raw

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self.raw.receive_some(max_bytes or RECEIVE_BYTES)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.raw.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.raw.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self.raw.aclose()


class TlsStream(trio.abc.HalfCloseableStream):
    """A TLS connection over a TCP stream; made by `accept_tls` and `connect_tls`.

    Attributes:
        raw: the TCP stream. Closing it closes this.
    """

    def __init__(
        self,
        raw: trio.SocketStream,
        context: TlsContext,
        *,
        server_side: bool,
        server_name: str | None = None,
    ) -> None:
        """Wrap a connected stream; nothing is sent before `handshake`."""
        self.raw = raw
        self._is_server = server_side
        self._secure = trio.SSLStream(
            _Transport(raw),
            context,
            server_side=server_side,
            server_hostname=server_name,
            https_compatible=True,
        )
        self._object = context.newest

    async def handshake(self) -> None:
        """Agree on keys, with the certificates verified that are to be; the caller limits the time.

        Raises:
            LinkClosed: the connection ended.
            LinkRefused: one side does not take the other's TLS; the peer has been told why.
        """
        try:
            await self._secure.do_handshake()
        except trio.BrokenResourceError as error:
            alert = self._object.outgoing.read()
            if alert:
                with trio.move_on_after(ALERT_SECONDS), suppress(trio.BrokenResourceError):
                    await self.raw.send_all(alert)
            refused = self.refusal(error)
            if refused is not None:
                raise refused from error
            cause = error.__cause__
            if isinstance(cause, ssl.SSLError) and not _is_end(cause):
                raise LinkRefused(f"the TLS handshake failed: {openssl_words(cause)}") from error
            raise LinkClosed(f"the connection ended in the TLS handshake: {cause}") from error

    def refusal(self, error: trio.BrokenResourceError) -> LinkRefused | None:
        """Return what a failure means if one side does not take the other's TLS, else None."""
        cause = error.__cause__
        text = explain(cause, server_side=self._is_server) if isinstance(cause, ssl.SSLError) else None
        return None if text is None else LinkRefused(text)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Return what has arrived, at most a record."""
        return await self._secure.receive_some(min(max_bytes or RECORD_BYTES, RECORD_BYTES))

    async def receive_into(self, view: memoryview) -> int:
        """Fill the view as far as bytes have arrived; return how many, 0 at the end of the stream."""
        self._object.target = view
        try:
            return len(await self._secure.receive_some(RECORD_BYTES))
        finally:
            self._object.target = None

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send, a piece after the other."""
        view = memoryview(data)
        for start in range(0, len(view), SEND_BYTES):
            await self._secure.send_all(view[start : start + SEND_BYTES])

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until the socket takes something."""
        await self._secure.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Say that nothing follows, at both levels: close_notify, then the end of the TCP stream.

        Nobody may be sending or receiving. What still comes is to be read away from ``raw``: OpenSSL takes
        data after its close_notify for an error.
        """
        with suppress(ssl.SSLError):
            self._object.unwrap()
        await self.raw.send_all(self._object.outgoing.read())
        await self.raw.send_eof()

    async def aclose(self) -> None:
        """Close the TCP stream."""
        await self.raw.aclose()


def _is_end(error: ssl.SSLError) -> bool:
    """Whether OpenSSL means that the connection ended; it has several words for that."""
    return isinstance(error, ssl.SSLEOFError | ssl.SSLSyscallError) or "UNEXPECTED_EOF" in (
        error.reason or ""
    )


async def accept_tls(raw: trio.SocketStream, context: TlsContext) -> TlsStream:
    """Return the stream of a learner that shook hands; see `TlsStream.handshake`."""
    stream = TlsStream(raw, context, server_side=True)
    await stream.handshake()
    return stream


async def connect_tls(raw: trio.SocketStream, context: TlsContext, server_name: str) -> TlsStream:
    """Return the stream to a syncer whose certificate is for this name; see `TlsStream.handshake`."""
    stream = TlsStream(raw, context, server_side=False, server_name=server_name)
    await stream.handshake()
    return stream
