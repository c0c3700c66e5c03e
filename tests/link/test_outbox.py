"""The outbox: newest of each fragment, started ones whole, bounded, and never waiting for a peer."""

import numpy as np
import pytest
import trio
import trio.testing
from link_helpers import SLICE, broadcast_head, inner_frame, lockstep_pair, memory_pair, push_head, read_frame

from yeto.link import LinkClosed, LinkOverflow, Outbox, write_bulk, write_control
from yeto.link.outbox import STARTED_MAX, Control
from yeto.wire.frames import MessageType, decode_header
from yeto.wire.messages import BroadcastHeader, ChunkHeader, FinalFragmentHeader
from yeto.wire.striping import Slice

pytestmark = pytest.mark.usefixtures("_small_slices")


def new_outbox(num_streams=1, **bounds):
    return Outbox(num_streams, **{"bytes_max": 1_000_000, **bounds})


def put(outbox, version, fragment=0, tensor=b"x", head=broadcast_head):
    return outbox.put(head(fragment, version), memoryview(tensor), order=(version,))


async def take_now(outbox, stream=0, control=False):
    """Return what a writer gets at once, or None when it has to wait."""
    taken = None

    async def take():
        nonlocal taken
        taken = await outbox.take(control=control, stream=stream)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return taken


async def sent_now(outbox, stream=0):
    """Send everything a stream can send at once; return (message id, offset) and head of each slice."""
    done = []
    while (piece := await take_now(outbox, stream)) is not None:
        prefix, tensor = outbox.pieces(piece)
        done.append((piece.chunk.message_id, piece.chunk.offset, prefix[13:], bytes(tensor)))
        outbox.sent(piece)
    return done


class TestConflation:
    async def test_only_the_newest_version_of_a_fragment_waits(self):
        outbox = new_outbox()
        for version in (1, 2, 5):
            assert put(outbox, version, tensor=b"%d" % version)
        assert await sent_now(outbox) == [(0, 0, broadcast_head(version=5).encode(), b"5")]

    async def test_a_started_message_is_finished_before_the_newer_one(self):
        outbox = new_outbox()
        put(outbox, 1, tensor=b"a" * 300)
        first = await take_now(outbox)
        outbox.sent(first)
        put(outbox, 2, tensor=b"b")
        put(outbox, 3, tensor=b"c")
        assert [(number, offset) for number, offset, _, _ in await sent_now(outbox)] == [
            (0, SLICE),
            (0, 2 * SLICE),
            (1, 0),
        ]

    async def test_types_and_fragments_do_not_replace_each_other(self):
        outbox = new_outbox()
        put(outbox, 1, fragment=0)
        put(outbox, 2, fragment=1)
        outbox.put(FinalFragmentHeader(fragment=0, version=1), memoryview(b"x"), order=(1,))
        assert [head for _, _, head, _ in await sent_now(outbox)] == [
            broadcast_head(0, 1).encode(),
            broadcast_head(1, 2).encode(),
            FinalFragmentHeader(fragment=0, version=1).encode(),
        ]

    async def test_a_replaced_message_keeps_its_place(self):
        outbox = new_outbox()
        put(outbox, 1, fragment=0)
        put(outbox, 2, fragment=1)
        put(outbox, 3, fragment=0)
        assert [head for _, _, head, _ in await sent_now(outbox)] == [
            broadcast_head(0, 3).encode(),
            broadcast_head(1, 2).encode(),
        ]

    @pytest.mark.parametrize("sent", [False, True])
    @pytest.mark.parametrize("version", [3, 4])
    async def test_versions_ascend(self, sent, version):
        outbox = new_outbox()
        put(outbox, 4)
        if sent:
            await sent_now(outbox)
        assert not put(outbox, version)
        assert put(outbox, version, fragment=1)
        assert put(outbox, 5)

    async def test_pushes_ascend_by_step_attempt_and_base(self):
        outbox = new_outbox()
        taken = [
            outbox.put(push_head(step=order[0]), memoryview(b"x"), order=order)
            for order in [(5, 1, 0), (5, 2, 0), (5, 2, 0), (5, 2, 3), (5, 1, 4), (13, 1, 3)]
        ]
        assert taken == [True, True, False, True, False, True]


class TestBounds:
    async def test_bytes_are_counted_and_released(self):
        outbox = new_outbox()
        put(outbox, 1, tensor=bytes(300))
        assert outbox.bytes_held == 13 + 12 + 300
        put(outbox, 2, tensor=bytes(200))
        assert outbox.bytes_held == 13 + 12 + 200
        await sent_now(outbox)
        assert outbox.bytes_held == 0

    async def test_overflow_ends_the_group_and_not_the_caller(self):
        outbox = new_outbox(bytes_max=100)
        assert put(outbox, 1, fragment=0, tensor=bytes(70))
        assert not put(outbox, 2, fragment=1, tensor=bytes(10))
        assert outbox.is_closed
        assert outbox.bytes_held == 0
        for wait in (outbox.failed, outbox.control_flushed):
            outbox._control_under_way = 1  # a writer that is stuck in a send
            with pytest.raises(LinkOverflow, match="130 bytes wait, at most 100 may wait"):
                await wait()
        with pytest.raises(LinkOverflow):
            await outbox.take(control=True, stream=0)
        assert not put(outbox, 3)
        assert not outbox.put_control(MessageType.SHUTDOWN, b"")

    async def test_a_newer_version_takes_the_bytes_of_the_one_it_replaces(self):
        outbox = new_outbox(bytes_max=100)
        for version in range(1, 50):
            assert put(outbox, version, tensor=bytes(70))

    async def test_overflow_of_control_messages(self):
        outbox = new_outbox(control_bytes_max=40)
        assert outbox.put_control(MessageType.PULL_REQ, bytes(16))
        assert outbox.put_control(MessageType.PULL_REQ, bytes(16))
        assert not outbox.put_control(MessageType.PULL_REQ, bytes(16))
        with pytest.raises(LinkOverflow, match="32 bytes of control messages wait"):
            await outbox.failed()

    async def test_the_first_failure_is_the_reason(self):
        outbox = new_outbox()
        outbox.fail(LinkClosed("one"))
        outbox.fail(LinkClosed("two"))
        with pytest.raises(LinkClosed, match="one"):
            await outbox.failed()

    async def test_few_messages_are_under_way_at_a_time(self):
        outbox = new_outbox(2)
        # Two slices each: stream 0 has the first ones, stream 1 does not move.
        for fragment in range(STARTED_MAX + 5):
            put(outbox, 1, fragment=fragment, tensor=bytes(SLICE))
        assert len(await sent_now(outbox, 0)) == STARTED_MAX
        stuck = await take_now(outbox, 1)
        outbox.sent(stuck)
        assert len(await sent_now(outbox, 0)) == 1

    async def test_tensors_are_shared_not_copied(self):
        tensor = np.arange(100, dtype=np.float32)
        outboxes = [new_outbox(), new_outbox()]
        for outbox in outboxes:
            outbox.put(broadcast_head(), tensor.data, order=(1,))
            pieces = outbox.pieces(await take_now(outbox))
            assert pieces[1].obj is tensor
            assert pieces[1].readonly
            assert bytes(pieces[1]) == tensor.tobytes()[: SLICE - 25]

    async def test_an_empty_tensor(self):
        outbox = new_outbox()
        outbox.put(broadcast_head(), memoryview(np.empty(0, np.float32)), order=(1,))
        assert await sent_now(outbox) == [(0, 0, broadcast_head().encode(), b"")]


class TestOrder:
    async def test_streams_take_turns(self):
        outbox = new_outbox(3)
        for fragment in range(5):
            put(outbox, 1, fragment=fragment)
        for stream, number in [(0, 0), (1, 1), (2, 2), (0, 3)]:
            assert await take_now(outbox, (stream + 1) % 3) is None
            assert (await take_now(outbox, stream)).chunk.message_id == number

    async def test_a_message_is_not_started_before_its_streams_turn(self):
        outbox = new_outbox(2)
        put(outbox, 1, fragment=0)
        busy = await take_now(outbox, 0)
        put(outbox, 1, fragment=1)
        outbox.sent(await take_now(outbox, 1))
        put(outbox, 1, fragment=2)
        # Stream 1 is idle, but the turn is stream 0's, which is still sending.
        assert await take_now(outbox, 1) is None
        put(outbox, 2, fragment=2)
        outbox.sent(busy)
        assert [(number, head) for number, _, head, _ in await sent_now(outbox, 0)] == [
            (2, broadcast_head(2, 2).encode())
        ]

    async def test_control_goes_first_and_in_order(self):
        outbox = new_outbox(0)
        put(outbox, 1, tensor=bytes(2 * SLICE))
        outbox.put_control(MessageType.PULL_REQ, b"1")
        outbox.put_control(MessageType.PULL_REQ, b"2")
        seen = []
        for _ in range(3):
            item = await take_now(outbox, 0, control=True)
            seen.append(item.payload if isinstance(item, Control) else item.chunk.offset)
            outbox.sent(item)
            if isinstance(item, Slice) and not item.chunk.offset:
                outbox.put_control(MessageType.HEARTBEAT, b"3")
        item = await take_now(outbox, 0, control=True)
        assert [*seen, item.payload] == [b"1", b"2", 0, b"3"]

    async def test_a_control_message_may_replace_an_older_one(self):
        outbox = new_outbox()
        outbox.put_control(MessageType.HEARTBEAT, b"old", replaces=0)
        outbox.put_control(MessageType.PULL_REQ, b"fragment 0", replaces=0)
        outbox.put_control(MessageType.HEARTBEAT, b"new", replaces=0)
        items = [await take_now(outbox, None, control=True) for _ in range(3)]
        assert [item.payload for item in items[:2]] == [b"fragment 0", b"new"]
        assert items[2] is None

    async def test_stop_bulk_lets_control_through(self):
        outbox = new_outbox(0)
        put(outbox, 1, tensor=bytes(3 * SLICE))
        put(outbox, 1, fragment=1)
        under_way = await take_now(outbox, 0, control=True)
        outbox.put_control(MessageType.ERROR, b"why")
        outbox.stop_bulk()
        outbox.sent(under_way)
        item = await take_now(outbox, 0, control=True)
        assert item.payload == b"why"
        outbox.sent(item)
        await outbox.control_flushed()
        assert await take_now(outbox, 0, control=True) is None
        assert not put(outbox, 2)

    async def test_control_flushed_waits_for_what_is_under_way(self):
        outbox = new_outbox()
        outbox.put_control(MessageType.SHUTDOWN, b"")
        item = await take_now(outbox, None, control=True)
        flushed = trio.Event()

        async def flush():
            await outbox.control_flushed()
            flushed.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flush)
            await trio.testing.wait_all_tasks_blocked()
            assert not flushed.is_set()
            outbox.sent(item)

    async def test_a_slice_sent_after_the_failure_counts_no_more(self):
        outbox = new_outbox()
        put(outbox, 1)
        piece = await take_now(outbox)
        outbox.fail(LinkClosed("over"))
        outbox.sent(piece)


class TestWriters:
    async def test_bulk_goes_as_chunks_over_all_streams(self):
        outbox = new_outbox(2)
        tensor = bytes(range(250))
        pairs = [memory_pair() for _ in range(2)]
        frame = bytearray()
        async with trio.open_nursery() as nursery:
            for index, (end, _) in enumerate(pairs):
                nursery.start_soon(write_bulk, end, outbox, index)
            put(outbox, 7, tensor=tensor)
            for index in (0, 1, 0):
                kind, payload = await read_frame(pairs[index][1])
                chunk = ChunkHeader.decode(payload[: ChunkHeader.BYTES])
                assert (kind, chunk.message_id, chunk.offset) == (MessageType.CHUNK, 0, len(frame))
                frame += payload[ChunkHeader.BYTES :]
            nursery.cancel_scope.cancel()
        assert frame == inner_frame(broadcast_head(version=7), tensor)
        assert decode_header(frame[:13]).type is MessageType.BCAST_FRAGMENT
        assert BroadcastHeader.decode(frame[13:25]).version == 7

    async def test_without_data_streams_control_goes_between_chunks(self):
        outbox = new_outbox(0)
        here, there = lockstep_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write_control, here, outbox)
            put(outbox, 1, tensor=bytes(2 * SLICE))
            # The writer is in the first chunk's send, which ends when the peer has read it.
            await trio.testing.wait_all_tasks_blocked()
            outbox.put_control(MessageType.PULL_REQ, bytes(16))
            kinds = [(await read_frame(there))[0] for _ in range(4)]
            nursery.cancel_scope.cancel()
        assert kinds == [
            MessageType.CHUNK,
            MessageType.PULL_REQ,
            MessageType.CHUNK,
            MessageType.CHUNK,
        ]

    async def test_a_slow_reader_skips_versions_and_delays_nobody(self):
        slow, quick = new_outbox(1), new_outbox(1)
        (slow_end, slow_peer), (quick_end, quick_peer) = lockstep_pair(), lockstep_pair()
        versions = []

        async def read(peer):
            _, payload = await read_frame(peer)
            return BroadcastHeader.decode(payload[ChunkHeader.BYTES + 13 :][:12]).version

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write_bulk, slow_end, slow, 0)
            nursery.start_soon(write_bulk, quick_end, quick, 0)
            for version in range(1, 8):
                for outbox in (slow, quick):
                    assert put(outbox, version)
                versions.append(await read(quick_peer))
            assert versions == [1, 2, 3, 4, 5, 6, 7]
            # The first was under way, then only the newest.
            assert [await read(slow_peer), await read(slow_peer)] == [1, 7]
            nursery.cancel_scope.cancel()
