"""The wire: a fragment from the memory of one process into the memory of another, over loopback.

Two processes, one group of a control stream and S data streams, exactly as syncer and learner run it. A
*push* is timed at the syncer, from its pull to the last byte in the buffer; a *broadcast* at the learner,
which asks for it with a heartbeat. What is done with the bytes afterwards is not part of it.

The peer is the barest receiver: one thread, S sockets, a selector, ``recv_into`` straight to the destination;
no frames, no slices, each stream carries one S-th of the bytes. It is served by as bare a sender. Both kinds
use the same buffers, of which every page was touched before, and go the same way at nearly the same time.
"""

from __future__ import annotations

import multiprocessing
import selectors
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Final

import numpy as np
import trio

from benchmarks.figures import Report, Target, figure_of
from benchmarks.timing import rates
from yeto.link import FrameStream, Group, LinkClosed, Places, set_socket_options
from yeto.wire.frames import MessageType
from yeto.wire.legality import TensorSizes
from yeto.wire.messages import BroadcastHeader, Heartbeat, PullRequest, PushHeader, TensorHead

HOST: Final = "127.0.0.1"
RATIO = Target(sense="at least", number=0.7, of="ratio")
PATIENCE_SECONDS: Final = 60.0
"""For one transfer; only a process that died takes longer."""

Samples = tuple[list[float], list[float]]
"""Seconds over the group, and over the bare sockets."""


class End:
    """One end: a group, and bare sockets beside it.

    Args:
        sockets: connected, in the order in which they were opened: control, S data, S bare.
        size: bytes of a transfer.
        is_syncer: whether this end pulls pushes, or asks for broadcasts.
    """

    def __init__(self, sockets: Sequence[socket.socket], size: int, *, is_syncer: bool) -> None:
        num_streams = len(sockets) // 2
        self._bare = list(sockets[1 + num_streams :])
        for each in self._bare:
            each.setblocking(False)
        self._source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        self._target = np.zeros(size, dtype=np.uint8)
        self._is_syncer = is_syncer
        self._numbers = count(1)
        self._arrived = trio.Event()
        self._arrived_at = 0.0
        self._is_over = False
        streams = []
        for each in sockets[: 1 + num_streams]:
            raw = trio.SocketStream(trio.socket.from_stdlib_socket(each))
            set_socket_options(raw)
            streams.append(FrameStream(raw))
        sizes = TensorSizes.of([size // 2], "bf16")
        self.group = Group(
            streams[0],
            num_streams,
            places=Places.syncer(sizes, learner=0) if is_syncer else Places.learner(sizes),
            outbox_bytes_max=4 * size,
            on_control=self._on_control,
            admit=self._admit,
            deliver=self._deliver,
        )
        for index, stream in enumerate(streams[1:], 1):
            self.group.attach(index, stream)

    async def serve(self) -> None:
        """Run the group. The syncer closes it after the last transfer, which is how the learner's ends."""
        try:
            await self.group.run()
        except LinkClosed:
            if not self._is_over:
                raise

    async def receive_all(self, repeats: int) -> Samples:
        """Receive ``repeats`` transfers of each kind, in turn; return how long they took."""
        kinds: tuple[tuple[list[float], Callable[[], Awaitable[float]]], ...] = (
            ([], self._ask),
            ([], self._receive_bare),
        )
        for turn in range(repeats + 1):
            for seconds, receive in kinds if turn % 2 == 0 else reversed(kinds):
                self._target[:] = 0
                seconds.append(await receive())
                if not np.array_equal(self._target, self._source):
                    raise RuntimeError("what was received is not what was sent")
        self._is_over = True
        self._bare[0].send(b"e")
        ours, bare = (seconds[1:] for seconds, _ in kinds)
        return ours, bare

    async def send_all(self, repeats: int) -> None:
        """Serve the other end's ``receive_all``. The group's share is sent whenever it is asked for."""
        for _ in range(repeats + 1):
            await trio.to_thread.run_sync(send_bare, self._bare, self._source.data)
        await trio.to_thread.run_sync(wait_byte, self._bare[0])

    async def _ask(self) -> float:
        number = next(self._numbers)
        self._arrived = trio.Event()
        began = time.perf_counter()
        if self._is_syncer:
            pull = PullRequest(fragment=0, step=number, attempt=1)
            self.group.outbox.put_control(pull.TYPE, pull.encode())
        else:
            beat = Heartbeat(learner=0, local_step=number)
            self.group.outbox.put_control(beat.TYPE, beat.encode())
        await self._arrived.wait()
        return self._arrived_at - began

    async def _receive_bare(self) -> float:
        return await trio.to_thread.run_sync(receive_bare, self._bare, self._target.data)

    async def _on_control(self, kind: MessageType, payload: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if kind is MessageType.PULL_REQ:
            pull = PullRequest.decode(payload)
            push = PushHeader(
                learner=0,
                fragment=0,
                step=pull.step,
                attempt=1,
                base_version=0,
                local_step=pull.step,
                c_steps=1,
                c_tokens=1,
            )
            self.group.outbox.put(push, self._source.data, order=(pull.step,))
        else:
            beat = Heartbeat.decode(payload)
            broadcast = BroadcastHeader(fragment=0, version=beat.local_step)
            self.group.outbox.put(broadcast, self._source.data, order=(beat.local_step,))

    async def _admit(self, _: MessageType, head: TensorHead, tensor_bytes: int) -> memoryview:
        await trio.lowlevel.checkpoint()
        return self._target.data

    async def _deliver(self, _: MessageType, head: TensorHead, buffer: bytearray | memoryview) -> None:
        self._arrived_at = time.perf_counter()
        self._arrived.set()
        await trio.lowlevel.checkpoint()


def receive_bare(sockets: Sequence[socket.socket], target: memoryview) -> float:
    """Ask for the bytes, receive each stream's share where it belongs; return the seconds."""
    began = time.perf_counter()
    sockets[0].send(b"g")
    _move(sockets, target, selectors.EVENT_READ, socket.socket.recv_into)
    return time.perf_counter() - began


def send_bare(sockets: Sequence[socket.socket], source: memoryview) -> None:
    """Wait until the other end asks, then send each stream its share."""
    wait_byte(sockets[0])
    _move(sockets, source, selectors.EVENT_WRITE, socket.socket.send)


def wait_byte(sock: socket.socket) -> None:
    """Wait for one byte of a socket that does not block."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        if not selector.select(PATIENCE_SECONDS) or not sock.recv(1):
            raise RuntimeError("the other process is gone")


def _move(
    sockets: Sequence[socket.socket],
    memory: memoryview,
    event: int,
    move: Callable[[socket.socket, memoryview], int],
) -> None:
    share = -(-len(memory) // len(sockets))
    rests = [memory[index * share : (index + 1) * share] for index in range(len(sockets))]
    with selectors.DefaultSelector() as selector:
        for index, sock in enumerate(sockets):
            selector.register(sock, event, index)
        while selector.get_map():
            ready = selector.select(PATIENCE_SECONDS)
            if not ready:
                raise RuntimeError("the other process is gone")
            for key, _ in ready:
                moved = move(sockets[key.data], rests[key.data])
                if moved == 0:
                    raise RuntimeError("the other process closed the connection")
                rests[key.data] = rests[key.data][moved:]
                if not rests[key.data]:
                    selector.unregister(key.fileobj)


async def run_end(sockets: Sequence[socket.socket], size: int, repeats: int, *, is_syncer: bool) -> Samples:
    """Run one end; return how long what it received took: pushes at the syncer, broadcasts at the learner."""
    end = End(sockets, size, is_syncer=is_syncer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end.serve)
        if is_syncer:
            samples = await end.receive_all(repeats)
            await end.send_all(repeats)
            nursery.cancel_scope.cancel()
        else:
            await end.send_all(repeats)
            samples = await end.receive_all(repeats)
    return samples


def run_learner(port: int, num_streams: int, size: int, repeats: int) -> Samples:
    """Be the learner's process: connect, push, take broadcasts."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_connection((HOST, port), timeout=PATIENCE_SECONDS))
            for _ in range(1 + 2 * num_streams)
        ]
        return trio.run(partial(run_end, sockets, size, repeats, is_syncer=False))


def measure(*, repeats: int, size: int, num_streams: int) -> Report:
    """Measure push and broadcast.

    Args:
        repeats: samples of each figure.
        size: bytes of the fragment on the wire, a multiple of 2.
        num_streams: S.
    """
    pool = ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))
    with pool, socket.create_server((HOST, 0)) as server, ExitStack() as stack:
        server.settimeout(PATIENCE_SECONDS)
        learner: Future[Samples] = pool.submit(
            run_learner, server.getsockname()[1], num_streams, size, repeats
        )
        sockets = [stack.enter_context(server.accept()[0]) for _ in range(1 + 2 * num_streams)]
        pushes = trio.run(partial(run_end, sockets, size, repeats, is_syncer=True))
        broadcasts = learner.result()
    return Report(
        benchmark="wire",
        what="two processes, loopback, from asking for it to the last byte in the buffer; wall seconds",
        settings={"bytes": size, "streams": num_streams, "repeats": repeats},
        figures=tuple(
            figure_of(
                f"{name}_gb_per_second",
                name,
                "GB/s",
                rates(1e-9 * size, ours),
                peer="bare receiver",
                peer_values=rates(1e-9 * size, bare),
                target=RATIO,
            )
            for name, (ours, bare) in (("push", pushes), ("broadcast", broadcasts))
        ),
    )
