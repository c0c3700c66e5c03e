"""Dialling the syncer: where it is, how its streams are opened, and when to try again.

The syncer's address is looked up anew at every dial, also when it stands in a file, because a relaunched
syncer has a new one. Every address that a name has is tried, and all streams of a group go to the one that
answered the first. Nothing here decides whether to try again; `backoff` says when.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import trio
from attrs import frozen

from yeto.errors import ConfigError
from yeto.link.errors import LinkClosed
from yeto.link.framing import FrameStream, set_socket_options

BACKOFF_BASE_SECONDS: Final = 1.0
BACKOFF_CAP_SECONDS: Final = 30.0
"""A syncer that is back is found within half a minute; a fleet of 200 asks it seven times a second."""


@frozen
class Target:
    """Where the syncer is: ``HOST:PORT``, ``[IPV6]:PORT``, or ``@FILE`` with one of these in it."""

    text: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Take what ``--syncer`` says.

        Raises:
            ConfigError: Neither an address nor ``@FILE``. What the file holds is seen when dialling.
        """
        if text.startswith("@"):
            if not text[1:]:
                raise ConfigError("--syncer @: name the file that holds HOST:PORT, as in @/path/address")
        else:
            try:
                parse_address(text)
            except ValueError as error:
                raise ConfigError(f"--syncer {text}: {error}") from None
        return cls(text)

    async def address(self) -> tuple[str, int]:
        """Return host and port as they are now; reads the file, if it is one, in a worker thread.

        Raises:
            LinkClosed: The file is missing or does not hold an address (yet).
        """
        if not self.text.startswith("@"):
            return parse_address(self.text)
        path = Path(self.text[1:])
        try:
            return parse_address((await trio.Path(path).read_text(encoding="utf-8")).strip())
        except (OSError, ValueError) as error:
            raise LinkClosed(f"no syncer address in {path}: {error}") from error


def parse_address(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises:
        ValueError: Not of that form, or not a port.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or "]" in port:
        raise ValueError("write an IPv6 address as [ADDRESS]:PORT")
    if not colon or not host:
        raise ValueError("must be HOST:PORT")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"port {port!r} must be a number from 1 to 65535")
    return host, int(port)


async def dial(
    host: str, port: int, num_streams: int, *, tls: ssl.SSLContext | None = None
) -> tuple[FrameStream, ...]:
    """Open the 1 + S streams of a group; the caller limits the time.

    Args:
        host: Name or address.
        port: Port.
        num_streams: S, the data streams.
        tls: When given, every stream is TLS, and the syncer's certificate must be for `host`.

    Returns:
        The control stream, then the data streams, with their socket options set.

    Raises:
        LinkClosed: The name has no address, or none that answers; the message names all that were tried.
            No stream is left open, also when cancelled.
    """
    opened: list[FrameStream] = []
    address = host
    try:
        for _ in range(1 + num_streams):
            raw = await _connect(host, address, port)
            opened.append(FrameStream(raw))
            set_socket_options(raw)
            # A name may stand for several machines. A group belongs to one: the others go where this went.
            address = raw.socket.getpeername()[0]
            if tls is not None:
                secure: trio.SSLStream[trio.SocketStream] = trio.SSLStream(raw, tls, server_hostname=host)
                opened[-1] = FrameStream(secure)
                await secure.do_handshake()
    except BaseException as error:
        for stream in opened:
            await stream.close()
        if isinstance(error, (OSError, trio.BrokenResourceError)):
            raise LinkClosed(f"cannot connect to {host}:{port}: {error.__cause__ or error}") from error
        raise
    return tuple(opened)


async def _connect(host: str, address: str, port: int) -> trio.SocketStream:
    try:
        return await trio.open_tcp_stream(address, port)
    except OSError as error:
        tried = error.__cause__
        reasons = tried.exceptions if isinstance(tried, ExceptionGroup) else (error,)
        raise LinkClosed(f"cannot connect to {host}:{port}: {'; '.join(map(str, reasons))}") from error


def backoff(
    rng: random.Random,
    *,
    base_seconds: float = BACKOFF_BASE_SECONDS,
    cap_seconds: float = BACKOFF_CAP_SECONDS,
) -> Iterator[float]:
    """Yield for ever how long to wait before the next try.

    Full jitter: uniform between 0 and a limit that doubles from the base up to the cap, so that learners who
    lost the syncer at the same moment do not come back at the same moment. Start a new one after a success.

    Args:
        rng: Source of chance; each learner seeds its own.
        base_seconds: Limit of the first wait.
        cap_seconds: Limit of every later one.

    Source: M. Brooker, "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015).
    """
    limit = base_seconds
    while True:
        yield rng.uniform(0.0, min(limit, cap_seconds))
        limit = min(2 * limit, cap_seconds)
