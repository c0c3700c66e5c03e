"""The 48 bytes between syncer and SVD worker: exact bytes, and everything that is refused."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yeto.errors import ProtocolError
from yeto.merge.svd_frames import (
    HEADER_BYTES,
    MESSAGE_BYTES_MAX,
    Answer,
    Code,
    Refusal,
    Request,
    decode_answer,
    decode_message,
    decode_request,
    encode_matrix_header,
    encode_refusal,
    require_magic,
)

U64 = st.integers(0, 2**64 - 1)


def header(magic=b"YETOISO1", version=1, code=0, request=7, rows=2, cols=3, payload=24):
    return struct.pack("<8sIIQQQQ", magic, version, code, request, rows, cols, payload)


def test_the_bytes():
    assert encode_matrix_header(7, 2, 3) == header()
    assert encode_matrix_header(7, 2, 3).hex(" ", 4) == (
        "5945544f 49534f31 01000000 00000000 07000000 00000000 "
        "02000000 00000000 03000000 00000000 18000000 00000000"
    )
    assert encode_refusal(7, Code.FAILED, "no") == header(code=6, rows=0, cols=0, payload=2) + b"no"
    assert [(code.name, code.value) for code in Code] == [
        ("OK", 0),
        ("MALFORMED", 1),
        ("UNSUPPORTED", 2),
        ("BAD_SHAPE", 3),
        ("BAD_LENGTH", 4),
        ("NOT_FINITE", 5),
        ("FAILED", 6),
        ("RESULT_NOT_FINITE", 7),
        ("TOO_LARGE", 8),
    ]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"magic": b"YETOISO2"}, Code.MALFORMED, "b'YETOISO2'"),
        ({"version": 2}, Code.UNSUPPORTED, "version 2"),
        ({"code": 1}, Code.UNSUPPORTED, "request code 1"),
        ({"rows": 0, "payload": 0}, Code.BAD_SHAPE, "0 x 3"),
        ({"cols": 0, "payload": 0}, Code.BAD_SHAPE, "2 x 0"),
        ({"payload": 23}, Code.BAD_LENGTH, "23 bytes for a matrix of 2 x 3, which has 24"),
        ({"rows": 2**63, "cols": 2**63}, Code.BAD_LENGTH, "24 bytes"),
        ({"rows": 100, "cols": 100, "payload": 40_000}, Code.TOO_LARGE, "--iso-worker-frame-mib"),
    ],
)
def test_a_bad_request_is_refused_by_its_header_and_says_how_much_follows(changes, code, words):
    refusal = decode_request(header(**changes), frame_bytes_max=39_999)
    assert isinstance(refusal, Refusal)
    assert (refusal.number, refusal.code) == (7, code)
    assert words in refusal.message
    assert refusal.payload_bytes == changes.get("payload", 24)


def test_a_matrix_as_large_as_the_limit_is_taken():
    request = decode_request(header(rows=100, cols=100, payload=40_000), frame_bytes_max=40_000)
    assert request == Request(number=7, rows=100, cols=100)
    assert request.payload_bytes == 40_000


REQUEST = Request(number=7, rows=2, cols=3)


def test_answers_that_fit():
    assert decode_answer(header(), REQUEST) == Answer(code=Code.OK, payload_bytes=24)
    refusal = encode_refusal(7, Code.NOT_FINITE, "NaN")
    assert decode_answer(refusal[:HEADER_BYTES], REQUEST) == Answer(code=Code.NOT_FINITE, payload_bytes=3)
    assert decode_message(refusal[HEADER_BYTES:]) == "NaN"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"magic": b"Hello, w"}, "Hello, w"),
        ({"version": 3}, "version 3"),
        ({"code": 9, "rows": 0, "cols": 0, "payload": 0}, "unknown code 9"),
        ({"request": 8}, "request 8"),
        ({"rows": 3, "cols": 2}, "a matrix of 3 x 2"),
        ({"code": 6, "payload": 0}, "a matrix of 2 x 3"),
        ({"payload": 20}, "20 bytes"),
        (
            {"code": 6, "rows": 0, "cols": 0, "payload": MESSAGE_BYTES_MAX + 1},
            "4097 bytes and the code failed",
        ),
    ],
)
def test_answers_that_do_not_fit_are_named(changes, words):
    with pytest.raises(ProtocolError) as refused:
        decode_answer(header(**changes), REQUEST)
    assert words in str(refused.value)


def test_garbage_is_noticed_at_its_first_byte():
    for length in range(9):
        require_magic(b"YETOISO1"[:length])
    for start in (b"y", b"YETO!", b"Warning: something"):
        with pytest.raises(ProtocolError, match="no answer begins with"):
            require_magic(start)


def test_a_long_sentence_is_cut_between_two_letters():
    answer = encode_refusal(1, Code.FAILED, "ä" * MESSAGE_BYTES_MAX)
    assert len(answer) == HEADER_BYTES + MESSAGE_BYTES_MAX
    answer = encode_refusal(1, Code.FAILED, "x" + "ä" * MESSAGE_BYTES_MAX)
    assert len(answer) == HEADER_BYTES + MESSAGE_BYTES_MAX - 1
    assert decode_message(answer[HEADER_BYTES:]) == "x" + "ä" * (MESSAGE_BYTES_MAX // 2 - 1)
    with pytest.raises(ProtocolError, match="UTF-8"):
        decode_message(b"\xff")


@given(
    magic=st.binary(min_size=8, max_size=8) | st.just(b"YETOISO1"),
    version=st.integers(0, 2**32 - 1) | st.just(1),
    code=st.integers(0, 2**32 - 1) | st.integers(0, 9),
    request=U64,
    rows=U64 | st.integers(0, 4),
    cols=U64 | st.integers(0, 4),
    payload=U64 | st.integers(0, 64),
)
def test_any_48_bytes_are_judged(magic, version, code, request, rows, cols, payload):
    data = header(magic, version, code, request, rows, cols, payload)
    found = decode_request(data, frame_bytes_max=1000)
    if isinstance(found, Request):
        assert encode_matrix_header(found.number, found.rows, found.cols) == data
        assert 0 < found.payload_bytes <= 1000
    else:
        assert found.payload_bytes == payload
        assert encode_refusal(found.number, found.code, found.message)
    with contextlib.suppress(ProtocolError):
        answer = decode_answer(data, Request(number=request, rows=2, cols=3))
        assert answer.payload_bytes == payload <= MESSAGE_BYTES_MAX
