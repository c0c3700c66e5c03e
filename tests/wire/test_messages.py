import json
import pickle
import struct

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_examples import EXAMPLES, GENERATION, HELLO, KEY, MANIFEST, MESSAGES, PUSH, REPEATABLE, u64

from yeto.errors import ProtocolError
from yeto.wire.frames import HEADER_BYTES, SLICE_BYTES, MessageType, decode_header, encode_header
from yeto.wire.messages import (
    COUNTER_MAX,
    ERROR_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    TENSOR_HEADS,
    BudgetDone,
    ChunkHeader,
    DataHello,
    ErrorMessage,
    FinalManifest,
    FixedMessage,
    Heartbeat,
    InitHeader,
    PullRequest,
    PushHeader,
    Shutdown,
    check_bounds,
    format_generation,
)

DECODERS = sorted(MESSAGES, key=lambda cls: cls.TYPE)
CHUNK = ChunkHeader(message_id=0, total=69, offset=0)


def frame(name, fixtures):
    fields = json.loads((fixtures / "wire" / "messages.json").read_text(encoding="utf-8"))[name]
    return bytes.fromhex("".join(fields))


def encode_frame(message, tensor_bytes=0):
    """Return frame header and payload, up to where a tensor starts."""
    payload = message.encode()
    return encode_header(message.TYPE, len(payload) + tensor_bytes) + payload


def example_frame(name):
    if name == "HELLO":
        payload = HELLO.encode(KEY)
    elif name == "MANIFEST":
        payload = MANIFEST.encode()
    elif name == "CHUNK":
        message, tensor = EXAMPLES["PUSH_FRAGMENT"]
        inner = encode_frame(message, len(tensor)) + tensor
        return encode_frame(CHUNK, len(inner)) + inner
    else:
        message, tensor = EXAMPLES[name]
        return encode_frame(message, len(tensor)) + tensor
    return encode_header(MessageType[name], len(payload)) + payload


def test_the_pull_that_the_format_gives_as_its_example():
    pull = PullRequest(fragment=2, step=7, attempt=1)
    expected = "dec070d1 03 1000000000000000 02000000 0700000000000000 01000000"
    assert encode_frame(pull) == bytes.fromhex(expected)


@pytest.mark.parametrize("name", [kind.name for kind in MessageType])
def test_bytes_of_every_message(name, fixtures):
    expected = frame(name, fixtures)
    assert example_frame(name) == expected
    assert decode_header(expected[:HEADER_BYTES]).length == len(expected) - HEADER_BYTES


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_decodes_to_its_message(name, fixtures):
    message, tensor = EXAMPLES[name]
    payload = frame(name, fixtures)[HEADER_BYTES:]
    head, rest = payload[: len(payload) - len(tensor)], payload[len(payload) - len(tensor) :]
    assert type(message).decode(head) == message
    assert rest == tensor


def test_sizes_of_heads_and_fixed_messages():
    assert {cls.TYPE.name: cls.BYTES for cls in DECODERS if issubclass(cls, FixedMessage)} == {
        "INIT_PARAMS": 4,
        "PULL_REQ": 16,
        "PUSH_FRAGMENT": 48,
        "BCAST_FRAGMENT": 12,
        "HEARTBEAT": 12,
        "SHUTDOWN": 0,
        "DATA_HELLO": 16,
        "CHUNK": 24,
        "FINAL_ACK": 10,
        "FINAL_FRAGMENT": 12,
        "BUDGET_DONE": 8,
    }
    assert [kind.name for kind in sorted(TENSOR_HEADS)] == [
        "INIT_PARAMS",
        "PUSH_FRAGMENT",
        "BCAST_FRAGMENT",
        "FINAL_FRAGMENT",
    ]


@pytest.mark.parametrize("cls", DECODERS)
def test_round_trip(cls):
    @REPEATABLE
    @given(MESSAGES[cls])
    def holds(message):
        assert cls.decode(message.encode()) == message
        assert cls.decode(memoryview(bytearray(message.encode()))) == message

    holds()


# Any text is an ERROR, whatever its length.
@pytest.mark.parametrize("cls", [cls for cls in DECODERS if cls is not ErrorMessage])
def test_truncated_and_trailing_bytes_are_refused(cls):
    name = cls.TYPE.name
    payload = CHUNK.encode() if cls is ChunkHeader else EXAMPLES[name][0].encode()
    for size in range(len(payload)):
        with pytest.raises(ProtocolError, match=name):
            cls.decode(payload[:size])
    with pytest.raises(ProtocolError, match=name):
        cls.decode(payload + b"\0")


@pytest.mark.parametrize("cls", DECODERS)
def test_random_bytes_are_a_message_or_a_protocol_error(cls):
    size = getattr(cls, "BYTES", 40)

    @REPEATABLE
    @given(st.binary(max_size=64) | st.binary(min_size=size, max_size=size))
    def holds(data):
        try:
            message = cls.decode(data)
        except ProtocolError:
            return
        assert message.encode() == data

    holds()


@pytest.mark.parametrize("cls", [cls for cls in DECODERS if issubclass(cls, FixedMessage) and cls.FIELDS])
def test_each_integer_of_each_message_is_range_checked(cls):
    """Every field in turn gets every extreme value; the message then holds it, or the error names it."""
    good = CHUNK if cls is ChunkHeader else EXAMPLES[cls.TYPE.name][0]
    values = list(struct.unpack("<" + "".join(f.code for f in cls.FIELDS), good.encode()))
    for index, field in enumerate(cls.FIELDS):
        bits = 8 * struct.calcsize("<" + field.code)
        for extreme in (0, 1, 2 ** (bits - 1), 2**bits - 1):
            changed = [*values[:index], extreme, *values[index + 1 :]]
            data = struct.pack("<" + "".join(f.code for f in cls.FIELDS), *changed)
            try:
                message = cls.decode(data)
            except ProtocolError as error:
                assert field.name in str(error)  # noqa: PT017  (both outcomes are right)
            else:
                assert message.encode() == data


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: PullRequest(fragment=0, step=1, attempt=0), "PULL_REQ: attempt 0"),
        (lambda: attrs.evolve(PUSH, attempt=0), "PUSH_FRAGMENT: attempt 0"),
        (lambda: attrs.evolve(PUSH, c_tokens=COUNTER_MAX + 1), "c_tokens 9007199254740992"),
        (lambda: attrs.evolve(PUSH, c_steps=-1), "c_steps -1"),
        (lambda: Heartbeat(learner=2**32, local_step=0), "learner 4294967296"),
        (lambda: DataHello(learner=0, generation=0, stream=1), "generation 0"),
        (lambda: DataHello(learner=0, generation=1, stream=0), "stream 0"),
        (lambda: DataHello(learner=0, generation=1, stream=257), "stream 257 must be 1 to 256"),
        (lambda: ChunkHeader(message_id=0, total=13, offset=0), "total 13"),
        (lambda: ChunkHeader(message_id=0, total=MESSAGE_BYTES_MAX + 1, offset=0), "total"),
        (lambda: ChunkHeader(message_id=0, total=SLICE_BYTES, offset=SLICE_BYTES), "below total"),
        (lambda: ChunkHeader(message_id=0, total=2 * SLICE_BYTES, offset=1), "multiple of 4194304"),
        (lambda: FinalManifest(step=1, versions=()), "count 0"),
        (lambda: FinalManifest(step=1, versions=(1, COUNTER_MAX + 1)), "version 9007199254740992"),
        (lambda: BudgetDone(local_steps=COUNTER_MAX + 1), "local_steps"),
    ],
)
def test_an_illegal_message_cannot_be_made(make, reason):
    with pytest.raises(ProtocolError, match=reason):
        make()


def test_version_and_revision_are_checked():
    with pytest.raises(ProtocolError, match="DATA_HELLO: version 5 must be 4"):
        DataHello.decode(bytes.fromhex("0500 01000000 0100000000000000 0100"))
    with pytest.raises(ProtocolError, match="FINAL_MANIFEST: revision 2 must be 1"):
        FinalManifest.decode(bytes.fromhex("0200 0800000000000000 01000000 0100000000000000"))


def test_a_final_manifest_with_an_absurd_count_takes_no_memory_for_it():
    data = bytes.fromhex("0100 0800000000000000 ffffffff") + bytes(80)
    with pytest.raises(ProtocolError, match="truncated, version at byte 14 needs 34359738360 bytes"):
        FinalManifest.decode(data)


def test_an_error_is_cut_at_a_character():
    text = "é" * ERROR_BYTES_MAX
    data = ErrorMessage(text=text).encode()
    assert len(data) <= ERROR_BYTES_MAX
    assert ErrorMessage.decode(data).text == text[: ERROR_BYTES_MAX // 2]
    odd = ErrorMessage(text="x" + text).encode()
    assert len(odd) == ERROR_BYTES_MAX - 1
    with pytest.raises(ProtocolError, match="ERROR: 65537 bytes"):
        ErrorMessage.decode(bytes(ERROR_BYTES_MAX + 1))
    with pytest.raises(ProtocolError, match="not UTF-8 at byte 1"):
        ErrorMessage.decode(b"a\xff")


def test_lengths_beyond_4_gib():
    """A fragment of 6 GiB: nothing of that size is made, its frame and slices are right."""
    tensor_bytes = 6 * 2**30
    header = decode_header(encode_frame(InitHeader(fragment=3), tensor_bytes)[:HEADER_BYTES])
    assert header.length == 4 + tensor_bytes
    total = HEADER_BYTES + header.length
    last = ChunkHeader(message_id=9, total=total, offset=1536 * SLICE_BYTES)
    assert ChunkHeader.decode(last.encode()) == last
    assert last.slice_bytes == 17
    assert ChunkHeader(message_id=9, total=total, offset=1535 * SLICE_BYTES).slice_bytes == SLICE_BYTES


def test_bounds_of_the_session():
    check_bounds(PUSH, learner=1, num_fragments=3)
    check_bounds(Shutdown(), learner=1, num_fragments=3)
    with pytest.raises(ProtocolError, match="PUSH_FRAGMENT: learner 1 on the connection of learner 0"):
        check_bounds(PUSH, learner=0)
    with pytest.raises(ProtocolError, match="PUSH_FRAGMENT: fragment 2 must be below 2"):
        check_bounds(PUSH, num_fragments=2)


@pytest.mark.parametrize("cls", DECODERS)
def test_a_pickle_is_no_message(cls):
    """Nothing on the wire is ever unpickled: a pickle is refused like any other bytes."""

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    with pytest.raises(ProtocolError):
        cls.decode(pickle.dumps(Bomb(), protocol=4))


@REPEATABLE
@given(u64)
def test_generation_text_keeps_all_bits(generation):
    text = format_generation(generation)
    assert len(text) == 16
    assert int(text, 16) == generation
    assert text == text.lower()


def test_generation_text_example():
    assert format_generation(GENERATION) == "0123456789abcdef"
    assert PushHeader.TYPE is MessageType.PUSH_FRAGMENT
