"""Streams and messages that the tests of the link share."""

import trio
import trio.testing

from yeto.link import FrameStream, LinkClosed, TlsStream
from yeto.wire.frames import MessageType, encode_header
from yeto.wire.legality import TensorSizes
from yeto.wire.messages import BroadcastHeader, PushHeader

SLICE = 128
"""Slice size of the tests that use ``_small_slices``."""


class OneByteStream(trio.abc.Stream):
    """Hands on what another stream receives one byte at a time."""

    def __init__(self, stream):
        self._stream = stream

    async def receive_some(self, max_bytes=None):
        return await self._stream.receive_some(1)

    async def send_all(self, data):
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self):
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self):
        await self._stream.aclose()


def memory_pair():
    """Return two framed ends of a memory stream."""
    left, right = trio.testing.memory_stream_pair()
    return FrameStream(left), FrameStream(right)


def lockstep_pair():
    """Return two framed ends of a stream whose sends wait until the other end has read everything."""
    left, right = trio.testing.lockstep_stream_pair()
    return FrameStream(left), FrameStream(right)


async def socket_pair():
    """Return two connected TCP streams on the loopback."""
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        accepted = []

        async def accept():
            accepted.append(await listener.accept())

        nursery.start_soon(accept)
        left = await trio.open_tcp_stream(*listener.socket.getsockname())
    await listener.aclose()
    return left, accepted[0]


async def tls_pair(tls):
    """Return the two ends of a TLS connection, client and server."""
    server_context, client_context = tls
    left, right = await socket_pair()
    client = TlsStream(left, client_context, server_side=False, server_name="localhost")
    server = TlsStream(right, server_context, server_side=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.handshake)
        nursery.start_soon(server.handshake)
    return client, server


async def handshakes(server_context, client_context, server_name="localhost"):
    """Shake hands; return what each side said of it (None: it went well) and both streams."""
    left, right = await socket_pair()
    client = TlsStream(left, client_context, server_side=False, server_name=server_name)
    server = TlsStream(right, server_context, server_side=True)
    said = {}

    async def shake(name, stream):
        try:
            with trio.fail_after(100):
                await stream.handshake()
            said[name] = None
        except LinkClosed as error:
            said[name] = error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shake, "client", client)
        nursery.start_soon(shake, "server", server)
    return said["server"], said["client"], server, client


def sizes_of(*tensor_bytes):
    """Return the sizes of a session whose fragments have the same size in every encoding."""
    return TensorSizes(bulk=tensor_bytes, delta=tensor_bytes, final=tensor_bytes)


def push_head(fragment=0, step=1):
    return PushHeader(
        learner=0,
        fragment=fragment,
        step=step,
        attempt=1,
        base_version=0,
        local_step=1,
        c_steps=1,
        c_tokens=1,
    )


def broadcast_head(fragment=0, version=1):
    return BroadcastHeader(fragment=fragment, version=version)


def inner_frame(head, tensor):
    """Return a complete bulk frame."""
    payload = head.encode() + tensor
    return encode_header(head.TYPE, len(payload)) + payload


async def read_frame(stream):
    """Return type and payload of the next frame."""
    header = await stream.read_header()
    return header.type, await stream.read_exact(header.length)


def chunk_frame(chunk, data):
    """Return a CHUNK frame."""
    payload = chunk.encode() + data
    return encode_header(MessageType.CHUNK, len(payload)) + payload


class Owner:
    """Decides about messages and keeps those that were delivered."""

    def __init__(self, *, wants=lambda head: True):
        self._wants = wants
        self.asked = []
        self.delivered = []
        self.arrived = trio.Event()

    async def admit(self, kind, head, tensor_bytes):
        await trio.lowlevel.checkpoint()
        self.asked.append((kind, head, tensor_bytes))
        return bytearray(tensor_bytes) if self._wants(head) else None

    async def deliver(self, kind, head, buffer):
        await trio.lowlevel.checkpoint()
        self.delivered.append((head, bytes(buffer)))
        self.arrived.set()
        self.arrived = trio.Event()

    async def count(self, number):
        """Wait until so many messages were delivered; return the last."""
        while len(self.delivered) < number:
            await self.arrived.wait()
        return self.delivered[-1]
