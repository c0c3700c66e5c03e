"""Dialling the syncer: where it is, how its streams are opened, and when to try again.

The syncer's address is looked up anew at every dial, also when it stands in a file, because a relaunched
syncer has a new one. Every address that a name has is tried, and all streams of a group go to the one that
answered the first. Nothing here decides whether to try again; `backoff` says when.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import idna
import trio
from attrs import frozen

from yeto.errors import ConfigError
from yeto.hosts import with_port
from yeto.link.errors import LinkClosed, LinkRefused
from yeto.link.framing import FrameStream, set_socket_options
from yeto.link.tls import TlsContext, connect_tls

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
            return parse_address((await trio.Path(path).read_text(encoding="utf-8-sig")).strip())
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
    try:
        if not host.isascii():
            # As Trio, which brings this package, spells it when it dials.
            idna.encode(host, uts46=True)
    except UnicodeError as error:
        raise ValueError(f"{host!r} cannot be a name of a machine") from error
    return host, int(port)


class Dialler:
    """Opens the streams of one group, one after the other or several at a time."""

    def __init__(
        self, host: str, port: int, *, tls: TlsContext | None = None, server_name: str | None = None
    ) -> None:
        """Prepare.

        Args:
            host: Name or address.
            port: Port.
            tls: When given, every stream is TLS.
            server_name: Name or address that the syncer's certificate must be for; by default the host.
        """
        self._host = host
        self._port = port
        self._tls = tls
        self._server_name = server_name or host
        self._address = host

    async def open(self) -> FrameStream:
        """Open one more stream; the caller limits the time.

        Returns:
            The stream, with its socket options set.

        Raises:
            LinkClosed: The name has no address, or none that answers; the message names all that were tried.
                Nothing is left open, also when cancelled.
            LinkRefused: One side does not take the other's TLS.
        """
        raw: trio.SocketStream | None = None
        try:
            raw = await _connect(self._address, self._port)
            set_socket_options(raw)
            # A name may stand for several machines. A group belongs to one: the others go where this went.
            self._address = raw.socket.getpeername()[0]
            if self._tls is None:
                return FrameStream(raw)
            return FrameStream(await connect_tls(raw, self._tls, self._server_name))
        except BaseException as error:
            if raw is not None:
                await FrameStream(raw).close()
            if isinstance(error, OSError | LinkClosed):
                kind = LinkRefused if isinstance(error, LinkRefused) else LinkClosed
                raise kind(f"cannot connect to {with_port(self._host, self._port)}: {error}") from error
            raise


async def _connect(address: str, port: int) -> trio.SocketStream:
    try:
        return await trio.open_tcp_stream(address, port)
    except OSError as error:
        tried = error.__cause__
        reasons = tried.exceptions if isinstance(tried, ExceptionGroup) else (error,)
        raise LinkClosed("; ".join(map(str, reasons))) from error


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
