"""Striping: where slices go, and that nothing but the one right set of slices makes a message."""

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yeto.errors import ProtocolError
from yeto.wire import messages, striping
from yeto.wire.frames import HEADER_BYTES, SLICE_BYTES, FrameHeader, MessageType, decode_header, encode_header
from yeto.wire.legality import TensorSizes, client_inner, server_inner
from yeto.wire.messages import BroadcastHeader, ChunkHeader, InitHeader, PushHeader
from yeto.wire.striping import EARLY_BYTES_MAX, ID_WINDOW, PARTIALS_MAX, Assembler, Striper

SMALL = 128
"""Slice size of the tests with contents: every message of a few hundred bytes has several slices."""

BIG = TensorSizes(bulk=(0, 2**33), delta=(0, 2**33), final=(0, 2**34))
"""A session whose fragments have up to 8 GiB."""


@pytest.fixture
def _small_slices(monkeypatch):
    monkeypatch.setattr(messages, "SLICE_BYTES", SMALL)
    monkeypatch.setattr(striping, "SLICE_BYTES", SMALL)


def push_head(step=1):
    return PushHeader(
        learner=0, fragment=0, step=step, attempt=1, base_version=0, local_step=1, c_steps=1, c_tokens=1
    )


def chunk(message_id=0, offset=0, total=3 * SLICE_BYTES):
    return ChunkHeader(message_id=message_id, total=total, offset=offset)


def big_assembler(**options):
    return Assembler(server_inner(BIG, learner=0), **options)


def open_push(assembler, slot):
    """Open a first slice as a push of the length that its slices' total says."""
    return assembler.open(slot, FrameHeader(MessageType.PUSH_FRAGMENT, slot.message.total - HEADER_BYTES))


def drain(assembler, slot):
    """Take a slice of a message nobody wants."""
    if slot.is_first:
        open_push(assembler, slot)
        assembler.decide(slot, push_head(), None)
    assert assembler.target(slot) is None
    return assembler.filled(slot)


class TestStriper:
    def test_cuts_on_boundaries_and_takes_turns(self):
        slices = Striper(4).slices(2 * SLICE_BYTES + 5)
        assert [(s.stream, s.chunk.offset, s.size) for s in slices] == [
            (0, 0, SLICE_BYTES),
            (1, SLICE_BYTES, SLICE_BYTES),
            (2, 2 * SLICE_BYTES, 5),
        ]
        assert {s.chunk.total for s in slices} == {2 * SLICE_BYTES + 5}

    def test_a_whole_number_of_slices_has_no_empty_one(self):
        assert [s.size for s in Striper(1).slices(2 * SLICE_BYTES)] == [SLICE_BYTES, SLICE_BYTES]

    def test_ids_ascend_and_the_turn_goes_on_across_messages(self):
        striper = Striper(3)
        placed = [
            (s.chunk.message_id, s.stream)
            for total in (100, SLICE_BYTES + 1, 100)
            for s in striper.slices(total)
        ]
        assert placed == [(0, 0), (1, 1), (1, 2), (2, 0)]
        assert striper.turn == 1

    def test_a_message_above_four_gib(self):
        slices = Striper(5).slices(2**33 + 61)
        assert len(slices) == 2**33 // SLICE_BYTES + 1
        assert slices[-1].chunk.offset == 2**33
        assert sum(s.size for s in slices) == 2**33 + 61

    def test_needs_a_stream(self):
        with pytest.raises(ValueError, match="needs a stream"):
            Striper(0)


class Delivery:
    """One slice on its way through the assembler, in the steps between which a reader may be interrupted."""

    def __init__(self, assembler, header, data, wanted, received):
        self.assembler, self.header, self.data = assembler, header, data
        self.wanted, self.received = wanted, received

    def steps(self):
        assembler, data = self.assembler, self.data
        slot = assembler.claim(self.header, len(data))
        yield
        if slot.is_first:
            inner = assembler.open(slot, decode_header(data[:HEADER_BYTES]))
            yield
            start = HEADER_BYTES + inner.head_bytes
            head = PushHeader.decode(data[HEADER_BYTES:start])
            assembler.decide(slot, head, bytearray(inner.tensor_bytes) if self.wanted else None)
            data = data[start:]
            yield
        target = assembler.target(slot)
        assert striping.tensor_bytes(slot) == len(data) if slot.message.inner else not slot.is_first
        yield
        if target is not None:
            target[:] = data
        done = assembler.filled(slot)
        if done is not None:
            self.received.append(done)


@pytest.mark.usefixtures("_small_slices")
class TestAnyOrder:
    @given(
        sizes=st.lists(st.integers(0, 6 * SMALL), min_size=1, max_size=6),
        wanted=st.lists(st.booleans(), min_size=6, max_size=6),
        seed=st.integers(0, 2**32),
        readers=st.integers(1, 5),
    )
    def test_every_order_and_interleaving_gives_the_messages(self, sizes, wanted, seed, readers):
        rng = random.Random(seed)
        assembler = Assembler(
            server_inner(TensorSizes(bulk=(1,), delta=(0, 6 * SMALL), final=(1,)), learner=0)
        )
        striper = Striper(readers)
        tensors = [rng.randbytes(size) for size in sizes]
        received = []
        waiting = []
        for number, tensor in enumerate(tensors):
            head = push_head(step=number).encode()
            frame = encode_header(MessageType.PUSH_FRAGMENT, len(head) + len(tensor)) + head + tensor
            for piece in striper.slices(len(frame)):
                data = frame[piece.chunk.offset : piece.chunk.offset + piece.size]
                waiting.append(
                    Delivery(assembler, piece.chunk, data, wanted[number], received).steps(),
                )
        rng.shuffle(waiting)
        running = []
        while waiting or running:
            while waiting and len(running) < readers:
                running.append(waiting.pop())
            delivery = rng.choice(running)
            if next(delivery, "ended") == "ended":
                running.remove(delivery)

        assert sorted(done.head.step for done in received) == list(range(len(sizes)))
        for done in received:
            expected = tensors[done.head.step] if wanted[done.head.step] else None
            assert done.buffer == expected
        assert assembler.partials == ()
        assert assembler.early_bytes == 0
        for number in range(len(sizes)):
            with pytest.raises(ProtocolError, match="already complete"):
                assembler.claim(ChunkHeader(message_id=number, total=100, offset=0), 100)

    def test_the_buffer_itself_is_filled_and_is_free_afterwards(self):
        assembler = Assembler(server_inner(TensorSizes(bulk=(1,), delta=(SMALL,), final=(1,)), learner=0))
        buffer = bytearray(SMALL)
        total = HEADER_BYTES + PushHeader.BYTES + SMALL
        first = assembler.claim(ChunkHeader(message_id=0, total=total, offset=0), SMALL)
        open_push(assembler, first)
        assembler.decide(first, push_head(), buffer)
        view = assembler.target(first)
        assert view.obj is buffer
        view[:] = b"\x01" * len(view)
        view.release()
        assert assembler.filled(first) is None
        [partial] = assembler.partials
        assert partial.received_bytes == SMALL
        last = assembler.claim(ChunkHeader(message_id=0, total=total, offset=SMALL), total - SMALL)
        with assembler.target(last) as view:
            view[:] = b"\x02" * len(view)
        done = assembler.filled(last)
        assert done.buffer is buffer
        assert buffer == b"\x01" * (SMALL - 61) + b"\x02" * 61
        buffer.append(0)  # no view of it is left, or this would raise


class TestRefusals:
    @pytest.mark.parametrize(
        ("offset", "total", "size"),
        [
            (0, 3 * SLICE_BYTES, SLICE_BYTES - 1),
            (0, 3 * SLICE_BYTES, SLICE_BYTES + 1),
            (SLICE_BYTES, SLICE_BYTES + 10, 11),
            (SLICE_BYTES, SLICE_BYTES + 10, 9),
            (0, 100, 99),
        ],
    )
    def test_a_slice_of_another_size(self, offset, total, size):
        with pytest.raises(ProtocolError, match=f"slice of {size} bytes at offset {offset} of message 0"):
            big_assembler().claim(chunk(offset=offset, total=total), size)

    @pytest.mark.parametrize("offset", [1, SLICE_BYTES - 1, 3 * SLICE_BYTES])
    def test_a_slice_out_of_place(self, offset):
        with pytest.raises(ProtocolError, match="offset"):
            chunk(offset=offset)

    def test_a_slice_sent_twice(self):
        assembler = big_assembler()
        drain(assembler, assembler.claim(chunk(), SLICE_BYTES))
        with pytest.raises(ProtocolError, match="slice at offset 0 of message 0 was sent twice"):
            assembler.claim(chunk(), SLICE_BYTES)

    def test_a_slice_sent_twice_while_the_first_copy_is_still_read(self):
        assembler = big_assembler()
        assembler.claim(chunk(offset=SLICE_BYTES), SLICE_BYTES)
        with pytest.raises(ProtocolError, match="sent twice"):
            assembler.claim(chunk(offset=SLICE_BYTES), SLICE_BYTES)

    def test_two_totals(self):
        assembler = big_assembler()
        assembler.claim(chunk(total=3 * SLICE_BYTES), SLICE_BYTES)
        with pytest.raises(ProtocolError, match="message 0 claims 16777216 bytes after it claimed 12582912"):
            assembler.claim(chunk(offset=SLICE_BYTES, total=4 * SLICE_BYTES), SLICE_BYTES)

    def test_a_total_beyond_every_legal_type_costs_nothing(self):
        assembler = big_assembler()
        tracemalloc.start()
        with pytest.raises(ProtocolError, match="claims 1099511627776 bytes, the largest that is legal"):
            assembler.claim(chunk(total=2**40), SLICE_BYTES)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000
        assert assembler.partials == ()

    def test_a_total_beyond_the_inner_type(self):
        # The final cut is f32 and twice as large as the broadcast: the total alone cannot tell.
        assembler = Assembler(client_inner(BIG))
        total = HEADER_BYTES + FrameHeader(MessageType.BCAST_FRAGMENT, 12 + 2**33 + 1).length
        slot = assembler.claim(chunk(total=total), SLICE_BYTES)
        with pytest.raises(ProtocolError, match="BCAST_FRAGMENT of 8589934605 bytes is not legal here"):
            assembler.open(slot, FrameHeader(MessageType.BCAST_FRAGMENT, 12 + 2**33 + 1))

    @pytest.mark.parametrize("kind", [MessageType.CHUNK, MessageType.HEARTBEAT, MessageType.BCAST_FRAGMENT])
    def test_inner_types_that_are_not_legal(self, kind):
        assembler = big_assembler()
        slot = assembler.claim(chunk(total=100), 100)
        with pytest.raises(ProtocolError, match=f"{kind.name} is not legal here"):
            assembler.open(slot, FrameHeader(kind, 87))

    def test_an_inner_length_shorter_than_its_head(self):
        sizes = TensorSizes(bulk=(1,), delta=(0,), final=(1,))
        assembler = Assembler(server_inner(sizes, learner=0))
        slot = assembler.claim(chunk(total=HEADER_BYTES + 47), HEADER_BYTES + 47)
        with pytest.raises(ProtocolError, match="PUSH_FRAGMENT of 47 bytes"):
            open_push(assembler, slot)

    def test_an_inner_length_that_is_not_the_total(self):
        assembler = big_assembler()
        slot = assembler.claim(chunk(), SLICE_BYTES)
        with pytest.raises(ProtocolError, match="does not fit its slices' total of 12582912"):
            assembler.open(slot, FrameHeader(MessageType.PUSH_FRAGMENT, 48 + 2**33))

    @pytest.mark.parametrize("difference", [-1, 1])
    def test_a_tensor_that_does_not_fill_its_buffer(self, difference):
        sizes = TensorSizes(bulk=(8,), delta=(8,), final=(8,))
        assembler = Assembler(server_inner(sizes, learner=0))
        slot = assembler.claim(chunk(total=HEADER_BYTES + 12), HEADER_BYTES + 12)
        assembler.open(slot, FrameHeader(MessageType.INIT_PARAMS, 12))
        with pytest.raises(ProtocolError, match=f"8 bytes where {8 + difference} are expected"):
            assembler.decide(slot, InitHeader(fragment=0), bytearray(8 + difference))

    def test_too_many_incomplete_messages(self):
        assembler = big_assembler()
        for number in range(PARTIALS_MAX):
            assembler.claim(chunk(message_id=number), SLICE_BYTES)
        with pytest.raises(ProtocolError, match="message 64 would be incomplete message 65"):
            assembler.claim(chunk(message_id=PARTIALS_MAX), SLICE_BYTES)
        # A slice of a message under way is still welcome.
        assembler.claim(chunk(message_id=0, offset=SLICE_BYTES), SLICE_BYTES)

    def test_ids_far_ahead(self):
        with pytest.raises(ProtocolError, match="message 4096 is too far ahead of message 0"):
            big_assembler().claim(chunk(message_id=ID_WINDOW), SLICE_BYTES)

    def test_memory_of_completed_ids_is_bounded(self):
        assembler = big_assembler()
        for number in range(1, ID_WINDOW):
            assert drain(assembler, assembler.claim(chunk(number, total=100), 100)) is not None
        assert len(assembler._completed) == ID_WINDOW - 1
        with pytest.raises(ProtocolError, match="message 17 was already complete"):
            assembler.claim(chunk(17, total=100), 100)
        with pytest.raises(ProtocolError, match="too far ahead"):
            assembler.claim(chunk(ID_WINDOW, total=100), 100)
        drain(assembler, assembler.claim(chunk(0, total=100), 100))
        assert not assembler._completed
        drain(assembler, assembler.claim(chunk(ID_WINDOW, total=100), 100))
        with pytest.raises(ProtocolError, match="message 0 was already complete"):
            assembler.claim(chunk(0, total=100), 100)


class TestEarlySlices:
    def test_they_are_bounded(self):
        assembler = big_assembler()
        total = 2**33
        for index in range(1, 1 + EARLY_BYTES_MAX // SLICE_BYTES):
            slot = assembler.claim(chunk(offset=index * SLICE_BYTES, total=total), SLICE_BYTES)
            assert assembler.has_room(slot)
            assert len(assembler.target(slot)) == SLICE_BYTES
        assert assembler.early_bytes == EARLY_BYTES_MAX
        late = assembler.claim(chunk(message_id=1, offset=SLICE_BYTES), SLICE_BYTES)
        assert not assembler.has_room(late)
        with pytest.raises(ProtocolError, match="4194304 more would pass the bound of 33554432"):
            assembler.target(late)

    def test_the_first_slice_and_later_ones_always_have_room(self):
        assembler = big_assembler(early_bytes_max=0)
        first = assembler.claim(chunk(), SLICE_BYTES)
        second = assembler.claim(chunk(offset=SLICE_BYTES), SLICE_BYTES)
        assert assembler.has_room(first)
        assert not assembler.has_room(second)
        drain(assembler, first)
        assert assembler.has_room(second)
        assert assembler.target(second) is None

    def test_a_decision_frees_what_they_held(self):
        assembler = big_assembler()
        early = assembler.claim(chunk(offset=SLICE_BYTES), SLICE_BYTES)
        assembler.target(early)
        assembler.filled(early)
        assert assembler.early_bytes == SLICE_BYTES
        drain(assembler, assembler.claim(chunk(), SLICE_BYTES))
        assert assembler.early_bytes == 0


def test_an_unwanted_message_above_four_gib_is_drained_without_a_buffer():
    assembler = big_assembler()
    total = HEADER_BYTES + PushHeader.BYTES + 2**33
    tracemalloc.start()
    done = [drain(assembler, assembler.claim(s.chunk, s.size)) for s in Striper(1).slices(total)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert done[:-1] == [None] * (len(done) - 1)
    assert done[-1].buffer is None
    assert done[-1].type is MessageType.PUSH_FRAGMENT
    assert peak < 4_000_000


def test_broadcasts_and_final_fragments_are_told_apart():
    sizes = TensorSizes(bulk=(2,), delta=(2,), final=(4,))
    assembler = Assembler(client_inner(sizes))
    inner = assembler.examine(FrameHeader(MessageType.FINAL_FRAGMENT, 16))
    assert (inner.head_bytes, inner.tensor_bytes) == (12, 4)
    head = BroadcastHeader(fragment=0, version=3)
    slot = assembler.claim(chunk(total=HEADER_BYTES + 14), HEADER_BYTES + 14)
    assembler.open(slot, FrameHeader(MessageType.BCAST_FRAGMENT, 14))
    assembler.decide(slot, head, bytearray(2))
    assembler.target(slot)[:] = b"ab"
    done = assembler.filled(slot)
    assert (done.type, done.head, bytes(done.buffer)) == (MessageType.BCAST_FRAGMENT, head, b"ab")
