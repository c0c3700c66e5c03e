"""What is fuzzed: every place where bytes of a peer become something else.

A target takes any bytes. It returns when they were taken or refused as they should be; whatever it raises is
a bug. What was taken must say the same when it is written again: a decoder that understands more than its
encoder can say has two spellings of one thing.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator

import numpy as np

from yeto.errors import ProtocolError
from yeto.wire import bf16, f32, messages, q4, striping
from yeto.wire.auth import hello_mac
from yeto.wire.contract import TrainingManifest, canonical_json
from yeto.wire.errors import AuthenticationError, NonFiniteError
from yeto.wire.frames import HEADER_BYTES, MessageType, decode_header, encode_header
from yeto.wire.hello import Hello
from yeto.wire.legality import (
    HANDSHAKE,
    Legality,
    TensorSizes,
    client_control,
    client_data,
    server_control,
    server_data,
    server_inner,
)
from yeto.wire.messages import TENSOR_HEADS, ChunkHeader, TensorHead, check_bounds
from yeto.wire.striping import Assembler

KEY = b"not a secret"
SIZES = TensorSizes(bulk=(8, 400), delta=(8, 400), final=(16, 800))
"""A session of two fragments, small enough that a fuzzer finds whole messages."""
SLICE = 128
"""Bytes of a slice here: room for every head, and messages of several."""
EARLY_BYTES_MAX = 4 * SLICE

PLACES = (
    HANDSHAKE,
    server_control(SIZES, learner=0),
    server_control(SIZES, learner=1),
    server_data(SIZES, learner=0),
    server_inner(SIZES, learner=1),
    client_control(SIZES),
    client_data(SIZES),
)
MESSAGES = (
    messages.InitHeader,
    messages.PullRequest,
    messages.PushHeader,
    messages.BroadcastHeader,
    messages.Heartbeat,
    messages.Shutdown,
    messages.DataHello,
    messages.ChunkHeader,
    messages.FinalAck,
    messages.FinalFragmentHeader,
    messages.BudgetDone,
    messages.FinalManifest,
    messages.ErrorMessage,
)
CODECS = (f32, bf16, q4)


def header(data: bytes) -> None:
    """A frame header, held against the table of every place."""
    try:
        decoded = decode_header(data)
    except ProtocolError:
        return
    assert encode_header(decoded.type, decoded.length) == data
    for place in PLACES:
        try:
            place.check(decoded)
        except ProtocolError:
            continue
        least, most = place.lengths[decoded.type]
        assert least <= decoded.length <= most


def message(data: bytes) -> None:
    """A message of the type that the first byte chooses, and what the session says of it."""
    cls = MESSAGES[data[0] % len(MESSAGES)] if data else messages.Shutdown
    payload = data[1:]
    try:
        decoded = cls.decode(payload)
    except ProtocolError:
        return
    assert decoded.encode() == payload
    if isinstance(decoded, messages.FixedMessage):
        with contextlib.suppress(ProtocolError):
            check_bounds(decoded, learner=1, num_fragments=2)


def hello(data: bytes) -> None:
    """A HELLO, without a key, with a right mac, or with whatever mac the bytes hold."""
    payload, key = data[1:], None
    if data[:1] == b"\1":
        payload, key = payload + hello_mac(KEY, payload), KEY
    elif data[:1] == b"\2":
        key = KEY
    try:
        decoded = Hello.decode(payload, key)
    except ProtocolError:
        return
    assert decoded.encode(key) == payload
    assert decoded.layout.as_layout().fragments


def wrong_key(data: bytes) -> None:
    """No bytes are authentic that were not made with the key."""
    try:
        Hello.decode(data, KEY)
    except AuthenticationError:
        return
    raise AssertionError("taken for authentic")


def manifest(data: bytes) -> None:
    """A training manifest."""
    try:
        decoded = TrainingManifest.decode(data)
    except ProtocolError:
        return
    again = TrainingManifest.decode(decoded.encode())
    assert again == decoded
    assert again.contract() == decoded.contract()
    assert canonical_json(again.binding) == canonical_json(decoded.binding)
    assert decoded.first_difference(again) is None


def tensor(data: bytes) -> None:
    """A tensor: codec, number of elements, bytes."""
    if len(data) < 3:
        return
    codec, numel, payload = CODECS[data[0] % 3], int.from_bytes(data[1:3], "little"), data[3:]
    try:
        values = codec.decode(payload, numel)
    except NonFiniteError:
        assert codec is q4
        return
    except ProtocolError:
        assert len(payload) != codec.encoded_size(numel)
        return
    assert len(payload) == codec.encoded_size(numel)
    if codec is not q4 and not np.isnan(values).any():
        assert codec.encode(values) == payload


@contextlib.contextmanager
def small_slices() -> Iterator[None]:
    """Slices of ``SLICE`` bytes for as long as the block lasts."""
    before = messages.SLICE_BYTES
    messages.SLICE_BYTES = striping.SLICE_BYTES = SLICE
    try:
        yield
    finally:
        messages.SLICE_BYTES = striping.SLICE_BYTES = before


def slices(data: bytes) -> None:
    """The frames of a data stream, as a reader takes them apart; memory is counted after each."""
    with small_slices():
        _Reader(server_data(SIZES, learner=0), data).read()


class _Reader:
    """Reads frames from bytes and puts messages together, as the inbox does from a socket."""

    def __init__(self, legal: Legality, data: bytes) -> None:
        self._legal = legal
        self._data = data
        self._assembler = Assembler(server_inner(SIZES, learner=0), early_bytes_max=EARLY_BYTES_MAX)

    def read(self) -> None:
        with contextlib.suppress(ProtocolError, EOFError):
            while True:
                frame = decode_header(self._take(HEADER_BYTES))
                self._legal.check(frame)
                if frame.type is MessageType.CHUNK:
                    self._chunk(frame.length)
                else:
                    inner = self._assembler.examine(frame)
                    self._head(inner.type, inner.head_bytes, inner.tensor_bytes)
                    self._take(inner.tensor_bytes)
                self._count()

    def _take(self, size: int) -> bytes:
        if size > len(self._data):
            raise EOFError
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def _head(self, kind: MessageType, head_bytes: int, tensor_bytes: int) -> TensorHead:
        head = TENSOR_HEADS[kind].decode(self._take(head_bytes))
        SIZES.expect(head, tensor_bytes)
        return head

    def _chunk(self, length: int) -> None:
        assembler = self._assembler
        chunk = ChunkHeader.decode(self._take(min(length, ChunkHeader.BYTES)))
        slot = assembler.claim(chunk, length - ChunkHeader.BYTES)
        if slot.is_first:
            inner = assembler.open(slot, decode_header(self._take(HEADER_BYTES)))
            head = self._head(inner.type, inner.head_bytes, inner.tensor_bytes)
            wanted = head.fragment == 0
            assembler.decide(slot, head, bytearray(inner.tensor_bytes) if wanted else None)
        target = assembler.target(slot)
        size = striping.tensor_bytes(slot)
        data = self._take(size)
        if target is not None:
            assert len(target) == size
            target[:] = data
        done = assembler.filled(slot)
        if done is not None and done.buffer is not None:
            assert len(done.buffer) == SIZES.bulk[0]

    def _count(self) -> None:
        """What a peer has sent so far is all that it can make us hold."""
        assembler = self._assembler
        assert 0 <= assembler.early_bytes <= EARLY_BYTES_MAX
        assert len(assembler.partials) <= striping.PARTIALS_MAX
        assert len(assembler._completed) < striping.ID_WINDOW


Target = Callable[[bytes], None]


def syncer_group(data: bytes) -> None:
    """A learner's connection at the syncer."""
    # Its world is heavy, and the others do without.
    import fuzz_connections

    fuzz_connections.syncer_group(data)


def learner_connection(data: bytes) -> None:
    """A syncer's connection at the learner."""
    import fuzz_connections

    fuzz_connections.learner_connection(data)


CONNECTIONS = ("syncer-group", "learner-connection")
"""Targets that are whole connections; see fuzz_connections.py."""

TARGETS: dict[str, Target] = {
    "header": header,
    "message": message,
    "hello": hello,
    "wrong-key": wrong_key,
    "manifest": manifest,
    "tensor": tensor,
    "slices": slices,
    "syncer-group": syncer_group,
    "learner-connection": learner_connection,
}
"""Name, as the corpus calls it, to target."""


# What a corpus begins with: one whole example of everything.


def _example_messages() -> Iterator[bytes]:
    examples = (
        messages.InitHeader(fragment=1),
        messages.PullRequest(fragment=1, step=7, attempt=1),
        messages.PushHeader(
            learner=1,
            fragment=1,
            step=7,
            attempt=1,
            base_version=5,
            local_step=48,
            c_steps=24,
            c_tokens=4096,
        ),
        messages.BroadcastHeader(fragment=1, version=7),
        messages.Heartbeat(learner=1, local_step=48),
        messages.Shutdown(),
        messages.DataHello(learner=1, generation=2**63, stream=1),
        messages.ChunkHeader(message_id=3, total=2**23, offset=2**22),
        messages.FinalAck(step=8),
        messages.FinalFragmentHeader(fragment=0, version=7),
        messages.BudgetDone(local_steps=400),
        messages.FinalManifest(step=8, versions=(7, 8)),
        messages.ErrorMessage(text="refused é"),
    )
    for number, example in enumerate(examples):
        assert type(example) is MESSAGES[number]
        yield bytes([number]) + example.encode()


def _example_slices() -> Iterator[bytes]:
    push, large = _example_of_push()
    with small_slices():
        pieces = [
            _chunk(number, inner, offset)
            for number, inner in enumerate((push, large, large))
            for offset in range(0, len(inner), SLICE)
        ]
    yield push
    yield b"".join(pieces)
    yield b"".join(reversed(pieces))
    yield b"".join(pieces[2:4])


def _example_of_push() -> Iterator[bytes]:
    for fragment in (0, 1):
        head = messages.PushHeader(
            learner=0,
            fragment=fragment,
            step=1,
            attempt=1,
            base_version=0,
            local_step=1,
            c_steps=1,
            c_tokens=1,
        )
        data = bytes(i % 251 for i in range(SIZES.delta[fragment]))
        yield encode_header(head.TYPE, head.BYTES + len(data)) + head.encode() + data


def _chunk(number: int, inner: bytes, offset: int) -> bytes:
    head = ChunkHeader(message_id=number, total=len(inner), offset=offset).encode()
    data = inner[offset : offset + SLICE]
    return encode_header(MessageType.CHUNK, len(head) + len(data)) + head + data


def _example_hellos() -> Iterator[bytes]:
    avg = struct.pack("<BIQQ", 0, 2, 4, 6)
    iso = struct.pack("<BIQQQ", 2, 1, 6, 2, 3)
    for dtype, fragments in ((1, (avg,)), (3, (avg, iso))):
        start = struct.pack("<HIQBI", 4, 1, 77, dtype, len(fragments))
        for profile in (b"", bytes(32)):
            body = start + b"".join(fragments) + bytes(64) + profile + struct.pack("<H", 4)
            yield b"\0" + body
            yield b"\1" + body
            yield b"\2" + body + hello_mac(KEY, body)


def _example_tensors() -> Iterator[bytes]:
    values = np.array([1.0, -0.5, 0.25, 0.0, -0.0, 1e-40, 3e38], dtype=np.float32)
    for number, codec in enumerate(CODECS):
        for numel in (0, 7, 300):
            source = np.resize(values, numel).astype(np.float32)
            yield bytes([number]) + numel.to_bytes(2, "little") + codec.encode(source)


def _example_manifests() -> Iterator[bytes]:
    yield (
        '{"binding":{"model":"é","seed":0,"lora":{"r":16,"targets":["q"]}},"merge_alpha":0.5,"fragments":'
        '[{"mode":"avg","tensors":[["a",[4]]]},{"mode":"iso","tensors":[["b",[2,3]],["c",[1,1]]]}]}'
    ).encode()
    yield b'{"binding":{},"merge_alpha":"carry","fragments":[{"mode":"rda","tensors":[["w",[]]]}]}'


def examples(name: str) -> list[bytes]:
    """Return what the corpus of a target is grown from."""
    match name:
        case "header":
            return [encode_header(kind, length) for kind in MessageType for length in (0, 12, 2**40)]
        case "message":
            return list(_example_messages())
        case "hello":
            return list(_example_hellos())
        case "wrong-key":
            return [data[1:] for data in _example_hellos() if data[0] == 0]
        case "manifest":
            return list(_example_manifests())
        case "tensor":
            return list(_example_tensors())
        case "slices":
            return list(_example_slices())
        case "syncer-group" | "learner-connection":
            import fuzz_connections

            return fuzz_connections.examples(name)
    raise ValueError(f"{name}: there is no such target")
