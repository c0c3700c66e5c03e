"""Whole connections under a fuzzer: what one side makes of any bytes on any of its streams.

An input says how many data streams there are and then, piece by piece, which bytes arrive on which stream;
behind the last one every stream ends. Whatever the bytes, the connection must end with a reason, and nothing
may have been told or handed over that its HELLO does not cover.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import trio
import trio.testing
from attrs import define, field

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.errors import YetoError
from yeto.learner.bells import Bell
from yeto.learner.config import LearnerConfig
from yeto.learner.connection import Connection, Shared
from yeto.learner.identity import Identity, make_identity
from yeto.learner.mailbox import Arrivals, Departures
from yeto.link import FrameStream, Traffic
from yeto.syncer.allowances import Allowances
from yeto.syncer.config import Bounds
from yeto.syncer.group import LearnerGroup
from yeto.syncer.receivers import Receivers
from yeto.wire import messages
from yeto.wire.frames import MessageType, encode_header
from yeto.wire.hello import Hello
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec
from yeto.wire.legality import TensorSizes

DTYPE = "bf16"
LAYOUT = Layout(
    fragments=tuple(
        FragmentLayout(mode=MergeMode.AVG, tensors=(TensorSpec(name=f"t{p}", shape=(numel,)),))
        for p, numel in enumerate((4, 200))
    )
)
SIZES = TensorSizes.of([fragment.numel for fragment in LAYOUT.fragments], DTYPE)
LEARNER, GENERATION = 0, 9
STREAMS_MAX = 2
PIECE_HEAD = struct.Struct("<BH")
"""Stream, and how many bytes follow for it."""
END_SECONDS = 200.0
"""On the clock of the machine; a connection that has not ended by then never does."""

CONFIG = LearnerConfig(
    syncer="127.0.0.1:1", output_dir=Path("unused"), wire_dtype=DTYPE, learner_id=LEARNER, fragments=2
)
IDENTITY: Identity = make_identity(CONFIG, LAYOUT, {"model": "fuzzed", "seed": 0}, ())


def script(pieces: list[tuple[int, bytes]], num_streams: int) -> bytes:
    """Return the input in which these bytes arrive on these streams."""
    return bytes([num_streams]) + b"".join(
        PIECE_HEAD.pack(stream, len(data)) + data for stream, data in pieces
    )


def pieces_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces of an input."""
    start = 1
    while start + PIECE_HEAD.size <= len(data):
        stream, size = PIECE_HEAD.unpack_from(data, start)
        start += PIECE_HEAD.size
        yield stream, data[start : start + size]
        start += size


@define
class Everything:
    """A coordinator that admits every push, and whoever wants what arrives; they check what they are told."""

    told: list[ev.Event] = field(factory=list)
    buffers: dict[tuple[int, int], memoryview] = field(factory=dict)
    delivered: int = 0

    async def tell(self, event: ev.Event) -> None:
        await trio.lowlevel.checkpoint()
        self.told.append(event)
        assert (event.learner, event.generation) == (LEARNER, messages.format_generation(GENERATION))

    async def ask(self, event: ev.PushOffered) -> tuple[de.Decision, ...]:
        await self.tell(event)
        assert event.payload_bytes == SIZES.delta[event.fragment]
        if (event.step, event.attempt) in self.buffers:
            return ()
        self.buffers[event.step, event.attempt] = memoryview(b"")
        return (
            de.PushAdmitted(
                learner=event.learner,
                generation=event.generation,
                step=event.step,
                attempt=event.attempt,
                staleness=0,
                why="all are",
            ),
        )

    def push_buffer(self, member, head, size):
        buffer = self.buffers[head.step, head.attempt] = np.empty(size, np.uint8).data
        return buffer

    async def push_arrived(self, member, head, buffer):
        assert self.buffers[head.step, head.attempt] is buffer
        self.delivered += 1

    def init_buffer(self, member, head, size):
        assert size == SIZES.bulk[head.fragment]
        return np.empty(size, np.uint8).data if head.fragment == 0 else None

    def init_arrived(self, member, head, buffer):
        assert head.fragment == 0

    def waits_for(self, member):
        return False

    def manifest_arrived(self, manifest):
        assert manifest.contract() == IDENTITY.contract


@define
class Dialled:
    """A dialler whose streams are there already."""

    streams: list[FrameStream]

    async def open(self) -> FrameStream:
        await trio.lowlevel.checkpoint()
        return self.streams.pop(0)


def syncer_group(data: bytes) -> None:
    """What a learner sends, as the syncer reads it."""
    receiver = Everything()

    async def serve(streams: list[FrameStream]) -> None:
        hello = Hello.decode(IDENTITY.hello(CONFIG, GENERATION))
        control, *others = streams
        group = LearnerGroup(
            control,
            Hello(
                learner=LEARNER,
                generation=GENERATION,
                dtype=DTYPE,
                layout=hello.layout,
                fingerprint=hello.fingerprint,
                contract=hello.contract,
                num_streams=len(others),
            ),
            receivers=Receivers(facts=receiver, pushes=receiver, first_values=receiver),
            allowances=Allowances(),
            bounds=Bounds(),
            traffic=Traffic(),
        )
        for index, stream in enumerate(others, start=1):
            group.attach(index, stream)
        reason = await group.run()
        assert reason
        assert len(reason) < 10_000
        assert "\n" not in reason

    _play(data, serve)
    assert receiver.delivered <= len(receiver.buffers)


def learner_connection(data: bytes) -> None:
    """What a syncer sends, as the learner reads it."""
    arrivals = Arrivals()

    async def serve(streams: list[FrameStream]) -> None:
        pushes, news = Bell(), Bell()
        shared = Shared(
            config=LearnerConfig(
                syncer="127.0.0.1:1",
                output_dir=Path("unused"),
                wire_dtype=DTYPE,
                learner_id=LEARNER,
                fragments=2,
                wan_streams=len(streams) - 1,
            ),
            identity=IDENTITY,
            arrivals=arrivals,
            departures=Departures(ring_pushes=pushes.ring, ring_news=news.ring),
            pushes_bell=pushes,
            news_bell=news,
        )
        control, *others = streams
        connection = Connection(shared, GENERATION, control, SIZES)
        try:
            await connection.introduce(Dialled(others))
        except YetoError as error:
            end = error
        else:
            end = await connection.run(())
        await connection.close()
        assert isinstance(end, YetoError)
        assert str(end)

    _play(data, serve)
    mail = arrivals.take()
    assert len({broadcast.fragment for broadcast in mail.broadcasts}) == len(mail.broadcasts)
    assert all(np.isfinite(broadcast.values).all() for broadcast in mail.broadcasts)
    assert all(pull.fragment < len(LAYOUT.fragments) for pull in mail.pulls)
    if mail.final is not None:
        assert all(np.isfinite(values).all() for values in mail.final.values)


def _play(data: bytes, serve: Callable[[list[FrameStream]], Awaitable[None]]) -> None:
    """Run one side of a connection on memory streams while the other says what the input says."""

    async def main() -> None:
        pairs = [
            trio.testing.memory_stream_pair() for _ in range(1 + (data[0] if data else 0) % (1 + STREAMS_MAX))
        ]

        async def speak() -> None:
            for stream, said in pieces_of(data):
                if said:
                    with contextlib.suppress(trio.BrokenResourceError):  # it has hung up
                        await pairs[stream % len(pairs)][1].send_all(said)
            for _, peer in pairs:
                await peer.send_eof()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(speak)
            with trio.fail_after(END_SECONDS):
                await serve([FrameStream(ours) for ours, _ in pairs])
            nursery.cancel_scope.cancel()

    trio.run(main)


def _frame(message: messages.FixedMessage, tensor: bytes = b"") -> bytes:
    return encode_header(message.TYPE, message.BYTES + len(tensor)) + message.encode() + tensor


def _sliced(number: int, inner: bytes) -> bytes:
    chunk = messages.ChunkHeader(message_id=number, total=len(inner), offset=0)
    return encode_header(chunk.TYPE, chunk.BYTES + len(inner)) + chunk.encode() + inner


def _push(fragment: int, step: int) -> bytes:
    head = messages.PushHeader(
        learner=LEARNER,
        fragment=fragment,
        step=step,
        attempt=1,
        base_version=0,
        local_step=24,
        c_steps=24,
        c_tokens=4096,
    )
    return _frame(head, bytes(SIZES.delta[fragment]))


def examples(name: str) -> list[bytes]:
    """Return what the corpus of a target is grown from."""
    return syncer_examples() if name == "syncer-group" else learner_examples()


def syncer_examples() -> list[bytes]:
    """Return what a learner may say: everything in slices and plain, on no, one and two data streams."""
    manifest = encode_header(MessageType.MANIFEST, len(IDENTITY.manifest)) + IDENTITY.manifest
    small = [
        _frame(messages.Heartbeat(learner=LEARNER, local_step=1)),
        _frame(messages.FinalAck(step=8)),
        _frame(messages.BudgetDone(local_steps=400)),
    ]
    inits = [_frame(messages.InitHeader(fragment=p), bytes(SIZES.bulk[p])) for p in (0, 1)]
    bulk = [*inits, _push(0, 1), _push(1, 2)]
    in_slices = [_sliced(number, inner) for number, inner in enumerate(bulk)]
    return [
        script([(0, manifest), *((0, data) for data in small + in_slices)], 0),
        script([(0, data) for data in bulk], 0),
        script([(1, in_slices[2]), (0, small[0]), (1, in_slices[3])], 1),
        script([(1 + index % 2, data) for index, data in enumerate(in_slices)], 2),
        script([(1, in_slices[2][:50]), (2, in_slices[3]), (1, in_slices[2][50:])], 2),
    ]


def learner_examples() -> list[bytes]:
    """Return what a syncer may say, likewise."""
    control = [
        _frame(messages.PullRequest(fragment=1, step=2, attempt=1)),
        encode_header(MessageType.FINAL_MANIFEST, 30)
        + messages.FinalManifest(step=8, versions=(7, 8)).encode(),
    ]
    error = messages.ErrorMessage(text="refused").encode()
    ends = [encode_header(MessageType.ERROR, len(error)) + error, _frame(messages.Shutdown())]
    values = np.arange(200, dtype=np.float32)
    casts = [
        _frame(messages.BroadcastHeader(fragment=p, version=v), bytes(SIZES.bulk[p]))
        for p, v in ((0, 0), (1, 2))
    ]
    finals = [
        _frame(messages.FinalFragmentHeader(fragment=p, version=7 + p), values[: (4, 200)[p]].tobytes())
        for p in (0, 1)
    ]
    in_slices = [_sliced(number, inner) for number, inner in enumerate([*casts, *finals])]
    return [
        script([(0, data) for data in [*casts, control[0], *finals, control[1], ends[1]]], 0),
        script([(0, ends[0])], 0),
        script([(1, in_slices[0]), (0, control[0]), (1, in_slices[1]), (0, control[1])], 1),
        script([*((1 + index % 2, data) for index, data in enumerate(in_slices)), (0, control[1])], 2),
    ]
