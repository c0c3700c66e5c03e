"""The dashboard's answers: the page, the JSON behind it, events as the run goes on, metrics and health.

Everything is rendered from one shared look (:mod:`yeto.view.looks`). A client of ``/events`` gets the newest
moment whenever it can take one, so a slow one misses some instead of having them kept for it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import trio

from yeto.errors import YetoError
from yeto.view.door import Door, Guarded
from yeto.view.looks import REFRESH_SECONDS, Look, Looks
from yeto.view.page import served, served_page

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

STREAMS_MAX = 24
"""Pages that follow a run at a time: fewer than connections, so that a scraper still gets in."""
KEEPALIVE_SECONDS = 15.0
"""A stream without news says so often that it is there: proxies close silent ones after 30 s and more."""
STEP_DIGITS_MAX = 15
"""Of a round in an address: JavaScript has whole numbers of so many digits exactly."""


def health(look: Look) -> tuple[bool, str]:
    """Return whether a run is as it should be, and the sentence that says so or why not."""
    moment = look.moment
    if look.reading:
        # Whoever restarts what is not healthy would never let a long tape be read.
        return True, look.problem
    if moment is None or look.problem:
        return False, look.problem
    sentence = str(moment["wait"]["sentence"])
    exit_code = moment["session"]["exit_code"]
    if exit_code is not None:
        return exit_code == 0, sentence
    if moment["phase"] == "stopping":
        return False, sentence
    for alert in moment["alerts"]:
        if alert["severity"] == "critical":
            return False, f"{alert['subject']}: {alert['sentence']}"
    return True, sentence


def make_app(looks: Looks, door: Door) -> ASGIApp:
    """Return the app that shows what ``looks`` sees to whom ``door`` lets in."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    no_store = {"cache-control": "no-store"}

    def nothing(look: Look) -> Response:
        return JSONResponse(
            {"error": look.problem}, status_code=503, headers={**no_store, "retry-after": "2"}
        )

    async def page(request: Request) -> Response:
        return HTMLResponse(served_page(), headers=no_store)

    async def part(request: Request) -> Response:
        found = served(request.path_params["name"])
        if found is None:
            return PlainTextResponse("no such file\n", status_code=404)
        body, media_type = found
        # The same address has another content after an upgrade.
        return Response(body, media_type=media_type, headers={"cache-control": "no-cache"})

    async def status(request: Request) -> Response:
        look = await looks.look()
        if look.status is None:
            return nothing(look)
        return Response(look.status, media_type="application/json", headers=no_store)

    async def history(request: Request) -> Response:
        packed = "gzip" in request.headers.get("accept-encoding", "")
        try:
            body = await looks.history(packed=packed)
        except YetoError as error:
            return JSONResponse({"error": str(error)}, status_code=503, headers=no_store)
        if body is None:
            return nothing(await looks.look())
        encoding = {"content-encoding": "gzip"} if packed else {}
        headers = {**no_store, **encoding, "vary": "accept-encoding"}
        return Response(body, media_type="application/json", headers=headers)

    async def story(request: Request) -> Response:
        text = request.path_params["step"]
        if not re.fullmatch(f"[0-9]{{1,{STEP_DIGITS_MAX}}}", text):
            return JSONResponse({"error": "a round is a number"}, status_code=404, headers=no_store)
        try:
            records = await looks.story(int(text))
        except YetoError as error:
            return JSONResponse({"error": str(error)}, status_code=503, headers=no_store)
        if not records:
            none = {"error": f"no attempt of round {int(text)} was opened"}
            return JSONResponse(none, status_code=404, headers=no_store)
        return JSONResponse({"step": int(text), "records": records}, headers=no_store)

    async def metrics(request: Request) -> Response:
        look = await looks.look()
        if look.moment is None:
            return PlainTextResponse(f"{look.problem}\n", status_code=503, headers=no_store)
        try:
            body = await looks.metrics()
        except YetoError as error:
            return PlainTextResponse(f"{error}\n", status_code=503, headers=no_store)
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(body, media_type=media_type, headers=no_store)

    async def healthz(request: Request) -> Response:
        good, sentence = health(await looks.look())
        return PlainTextResponse(f"{sentence}\n", status_code=200 if good else 503, headers=no_store)

    async def missing(request: Request, error: Exception) -> Response:
        return PlainTextResponse("nothing is here\n", status_code=404, headers=no_store)

    return Guarded(
        Starlette(
            routes=[
                Route("/", page),
                Route("/page/{name}", part),
                Route("/api/status", status),
                Route("/api/history", history),
                Route("/api/round/{step}", story),
                Route("/metrics", metrics),
                Route("/healthz", healthz),
                Route("/events", Events(looks)),
            ],
            exception_handlers={404: missing},
        ),
        door,
    )


class Events:
    """Server-sent events: ``status`` with the moment, ``waiting`` with the reason why there is none."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self._streams = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client goes away."""
        if self._streams >= STREAMS_MAX:
            await _refuse(send)
            return
        self._streams += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_until_gone, receive, nursery.cancel_scope)
                headers = [
                    (b"content-type", b"text/event-stream"),
                    (b"cache-control", b"no-store"),
                    # Nginx would keep events until there are many.
                    (b"x-accel-buffering", b"no"),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                if scope["method"] == "HEAD":
                    await send({"type": "http.response.body", "body": b""})
                    nursery.cancel_scope.cancel()
                    return
                await self._tell(send)
        finally:
            self._streams -= 1

    async def _tell(self, send: Send) -> None:
        seen, told_at = -1, trio.current_time()
        while True:
            look = await self._looks.look()
            if look.number != seen:
                seen, told_at = look.number, trio.current_time()
                await _send(send, _event(look))
            elif trio.current_time() - told_at >= KEEPALIVE_SECONDS:
                told_at = trio.current_time()
                await _send(send, b": still here\n\n")
            await trio.sleep(REFRESH_SECONDS)


def _event(look: Look) -> bytes:
    told = b""
    if look.status is not None:
        told += b"event: status\ndata: " + look.status + b"\n\n"
    if look.problem:
        told += b"event: waiting\ndata: " + json.dumps({"error": look.problem}).encode() + b"\n\n"
    return told


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _until_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            scope.cancel()
            return


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"retry-after", b"30")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": b"too many pages follow this run\n"})
