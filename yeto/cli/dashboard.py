"""``yeto dashboard``: the page of a run as it goes on, in a browser."""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attrs import evolve
from cyclopts import Parameter

from yeto.errors import ConfigError

if TYPE_CHECKING:
    from yeto.view.looks import Source
    from yeto.view.server import Place

DEFAULT_PORT = 29480


def dashboard_command(
    run: Annotated[
        str, Parameter(help="The tape (it need not be there yet), or the address of another dashboard.")
    ] = "events.jsonl",
    /,
    *,
    host: Annotated[
        str, Parameter(help="Address to serve at. Anything but this machine's own asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port to serve at; 0 takes any free one.")] = DEFAULT_PORT,
    token_file: Annotated[
        Path | None,
        Parameter(
            help="File with the token that is asked for; and, for an address, with the token that it asks "
            "for. Without one a new token is made and printed where one is needed."
        ),
    ] = None,
) -> int:
    """Show a run in a browser as it goes on: the page of yeto report, live. Ctrl-C ends it."""
    from yeto.hosts import is_loopback
    from yeto.view.server import choose_place
    from yeto.view.sources import RemoteSource, TapeSource

    place, made_up = choose_place(host, port, token_file)
    source: Source
    if run.startswith(("http://", "https://")):
        source = RemoteSource(run, None if token_file is None else place.token)
        if is_loopback(host):
            # The token is for the other one; on this machine none is needed.
            place = evolve(place, token=None)
    else:
        if Path(run).is_dir():
            raise ConfigError(f"{run}: is a folder; name the tape in it, such as {Path(run, 'events.jsonl')}")
        source = TapeSource(Path(run))
    return _serve(source, place, made_up=made_up)


def _serve(source: Source, place: Place, *, made_up: bool) -> int:
    import trio

    from yeto.view.server import serve_dashboard, url_of

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                bound, number = await nursery.start(partial(serve_dashboard, source, place))
                url = url_of(bound, number, place.token if made_up else None)
                print(f"yeto dashboard of {source.name}: {url}")
                if place.token is not None and not made_up:
                    print("it asks for the token of --token-file: add ?token=... to the address, once")
                sys.stdout.flush()
                await signals.__anext__()
                nursery.cancel_scope.cancel()

    try:
        trio.run(run)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, ConfigError):
            raise error from group
        raise
    return 0
