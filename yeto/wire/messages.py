"""The messages, except HELLO: a frozen class each, whose existence means that its fields are in range.

A message checks itself when it is made, so a decoder cannot hand out an illegal one and an encoder cannot
send one. Tensors are no part of these classes: INIT, PUSH, BCAST and FINAL_FRAGMENT are a *head* of fixed
size followed by tensor bytes, which travel beside the head and are never copied for its sake.

Counters (steps, versions, tokens) are u64 on the wire but must stay below 2**53: the tape keeps them as JSON
numbers, which lose bits above that, and no honest run gets there. Fields that only a session can judge
(is this learner's id its own, does this fragment exist) are judged by ``check_bounds``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import ClassVar, Final, Self, TypeAlias

from attrs import frozen

from yeto.errors import ProtocolError
from yeto.wire.frames import (
    HEADER_BYTES,
    PROTOCOL_VERSION,
    SLICE_BYTES,
    WAN_STREAMS_MAX,
    BytesLike,
    MessageType,
)
from yeto.wire.reader import Reader

COUNTER_MAX: Final = 2**53 - 1
"""Largest step, version or token count: the largest integer that every JSON reader keeps exact."""

FRAGMENT_NUMEL_MAX: Final = 2**40
"""Elements of one fragment: 4 TiB of f32, beyond any host, and far from overflowing a u64 length."""

MESSAGE_BYTES_MAX: Final = HEADER_BYTES + 48 + 4 * FRAGMENT_NUMEL_MAX
"""Largest inner frame that slices can belong to: the longest head and the largest f32 fragment."""

ERROR_BYTES_MAX: Final = 64 * 1024
"""Text of an ERROR: a sentence with two long values, not a log."""

FINAL_REVISION: Final = 1
"""Revision of the final-cut messages."""

_U32_MAX: Final = 2**32 - 1
_U64_MAX: Final = 2**64 - 1


@frozen
class Field:
    """One integer on the wire: its name, its struct code and the values it may have."""

    name: str
    code: str
    least: int
    most: int
    constant: bool = False
    """Whether the field has one legal value and therefore no attribute."""


def _u32(name: str, least: int = 0) -> Field:
    return Field(name, "I", least, _U32_MAX)


def _counter(name: str, least: int = 0) -> Field:
    return Field(name, "Q", least, COUNTER_MAX)


def _constant(name: str, code: str, value: int) -> Field:
    return Field(name, code, value, value, constant=True)


class FixedMessage:
    """Base of the messages and heads that are a fixed row of integers, given by ``FIELDS``."""

    __slots__ = ()

    TYPE: ClassVar[MessageType]
    FIELDS: ClassVar[tuple[Field, ...]]
    BYTES: ClassVar[int]
    """Size of the encoded fields."""
    _PACKER: ClassVar[struct.Struct]
    _CONSTANTS: ClassVar[tuple[int, ...]]
    """Values of the constant fields, which come first."""
    _VARIABLE: ClassVar[tuple[Field, ...]]

    def __init_subclass__(cls) -> None:
        cls._PACKER = struct.Struct("<" + "".join(field.code for field in cls.FIELDS))
        cls.BYTES = cls._PACKER.size
        cls._CONSTANTS = tuple(field.least for field in cls.FIELDS if field.constant)
        cls._VARIABLE = cls.FIELDS[len(cls._CONSTANTS) :]
        assert not any(field.constant for field in cls._VARIABLE), "constant fields come first"

    def __attrs_post_init__(self) -> None:
        for field in self._VARIABLE:
            if not field.least <= getattr(self, field.name) <= field.most:
                self._check(field, getattr(self, field.name))

    def encode(self) -> bytes:
        """Return the payload, or its head when a tensor follows."""
        return self._PACKER.pack(*self._CONSTANTS, *[getattr(self, field.name) for field in self._VARIABLE])

    @classmethod
    def decode(cls, payload: BytesLike) -> Self:
        """Read exactly ``BYTES`` bytes.

        Raises:
            ProtocolError: another size, or a field out of its range; the message names it.
        """
        if len(payload) != cls.BYTES:
            raise ProtocolError(f"{cls.TYPE.name}: {len(payload)} bytes instead of {cls.BYTES}")
        values = cls._PACKER.unpack(payload)
        if constants := len(cls._CONSTANTS):
            for field, value in zip(cls.FIELDS, values[:constants], strict=False):
                cls._check(field, value)
            values = values[constants:]
        return cls(**{field.name: value for field, value in zip(cls._VARIABLE, values, strict=True)})

    @classmethod
    def _check(cls, field: Field, value: int) -> None:
        if not field.least <= value <= field.most:
            wanted = str(field.least) if field.constant else f"{field.least} to {field.most}"
            raise ProtocolError(f"{cls.TYPE.name}: {field.name} {value} must be {wanted}")


@frozen(kw_only=True)
class InitHeader(FixedMessage):
    """Head of INIT_PARAMS, learner to syncer; the fragment's initial value in the bulk dtype follows."""

    TYPE = MessageType.INIT_PARAMS
    FIELDS = (_u32("fragment"),)

    fragment: int


@frozen(kw_only=True)
class PullRequest(FixedMessage):
    """Syncer to learner: answer round ``step`` on ``fragment``, as attempt ``attempt``."""

    TYPE = MessageType.PULL_REQ
    FIELDS = (_u32("fragment"), _counter("step"), _u32("attempt", least=1))

    fragment: int
    step: int
    attempt: int


@frozen(kw_only=True)
class PushHeader(FixedMessage):
    """Head of PUSH_FRAGMENT, learner to syncer; local minus raw anchor in the session dtype follows."""

    TYPE = MessageType.PUSH_FRAGMENT
    FIELDS = (
        _u32("learner"),
        _u32("fragment"),
        _counter("step"),
        _u32("attempt", least=1),
        _counter("base_version"),
        _counter("local_step"),
        _u32("c_steps"),
        _counter("c_tokens"),
    )

    learner: int
    fragment: int
    step: int
    """Round that is answered."""
    attempt: int
    base_version: int
    """Version of the raw anchor that was subtracted."""
    local_step: int
    c_steps: int
    """Optimizer steps since that anchor was received."""
    c_tokens: int
    """Tokens since that anchor was received."""


@frozen(kw_only=True)
class BroadcastHeader(FixedMessage):
    """Head of BCAST_FRAGMENT, syncer to learner; the fragment in the bulk dtype follows."""

    TYPE = MessageType.BCAST_FRAGMENT
    FIELDS = (_u32("fragment"), _counter("version"))

    fragment: int
    version: int


@frozen(kw_only=True)
class Heartbeat(FixedMessage):
    """Learner to syncer: alive, and at this local step."""

    TYPE = MessageType.HEARTBEAT
    FIELDS = (_u32("learner"), _counter("local_step"))

    learner: int
    local_step: int


@frozen(kw_only=True)
class Shutdown(FixedMessage):
    """Syncer to learner: the final cut is acknowledged, the session is over."""

    TYPE = MessageType.SHUTDOWN
    FIELDS = ()


@frozen(kw_only=True)
class DataHello(FixedMessage):
    """First frame of a data stream: which group it belongs to, and as which of its streams."""

    TYPE = MessageType.DATA_HELLO
    FIELDS = (
        _constant("version", "H", PROTOCOL_VERSION),
        _u32("learner"),
        Field("generation", "Q", 1, _U64_MAX),
        Field("stream", "H", 1, WAN_STREAMS_MAX),
    )

    learner: int
    generation: int
    stream: int
    """1 to S; stream 0 is the control stream and says HELLO."""


@frozen(kw_only=True)
class ChunkHeader(FixedMessage):
    """Head of CHUNK, both ways; one slice of an inner frame follows."""

    TYPE = MessageType.CHUNK
    FIELDS = (
        Field("message_id", "Q", 0, _U64_MAX),
        Field("total", "Q", HEADER_BYTES + 1, MESSAGE_BYTES_MAX),
        Field("offset", "Q", 0, MESSAGE_BYTES_MAX - 1),
    )

    message_id: int
    total: int
    """Bytes of the whole inner frame, its header included."""
    offset: int
    """Where the slice lies in the inner frame."""

    def __attrs_post_init__(self) -> None:
        super(ChunkHeader, self).__attrs_post_init__()  # noqa: UP008  (slots make a second class)
        if self.offset >= self.total:
            raise ProtocolError(f"CHUNK: offset {self.offset} must lie below total {self.total}")
        if self.offset % SLICE_BYTES:
            raise ProtocolError(f"CHUNK: offset {self.offset} must be a multiple of {SLICE_BYTES}")

    @property
    def slice_bytes(self) -> int:
        """Size that the slice at this offset must have: 4 MiB, or what is left of the message."""
        return min(SLICE_BYTES, self.total - self.offset)


@frozen(kw_only=True)
class FinalAck(FixedMessage):
    """Learner to syncer: the final cut of this step is taken and saved."""

    TYPE = MessageType.FINAL_ACK
    FIELDS = (_constant("revision", "H", FINAL_REVISION), _counter("step"))

    step: int


@frozen(kw_only=True)
class FinalFragmentHeader(FixedMessage):
    """Head of FINAL_FRAGMENT, syncer to learner; the fragment follows, always as f32."""

    TYPE = MessageType.FINAL_FRAGMENT
    FIELDS = (_u32("fragment"), _counter("version"))

    fragment: int
    version: int


@frozen(kw_only=True)
class BudgetDone(FixedMessage):
    """Learner to syncer: the budget of local steps is used up, the weights are frozen."""

    TYPE = MessageType.BUDGET_DONE
    FIELDS = (_counter("local_steps"),)

    local_steps: int


@frozen(kw_only=True)
class FinalManifest:
    """Syncer to learner: the step of the final cut and the version of every fragment in it."""

    TYPE: ClassVar = MessageType.FINAL_MANIFEST
    HEAD_BYTES: ClassVar = 14

    step: int
    versions: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        if not self.versions:
            raise ProtocolError("FINAL_MANIFEST: count 0 must be at least 1")
        for name, value in (("step", self.step), ("version", max(self.versions))):
            if not 0 <= value <= COUNTER_MAX:
                raise ProtocolError(f"FINAL_MANIFEST: {name} {value} must be 0 to {COUNTER_MAX}")

    def encode(self) -> bytes:
        """Return the payload, 14 + 8 bytes a fragment."""
        count = len(self.versions)
        return struct.pack(f"<HQI{count}Q", FINAL_REVISION, self.step, count, *self.versions)

    @classmethod
    def decode(cls, payload: BytesLike) -> FinalManifest:
        """Read the payload.

        Raises:
            ProtocolError: truncated, too long, another revision, or a field out of range.
        """
        reader = Reader(payload, "FINAL_MANIFEST")
        revision = reader.u16("revision")
        if revision != FINAL_REVISION:
            raise ProtocolError(f"FINAL_MANIFEST: revision {revision} must be {FINAL_REVISION}")
        step = reader.u64("step")
        versions = reader.u64s(reader.u32("count"), "version")
        reader.finish()
        return cls(step=step, versions=versions)


@frozen(kw_only=True)
class ErrorMessage:
    """Syncer to learner: why this client is refused for good."""

    TYPE: ClassVar = MessageType.ERROR

    text: str

    def encode(self) -> bytes:
        """Return the text as UTF-8, cut at a character when it is longer than an ERROR may be."""
        data = self.text.encode("utf-8", errors="replace")
        return data[:ERROR_BYTES_MAX].decode("utf-8", errors="ignore").encode("utf-8")

    @classmethod
    def decode(cls, payload: BytesLike) -> ErrorMessage:
        """Read the text.

        Raises:
            ProtocolError: too long, or not UTF-8.
        """
        if len(payload) > ERROR_BYTES_MAX:
            raise ProtocolError(f"ERROR: {len(payload)} bytes, at most {ERROR_BYTES_MAX} are allowed")
        try:
            return cls(text=str(payload, "utf-8"))
        except UnicodeDecodeError as error:
            raise ProtocolError(f"ERROR: text is not UTF-8 at byte {error.start}") from error


TensorHead: TypeAlias = InitHeader | PushHeader | BroadcastHeader | FinalFragmentHeader
"""Heads that a tensor follows; the messages that may be cut into slices."""

TENSOR_HEADS: Final[Mapping[MessageType, type[TensorHead]]] = {
    head.TYPE: head for head in (InitHeader, PushHeader, BroadcastHeader, FinalFragmentHeader)
}
"""Head class of each message that carries a tensor."""


def check_bounds(
    message: FixedMessage, *, learner: int | None = None, num_fragments: int | None = None
) -> None:
    """Check the fields that only the session can judge; identity comes from it, not from the message.

    Args:
        message: a decoded message or head; fields it does not have are not checked.
        learner: id that the group's HELLO stated.
        num_fragments: P of the session.

    Raises:
        ProtocolError: the message speaks for another learner, or of a fragment that does not exist.
    """
    stated = getattr(message, "learner", None)
    if learner is not None and stated is not None and stated != learner:
        raise ProtocolError(f"{message.TYPE.name}: learner {stated} on the connection of learner {learner}")
    fragment = getattr(message, "fragment", None)
    if num_fragments is not None and fragment is not None and fragment >= num_fragments:
        raise ProtocolError(
            f"{message.TYPE.name}: fragment {fragment} must be below {num_fragments}, the session's fragments"
        )


def format_generation(generation: int) -> str:
    """Return a generation as the coordinator and the tape write it: 16 lowercase hex digits."""
    return f"{generation:016x}"
