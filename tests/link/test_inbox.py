"""The inbox: from sockets into the buffers of those who want the messages, in whatever order they come."""

import random

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from link_helpers import (
    SLICE,
    OneByteStream,
    Owner,
    chunk_frame,
    inner_frame,
    memory_pair,
    push_head,
    sizes_of,
)

from yeto.errors import ProtocolError
from yeto.link import FrameStream, Inbox, LinkClosed, new_buffer, receive_bulk
from yeto.wire import legality
from yeto.wire.frames import MessageType, encode_header
from yeto.wire.messages import InitHeader
from yeto.wire.striping import Assembler, Striper

pytestmark = pytest.mark.usefixtures("_small_slices")


def make_inbox(sizes, owner, *, num_streams=1, **options):
    assembler = Assembler(legality.server_inner(sizes, learner=0), **options)
    return Inbox(assembler, sizes, owner.admit, owner.deliver, num_streams=num_streams)


def chunks_of(striper, head, tensor):
    """Cut a message; return (stream, CHUNK frame) pairs."""
    frame = inner_frame(head, tensor)
    return [
        (piece.stream, chunk_frame(piece.chunk, frame[piece.chunk.offset : piece.chunk.offset + piece.size]))
        for piece in striper.slices(len(frame))
    ]


async def run_reader(stream, inbox, sizes, failures):
    """Read a data stream; note how that ended."""
    try:
        await receive_bulk(stream, inbox, legality.server_data(sizes, learner=0))
    except (LinkClosed, ProtocolError) as error:
        failures.append(error)


async def receive_frames(frames, sizes, owner, **options):
    """Receive frames on one stream that ends behind them; return the inbox and how reading ended."""
    sender, receiver = memory_pair()
    inbox = make_inbox(sizes, owner, **options)
    await sender.stream.send_all(b"".join(frames))
    await sender.close()
    failures = []
    await run_reader(receiver, inbox, sizes, failures)
    return inbox, failures[0]


@given(
    lengths=st.lists(st.sampled_from([0, 1, SLICE - 61, SLICE - 60, 3 * SLICE, 700]), min_size=1, max_size=5),
    num_streams=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    trickle=st.booleans(),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_order_over_any_stream(lengths, num_streams, seed, trickle):
    rng = random.Random(seed)
    sizes = sizes_of(*lengths)
    owner = Owner(wants=lambda head: head.step != 1)
    inbox = make_inbox(sizes, owner, num_streams=num_streams)
    tensors = [rng.randbytes(length) for length in lengths]
    striper = Striper(num_streams)
    frames = [
        frame
        for number, tensor in enumerate(tensors)
        for _, frame in chunks_of(striper, push_head(fragment=number, step=number), tensor)
    ]
    rng.shuffle(frames)
    pairs = [trio.testing.memory_stream_pair() for _ in range(num_streams)]
    for frame in frames:
        await rng.choice(pairs)[0].send_all(frame)
    failures = []
    async with trio.open_nursery() as nursery:
        for left, right in pairs:
            await left.aclose()
            stream = FrameStream(OneByteStream(right) if trickle else right)
            nursery.start_soon(run_reader, stream, inbox, sizes, failures)

    assert [str(failure) for failure in failures] == ["the peer closed the connection"] * num_streams
    assert sorted(head.step for _, head, _ in owner.asked) == list(range(len(lengths)))
    assert all(size == lengths[head.fragment] for _, head, size in owner.asked)
    assert sorted(head.step for head, _ in owner.delivered) == [n for n in range(len(lengths)) if n != 1]
    assert all(tensor == tensors[head.step] for head, tensor in owner.delivered)


class TestPlainFrames:
    async def test_wanted_and_unwanted(self):
        owner = Owner(wants=lambda head: head.step != 2)
        frames = [inner_frame(push_head(step=step), bytes([step]) * 300) for step in (1, 2, 3)]
        _, failure = await receive_frames(frames, sizes_of(300), owner)
        assert str(failure) == "the peer closed the connection"
        assert owner.delivered == [(push_head(step=step), bytes([step]) * 300) for step in (1, 3)]

    async def test_init_comes_like_any_other(self):
        owner = Owner()
        head = InitHeader(fragment=0)
        await receive_frames([inner_frame(head, b"1234")], sizes_of(4), owner)
        assert owner.asked == [(MessageType.INIT_PARAMS, head, 4)]
        assert owner.delivered == [(head, b"1234")]

    async def test_a_buffer_of_another_size(self):
        class Wrong(Owner):
            async def admit(self, kind, head, tensor_bytes):
                return bytearray(tensor_bytes - 1)

        _, failure = await receive_frames([inner_frame(push_head(), b"1234")], sizes_of(4), Wrong())
        assert str(failure) == "PUSH_FRAGMENT carries a tensor of 4 bytes where 3 are expected"


class TestRefusals:
    async def refused(self, *frames, sizes=None):
        owner = Owner()
        _, failure = await receive_frames(frames, sizes or sizes_of(300), owner)
        assert isinstance(failure, ProtocolError)
        assert owner.delivered == []
        return str(failure)

    async def test_a_frame_that_is_not_legal_here(self):
        reason = await self.refused(encode_header(MessageType.HEARTBEAT, 12) + bytes(12))
        assert "HEARTBEAT is not legal here (syncer, data stream)" in reason

    async def test_a_chunk_in_a_chunk(self):
        [(_, frame), *_] = chunks_of(Striper(1), push_head(), bytes(300))
        [(_, inside)] = chunks_of(Striper(1), push_head(), bytes(3))
        reason = await self.refused(frame[:37] + inside[:13] + frame[50:])
        assert "CHUNK is not legal here (syncer, sliced message)" in reason

    async def test_an_unwanted_message_of_a_wrong_size(self):
        head = push_head(fragment=1)
        [(_, frame)] = chunks_of(Striper(1), head, bytes(31))
        reason = await self.refused(frame, sizes=sizes_of(40, 30))
        assert reason == "PUSH_FRAGMENT: 31 tensor bytes, fragment 1 has 30"

    async def test_a_fragment_that_does_not_exist(self):
        [(_, frame)] = chunks_of(Striper(1), push_head(fragment=7), bytes(30))
        assert "fragment 7 must be below 1" in await self.refused(frame, sizes=sizes_of(30))

    async def test_a_slice_twice(self):
        [_, (_, frame), *_] = chunks_of(Striper(1), push_head(), bytes(300))
        assert "sent twice" in await self.refused(frame, frame)

    async def test_what_the_owner_does_not_allow(self):
        class Strict(Owner):
            async def admit(self, kind, head, tensor_bytes):
                raise ProtocolError("learner 3 pushes as learner 0")

        [(_, frame)] = chunks_of(Striper(1), push_head(), bytes(3))
        _, failure = await receive_frames([frame], sizes_of(3), Strict())
        assert str(failure) == "learner 3 pushes as learner 0"


@pytest.mark.parametrize(("keep", "delivered"), [(0.0, 0), (0.5, 0), (0.999, 0), (1.0, 1)])
async def test_a_message_cut_short_is_not_delivered(keep, delivered):
    owner = Owner()
    frames = b"".join(frame for _, frame in chunks_of(Striper(1), push_head(), bytes(1000)))
    _, failure = await receive_frames([frames[: int(len(frames) * keep)]], sizes_of(1000), owner)
    assert isinstance(failure, LinkClosed)
    assert len(owner.delivered) == delivered


async def test_a_missing_slice_leaves_the_message_incomplete():
    owner = Owner()
    frames = [frame for _, frame in chunks_of(Striper(1), push_head(), bytes(1000))]
    del frames[3]
    inbox, failure = await receive_frames(frames, sizes_of(1000), owner)
    assert str(failure) == "the peer closed the connection"
    assert owner.delivered == []
    [progress] = inbox.progress
    assert progress.head == push_head()
    assert progress.received_bytes == len(inner_frame(push_head(), bytes(1000))) - SLICE


async def test_progress_shows_wanted_messages_only():
    owner = Owner(wants=lambda head: False)
    frames = [frame for _, frame in chunks_of(Striper(1), push_head(), bytes(1000))]
    inbox, _ = await receive_frames(frames[:2], sizes_of(1000), owner)
    assert inbox.progress == ()


class TestEarlySlices:
    async def test_a_reader_waits_for_the_first_slice_of_another_stream(self):
        owner = Owner()
        sizes = sizes_of(1000)
        inbox = make_inbox(sizes, owner, num_streams=2, early_bytes_max=2 * SLICE)
        tensor = bytes(i % 251 for i in range(1000))
        first, *later = [frame for _, frame in chunks_of(Striper(1), push_head(), tensor)]
        (ahead, ahead_end), (behind, behind_end) = memory_pair(), memory_pair()
        failures = []
        async with trio.open_nursery() as nursery:
            for end in (ahead_end, behind_end):
                nursery.start_soon(run_reader, end, inbox, sizes, failures)
            await ahead.stream.send_all(b"".join(later))
            await trio.testing.wait_all_tasks_blocked()
            # Two slices are kept, the reader holds back the third and all behind it.
            assert inbox._assembler.early_bytes == 2 * SLICE
            assert ahead_end.silent_seconds == 0
            assert owner.asked == []
            await behind.stream.send_all(first)
            assert await owner.count(1) == (push_head(), tensor)
            await ahead.close()
            await behind.close()
        assert inbox._assembler.early_bytes == 0

    async def test_a_slice_still_being_read_makes_room_when_it_is_done(self):
        owner = Owner()
        sizes = sizes_of(1000)
        inbox = make_inbox(sizes, owner, num_streams=3, early_bytes_max=SLICE)
        striper = Striper(1)
        one = [frame for _, frame in chunks_of(striper, push_head(step=1), bytes(1000))]
        two = [frame for _, frame in chunks_of(striper, push_head(step=2), bytes(1000))]
        pairs = [memory_pair() for _ in range(3)]
        failures = []
        async with trio.open_nursery() as nursery:
            for _, end in pairs:
                nursery.start_soon(run_reader, end, inbox, sizes, failures)
            await pairs[0][0].stream.send_all(one[1][:-1])
            await trio.testing.wait_all_tasks_blocked()
            await pairs[1][0].stream.send_all(two[1])
            await trio.testing.wait_all_tasks_blocked()
            # The first message's decision comes, but its early slice is not whole and holds the room.
            await pairs[2][0].stream.send_all(one[0])
            await trio.testing.wait_all_tasks_blocked()
            assert inbox._assembler.early_bytes == SLICE
            assert len(inbox._waiting) == 1
            await pairs[0][0].stream.send_all(one[1][-1:])
            await trio.testing.wait_all_tasks_blocked()
            assert len(inbox._waiting) == 0
            await pairs[2][0].stream.send_all(b"".join(one[2:] + two[:1] + two[2:]))
            await owner.count(2)
            for left, _ in pairs:
                await left.close()

    @pytest.mark.parametrize("num_streams", [1, 3])
    async def test_an_order_that_nobody_could_follow(self, num_streams):
        owner = Owner()
        sizes = sizes_of(*[1000] * num_streams)
        inbox = make_inbox(sizes, owner, num_streams=num_streams, early_bytes_max=2 * SLICE)
        striper = Striper(1)
        failures = []
        async with trio.open_nursery() as nursery:
            for number in range(num_streams):
                _, *later = [f for _, f in chunks_of(striper, push_head(fragment=number), bytes(1000))]
                sender, receiver = memory_pair()
                await sender.stream.send_all(b"".join(later))
                nursery.start_soon(run_reader, receiver, inbox, sizes, failures)
            await trio.testing.wait_all_tasks_blocked()
            assert len(failures) == 1
            nursery.cancel_scope.cancel()
        assert isinstance(failures[0], ProtocolError)
        assert str(failures[0]) == (
            "every stream waits for the first slice of a message, 256 bytes of later slices are held"
        )


async def test_a_waiting_owner_holds_back_its_stream_only():
    gate = trio.Event()

    class Slow(Owner):
        async def admit(self, kind, head, tensor_bytes):
            if head.step == 1:
                await gate.wait()
            return await super().admit(kind, head, tensor_bytes)

    owner = Slow()
    sizes = sizes_of(30)
    inbox = make_inbox(sizes, owner, num_streams=2)
    striper = Striper(2)
    failures = []
    async with trio.open_nursery() as nursery:
        for step in (1, 2):
            sender, receiver = memory_pair()
            [(_, frame)] = chunks_of(striper, push_head(step=step), bytes([step]) * 30)
            await sender.stream.send_all(frame)
            await sender.close()
            nursery.start_soon(run_reader, receiver, inbox, sizes, failures)
        head, _ = await owner.count(1)
        assert head.step == 2
        gate.set()
        head, _ = await owner.count(2)
        assert head.step == 1


def test_new_buffer_is_writable_and_of_the_size():
    buffer = new_buffer(10)
    buffer[:] = b"0123456789"
    assert bytes(buffer) == b"0123456789"
    assert len(new_buffer(0)) == 0
