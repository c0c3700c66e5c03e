import pytest
from wire_examples import PUSH

from yeto.errors import ProtocolError
from yeto.wire.frames import FrameHeader, MessageType
from yeto.wire.legality import (
    HANDSHAKE,
    TensorSizes,
    client_control,
    client_data,
    client_inner,
    server_control,
    server_data,
    server_inner,
)
from yeto.wire.messages import BroadcastHeader, FinalFragmentHeader, InitHeader

MIB = 1024 * 1024
SIZES = TensorSizes.of([300, 1000], "q4")
SLICE = (25, 24 + 4 * MIB)
BULK = (600, 2000)  # bf16
DELTA = (2 * 132, 4 * 132)
FINAL = (1200, 4000)  # f32

PLACES = {
    "handshake": (HANDSHAKE, {"HELLO": (1, 16 * MIB), "DATA_HELLO": (16, 16)}),
    "server control, learner 0": (
        server_control(SIZES, learner=0),
        {
            "INIT_PARAMS": (4 + 600, 4 + 2000),
            "PUSH_FRAGMENT": (48 + 264, 48 + 528),
            "HEARTBEAT": (12, 12),
            "CHUNK": SLICE,
            "FINAL_ACK": (10, 10),
            "BUDGET_DONE": (8, 8),
            "MANIFEST": (1, MIB),
        },
    ),
    "server control, another learner": (
        server_control(SIZES, learner=1),
        {
            "PUSH_FRAGMENT": (48 + 264, 48 + 528),
            "HEARTBEAT": (12, 12),
            "CHUNK": SLICE,
            "FINAL_ACK": (10, 10),
            "BUDGET_DONE": (8, 8),
            "MANIFEST": (1, MIB),
        },
    ),
    "server data": (
        server_data(SIZES, learner=0),
        {"INIT_PARAMS": (604, 2004), "PUSH_FRAGMENT": (312, 576), "CHUNK": SLICE},
    ),
    "server slices": (
        server_inner(SIZES, learner=0),
        {"INIT_PARAMS": (604, 2004), "PUSH_FRAGMENT": (312, 576)},
    ),
    "client control": (
        client_control(SIZES),
        {
            "PULL_REQ": (16, 16),
            "BCAST_FRAGMENT": (12 + 600, 12 + 2000),
            "SHUTDOWN": (0, 0),
            "CHUNK": SLICE,
            "ERROR": (0, 64 * 1024),
            "FINAL_MANIFEST": (14 + 8 * 2, 14 + 8 * 2),
            "FINAL_FRAGMENT": (12 + 1200, 12 + 4000),
        },
    ),
    "client data": (
        client_data(SIZES),
        {"BCAST_FRAGMENT": (612, 2012), "FINAL_FRAGMENT": (1212, 4012), "CHUNK": SLICE},
    ),
    "client slices": (
        client_inner(SIZES),
        {"BCAST_FRAGMENT": (612, 2012), "FINAL_FRAGMENT": (1212, 4012)},
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_legal_where(place):
    legality, expected = PLACES[place]
    assert {kind.name: lengths for kind, lengths in legality.lengths.items()} == expected
    assert {kind.name: most for kind, most in legality.most.items()} == {k: v[1] for k, v in expected.items()}


@pytest.mark.parametrize("place", PLACES)
def test_every_type_at_every_place(place):
    """Each type with its least and most bytes, one byte beyond each, and absurd lengths."""
    legality, expected = PLACES[place]
    for kind in MessageType:
        if kind.name not in expected:
            for length in (0, 16, 2**40):
                with pytest.raises(ProtocolError, match=rf"{kind.name} is not legal here \("):
                    legality.check(FrameHeader(kind, length))
            continue
        least, most = expected[kind.name]
        legality.check(FrameHeader(kind, least))
        legality.check(FrameHeader(kind, most))
        for length in {least - 1, most + 1, 2**40, 2**64 - 1} - {-1}:
            with pytest.raises(ProtocolError, match=f"{kind.name} of {length} bytes is not legal here"):
                legality.check(FrameHeader(kind, length))


def test_slices_are_in_no_slice():
    for place in ("server slices", "client slices"):
        assert MessageType.CHUNK not in PLACES[place][0].lengths


@pytest.mark.parametrize(
    ("dtype", "bulk", "delta"),
    [("f32", FINAL, FINAL), ("bf16", BULK, BULK), ("q4", BULK, DELTA)],
)
def test_sizes_of_a_session(dtype, bulk, delta):
    sizes = TensorSizes.of([300, 1000], dtype)
    assert (sizes.bulk, sizes.delta, sizes.final) == (bulk, delta, FINAL)


def test_a_tensor_has_the_size_of_the_fragment_that_its_head_names():
    for head, size in (
        (InitHeader(fragment=1), 2000),
        (BroadcastHeader(fragment=0, version=3), 600),
        (FinalFragmentHeader(fragment=1, version=3), 4000),
    ):
        SIZES.expect(head, size)
        with pytest.raises(ProtocolError, match=rf"{head.TYPE.name}: {size - 1} tensor bytes"):
            SIZES.expect(head, size - 1)
    with pytest.raises(ProtocolError, match="PUSH_FRAGMENT: fragment 2 must be below 2"):
        SIZES.expect(PUSH, 528)


def test_a_fragment_over_4_gib_is_legal():
    numel = 3 * 2**30
    sizes = TensorSizes.of([numel], "bf16")
    server_data(sizes, learner=0).check(FrameHeader(MessageType.PUSH_FRAGMENT, 48 + 2 * numel))
    client_inner(sizes).check(FrameHeader(MessageType.FINAL_FRAGMENT, 12 + 4 * numel))
