import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_examples import REPEATABLE

from yeto.errors import ProtocolError
from yeto.wire.frames import HEADER_BYTES, FrameHeader, MessageType, decode_header, encode_header


def test_header_is_magic_type_length():
    assert encode_header(MessageType.PULL_REQ, 16).hex() == "dec070d1031000000000000000"


def test_numbers_of_the_types():
    assert {kind.name: int(kind) for kind in MessageType} == {
        "HELLO": 1,
        "INIT_PARAMS": 2,
        "PULL_REQ": 3,
        "PUSH_FRAGMENT": 4,
        "BCAST_FRAGMENT": 5,
        "HEARTBEAT": 6,
        "SHUTDOWN": 7,
        "DATA_HELLO": 8,
        "CHUNK": 9,
        "ERROR": 10,
        "FINAL_MANIFEST": 11,
        "FINAL_ACK": 12,
        "FINAL_FRAGMENT": 13,
        "BUDGET_DONE": 14,
        "MANIFEST": 15,
    }


@REPEATABLE
@given(st.sampled_from(MessageType), st.integers(0, 2**64 - 1))
def test_header_round_trip(kind, length):
    assert decode_header(encode_header(kind, length)) == FrameHeader(kind, length)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("dec070d1 03 10000000000000", "12 bytes instead of 13"),
        ("dec070d1 03 1000000000000000 00", "14 bytes instead of 13"),
        ("dec070d0 03 1000000000000000", "magic 0xd070c0de"),
        ("474554202f20485454502f312e", "not a Yeto peer"),
        ("dec070d1 00 1000000000000000", "type 0"),
        ("dec070d1 10 1000000000000000", "type 16"),
    ],
)
def test_what_is_no_header(header, reason):
    with pytest.raises(ProtocolError, match=reason):
        decode_header(bytes.fromhex(header))


@REPEATABLE
@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_a_header_or_a_protocol_error(data):
    try:
        header = decode_header(data)
    except ProtocolError:
        return
    assert encode_header(header.type, header.length) == data
