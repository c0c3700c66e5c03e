"""A network that misbehaves as declared: a TCP proxy between learners and syncer.

It reads the frames that pass, so a fault can be declared where a test means it ("in the middle of the second
push of learner 1") and not by time. Whatever no fault touches passes unchanged and at once. Bytes that are
not the protocol, as TLS makes them, pass too; faults are then placed by counting bytes.
"""

import contextlib
import socket
import struct
from collections import Counter

import trio
from attrs import define, field
from faults import DOWN, UP, Corrupt, Cut, Delay, Freeze, HalfOpen, Hold, Lose, Rate
from frame_follower import Follower

from yeto.wire.frames import MessageType

READ_BYTES = 64 * 1024
UNDER_WAY = 16
"""Reads that may be under way in one direction of a connection, so that a delay is no limit of the rate."""
RATE_PIECE_BYTES = 2048

SIDES = {UP: ("learner", "syncer"), DOWN: ("syncer", "learner")}
"""Who sends and who receives."""


@define(eq=False)
class Pipe:
    """One connection through the proxy, and what befell it."""

    streams: dict
    """Side to its socket."""
    learner: int | None = None
    generation: int | None = None
    stream: int | None = None
    deaf: set = field(factory=set)
    """Sides that nothing is sent to any more, not even an end."""
    mute: bool = False
    """Whether nothing that arrives is passed on."""
    delay: dict = field(factory=lambda: {UP: 0.0, DOWN: 0.0})
    rate: dict = field(factory=lambda: {UP: None, DOWN: None})
    gates: dict = field(factory=lambda: {UP: set(), DOWN: set()})
    """Faults that hold a direction back."""
    scope: trio.CancelScope = field(factory=trio.CancelScope)


class FaultProxy:
    """Listens for learners and dials the syncer for each connection."""

    def __init__(self, nursery, listener, target, faults):
        self.host, self.port = listener.socket.getsockname()[:2]
        self.address = f"{self.host}:{self.port}"
        self.target = target
        """(host, port) of the syncer; may be changed while running."""
        self.faults = []
        self.pipes = []
        self.begun = Counter()
        """(direction, kind, learner) to the frames that began to pass."""
        self._nursery = nursery
        self.declare(*faults)

    def declare(self, *faults):
        """Add faults; those that count frames count from now on."""
        self.faults += faults
        return faults[0] if len(faults) == 1 else faults

    @property
    def unused(self):
        return [fault for fault in self.faults if not fault.happened.is_set()]

    def count(self, kind, direction=UP, learner=None):
        """Return how many frames of a kind have begun to pass."""
        return sum(
            number
            for (way, what, who), number in self.begun.items()
            if (way, what) == (direction, kind) and learner in (None, who)
        )

    async def serve(self, accepted):
        """Serve one connection of a learner to its end."""
        try:
            dialled = await trio.open_tcp_stream(*self.target)
        except OSError:
            await _reset(accepted)
            return
        pipe = Pipe({"learner": accepted, "syncer": dialled})
        self.pipes.append(pipe)
        try:
            with pipe.scope:
                async with trio.open_nursery() as nursery:
                    for direction in (UP, DOWN):
                        nursery.start_soon(self._carry, pipe, direction)
        finally:
            self.pipes.remove(pipe)
            for stream in pipe.streams.values():
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(stream)

    async def _carry(self, pipe, direction):
        send, receive = trio.open_memory_channel(UNDER_WAY)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, pipe, direction, send)
            nursery.start_soon(self._write, pipe, direction, receive)

    async def _read(self, pipe, direction, send):
        source = pipe.streams[SIDES[direction][0]]
        data = b"..."
        async with send:
            while data:
                try:
                    data = await source.receive_some(READ_BYTES)
                except trio.BrokenResourceError:
                    data = None
                except trio.ClosedResourceError:
                    return
                try:
                    await send.send((trio.current_time(), data))
                except trio.BrokenResourceError:
                    return  # the other side is gone

    async def _write(self, pipe, direction, receive):
        follower = Follower()
        _, receiver = SIDES[direction]
        async with receive:
            async for arrived_at, data in receive:
                if data:
                    for piece in follower.feed(data):
                        self._notice(pipe, direction, piece)
                        await self._pass(pipe, direction, piece, arrived_at)
                    continue
                await self._due(pipe, direction, arrived_at)
                if receiver in pipe.deaf:
                    await trio.sleep_forever()
                if data is None:
                    await self._break(pipe, receiver)
                    return
                await self._send(pipe, direction, follower.rest(), arrived_at)
                try:
                    await pipe.streams[receiver].send_eof()
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return

    def _notice(self, pipe, direction, piece):
        """Count a frame that begins, learn from it whose connection this is, and end what waits for it."""
        if not piece.begins_frame:
            return
        frame = piece.frame
        if direction == UP and frame.kind is MessageType.HELLO:
            _, pipe.learner, pipe.generation = frame.numbers("HIQ")
            pipe.stream = 0
        elif direction == UP and frame.kind is MessageType.DATA_HELLO:
            _, pipe.learner, pipe.generation, pipe.stream = frame.numbers("HIQH")
        self.begun[direction, frame.kind, pipe.learner] += 1
        for fault in self.faults:
            fault.see(pipe, direction, frame)
            if isinstance(fault, Hold) and fault.until is not None and fault.until(direction, frame):
                fault.thaw()

    async def _pass(self, pipe, direction, piece, arrived_at):
        data, start = bytearray(piece.data), 0
        while True:
            places = (
                (index, fault)
                for fault in self.faults
                if (index := fault.index(pipe, direction, piece, start)) is not None
            )
            found = min(places, key=lambda place: place[0], default=None)
            if found is None:
                break
            index, fault = found
            await self._send(pipe, direction, data[start:index], arrived_at)
            start = index
            fault.happened.set()
            await self._befall(pipe, direction, fault, data, index)
        await self._send(pipe, direction, data[start:], arrived_at)

    async def _befall(self, pipe, direction, fault, data, index):
        match fault:
            case Corrupt():
                data[index] ^= fault.mask
            case Delay():
                pipe.delay[direction] = fault.seconds
            case Rate():
                pipe.rate[direction] = fault.bytes_per_second
            case Cut():
                pipe.mute = True
                for stream in pipe.streams.values():
                    await stream.send_eof()
            case Lose():
                for each in self._group(pipe):
                    await self._break(each, *each.streams)
            case HalfOpen():
                for each in self._group(pipe):
                    each.mute = True
                    each.deaf |= set(fault.deaf)
                    await self._break(each, *(each.streams.keys() - each.deaf))
            case Hold():
                self._close_gate(fault, [(pipe, direction)])
            case Freeze():
                self._close_gate(fault, [(each, way) for each in self._group(pipe) for way in (UP, DOWN)])

    def _group(self, pipe):
        """Return all connections of a pipe's generation, itself last: what befalls it may cancel us."""
        if pipe.generation is None:
            return [pipe]
        others = [each for each in self.pipes if each is not pipe and each.generation == pipe.generation]
        return [*others, pipe]

    def _close_gate(self, fault, ways):
        for pipe, direction in ways:
            pipe.gates[direction].add(fault)

        async def open_again():
            with trio.move_on_after(float("inf") if fault.seconds is None else fault.seconds):
                await fault.thawed.wait()
            fault.thaw()

        self._nursery.start_soon(open_again)

    async def _break(self, pipe, *sides):
        """Reset some sides of a pipe; without the other it lives on as long as somebody is deaf."""
        for side in sides:
            await _reset(pipe.streams[side])
        if not pipe.deaf:
            pipe.scope.cancel()
            await trio.lowlevel.checkpoint_if_cancelled()

    async def _due(self, pipe, direction, arrived_at):
        """Wait until what arrived then may go on."""
        while gates := [fault for fault in pipe.gates[direction] if not fault.thawed.is_set()]:
            await gates[0].thawed.wait()
        await trio.sleep_until(arrived_at + pipe.delay[direction])

    async def _send(self, pipe, direction, data, arrived_at):
        if not data:
            return
        await self._due(pipe, direction, arrived_at)
        rate = pipe.rate[direction]
        sink = pipe.streams[SIDES[direction][1]]
        size = len(data) if rate is None else RATE_PIECE_BYTES
        for begin in range(0, len(data), size):
            piece = data[begin : begin + size]
            if pipe.mute:
                return
            try:
                await sink.send_all(piece)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # its other direction sees the same, and tells the sender
            if rate is not None:
                await trio.sleep(len(piece) / rate)


async def _reset(stream):
    """Close a socket without a word of farewell."""
    with contextlib.suppress(OSError):  # it is closed already
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with trio.CancelScope(shield=True):
        await trio.aclose_forcefully(stream)


@contextlib.asynccontextmanager
async def fault_proxy(target, *faults, port=0):
    """A proxy to ``target``; every fault must have happened when the block is left."""
    [listener] = await trio.open_tcp_listeners(port, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        proxy = FaultProxy(nursery, listener, target, faults)
        nursery.start_soon(trio.serve_listeners, proxy.serve, [listener])
        yield proxy
        nursery.cancel_scope.cancel()
    assert not proxy.unused, f"declared and never happened: {proxy.unused}"
