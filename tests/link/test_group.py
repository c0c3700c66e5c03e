"""Groups: both ends of a learner's connection, whole exchanges, and every way they end."""

import pytest
import trio
import trio.testing
from link_helpers import (
    SLICE,
    Owner,
    broadcast_head,
    chunk_frame,
    lockstep_pair,
    memory_pair,
    push_head,
    sizes_of,
    socket_pair,
)

from yeto.errors import DataError, ProtocolError
from yeto.link import FrameStream, Group, LinkClosed, LinkOverflow, Places
from yeto.link.group import LINGER_SECONDS
from yeto.wire.frames import MessageType, encode_header
from yeto.wire.messages import ChunkHeader, ErrorMessage, Heartbeat, PullRequest

SIZES = sizes_of(1000, 40)
PULL = PullRequest(fragment=0, step=1, attempt=1).encode()
BEAT = Heartbeat(learner=0, local_step=3).encode()


class End:
    """One end of a connection and what it saw."""

    def __init__(self, streams, places, *, owner=None, attach=True, **options):
        self.owner = owner or Owner()
        self.control = []
        self.reason = None
        self.group = Group(
            streams[0],
            len(streams) - 1,
            places=places,
            outbox_bytes_max=options.pop("outbox_bytes_max", 1_000_000),
            on_control=options.pop("on_control", self.on_control),
            admit=self.owner.admit,
            deliver=self.owner.deliver,
            **options,
        )
        if attach:
            for index, stream in enumerate(streams[1:], start=1):
                self.group.attach(index, stream)

    async def on_control(self, kind, payload):
        await trio.lowlevel.checkpoint()
        self.control.append((kind, payload))

    async def run(self):
        try:
            await self.group.run()
        except (LinkClosed, ProtocolError, DataError) as error:
            self.reason = error
        else:
            self.reason = "finished"


def ends(num_streams, *, pair=memory_pair, syncer=None, learner=None):
    """Return the syncer's and the learner's end of a connection."""
    pairs = [pair() for _ in range(1 + num_streams)]
    return (
        End([left for left, _ in pairs], Places.syncer(SIZES, learner=0), **(syncer or {})),
        End([right for _, right in pairs], Places.learner(SIZES), **(learner or {})),
    )


def put(end, head, tensor):
    order = (head.version,) if hasattr(head, "version") else (head.step, head.attempt)
    assert end.group.outbox.put(head, memoryview(tensor), order=order)


@pytest.mark.usefixtures("_small_slices")
@pytest.mark.parametrize("num_streams", [0, 1, 3])
@pytest.mark.parametrize("pair", [memory_pair, lockstep_pair])
async def test_a_whole_exchange(num_streams, pair):
    syncer, learner = ends(num_streams, pair=pair)
    tensor = bytes(i % 251 for i in range(1000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(syncer.run)
        nursery.start_soon(learner.run)
        syncer.group.outbox.put_control(MessageType.PULL_REQ, PULL)
        put(syncer, broadcast_head(0, 4), tensor)
        put(syncer, broadcast_head(1, 3), tensor[:40])
        assert await learner.owner.count(2)
        put(learner, push_head(0, 1), tensor[::-1])
        put(learner, push_head(1, 2), tensor[-40:])
        await syncer.owner.count(2)
        learner.group.outbox.put_control(MessageType.HEARTBEAT, BEAT)
        await trio.testing.wait_all_tasks_blocked()
        syncer.group.outbox.put_control(MessageType.SHUTDOWN, b"")
        syncer.group.finish()
        await trio.testing.wait_all_tasks_blocked()
        assert learner.control == [(MessageType.PULL_REQ, PULL), (MessageType.SHUTDOWN, b"")]
        learner.group.finish()
    assert dict(learner.owner.delivered) == {
        broadcast_head(0, 4): tensor,
        broadcast_head(1, 3): tensor[:40],
    }
    assert dict(syncer.owner.delivered) == {
        push_head(0, 1): tensor[::-1],
        push_head(1, 2): tensor[-40:],
    }
    assert syncer.control == [(MessageType.HEARTBEAT, BEAT)]
    assert (syncer.reason, str(learner.reason)) in [
        ("finished", "finished"),
        ("finished", "the peer closed the connection"),
    ]
    assert not syncer.group.outbox.put_control(MessageType.PULL_REQ, PULL)


async def test_over_sockets():
    pairs = [await socket_pair() for _ in range(5)]
    sizes, bound = sizes_of(9_000_000), {"outbox_bytes_max": 10_000_000}
    syncer = End([FrameStream(a) for a, _ in pairs], Places.syncer(sizes, learner=0), **bound)
    learner = End([FrameStream(b) for _, b in pairs], Places.learner(sizes), **bound)
    tensor = memoryview(bytes(range(256)) * 35157)[:9_000_000]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(syncer.run)
        nursery.start_soon(learner.run)
        put(syncer, broadcast_head(0, 1), tensor)
        put(learner, push_head(0, 1), tensor)
        assert (await learner.owner.count(1))[1] == tensor
        assert (await syncer.owner.count(1))[1] == tensor
        host, port = pairs[0][1].socket.getsockname()
        assert syncer.group.peer == f"{host}:{port}"
        syncer.group.finish()
    assert str(learner.reason) == "the peer closed the connection"


class TestEnds:
    @pytest.mark.parametrize("dead", [0, 1, 2])
    async def test_any_dead_stream_ends_the_whole_group(self, dead):
        pairs = [memory_pair() for _ in range(3)]
        end = End([left for left, _ in pairs], Places.syncer(SIZES, learner=0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.run)
            await trio.testing.wait_all_tasks_blocked()
            await pairs[dead][1].close()
        assert str(end.reason) == "the peer closed the connection"
        for _, other in pairs:
            with pytest.raises(LinkClosed):
                await other.read_header()

    async def test_a_peer_that_breaks_the_protocol(self):
        pairs = [memory_pair() for _ in range(2)]
        end = End([left for left, _ in pairs], Places.syncer(SIZES, learner=0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.run)
            await pairs[0][1].stream.send_all(encode_header(MessageType.PULL_REQ, 2**40))
        assert "PULL_REQ is not legal here (syncer, control stream)" in str(end.reason)

    async def test_what_a_callback_raises(self):
        async def refuse(kind, payload):
            raise DataError(ErrorMessage.decode(payload).text)

        syncer, learner = ends(1, learner={"on_control": refuse})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(syncer.run)
            nursery.start_soon(learner.run)
            syncer.group.outbox.put_control(MessageType.ERROR, ErrorMessage(text="learner 0 twice").encode())
            syncer.group.finish()
        assert isinstance(learner.reason, DataError)
        assert str(learner.reason) == "learner 0 twice"
        assert syncer.reason == "finished"

    async def test_a_bug_in_a_callback_crashes(self):
        async def bug(kind, payload):
            raise ZeroDivisionError

        syncer, learner = ends(0, learner={"on_control": bug})
        with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(learner.run)
                nursery.start_soon(syncer.run)
                syncer.group.outbox.put_control(MessageType.PULL_REQ, PULL)

    async def test_cancelled_closes_every_stream(self):
        pairs = [memory_pair() for _ in range(4)]
        end = End([left for left, _ in pairs], Places.syncer(SIZES, learner=0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert end.reason is None
        for _, other in pairs:
            with pytest.raises(LinkClosed, match="the peer closed"):
                await other.read_header()

    @pytest.mark.usefixtures("_small_slices")
    async def test_overflow_ends_a_group_whose_peer_does_not_read(self):
        pairs = [lockstep_pair() for _ in range(2)]
        end = End(
            [left for left, _ in pairs], Places.syncer(SIZES, learner=0), outbox_bytes_max=2 * (25 + 1000)
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.run)
            put(end, broadcast_head(0, 1), bytes(1000))
            await trio.testing.wait_all_tasks_blocked()
            put(end, broadcast_head(0, 2), bytes(1000))
            assert not end.group.outbox.put(broadcast_head(1, 3), memoryview(bytes(40)), order=(3,))
        assert isinstance(end.reason, LinkOverflow)

    @pytest.mark.usefixtures("_small_slices")
    async def test_a_stopped_peer_does_not_hold_up_the_end(self, autojump_clock):
        pairs = [lockstep_pair()]
        end = End([left for left, _ in pairs], Places.syncer(SIZES, learner=0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.run)
            put(end, broadcast_head(0, 1), bytes(1000))
            await trio.testing.wait_all_tasks_blocked()
            end.group.outbox.put_control(MessageType.SHUTDOWN, b"")
            end.group.finish()
        assert end.reason == "finished"
        assert trio.current_time() <= 2 * LINGER_SECONDS + 1

    async def test_a_link_that_breaks_while_finishing_is_no_failure(self):
        pairs = [lockstep_pair()]
        end = End([left for left, _ in pairs], Places.syncer(SIZES, learner=0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.run)
            end.group.outbox.put_control(MessageType.SHUTDOWN, b"")
            end.group.finish()
            await trio.testing.wait_all_tasks_blocked()
            await pairs[0][1].close()
        assert end.reason == "finished"

    @pytest.mark.usefixtures("_small_slices")
    async def test_half_a_message_dies_with_its_group(self):
        pairs = [memory_pair() for _ in range(2)]
        end = End([left for left, _ in pairs], Places.syncer(SIZES, learner=0))
        chunk = ChunkHeader(message_id=0, total=1000, offset=SLICE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.run)
            await pairs[1][1].stream.send_all(chunk_frame(chunk, bytes(SLICE))[:-1])
            await trio.testing.wait_all_tasks_blocked()
            await pairs[1][1].close()
        assert str(end.reason) == (
            f"the peer closed the connection in the middle of a slice ({SLICE - 1} of {SLICE} bytes)"
        )
        assert end.owner.asked == []


class TestAttaching:
    async def test_streams_may_come_while_the_group_runs(self):
        pairs = [memory_pair() for _ in range(3)]
        end = End([left for left, _ in pairs], Places.syncer(SIZES, learner=0), attach=False)
        peer = End([right for _, right in pairs], Places.learner(SIZES))
        put(end, broadcast_head(1, 1), bytes(40))
        completed = trio.Event()

        async def wait():
            await end.group.completed()
            completed.set()

        async with trio.open_nursery() as nursery:
            for work in (end.run, peer.run, wait):
                nursery.start_soon(work)
            peer.group.outbox.put_control(MessageType.HEARTBEAT, BEAT)
            await trio.testing.wait_all_tasks_blocked()
            # Control is served before the group is complete; bulk waits for its stream.
            assert end.control == [(MessageType.HEARTBEAT, BEAT)]
            end.group.attach(2, pairs[2][0])
            await trio.testing.wait_all_tasks_blocked()
            assert not completed.is_set()
            assert not end.group.is_complete
            assert peer.owner.delivered == []
            end.group.attach(1, pairs[1][0])
            assert end.group.is_complete
            await peer.owner.count(1)
            assert completed.is_set()
            end.group.finish()

    @pytest.mark.parametrize("index", [0, 3, -1])
    async def test_a_stream_that_the_group_does_not_have(self, index):
        syncer, _ = ends(2)
        with pytest.raises(ProtocolError, match=f"data stream {index} of a group with 2 data streams"):
            syncer.group.attach(index, memory_pair()[0])

    async def test_a_stream_twice(self):
        syncer, _ = ends(2)
        with pytest.raises(ProtocolError, match="data stream 1 is attached already"):
            syncer.group.attach(1, memory_pair()[0])

    async def test_after_the_end(self):
        left, right = memory_pair()
        end = End([left, *memory_pair()], Places.syncer(SIZES, learner=0), attach=False)
        await right.close()
        await end.run()
        with pytest.raises(LinkClosed, match="has ended"):
            end.group.attach(1, memory_pair()[0])

    async def test_at_any_moment_of_the_end(self):
        """Streams introduce themselves one by one; while the first breaks, the last may be on its way."""
        for ticks in [*range(6)] * 10:  # the order of tasks within a tick is a matter of chance
            pairs = [memory_pair() for _ in range(2)]
            end = End([left for left, _ in pairs], Places.syncer(SIZES, learner=0), attach=False)

            async def come_late(ticks=ticks, pairs=pairs, end=end):
                pairs[0][1].stream.send_stream.close()
                for _ in range(ticks):
                    await trio.lowlevel.checkpoint()
                try:
                    end.group.attach(1, pairs[1][0])
                except LinkClosed:
                    await pairs[1][0].close()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(end.run)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(come_late)
            assert str(end.reason) == "the peer closed the connection"
            with pytest.raises(LinkClosed):
                await pairs[1][1].read_header()

    async def test_without_data_streams_a_group_is_complete(self):
        syncer, _ = ends(0)
        assert syncer.group.is_complete


class TestSilence:
    async def test_heartbeats_keep_a_group_alive(self, autojump_clock):
        syncer, learner = ends(1, syncer={"silence_seconds": 15.0}, learner={"heartbeat": lambda: BEAT})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(syncer.run)
            nursery.start_soon(learner.run)
            await trio.sleep(62)
            assert syncer.control == [(MessageType.HEARTBEAT, BEAT)] * 13
            learner.group.finish()
        assert str(syncer.reason) == "the peer closed the connection"

    async def test_a_silent_peer_is_taken_for_dead(self, autojump_clock):
        syncer, _ = ends(1, syncer={"silence_seconds": 15.0})
        await syncer.run()
        assert str(syncer.reason) == "no byte on the control stream for 15 s"
        assert trio.current_time() == 15

    async def test_single_bytes_are_a_sign_of_life(self, autojump_clock):
        left, right = memory_pair()
        end = End([left], Places.syncer(SIZES, learner=0), silence_seconds=15.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.run)
            for byte in encode_header(MessageType.HEARTBEAT, 12):
                await trio.sleep(14)
                await right.stream.send_all(bytes([byte]))
        assert trio.current_time() == 13 * 14 + 15

    async def test_our_own_slowness_is_not_the_peers_silence(self, autojump_clock):
        async def slow(kind, payload):
            await trio.sleep(100)

        syncer, learner = ends(0, syncer={"silence_seconds": 15.0, "on_control": slow})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(syncer.run)
            learner.group.outbox.put_control(MessageType.HEARTBEAT, BEAT)
            nursery.start_soon(learner.run)
        assert str(syncer.reason) == "no byte on the control stream for 15 s"
        assert trio.current_time() == 115


@pytest.mark.usefixtures("_small_slices")
async def test_one_learner_that_does_not_read_delays_nobody():
    stuck, _ = ends(2, pair=lockstep_pair)
    syncer, learner = ends(2, pair=lockstep_pair)
    tensor = bytes(1000)
    async with trio.open_nursery() as nursery:
        for end in (stuck, syncer, learner):
            nursery.start_soon(end.run)
        for version in range(1, 20):
            for end in (stuck, syncer):
                put(end, broadcast_head(0, version), tensor)
            head, _ = await learner.owner.count(version)
            assert head.version == version
        # Two messages of eight slices: one stuck, one that waits.
        assert stuck.group.outbox.bytes_held == 2 * (25 + 1000)
        nursery.cancel_scope.cancel()
