"""A syncer that does what a test tells it, over real sockets; it decides nothing."""

from contextlib import asynccontextmanager, suppress

import numpy as np
import trio

from yeto.link import FrameStream, Group, LinkClosed, Places, accept_tls, new_buffer
from yeto.wire import codecs, f32
from yeto.wire.contract import TrainingManifest
from yeto.wire.errors import AuthenticationError
from yeto.wire.frames import MessageType
from yeto.wire.hello import Hello
from yeto.wire.legality import HANDSHAKE, TensorSizes
from yeto.wire.messages import (
    BroadcastHeader,
    BudgetDone,
    DataHello,
    ErrorMessage,
    FinalAck,
    FinalFragmentHeader,
    FinalManifest,
    Heartbeat,
    PullRequest,
    Shutdown,
)

WAIT_SECONDS = 200
"""What has not come by then never does, on a busy machine either."""


class FakeLink:
    """One generation of one learner, seen from the syncer."""

    def __init__(self, hello, control):
        self.hello = hello
        self.numels = hello.layout.numels
        self._codec = codecs.by_name(hello.dtype)
        self._bulk = codecs.by_name(codecs.bulk_dtype(hello.dtype))
        sizes = TensorSizes.of(self.numels, hello.dtype)
        self.manifest = None
        self.heartbeats = []
        self._beat = trio.Event()
        self.inits = {}
        self._news, self._heard = trio.open_memory_channel(1000)
        self.group = Group(
            control,
            hello.num_streams,
            places=Places.syncer(sizes, learner=hello.learner),
            outbox_bytes_max=2**30,
            on_control=self._on_control,
            admit=self._admit,
            deliver=self._deliver,
        )
        self.ended = trio.Event()
        self.scope = trio.CancelScope()

    async def run(self):
        with self.scope, suppress(LinkClosed):
            await self.group.run()
        self.ended.set()

    async def _on_control(self, kind, payload):
        match kind:
            case MessageType.MANIFEST:
                self.manifest = TrainingManifest.decode(payload)
            case MessageType.HEARTBEAT:
                beat = Heartbeat.decode(payload)
                assert beat.learner == self.hello.learner
                self.heartbeats.append(beat.local_step)
                self._beat.set()
                self._beat = trio.Event()
            case MessageType.FINAL_ACK:
                await self._news.send(("ack", FinalAck.decode(payload).step))
            case MessageType.BUDGET_DONE:
                await self._news.send(("budget", BudgetDone.decode(payload).local_steps))

    async def _admit(self, kind, head, tensor_bytes):
        return new_buffer(tensor_bytes)

    async def _deliver(self, kind, head, buffer):
        numel = self.numels[head.fragment]
        if kind is MessageType.INIT_PARAMS:
            self.inits[head.fragment] = self._bulk.decode(buffer, numel)
            await self._news.send(("init", head.fragment))
        else:
            await self._news.send(("push", (head, self._codec.decode(buffer, numel))))

    # -- what a test does -----------------------------------------------------------------------------

    async def expect(self, kind):
        """Return the next thing the learner sends (but heartbeats), which must be of this kind."""
        with trio.fail_after(WAIT_SECONDS):
            found, value = await self._heard.receive()
        assert found == kind, f"expected {kind}, the learner sent {found} {value}"
        return value

    async def expect_inits(self):
        for _ in self.numels:
            await self.expect("init")
        return [self.inits[fragment] for fragment in range(len(self.numels))]

    async def expect_end(self):
        with trio.fail_after(WAIT_SECONDS):
            await self.ended.wait()

    async def expect_heartbeat(self, local_step):
        """Wait for a heartbeat that reports at least this step."""
        with trio.fail_after(WAIT_SECONDS):
            while max(self.heartbeats, default=-1) < local_step:
                await self._beat.wait()

    def nothing_more(self):
        """Whether the learner has sent nothing else so far (but heartbeats)."""
        return self._heard.statistics().current_buffer_used == 0

    def broadcast(self, fragment, version, values):
        data = self._bulk.encode(np.asarray(values, dtype=np.float32))
        head = BroadcastHeader(fragment=fragment, version=version)
        assert self.group.outbox.put(head, memoryview(data), order=(version,))

    def broadcast_all(self, version, everything):
        for fragment, values in enumerate(everything):
            self.broadcast(fragment, version, values)

    def pull(self, fragment, step, attempt=1):
        request = PullRequest(fragment=fragment, step=step, attempt=attempt)
        self.group.outbox.put_control(MessageType.PULL_REQ, request.encode())

    def final(self, step, versions, everything, *, manifest_first=True):
        manifest = FinalManifest(step=step, versions=tuple(versions)).encode()
        if manifest_first:
            self.group.outbox.put_control(MessageType.FINAL_MANIFEST, manifest)
        for fragment, (version, values) in enumerate(zip(versions, everything, strict=True)):
            data = f32.encode(np.asarray(values, dtype=np.float32))
            head = FinalFragmentHeader(fragment=fragment, version=version)
            self.group.outbox.put(head, memoryview(data), order=(step,))
        if not manifest_first:
            self.group.outbox.put_control(MessageType.FINAL_MANIFEST, manifest)

    def shutdown(self):
        self.group.outbox.put_control(MessageType.SHUTDOWN, Shutdown().encode())
        self.group.finish()

    def error(self, text):
        self.group.outbox.put_control(MessageType.ERROR, ErrorMessage(text=text).encode())
        self.group.finish()

    async def drop(self):
        """Cut every socket, as a lost machine does."""
        self.scope.cancel()
        await self.ended.wait()


class FakeSyncer:
    """Listens, forms groups, hands them to the test in the order of their HELLOs."""

    def __init__(self, nursery, listener, key, tls):
        self._nursery = nursery
        self._key = key
        self.tls = tls
        """Context of the next connections; None speaks plain TCP."""
        self.accepted = 0
        self.is_tunnel = False
        """Whether connections are accepted and closed at once, as by a tunnel to a syncer that is gone."""
        self.silent = self.most_silent = 0
        """Connections that have not said who they are: now, and at most so far."""
        self._links = {}
        self._hello = trio.Event()
        self._complete, self._completed = trio.open_memory_channel(100)
        self.port = listener.socket.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.refused = []
        self.refusal = None
        """Text to answer every HELLO with."""

    async def handle(self, raw):
        self.accepted += 1
        if self.is_tunnel:
            return
        stream = FrameStream(raw)
        self.silent += 1
        self.most_silent = max(self.silent, self.most_silent)
        try:
            if self.tls is not None:
                stream = FrameStream(await accept_tls(raw, self.tls))
            header = await stream.read_header()
            HANDSHAKE.check(header)
            payload = await stream.read_exact(header.length)
            self.silent -= 1
            if header.type is MessageType.HELLO:
                await self._on_hello(stream, payload)
            else:
                await self._on_data_hello(stream, DataHello.decode(payload))
        except LinkClosed:
            await stream.close_after_peer(5)

    async def _on_hello(self, stream, payload):
        text = self.refusal
        try:
            hello = Hello.decode(payload, self._key)
        except AuthenticationError as error:
            text = str(error)
        if text is not None:
            self.refused.append(text)
            await stream.send(MessageType.ERROR, ErrorMessage(text=text).encode())
            await stream.close_after_peer(5)
            return
        link = self._links[hello.generation] = FakeLink(hello, stream)
        self._nursery.start_soon(link.run)
        self._hello.set()
        self._hello = trio.Event()
        if hello.num_streams == 0:
            await self._complete.send(link)
        # A served stream is closed when its handler returns.
        await link.ended.wait()

    async def _on_data_hello(self, stream, hello):
        with trio.move_on_after(WAIT_SECONDS):
            while hello.generation not in self._links:
                await self._hello.wait()
        link = self._links[hello.generation]
        link.group.attach(hello.stream, stream)
        if link.group.is_complete:
            await self._complete.send(link)
        await link.ended.wait()

    async def connection(self):
        """Return the next complete group."""
        with trio.fail_after(WAIT_SECONDS):
            return await self._completed.receive()


@asynccontextmanager
async def fake_syncer(*, key=None, port=0, tls=None):
    """Serve on loopback for as long as the block lasts."""
    listener = (await trio.open_tcp_listeners(port, host="127.0.0.1"))[0]
    async with trio.open_nursery() as nursery:
        syncer = FakeSyncer(nursery, listener, key, tls)
        nursery.start_soon(trio.serve_listeners, syncer.handle, [listener])
        yield syncer
        nursery.cancel_scope.cancel()
