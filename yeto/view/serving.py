"""Hypercorn's HTTP on our own listeners, bounded so that no observer can harm what is observed.

Three bounds that a server inside a syncer needs. Connections: one more than fit is closed at once, so
observers cannot use up the descriptors that learners need. Time to send: a client that does not read is
dropped, because Hypercorn shields its sending from being cancelled, and a syncer that ends would wait for it
for ever. And the end: when the server is cancelled, its sockets are closed under whatever is going on.
"""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from yeto.errors import ConfigError
from yeto.view.door import REQUEST_BYTES_MAX

if TYPE_CHECKING:
    from starlette.types import ASGIApp

CONNECTIONS_MAX = 64
"""A browser has at most 6 to a host, a scraper one; this is a team with the page open."""
SEND_SECONDS = 10.0
"""A client that takes nothing for so long is dropped."""
IDLE_SECONDS = 15.0
"""A connection without a whole request for so long is closed."""


async def listen(host: str, port: int, *, host_flag: str, port_flag: str) -> list[trio.SocketListener]:
    """Bind a port on a host.

    Raises:
        ConfigError: that is not possible; the flags are named.
    """
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except (OSError, UnicodeError) as error:  # the other: no name can be spelled so
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{port_flag} {port}: in use on {host}; take another port ({port_flag} 0: any)"
            ) from error
        raise ConfigError(f"{host_flag} {host} {port_flag} {port}: cannot listen there: {error}") from error
    if port == 0:
        # A name with several addresses would get a port for each; one is enough to look at.
        for other in listeners[1:]:
            await other.aclose()
        del listeners[1:]
    return listeners


def address(listener: trio.SocketListener) -> tuple[str, int]:
    """Return host and port of a listener."""
    host, port = listener.socket.getsockname()[:2]
    return str(host), int(port)


class _Stream:
    """A connection as Hypercorn wants it, whose sending ends."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket

    async def send_all(self, data: bytes) -> None:
        with trio.move_on_after(SEND_SECONDS) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            self.socket.close()
            raise trio.BrokenResourceError("the client does not read")

    async def receive_some(self, bytes_max: int) -> bytes:
        return bytes(await self._stream.receive_some(bytes_max))

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class HttpServer:
    """Serves one app on some listeners, until it is cancelled."""

    def __init__(self, app: ASGIApp) -> None:
        from hypercorn.app_wrappers import ASGIWrapper
        from hypercorn.config import Config
        from hypercorn.trio.worker_context import WorkerContext

        config = Config()
        # What goes wrong with one request is that client's business; nobody's terminal is written to.
        config.errorlog = config.accesslog = None
        config.include_server_header = False
        config.h11_max_incomplete_size = REQUEST_BYTES_MAX
        config.keep_alive_timeout = IDLE_SECONDS
        self._config = config
        self._app = ASGIWrapper(app)  # type: ignore[arg-type]
        self._context = WorkerContext(None)
        self._open: set[_Stream] = set()

    async def run(
        self,
        listeners: list[trio.SocketListener],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept connections and answer them."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._close_at_the_end)
            nursery.start_soon(partial(trio.serve_listeners, self._serve, listeners))
            task_status.started()

    async def _close_at_the_end(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            task_status.started()
            await trio.sleep_forever()
        finally:
            # Whoever is sending is shielded; a closed socket ends that as well.
            for stream in self._open:
                stream.socket.close()

    async def _serve(self, raw: trio.SocketStream) -> None:
        from hypercorn.trio.tcp_server import TCPServer
        from hypercorn.typing import LifespanState

        if len(self._open) >= CONNECTIONS_MAX:
            await trio.aclose_forcefully(raw)
            return
        stream = _Stream(raw)
        self._open.add(stream)
        try:
            await TCPServer(self._app, self._config, self._context, LifespanState(), stream).run()  # type: ignore[arg-type]
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client has gone, as clients do
        except Exception:
            # One client's request; the others go on.
            logging.getLogger("yeto.view").debug("a connection failed", exc_info=True)
        finally:
            self._open.discard(stream)
            with suppress(OSError):
                stream.socket.close()
