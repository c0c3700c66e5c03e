"""A slow reader: what it costs the others when one learner reads 1 MB/s.

One process broadcasts a fragment to a few learners in another, through a whole `yeto.link` group for each,
and times until the last of them has said that it has all of it. The same once more with one learner beside
them that takes 1 MB/s and so is behind from the first broadcast on: for its group one message is under way,
and the newest waits. Both turn about, the slow learner connects and leaves again in between.
"""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count, cycle
from typing import Final

import numpy as np
import trio

from benchmarks.figures import Figure, Target, figure_of
from yeto.link import FrameStream, Group, LinkClosed, Places, new_buffer, set_socket_options
from yeto.link.group import OnControl
from yeto.link.inbox import Deliver
from yeto.wire.frames import MessageType
from yeto.wire.legality import TensorSizes
from yeto.wire.messages import BroadcastHeader, Heartbeat, TensorHead
from yeto.wire.striping import Buffer

HOST: Final = "127.0.0.1"
OTHERS: Final = 3
SLOW_BYTES_PER_SECOND: Final = 1_000_000
PIECE_BYTES: Final = 10_000
PATIENCE_SECONDS: Final = 60.0
AT_MOST = Target(sense="at most", number=1.1, of="ratio")


def slow_reader_figures(*, repeats: int, size: int, num_streams: int) -> list[Figure]:
    """Measure the latency of a broadcast to the others, with and without the slow one.

    Args:
        repeats: samples of each.
        size: bytes of the fragment on the wire, a multiple of 2.
        num_streams: S.
    """
    with_slow, without = _broadcast_all(repeats, size, num_streams)
    return [
        figure_of(
            "broadcast_beside_slow_reader_milliseconds",
            f"broadcast to {OTHERS}, a fourth reads 1 MB/s",
            "ms",
            [1e3 * value for value in with_slow],
            peer="without it",
            peer_values=[1e3 * value for value in without],
            target=AT_MOST,
        )
    ]


def _broadcast_all(repeats: int, size: int, num_streams: int) -> tuple[list[float], list[float]]:
    pool = ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))
    with pool, socket.create_server((HOST, 0)) as server, ExitStack() as stack:
        server.settimeout(PATIENCE_SECONDS)
        learners = pool.submit(_be_others, server.getsockname()[1], num_streams, size)
        each = 1 + num_streams
        sockets = [stack.enter_context(server.accept()[0]) for _ in range(OTHERS * each)]
        groups = [sockets[first : first + each] for first in range(0, len(sockets), each)]
        samples = trio.run(_Syncer(server, size, num_streams).run, groups, repeats)
        learners.result()
        return samples


class _Syncer:
    """The broadcasting process."""

    def __init__(self, server: socket.socket, size: int, num_streams: int) -> None:
        self._server = server
        self._sizes = TensorSizes.of([size // 2], "bf16")
        self._tensor = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).data
        self._num_streams = num_streams
        self._versions = count(1)
        self._holders = 0
        self._all_hold = trio.Event()
        self._groups: list[Group] = []

    async def run(
        self, groups: Sequence[Sequence[socket.socket]], repeats: int
    ) -> tuple[list[float], list[float]]:
        with_slow: list[float] = []
        without: list[float] = []
        async with trio.open_nursery() as nursery:
            for sockets in groups:
                group = self._group(sockets, learner=len(self._groups))
                self._groups.append(group)
                nursery.start_soon(_serve, group)
            for turn in range(repeats + 1):
                for slow in (False, True) if turn % 2 == 0 else (True, False):
                    if slow:
                        seconds = await self._beside_slow(nursery)
                    else:
                        seconds = await self._broadcast(self._groups)
                    (with_slow if slow else without).append(seconds)
            nursery.cancel_scope.cancel()
        return with_slow[1:], without[1:]

    async def _beside_slow(self, nursery: trio.Nursery) -> float:
        with _SlowLearner(self._server, self._num_streams) as slow:
            group = self._group(slow.sockets, learner=OTHERS)
            ended = trio.Event()

            async def serve() -> None:
                with suppress(LinkClosed):
                    await group.run()
                ended.set()

            nursery.start_soon(serve)
            self._put(group, next(self._versions))
            await trio.to_thread.run_sync(slow.reading.wait)
            seconds = await self._broadcast([*self._groups, group])
            group.outbox.fail(LinkClosed("it has been slow enough"))
            await ended.wait()
            return seconds

    async def _broadcast(self, groups: Sequence[Group]) -> float:
        version = next(self._versions)
        self._holders, self._all_hold = 0, trio.Event()
        began = time.perf_counter()
        for group in groups:
            self._put(group, version)
        await self._all_hold.wait()
        return time.perf_counter() - began

    def _put(self, group: Group, version: int) -> None:
        group.outbox.put(BroadcastHeader(fragment=0, version=version), self._tensor, order=(version,))

    def _group(self, sockets: Sequence[socket.socket], *, learner: int) -> Group:
        return _group_of(sockets, Places.syncer(self._sizes, learner=learner), self._on_control, _nothing)

    async def _on_control(self, kind: MessageType, payload: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self._holders += 1
        if self._holders == OTHERS:
            self._all_hold.set()


class _SlowLearner:
    """Sockets whose other ends a thread reads slowly; a context manager."""

    def __init__(self, server: socket.socket, num_streams: int) -> None:
        self._near: list[socket.socket] = []
        self.sockets: list[socket.socket] = []
        """The syncer's ends."""
        self.reading = threading.Event()
        """Set when it has read something of a broadcast."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        for _ in range(1 + num_streams):
            self._near.append(socket.create_connection(server.getsockname(), timeout=PATIENCE_SECONDS))
            self.sockets.append(server.accept()[0])

    def __enter__(self) -> _SlowLearner:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for sock in (*self._near, *self.sockets):
            sock.close()

    def _read(self) -> None:
        pause = PIECE_BYTES / SLOW_BYTES_PER_SECOND
        for sock in self._near:
            sock.setblocking(False)
        for sock in cycle(self._near[1:] or self._near):
            if self._over.wait(pause):
                return
            with suppress(BlockingIOError, ConnectionError):
                if sock.recv(PIECE_BYTES):
                    self.reading.set()


def _group_of(
    sockets: Sequence[socket.socket], places: Places, on_control: OnControl, deliver: Deliver
) -> Group:
    """Return a group on connected sockets: control, then the data streams."""
    streams = []
    for sock in sockets:
        raw = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        set_socket_options(raw)
        streams.append(FrameStream(raw))

    async def admit(kind: MessageType, head: TensorHead, size: int) -> memoryview:
        await trio.lowlevel.checkpoint()
        return new_buffer(size)

    group = Group(
        streams[0],
        len(streams) - 1,
        places=places,
        outbox_bytes_max=1 << 40,
        on_control=on_control,
        admit=admit,
        deliver=deliver,
    )
    for index, stream in enumerate(streams[1:], 1):
        group.attach(index, stream)
    return group


async def _nothing(kind: MessageType, head: TensorHead, buffer: Buffer) -> None:
    raise RuntimeError(f"{kind.name} was not expected")


async def _serve(group: Group) -> None:
    await group.run()


def _be_others(port: int, num_streams: int, size: int) -> None:
    """Be the process of the learners that read as fast as they can."""
    with ExitStack() as stack:
        groups = [
            [
                stack.enter_context(socket.create_connection((HOST, port), timeout=PATIENCE_SECONDS))
                for _ in range(1 + num_streams)
            ]
            for _ in range(OTHERS)
        ]
        trio.run(_receive, groups, size)


async def _receive(groups: Sequence[Sequence[socket.socket]], size: int) -> None:
    sizes = TensorSizes.of([size // 2], "bf16")

    async def serve(learner: int, sockets: Sequence[socket.socket]) -> None:
        async def deliver(kind: MessageType, head: TensorHead, buffer: Buffer) -> None:
            await trio.lowlevel.checkpoint()
            assert isinstance(head, BroadcastHeader)
            beat = Heartbeat(learner=learner, local_step=head.version)
            group.outbox.put_control(beat.TYPE, beat.encode())

        async def on_control(kind: MessageType, payload: bytes) -> None:
            raise RuntimeError(f"{kind.name} was not expected")

        group = _group_of(sockets, Places.learner(sizes), on_control, deliver)
        with suppress(LinkClosed):  # the other process is done
            await group.run()

    async with trio.open_nursery() as nursery:
        for learner, sockets in enumerate(groups):
            nursery.start_soon(serve, learner, sockets)
