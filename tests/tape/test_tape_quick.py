"""The quick way of reading and writing lines against the thorough one: the same outcome, whatever comes.

Most tapes here are of format 1: without checksums it is the lines' content that both ways have to judge.
"""

import datetime
import decimal
import math
import re
import uuid

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tape_lines import summed
from tape_values import CLASSES, bodies

from yeto.core.config import CoreConfig
from yeto.core.decisions import DECISIONS, AttemptSealed, Decision, PushAdmitted
from yeto.core.events import EVENTS, CheckpointWritten, GateOpened, Heartbeat, StopRequested
from yeto.core.values import Weighted
from yeto.errors import TapeError
from yeto.tape import Decoder, Header, encode
from yeto.tape.codec import _encode_thoroughly
from yeto.tape.quick import read_line, write_line

HEADER = _encode_thoroughly(
    0,
    0.0,
    None,
    Header(
        format_version=1,
        software_version="0.1.0",
        wall_clock="2026-01-02T03:04:05+00:00",
        session_id="5e551011",
        config=CoreConfig(num_learners=2, total_steps=4, quorum=2, wait_for=2),
    ),
)
KINDS = [*EVENTS, *DECISIONS]
drawn = settings(
    max_examples=20,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class Thorough(Decoder):
    """Reads every line the thorough way."""

    def _decode_quickly(self, line):
        return None


def outcome(decoder_type, lines):
    """Return what comes of the last line: the record, or the error's text."""
    decoder = decoder_type("run.jsonl")
    for line in lines[:-1]:
        decoder.decode(line)
    try:
        record = decoder.decode(lines[-1])
    except TapeError as error:
        return str(error)
    # repr tells 1 from 1.0 and from True, and 0.0 from -0.0.
    return repr(record), repr(attrs.astuple(record.body)), (decoder.line, decoder.at)


def written(seq, at, because, body):
    """Return the line the thorough way, with its checksum, or the error's text."""
    try:
        return summed(_encode_thoroughly(seq, at, because, body))
    except TapeError as error:
        return str(error)


def tape_of(body, at):
    """Return the lines of a tape that ends with this body, the thorough way."""
    if isinstance(body, Decision):
        cause = StopRequested(at=at, signal="SIGTERM")
        return [HEADER, _encode_thoroughly(1, at, None, cause), _encode_thoroughly(2, at, 1, body)]
    return [HEADER, _encode_thoroughly(1, at, None, attrs.evolve(body, at=at))]


def test_nearly_all_lines_of_real_tapes_go_the_quick_way(fixtures):
    kinds, written_quickly, total = set(), 0, 0
    for path in sorted((fixtures / "tapes").glob("*.jsonl")):
        decoder = Decoder(str(path))
        for line in path.read_bytes().splitlines(keepends=True):
            record = decoder.decode(line)
            if record.kind == "header":
                is_summed = record.body.format_version > 1
            # The smallest and the greatest floats are written in another manner, but they are rare.
            if record.kind == "header" or re.search(rb":-?[0-9.]+e", line):
                continue
            assert read_line(line, is_summed=is_summed) is not None
            quick = write_line(record.seq, record.at, record.because, record.body)
            assert quick in (summed(line), None)
            kinds.add(record.kind)
            written_quickly += quick is not None
            total += 1
    assert len(kinds) > 20
    assert written_quickly > 0.95 * total


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_read_and_write_every_kind_alike(kind):
    @drawn
    @given(bodies(CLASSES[kind]), st.floats(0.0, 1e9))
    def alike(body, at):
        lines = tape_of(body, at)
        seq, because = len(lines) - 1, 1 if isinstance(body, Decision) else None
        body = body if because else attrs.evolve(body, at=at)
        line = write_line(seq, at, because, body)
        assert line in (None, summed(lines[-1]))
        # What is written the quick way can be read the quick way.
        assert line is None or read_line(lines[-1], is_summed=False) is not None
        assert line is None or read_line(line, is_summed=True) is not None
        assert encode(seq=seq, at=at, body=body, because=because) == summed(lines[-1])
        assert outcome(Decoder, lines) == outcome(Thorough, lines)

    alike()


TOKENS = [
    *(
        b"",
        b'"',
        b",",
        b":",
        b" ",
        b"\t",
        b"\n",
        b"{",
        b"}",
        b"[",
        b"]",
        b"\\",
        b"0",
        b"1",
        b"-",
        b".",
        b"e5",
    ),
    *(b"1.0", b"-0", b"1e400", b"9007199254740993", b"true", b"null", b"NaN", b"Infinity", b'"1"', b'"a":1,'),
    *(b'"seq":1,', b'"step":1,', b"\\u0031", b"\\ud800", b"\xff", "é".encode(), b"\x7f", b"\x00"),
]
OTHERS = [
    *(b"a", 1j, decimal.Decimal(1), uuid.UUID(int=1), datetime.date(2026, 1, 1), {1}, object(), (1, 2), []),
    *(Heartbeat, math.inf, "\ud800", "\x7f"),
]
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(OTHERS)
)


@st.composite
def damaged(draw, line):
    """Draw a line with up to three pieces replaced, doubled or taken out."""
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(line)))
        end = draw(st.integers(begin, min(begin + 12, len(line))))
        piece = draw(st.sampled_from([*TOKENS, line[begin:end] * 2]))
        line = line[:begin] + piece + line[end:]
    return line


def keys_moved(line):
    """Return the pieces of a flat line between its commas in another order, one of them doubled."""
    inner = line.strip(b"{}\n").split(b",")
    return b"{" + b",".join([*inner[1:], inner[0], inner[-1]]) + b"}\n"


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_say_the_same_of_damaged_lines(kind):
    @drawn
    @given(st.data())
    def alike(data):
        at = data.draw(st.sampled_from([0.0, 2.5, 1e-5]))
        *before, line = tape_of(data.draw(bodies(CLASSES[kind])), at)
        for worse in (data.draw(damaged(line)), keys_moved(line)):
            assert outcome(Decoder, [*before, worse]) == outcome(Thorough, [*before, worse])

    alike()


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_write_and_refuse_wrong_values_alike(kind):
    cls = CLASSES[kind]

    @drawn
    @given(bodies(cls), st.sampled_from(list(attrs.fields_dict(cls))), SCALARS)
    def alike(body, name, value):
        if attrs.has(type(getattr(body, name))) or type(getattr(body, name)) is tuple:
            return  # the thorough way has always taken these on trust
        body = attrs.evolve(body, **{name: value})
        because = 1 if isinstance(body, Decision) else None
        at = 2.5 if because else body.at
        line = write_line(2, at, because, body) if type(at) in (int, float) else None
        assert line in (None, written(2, at, because, body))

    alike()


@pytest.mark.parametrize("character", [*map(chr, range(0x80)), "\x80", "é", "\u2028", "😀"])
def test_characters_are_written_as_python_writes_them(character):
    event = StopRequested(at=1.0, signal=f"<{character}>")
    line = encode(seq=1, at=1.0, body=event)
    plain = _encode_thoroughly(1, 1.0, None, event)
    assert line == summed(plain)
    assert write_line(1, 1.0, None, event) == (summed(plain) if character < "\x7f" else None)


@pytest.mark.parametrize(
    "value",
    [
        *(0.0, -0.0, 1e-4, 9.9e-5, 1e-5, 1.5e-7, 1e15, 9.999999999999998e15, 1e16, 1.5e17),
        *(-1e-6, -9.9e-5, -1e-4, -9.999999999999998e15, -1e16),
    ],
)
def test_floats_are_written_as_python_writes_them(value):
    body = CheckpointWritten(at=1.0, step=1, written_bytes=1, seconds=value)
    line = _encode_thoroughly(1, 1.0, None, body)
    assert encode(seq=1, at=1.0, body=body) == summed(line)
    assert f'"seconds":{value!r}}}'.encode() in line
    assert write_line(1, 1.0, None, body) == (
        summed(line) if value == 0.0 or 1e-4 <= abs(value) < 1e16 else None
    )


@pytest.mark.parametrize("at", [0.0, 1e-6, 9e-5, 1e-4, 2, 1e16])
def test_times_are_written_as_python_writes_them(at):
    event = GateOpened(at=at, step=1)
    assert encode(seq=1, at=at, body=event) == summed(_encode_thoroughly(1, at, None, event))
    assert f'"at":{at!r},'.encode() in encode(seq=1, at=at, body=event)


class Name(str):
    """A string that is none to whoever looks closely."""


RESPONDER = Weighted(
    learner=1,
    generation="a0",
    base_version=1,
    staleness=0,
    c_steps=5,
    c_tokens=50,
    weight=500.0,
    correct=False,
)
SEALED = AttemptSealed(
    step=1, fragment=0, attempt=1, responders=(RESPONDER,), missed=(2,), left_out=(), why="enough"
)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": True},
        {"why": Name("enough")},
        {"missed": (2, True)},
        {"missed": [2]},
        {"missed": None},
        {"responders": [RESPONDER]},
        {"responders": (None,)},
        {"responders": (attrs.evolve(RESPONDER, c_steps=5.0),)},
        {"responders": (attrs.evolve(RESPONDER, weight=500),)},
        {"responders": (RESPONDER, attrs.evolve(RESPONDER, weight=1e-9))},
        {"responders": (attrs.evolve(RESPONDER, weight=math.nan),)},
        {"responders": (attrs.evolve(RESPONDER, generation=None),)},
    ],
)
def test_a_value_of_another_type_than_its_field_is_left_to_the_thorough_way(changes):
    assert write_line(3, 2.5, 2, SEALED) == summed(_encode_thoroughly(3, 2.5, 2, SEALED))
    assert write_line(3, 2.5, 2, attrs.evolve(SEALED, **changes)) is None


def test_what_looks_like_the_values_of_the_last_line_is_still_looked_at():
    again = attrs.evolve(SEALED, responders=(attrs.evolve(RESPONDER),))
    assert write_line(3, 2.5, 2, again) == write_line(3, 2.5, 2, SEALED)
    # Equal to it in Python, and another one in JSON.
    whole = attrs.evolve(SEALED, responders=(attrs.evolve(RESPONDER, weight=500),))
    assert whole == SEALED
    assert write_line(3, 2.5, 2, whole) is None
    more = attrs.evolve(SEALED, responders=(RESPONDER, attrs.evolve(RESPONDER, learner=2)))
    assert write_line(3, 2.5, 2, SEALED) is not None
    assert write_line(3, 2.5, 2, more) == summed(_encode_thoroughly(3, 2.5, 2, more))


def test_what_is_written_quickly_reads_back_equal():
    envelope, read_body = read_line(line := write_line(3, 2.5, 2, SEALED), is_summed=True)
    assert (envelope.seq, envelope.at, envelope.because, read_body(line)) == (3, 2.5, 2, SEALED)


def test_a_class_that_only_looks_like_a_registered_one_is_written_as_that_one():
    @attrs.frozen(kw_only=True)
    class Louder(Heartbeat):
        volume: int = 11

    beat = Louder(at=1.0, learner=1, generation="a0", local_step=3)
    assert write_line(1, 1.0, None, beat) is None
    assert b"volume" not in encode(seq=1, at=1.0, body=beat)


def test_a_body_is_made_of_its_line_when_it_is_looked_at():
    lines = tape_of(PushAdmitted(why="w", learner=1, generation="a0", step=1, attempt=1, staleness=0), 2.5)
    quick, thorough = Decoder("run.jsonl"), Thorough("run.jsonl")
    read = [quick.decode(line) for line in lines]
    assert "body" not in vars(read[-1])
    assert read == [thorough.decode(line) for line in lines]
    assert "body" in vars(read[-1])
    assert read[-1].body is read[-1].body
    with pytest.raises(AttributeError, match="no 'bodies'"):
        read[-1].bodies  # noqa: B018
