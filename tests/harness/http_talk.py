"""Talking to a dashboard over a real socket, in the test's own event loop."""

import contextlib
import json

import h11
import trio
from attrs import frozen

from yeto.view.server import Place, serve_dashboard

HANGS_SECONDS = 100
"""What has not come by then never does."""


@frozen
class Answer:
    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def text(self):
        return self.body.decode()


async def ask(port, path, *, method="GET", host="localhost", headers=(), body=b""):
    """Return the whole answer to one request."""
    with trio.fail_after(HANGS_SECONDS):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            link = h11.Connection(h11.CLIENT)
            fields = [("host", host), ("connection", "close"), *headers]
            if body:
                fields.append(("content-length", str(len(body))))
            await stream.send_all(link.send(h11.Request(method=method, target=path, headers=fields)))
            if body:
                await stream.send_all(link.send(h11.Data(data=body)))
            await stream.send_all(link.send(h11.EndOfMessage()))
            return await _answer(stream, link)


async def _answer(stream, link):
    status, headers, body = 0, {}, b""
    while True:
        event = link.next_event()
        if event is h11.NEED_DATA:
            link.receive_data(await stream.receive_some())
        elif isinstance(event, h11.Response):
            status = event.status_code
            headers = {name.decode(): value.decode() for name, value in event.headers}
        elif isinstance(event, h11.Data):
            body += event.data
        else:
            return Answer(status, headers, body)


class EventStream:
    """Reads server-sent events, in an ``async with``."""

    def __init__(self, port):
        self.port = port
        self.link = h11.Connection(h11.CLIENT)
        self.waiting = b""
        self.status = 0

    async def __aenter__(self):
        self.stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        request = h11.Request(method="GET", target="/events", headers=[("host", "localhost")])
        await self.stream.send_all(self.link.send(request) + self.link.send(h11.EndOfMessage()))
        return self

    async def __aexit__(self, *exc_info):
        await trio.aclose_forcefully(self.stream)

    async def next(self):
        """Return name and data of the next event; None when the stream has ended."""
        with trio.fail_after(HANGS_SECONDS):
            while b"\n\n" not in self.waiting:
                event = self.link.next_event()
                if event is h11.NEED_DATA:
                    self.link.receive_data(await self.stream.receive_some())
                elif isinstance(event, h11.Response):
                    self.status = event.status_code
                elif isinstance(event, h11.Data):
                    self.waiting += event.data
                else:
                    return None
        told, _, self.waiting = self.waiting.partition(b"\n\n")
        name, _, data = told.partition(b"\n")
        return name.decode().removeprefix("event: "), json.loads(data.removeprefix(b"data: "))


@contextlib.asynccontextmanager
async def deaf(port):
    """Somebody who asks for events and reads none of them."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4096)
    await stream.send_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        yield
    finally:
        await trio.aclose_forcefully(stream)


@contextlib.asynccontextmanager
async def serving(source, *, token=None, host="127.0.0.1", **how):
    """Serve a dashboard of a source while the block lasts; gives its port."""
    async with trio.open_nursery() as nursery:
        place = Place(host=host, port=0, token=token)

        async def serve(task_status=trio.TASK_STATUS_IGNORED):
            await serve_dashboard(source, place, task_status=task_status, **how)

        _, port = await nursery.start(serve)
        yield port
        nursery.cancel_scope.cancel()
