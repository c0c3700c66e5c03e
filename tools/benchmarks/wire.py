"""The wire: a fragment from the memory of one process into the memory of another, over loopback.

Two processes, one group of a control stream and S data streams, exactly as syncer and learner run it. A
*push* is timed at the syncer, from its pull to the last byte in the buffer; a *broadcast* at the learner,
which asks for it with a heartbeat. What is done with the bytes afterwards is not part of it.

The peer is the barest receiver: one thread, S sockets, a selector, ``recv_into`` straight to the destination;
no frames, no slices, each stream carries one S-th of the bytes. It is served by as bare a sender. Both kinds
use the same buffers, of which every page was touched before, and go the same way at nearly the same time.

With TLS both kinds are encrypted; the bare sockets are the standard library's ``ssl.SSLSocket``.

Push has gRPC for another peer, if it is installed (`benchmarks.wire_grpc`). Beside these transfers stand the
codecs, a slow reader and a crowd of learners with tiny fragments, each in a module of its own.
"""

from __future__ import annotations

import multiprocessing
import selectors
import socket
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
import trio
from attrs import frozen
from numpy.typing import NDArray

from benchmarks.figures import Report, Target, figure_of
from benchmarks.timing import rates
from benchmarks.wire_codecs import codec_figures
from benchmarks.wire_crowd import crowd_figures
from benchmarks.wire_grpc import MISSING, GrpcReceiver, GrpcSender, is_installed
from benchmarks.wire_slow import slow_reader_figures
from yeto.cli.certificates import make_certificates
from yeto.link import FrameStream, Group, LinkClosed, Places, TlsContext, TlsStream, set_socket_options
from yeto.link import client_context as learner_tls
from yeto.link import server_context as syncer_tls
from yeto.wire.frames import MessageType
from yeto.wire.legality import TensorSizes
from yeto.wire.messages import BroadcastHeader, Heartbeat, PullRequest, PushHeader, TensorHead

HOST: Final = "127.0.0.1"
RATIO = Target(sense="at least", number=0.7, of="ratio")
PATIENCE_SECONDS: Final = 60.0
"""For one transfer; only a process that died takes longer."""

ASK_BARE: Final = b"b"
ASK_GRPC: Final = b"g"
"""What the receiver sends to have a transfer over the bare sockets, or by gRPC."""

Samples = list[list[float]]
"""Seconds over the group, over the bare sockets, and, if there is any, by gRPC."""


class End:
    """One end: a group, and bare sockets beside it.

    Args:
        streams: of the group, control first.
        bare: as many as there are data streams, not blocking.
        target: where what it receives goes.
        is_syncer: whether this end pulls pushes, or asks for broadcasts.
    """

    def __init__(
        self,
        streams: Sequence[FrameStream],
        bare: Sequence[socket.socket],
        target: NDArray[np.uint8],
        *,
        is_syncer: bool,
    ) -> None:
        size = target.size
        self._bare = list(bare)
        self._source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        self._target = target
        self._is_syncer = is_syncer
        self._numbers = count(1)
        self._arrived = trio.Event()
        self._arrived_at = 0.0
        self._is_over = False
        sizes = TensorSizes.of([size // 2], "bf16")
        self.group = Group(
            streams[0],
            len(bare),
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

    async def receive_all(self, repeats: int, grpc: GrpcReceiver | None = None) -> Samples:
        """Receive ``repeats`` transfers of each kind, in turn; return how long they took."""
        kinds: list[tuple[list[float], Callable[[], Awaitable[float]]]] = [
            ([], self._ask),
            ([], self._receive_bare),
        ]
        if grpc is not None:
            kinds.append(([], partial(self._receive_grpc, grpc)))
        for turn in range(repeats + 1):
            for seconds, receive in kinds if turn % 2 == 0 else reversed(kinds):
                self._target[:] = 0
                seconds.append(await receive())
                if not np.array_equal(self._target, self._source):
                    raise RuntimeError("what was received is not what was sent")
        self._is_over = True
        self._bare[0].send(ASK_BARE)
        return [seconds[1:] for seconds, _ in kinds]

    async def send_all(self, repeats: int, grpc: GrpcSender | None = None) -> None:
        """Serve the other end's ``receive_all``. The group's share is sent whenever it is asked for."""
        for _ in range((repeats + 1) * (1 if grpc is None else 2)):
            if await trio.to_thread.run_sync(wait_byte, self._bare[0]) == ASK_BARE:
                await trio.to_thread.run_sync(send_bare, self._bare, self._source.data)
            else:
                assert grpc is not None, "nobody asks for gRPC that is not there"
                await trio.to_thread.run_sync(grpc.send, self._source.data)
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

    async def _receive_grpc(self, grpc: GrpcReceiver) -> float:
        began = time.perf_counter()
        self._bare[0].send(ASK_GRPC)
        return await trio.to_thread.run_sync(grpc.wait) - began

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
    sockets[0].send(ASK_BARE)
    _move(sockets, target, selectors.EVENT_READ, lambda sock, view: sock.recv_into(view))
    return time.perf_counter() - began


def send_bare(sockets: Sequence[socket.socket], source: memoryview) -> None:
    """Send each stream its share."""
    _move(sockets, source, selectors.EVENT_WRITE, lambda sock, view: sock.send(view))


def wait_byte(sock: socket.socket) -> bytes:
    """Return the next byte of a socket that does not block."""
    memory = bytearray(1)
    _move([sock], memoryview(memory), selectors.EVENT_READ, lambda sock, view: sock.recv_into(view))
    return bytes(memory)


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
                rests[key.data] = _move_some(sockets[key.data], rests[key.data], move)
                if not rests[key.data]:
                    selector.unregister(key.fileobj)


def _move_some(
    sock: socket.socket, rest: memoryview, move: Callable[[socket.socket, memoryview], int]
) -> memoryview:
    """Move once; over TLS until there is nothing to move, because the selector does not see what it holds."""
    try:
        while rest:
            moved = move(sock, rest)
            if moved == 0:
                raise RuntimeError("the other process closed the connection")
            rest = rest[moved:]
            if not isinstance(sock, ssl.SSLSocket):
                break
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        pass
    return rest


@frozen(kw_only=True)
class Tls:
    """TLS of one end, for the group and for the bare sockets."""

    context: TlsContext
    bare: ssl.SSLContext


def syncer_side(folder: Path) -> Tls:
    """Make certificates in a folder; return the syncer's side."""
    made = make_certificates((HOST,), clients=0, days=1)
    for name, content in (("cert", made.server.cert), ("key", made.server.key), ("ca", made.ca)):
        path = folder / f"{name}.pem"
        path.touch(mode=0o600)
        path.write_bytes(content)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    bare.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return Tls(context=syncer_tls(folder / "cert.pem", folder / "key.pem"), bare=bare)


def learner_side(folder: Path) -> Tls:
    """Return the learner's side."""
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(folder / "ca.pem")
    return Tls(context=learner_tls(folder / "ca.pem"), bare=bare)


async def opened(sock: socket.socket, tls: Tls | None, *, is_syncer: bool) -> FrameStream:
    """Return the stream of frames on a connected socket, shaken hands with."""
    raw = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
    set_socket_options(raw)
    if tls is None:
        return FrameStream(raw)
    name = None if is_syncer else HOST
    stream = TlsStream(raw, tls.context, server_side=is_syncer, server_name=name)
    await stream.handshake()
    return FrameStream(stream)


def bare_socket(sock: socket.socket, tls: Tls | None, *, is_syncer: bool) -> socket.socket:
    """Return a connected socket that does not block, shaken hands with."""
    if tls is not None:
        name = None if is_syncer else HOST
        sock = tls.bare.wrap_socket(sock, server_side=is_syncer, server_hostname=name)
    sock.setblocking(False)
    return sock


async def run_end(
    sockets: Sequence[socket.socket],
    target: NDArray[np.uint8],
    repeats: int,
    *,
    tls: Tls | None,
    receiver: GrpcReceiver | None = None,
    sender: GrpcSender | None = None,
    is_syncer: bool,
) -> Samples:
    """Run one end; return how long what it received took: pushes at the syncer, broadcasts at the learner.

    Args:
        sockets: connected, in the order in which they were opened: control, S data, S bare.
        target: where what this end receives goes; as large as a transfer.
        repeats: samples of each kind.
        tls: this end's, if there is any.
        receiver: writes what comes by gRPC to ``target``; the syncer's, if there is any.
        sender: its other end, the learner's.
        is_syncer: whether this end pulls pushes, or asks for broadcasts.
    """
    num_streams = len(sockets) // 2
    streams = [await opened(sock, tls, is_syncer=is_syncer) for sock in sockets[: 1 + num_streams]]
    bare = [
        await trio.to_thread.run_sync(partial(bare_socket, sock, tls, is_syncer=is_syncer))
        for sock in sockets[1 + num_streams :]
    ]
    end = End(streams, bare, target, is_syncer=is_syncer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end.serve)
        if is_syncer:
            samples = await end.receive_all(repeats, receiver)
            await end.send_all(repeats)
            nursery.cancel_scope.cancel()
        else:
            await end.send_all(repeats, sender)
            samples = await end.receive_all(repeats)
    for sock in bare:
        sock.close()
    return samples


def run_learner(
    port: int, num_streams: int, size: int, repeats: int, folder: Path | None, grpc_port: int | None
) -> Samples:
    """Be the learner's process: connect, push, take broadcasts."""
    tls = None if folder is None else learner_side(folder)
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_connection((HOST, port), timeout=PATIENCE_SECONDS))
            for _ in range(1 + 2 * num_streams)
        ]
        sender = None if grpc_port is None else stack.enter_context(GrpcSender(grpc_port))
        target = np.zeros(size, dtype=np.uint8)
        return trio.run(partial(run_end, sockets, target, repeats, tls=tls, sender=sender, is_syncer=False))


def exchange(
    size: int, num_streams: int, repeats: int, folder: Path | None = None, *, grpc: bool = False
) -> tuple[Samples, Samples]:
    """Measure pushes and broadcasts, over TLS with certificates in ``folder`` if one is given.

    Args:
        size: bytes of a transfer.
        num_streams: S.
        repeats: samples of each kind.
        folder: for certificates; None goes without TLS.
        grpc: whether pushes go by gRPC, too.
    """
    target = np.zeros(size, dtype=np.uint8)
    tls = None if folder is None else syncer_side(folder)
    pool = ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))
    with pool, socket.create_server((HOST, 0)) as server, ExitStack() as stack:
        server.settimeout(PATIENCE_SECONDS)
        port = server.getsockname()[1]
        receiver = stack.enter_context(GrpcReceiver(target.data)) if grpc else None
        grpc_port = None if receiver is None else receiver.port
        learner: Future[Samples] = pool.submit(
            run_learner, port, num_streams, size, repeats, folder, grpc_port
        )
        sockets = [stack.enter_context(server.accept()[0]) for _ in range(1 + 2 * num_streams)]
        pushes = trio.run(
            partial(run_end, sockets, target, repeats, tls=tls, receiver=receiver, is_syncer=True)
        )
        return pushes, learner.result()


def measure(
    *, repeats: int, size: int, num_streams: int, elements: int, learners: int, rounds: int
) -> Report:
    """Measure push and broadcast, the codecs, a slow reader and a crowd.

    Args:
        repeats: samples of each figure.
        size: bytes of the fragment on the wire, a multiple of 2.
        num_streams: S.
        elements: of the tensor that is encoded and decoded.
        learners: of the crowd.
        rounds: of the crowd, that are counted.
    """
    grpc = is_installed()
    pushes, broadcasts = exchange(size, num_streams, repeats, grpc=grpc)
    with tempfile.TemporaryDirectory() as folder:
        tls_pushes, tls_broadcasts = exchange(size, num_streams, repeats, Path(folder))
    kinds: list[tuple[str, list[float], list[float], str, Target | None]] = [
        ("push", pushes[0], pushes[1], "bare receiver", RATIO),
        ("broadcast", broadcasts[0], broadcasts[1], "bare receiver", RATIO),
        ("push over TLS", tls_pushes[0], tls_pushes[1], "bare receiver, TLS", None),
        ("broadcast over TLS", tls_broadcasts[0], tls_broadcasts[1], "bare receiver, TLS", None),
    ]
    if grpc:
        kinds.append(("push beside gRPC", pushes[0], pushes[2], "gRPC stream, 4 MiB messages", None))
    transfers = [
        figure_of(
            f"{name.lower().replace(' ', '_')}_gb_per_second",
            name,
            "GB/s",
            rates(1e-9 * size, ours),
            peer=peer,
            peer_values=rates(1e-9 * size, theirs),
            target=target,
        )
        for name, ours, theirs, peer, target in kinds
    ]
    return Report(
        benchmark="wire",
        what="two processes, loopback, from asking for it to the last byte in the buffer; wall seconds",
        settings={
            "bytes": size,
            "streams": num_streams,
            "repeats": repeats,
            "elements": elements,
            "learners": learners,
            "rounds": rounds,
        },
        figures=(
            *transfers,
            *codec_figures(repeats=repeats, elements=elements),
            *slow_reader_figures(repeats=repeats, size=size // 8, num_streams=num_streams),
            *crowd_figures(learners=learners, rounds=rounds),
        ),
        notes=() if grpc else (MISSING,),
    )
