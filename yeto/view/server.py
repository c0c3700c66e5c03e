"""The dashboard as one task: bind, serve, and nothing else; for its own process and for a syncer's."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

import trio
from attrs import field, frozen

from yeto.errors import ConfigError
from yeto.hosts import is_loopback, with_port
from yeto.view.door import Door, new_token, read_token
from yeto.view.follow import Traffic
from yeto.view.looks import Looks, Source
from yeto.view.serving import HttpServer, address, listen
from yeto.view.sources import TapeSource
from yeto.view.web import make_app

log = logging.getLogger("yeto.view")

BESIDE_SLICE_SECONDS = 0.02
BESIDE_REST = 4.0
"""Inside a syncer a long tape is read a fifth of the time, in slices that no learner notices."""
BESIDE_HISTORY_SECONDS = 20.0
"""And the plots of an open page may be older: to make their numbers takes a fifth of a second."""


@frozen(kw_only=True)
class Place:
    """Where to serve, and to whom."""

    host: str
    port: int
    host_flag: str = "--host"
    port_flag: str = "--port"
    token: str | None = field(default=None, repr=False)

    @property
    def door(self) -> Door:
        """The rules for whoever comes."""
        return Door(token=self.token, local=is_loopback(self.host))


def choose_place(
    host: str,
    port: int,
    token_file: Path | None,
    *,
    host_flag: str = "--host",
    port_flag: str = "--port",
    token_flag: str = "--token-file",
) -> tuple[Place, bool]:
    """Return where to serve, and whether the token was made up, so that it has to be told.

    Raises:
        ConfigError: a package is missing, or a flag makes no sense.
    """
    for package in ("starlette", "hypercorn", "prometheus_client"):
        if find_spec(package) is None:
            raise ConfigError(
                f"{port_flag} {port}: serving a dashboard needs {package}, which is not installed: "
                "pip install 'yeto[http]'"
            )
    if not 0 <= port <= 65535:
        raise ConfigError(f"{port_flag} {port}: must be 0 to 65535")
    token = None if token_file is None else read_token(token_file, token_flag)
    made_up = token is None and not is_loopback(host)
    if made_up:
        token = new_token()
    place = Place(host=host, port=port, host_flag=host_flag, port_flag=port_flag, token=token)
    return place, made_up


def url_of(host: str, port: int, token: str | None = None) -> str:
    """Return the address to open."""
    if host in ("0.0.0.0", "::"):
        # Nobody can open that; the machine's name is what others most likely reach it by.
        import socket

        host = socket.gethostname()
    return f"http://{with_port(host, port)}/" + ("" if token is None else f"?token={token}")


async def serve_dashboard(
    source: Source,
    place: Place,
    *,
    beside: bool = False,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a dashboard until cancelled; ``task_status`` gets host and port.

    Args:
        source: what it shows.
        place: where.
        beside: go easy on the process, which has more important things to do.
        task_status: for ``nursery.start``.

    Raises:
        ConfigError: the port is taken.
    """
    listeners = await listen(place.host, place.port, host_flag=place.host_flag, port_flag=place.port_flag)
    looks = Looks(source)
    if beside:
        looks = Looks(
            source,
            slice_seconds=BESIDE_SLICE_SECONDS,
            rest=BESIDE_REST,
            history_seconds=BESIDE_HISTORY_SECONDS,
        )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(looks.run)
            await nursery.start(HttpServer(make_app(looks, place.door)).run, listeners)
            task_status.started(address(listeners[0]))
    finally:
        for listener in listeners:
            await trio.aclose_forcefully(listener)


async def serve_beside(tape: Path, place: Place, traffic: Traffic, *, made_up: bool) -> None:
    """Serve a dashboard of a run inside the process that writes its tape.

    Whatever goes wrong is said once; the run goes on without its dashboard.

    Args:
        tape: what that process writes.
        place: where to serve.
        traffic: what it has received from and sent to its learners.
        made_up: whether the token has to be told.
    """
    try:
        async with trio.open_nursery() as nursery:
            host, port = await nursery.start(_serving, tape, place, traffic)
            token = place.token if made_up else None
            log.info("dashboard, metrics and health at %s", url_of(host, port, token))
    except Exception as error:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        log.error("%s: %s; the run goes on without a dashboard", place.port_flag, error)


async def _serving(
    tape: Path,
    place: Place,
    traffic: Traffic,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    await serve_dashboard(TapeSource(tape, traffic=traffic), place, beside=True, task_status=task_status)
