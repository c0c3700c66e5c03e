"""The proxy itself: what it leaves alone, where its faults happen, and that none may be forgotten."""

import socket
import struct
from contextlib import asynccontextmanager

import pytest
import trio
from fault_proxy import fault_proxy
from faults import DOWN, Corrupt, Cut, Delay, Freeze, HalfOpen, Hold, Lose, Rate
from frame_follower import Follower
from hypothesis import given, settings
from hypothesis import strategies as st

from yeto.wire.frames import MessageType, encode_header
from yeto.wire.messages import ChunkHeader, DataHello, Heartbeat, PullRequest, PushHeader

PULL = encode_header(MessageType.PULL_REQ, 16) + PullRequest(fragment=2, step=7, attempt=1).encode()
BEAT = encode_header(MessageType.HEARTBEAT, 12) + Heartbeat(learner=1, local_step=3).encode()


def data_hello(learner=1, generation=9, stream=1):
    return (
        encode_header(MessageType.DATA_HELLO, 16)
        + DataHello(learner=learner, generation=generation, stream=stream).encode()
    )


def push(tensor=bytes(40)):
    """Return a push in one slice."""
    head = PushHeader(
        learner=1, fragment=2, step=7, attempt=1, base_version=0, local_step=1, c_steps=1, c_tokens=1
    )
    inner = encode_header(head.TYPE, head.BYTES + len(tensor)) + head.encode() + tensor
    chunk = ChunkHeader(message_id=0, total=len(inner), offset=0)
    return encode_header(chunk.TYPE, chunk.BYTES + len(inner)) + chunk.encode() + inner


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_a_follower_loses_nothing_and_names_every_frame(sizes):
    data = data_hello() + push() + BEAT + PULL
    follower, pieces, start = Follower(), [], 0
    for size in [*sizes, len(data)]:
        pieces += follower.feed(data[start : start + size])
        start += size
    assert b"".join(piece.data for piece in pieces) == data
    assert follower.rest() == b""
    frames = [piece.frame for piece in pieces if piece.begins_frame]
    assert [frame.kind.name for frame in frames] == ["DATA_HELLO", "PUSH_FRAGMENT", "HEARTBEAT", "PULL_REQ"]
    assert frames[1].numbers("IIQ") == (1, 2, 7)
    assert [piece.position for piece in pieces] == [
        sum(len(before.data) for before in pieces[:index]) for index in range(len(pieces))
    ]


def test_what_is_not_the_protocol_passes_as_it_is():
    follower = Follower()
    pieces = [*follower.feed(BEAT), *follower.feed(b"\x16\x03\x01 TLS or worse, 13 bytes at least")]
    assert [piece.frame and piece.frame.kind.name for piece in pieces] == ["HEARTBEAT", None]
    assert pieces[1].position == len(BEAT)


class Ends:
    """Sockets of learners and of their syncer, joined by a proxy."""

    def __init__(self, proxy, listener):
        self.proxy = proxy
        self.open = []
        self._listener = listener

    async def pair(self, said=b""):
        """Connect once; return the learner's and the syncer's end, the latter behind what was said."""
        learner = await trio.open_tcp_stream(self.proxy.host, self.proxy.port)
        syncer = await self._listener.accept()
        self.open += [learner, syncer]
        await learner.send_all(said)
        assert await exactly(syncer, len(said)) == said
        return learner, syncer


@asynccontextmanager
async def joined(*faults):
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with fault_proxy(listener.socket.getsockname(), *faults) as proxy:
        ends = Ends(proxy, listener)
        try:
            yield ends
        finally:
            for stream in (listener, *ends.open):
                await stream.aclose()


async def exactly(stream, size):
    data = b""
    with trio.fail_after(100):
        while len(data) < size:
            more = await stream.receive_some(size - len(data))
            assert more, f"ended after {data!r}"
            data += more
    return data


async def end_of(stream):
    """Return what still comes, and how it ends."""
    data = b""
    with trio.fail_after(100):
        try:
            while more := await stream.receive_some(4096):
                data += more
        except trio.BrokenResourceError:
            return data, "reset"
    return data, "end"


async def nothing(stream, seconds=0.05):
    """Nothing arrives."""
    with trio.move_on_after(seconds):
        assert not await stream.receive_some(1), "something arrived"
        pytest.fail("the stream ended")


async def test_without_faults_bytes_and_ends_pass_both_ways():
    async with joined() as ends:
        learner, syncer = await ends.pair(data_hello() + BEAT)
        await syncer.send_all(PULL)
        assert await exactly(learner, len(PULL)) == PULL
        await learner.send_eof()
        assert await end_of(syncer) == (b"", "end")
        await syncer.send_all(PULL)
        await syncer.send_eof()
        assert await end_of(learner) == (PULL, "end")
        assert ends.proxy.count(MessageType.HEARTBEAT, learner=1) == 1
        assert ends.proxy.count(MessageType.HEARTBEAT, learner=2) == 0
        assert ends.proxy.count(MessageType.PULL_REQ, DOWN) == 2


async def test_half_a_frame_passes_before_the_end():
    async with joined() as ends:
        learner, syncer = await ends.pair()
        await learner.send_all(BEAT[:9])
        await learner.aclose()
        assert await end_of(syncer) == (BEAT[:9], "end")


async def test_a_fault_that_never_happens_fails_the_test():
    with pytest.raises(AssertionError, match=r"never happened: .*Lose.*HEARTBEAT"):
        async with joined(Lose(frame=MessageType.HEARTBEAT, nth=2)) as ends:
            await ends.pair(data_hello() + BEAT)


async def test_the_syncers_reset_is_the_learners():
    async with joined() as ends:
        learner, syncer = await ends.pair(BEAT)
        syncer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await syncer.aclose()
        assert await end_of(learner) == (b"", "reset")


async def test_nobody_at_the_target_is_a_reset():
    async with joined() as ends:
        ends.proxy.target = ("127.0.0.1", 1)
        learner = await trio.open_tcp_stream(ends.proxy.host, ends.proxy.port)
        assert await end_of(learner) == (b"", "reset")
        await learner.aclose()


@pytest.mark.parametrize("at", [0, 1, 30, -1, None])
async def test_a_loss_comes_after_so_many_bytes_of_the_frame_and_takes_the_whole_group(at):
    lost = Lose(frame=MessageType.PUSH_FRAGMENT, learner=1, stream=2, at=at)
    async with joined(lost) as ends:
        control = await ends.pair(data_hello(stream=1))
        other = await ends.pair(data_hello(learner=5, generation=4))
        learner, syncer = await ends.pair(data_hello(stream=2))
        await other[0].send_all(push())
        data = push()
        await learner.send_all(data)
        passed = {None: len(data), -1: len(data) - 1}.get(at, at)
        assert await exactly(syncer, passed) == data[:passed]
        for stream in (learner, syncer, *control):
            assert (await end_of(stream))[1] == "reset"
        assert await exactly(other[1], len(data)) == data


async def test_each_fault_happens_once():
    async with joined(Corrupt(frame=MessageType.HEARTBEAT, at=4), Corrupt(at=2, mask=1)) as ends:
        learner, syncer = await ends.pair()
        await learner.send_all(BEAT + BEAT)
        got = await exactly(syncer, 2 * len(BEAT))
        changed = [index for index, (a, b) in enumerate(zip(got, BEAT + BEAT, strict=True)) if a != b]
        assert changed == [2, 4]
        await ends.pair(BEAT)


async def test_a_cut_ends_one_connection_in_order():
    async with joined(Cut(frame=MessageType.HEARTBEAT, at=20, stream=1)) as ends:
        beside = await ends.pair(data_hello(stream=2))
        learner, syncer = await ends.pair(data_hello(stream=1))
        await learner.send_all(BEAT + BEAT)
        assert await end_of(syncer) == (BEAT[:20], "end")
        assert await end_of(learner) == (b"", "end")
        await beside[0].send_all(BEAT)
        assert await exactly(beside[1], len(BEAT)) == BEAT


@pytest.mark.parametrize("deaf", [("syncer",), ("learner",), ("learner", "syncer")])
async def test_a_half_open_connection_tells_the_deaf_nothing(deaf):
    async with joined(HalfOpen(frame=MessageType.HEARTBEAT, deaf=deaf)) as ends:
        groups = [await ends.pair(data_hello(stream=stream)) for stream in (1, 2)]
        await groups[0][0].send_all(BEAT)
        for pair in groups:
            sides = dict(zip(("learner", "syncer"), pair, strict=True))
            for name in {"learner", "syncer"} - set(deaf):
                assert await end_of(sides[name]) == (b"", "reset")
            for name in deaf:
                await nothing(sides[name])
                await sides[name].send_all(BEAT)
                await nothing(sides[name])


async def test_a_frozen_group_goes_on_where_it_was():
    frozen = Freeze(frame=MessageType.HEARTBEAT, at=5)
    async with joined(frozen) as ends:
        learner, syncer = await ends.pair(data_hello(stream=1))
        control, peer = await ends.pair(data_hello(stream=2))
        await learner.send_all(BEAT)
        assert await exactly(syncer, 5) == BEAT[:5]
        await peer.send_all(PULL)
        await control.aclose()
        await nothing(syncer)
        await nothing(peer)
        frozen.thaw()
        assert await exactly(syncer, len(BEAT) - 5) == BEAT[5:]
        assert await end_of(peer) == (b"", "end")


async def test_a_freeze_may_end_by_itself():
    async with joined(Freeze(frame=MessageType.HEARTBEAT, seconds=0.05)) as ends:
        await ends.pair(data_hello() + BEAT)


async def test_a_held_stream_is_overtaken():
    held = Hold(
        frame=MessageType.HEARTBEAT,
        stream=1,
        until=lambda direction, frame: (direction, frame.kind) == (DOWN, MessageType.PULL_REQ),
    )
    async with joined(held) as ends:
        learner, syncer = await ends.pair(data_hello(stream=1))
        control, peer = await ends.pair(data_hello(stream=2) + BEAT)
        await learner.send_all(BEAT)
        await nothing(syncer)
        await syncer.send_all(BEAT)
        assert await exactly(learner, len(BEAT)) == BEAT
        await peer.send_all(PULL)
        assert await exactly(control, len(PULL)) == PULL
        assert await exactly(syncer, len(BEAT)) == BEAT


async def test_a_delay_is_one_of_time_and_not_of_the_rate():
    async with joined(Delay(seconds=0.1)) as ends:
        learner, syncer = await ends.pair()
        began = trio.current_time()
        for _ in range(10):
            await learner.send_all(BEAT)
            await trio.sleep(0.001)
        assert await exactly(syncer, 10 * len(BEAT)) == 10 * BEAT
        assert trio.current_time() - began >= 0.1


async def test_a_rate_holds_back_one_direction_only():
    async with joined(Rate(direction=DOWN, bytes_per_second=100_000)) as ends:
        learner, syncer = await ends.pair(bytes(200_000))
        began = trio.current_time()
        await syncer.send_all(bytes(20_000))
        await exactly(learner, 20_000)
        assert trio.current_time() - began >= 0.17
