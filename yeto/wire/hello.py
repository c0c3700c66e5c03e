"""HELLO: what a learner states about itself and the session it means to join.

The first frame on a control stream. It carries everything the two ends must agree on (dtype, sizes and modes
of all tensors, fingerprint of their names and shapes, contract of the experiment), so that a wrong learner
is refused before the first tensor moves. It is authenticated as a whole before it is parsed.

The layout in it has no names: those are in the fingerprint, and in the training manifest for people.
"""

from __future__ import annotations

import math
import struct
from typing import ClassVar, Final

from attrs import frozen

from yeto.errors import ProtocolError
from yeto.wire.auth import authenticated_body, hello_mac
from yeto.wire.codecs import DTYPE_NUMBERS
from yeto.wire.frames import PROTOCOL_VERSION, WAN_STREAMS_MAX, BytesLike, MessageType
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec
from yeto.wire.messages import FRAGMENT_NUMEL_MAX
from yeto.wire.reader import Reader

HELLO_BYTES_MAX: Final = 16 * 1024 * 1024
"""Largest first frame: a layout of ``TENSORS_MAX`` matrices takes 6 MiB, anything larger is no HELLO."""

TENSORS_MAX: Final = 2**18
"""Tensors of a layout, all fragments together: several times the unfused experts of the largest models;
bounds what one HELLO can make the syncer build before it is judged."""

FRAGMENTS_MAX: Final = 4096
"""Fragments of a layout: more than a round for each layer of any model; bounds how long one HELLO can hold up
everybody else's sockets."""

HASH_BYTES: Final = 32
"""Size of fingerprint, contract and profile."""

_MODES: Final = {int(mode): mode for mode in MergeMode}
_NAMES: Final = {number: name for name, number in DTYPE_NUMBERS.items()}


@frozen(kw_only=True)
class HelloFragment:
    """One fragment as HELLO states it: mode and sizes."""

    mode: MergeMode
    numels: tuple[int, ...]
    """Elements of each tensor."""
    matrices: tuple[tuple[int, int], ...] = ()
    """Rows and columns of each tensor; stated for mode iso only."""

    def __attrs_post_init__(self) -> None:
        if not self.numels:
            raise ProtocolError("HELLO: T 0, a fragment has at least one tensor")
        if min(self.numels) < 1:
            raise ProtocolError("HELLO: numel must be at least 1")
        if self.numel > FRAGMENT_NUMEL_MAX:
            raise ProtocolError(f"HELLO: numel {self.numel} of a fragment is above {FRAGMENT_NUMEL_MAX}")
        if self.mode is MergeMode.ISO:
            if tuple(rows * columns for rows, columns in self.matrices) != self.numels:
                raise ProtocolError("HELLO: rows x cols must be numel for every tensor of an iso fragment")
        elif self.matrices:
            raise ProtocolError(f"HELLO: rows and cols do not belong to mode {self.mode.name.lower()}")

    @property
    def numel(self) -> int:
        """Elements of the whole fragment."""
        return sum(self.numels)


@frozen(kw_only=True)
class HelloLayout:
    """All fragments as HELLO states them."""

    fragments: tuple[HelloFragment, ...]

    def __attrs_post_init__(self) -> None:
        if not self.fragments:
            raise ProtocolError("HELLO: P 0, a session has at least one fragment")
        _check_count(len(self.fragments))
        count = sum(len(fragment.numels) for fragment in self.fragments)
        if count > TENSORS_MAX:
            raise ProtocolError(f"HELLO: {count} tensors, at most {TENSORS_MAX} are allowed")

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each fragment."""
        return tuple(fragment.numel for fragment in self.fragments)

    @classmethod
    def of(cls, layout: Layout) -> HelloLayout:
        """Return what HELLO states of a layout.

        Raises:
            ProtocolError: a size that HELLO cannot carry, or a tensor of an iso fragment that is no matrix.
        """
        return cls(fragments=tuple(_stated(fragment) for fragment in layout.fragments))

    def as_layout(self) -> Layout:
        """Return these sizes as a layout whose tensors have no names, for code that merges."""
        return Layout(
            fragments=tuple(
                FragmentLayout(
                    mode=fragment.mode,
                    tensors=tuple(
                        TensorSpec(name="", shape=shape)
                        for shape in (fragment.matrices or ((numel,) for numel in fragment.numels))
                    ),
                )
                for fragment in self.fragments
            )
        )


@frozen(kw_only=True)
class Hello:
    """First frame of a control stream, learner to syncer."""

    TYPE: ClassVar = MessageType.HELLO

    learner: int
    generation: int
    """Drawn anew, not 0, for each dial of the whole group."""
    dtype: str
    """Session dtype: ``f32``, ``bf16`` or ``q4``."""
    layout: HelloLayout
    fingerprint: bytes
    """32 bytes, see ``yeto.wire.fingerprint``."""
    contract: bytes
    """32 bytes, see ``yeto.wire.contract``."""
    num_streams: int
    """Data streams S that will follow, 0 to 256."""
    profile: bytes | None = None
    """32 bytes: hash of the syncer's settings that the learner insists on."""

    def __attrs_post_init__(self) -> None:
        if self.dtype not in DTYPE_NUMBERS:
            raise ProtocolError(f"HELLO: dtype {self.dtype} must be one of {', '.join(DTYPE_NUMBERS)}")
        for name, value, least, most in (
            ("learner", self.learner, 0, 2**32 - 1),
            ("generation", self.generation, 1, 2**64 - 1),
            ("num_streams", self.num_streams, 0, WAN_STREAMS_MAX),
        ):
            if not least <= value <= most:
                raise ProtocolError(f"HELLO: {name} {value} must be {least} to {most}")
        for name, hashed in (
            ("fingerprint", self.fingerprint),
            ("session_contract", self.contract),
            ("profile", self.profile),
        ):
            if hashed is not None and len(hashed) != HASH_BYTES:
                raise ProtocolError(f"HELLO: {name} has {len(hashed)} bytes instead of {HASH_BYTES}")

    def encode(self, key: bytes | None = None) -> bytes:
        """Return the payload, with a mac when there is a key."""
        body = b"".join(
            (
                struct.pack("<HIQ", PROTOCOL_VERSION, self.learner, self.generation),
                struct.pack("<BI", DTYPE_NUMBERS[self.dtype], len(self.layout.fragments)),
                *(_encode_fragment(fragment) for fragment in self.layout.fragments),
                self.fingerprint,
                self.contract,
                self.profile or b"",
                struct.pack("<H", self.num_streams),
            )
        )
        return body if key is None else body + hello_mac(key, body)

    @classmethod
    def decode(cls, payload: BytesLike, key: bytes | None = None) -> Hello:
        """Verify the mac when there is a key, then read the fields.

        Args:
            payload: the whole payload.
            key: the session's key; None expects a HELLO without mac.

        Raises:
            AuthenticationError: the mac is wrong or missing.
            ProtocolError: anything else; the message names the field.
        """
        if len(payload) > HELLO_BYTES_MAX:
            raise ProtocolError(f"HELLO: {len(payload)} bytes, at most {HELLO_BYTES_MAX} are allowed")
        reader = Reader(payload if key is None else authenticated_body(key, payload), "HELLO")
        version = reader.u16("version")
        if version != PROTOCOL_VERSION:
            raise ProtocolError(f"HELLO: version {version} must be {PROTOCOL_VERSION}")
        learner = reader.u32("learner")
        generation = reader.u64("generation")
        dtype = reader.u8("dtype")
        if dtype not in _NAMES:
            raise ProtocolError(f"HELLO: dtype {dtype} must be one of {', '.join(map(str, _NAMES))}")
        layout = _decode_layout(reader)
        fingerprint = bytes(reader.raw(HASH_BYTES, "fingerprint"))
        contract = bytes(reader.raw(HASH_BYTES, "session_contract"))
        profile = bytes(reader.raw(HASH_BYTES, "profile")) if reader.remaining > 2 else None
        num_streams = reader.u16("num_streams")
        reader.finish()
        return cls(
            learner=learner,
            generation=generation,
            dtype=_NAMES[dtype],
            layout=layout,
            fingerprint=fingerprint,
            contract=contract,
            num_streams=num_streams,
            profile=profile,
        )


def _stated(fragment: FragmentLayout) -> HelloFragment:
    shapes = tuple(tensor.shape for tensor in fragment.tensors)
    matrices = []
    if fragment.mode is MergeMode.ISO:
        for tensor in fragment.tensors:
            if len(tensor.shape) != 2:
                raise ProtocolError(f"HELLO: {tensor.name} {tensor.shape} is no matrix, as iso wants it")
            matrices.append((tensor.shape[0], tensor.shape[1]))
    return HelloFragment(
        mode=fragment.mode, numels=tuple(math.prod(shape) for shape in shapes), matrices=tuple(matrices)
    )


def _encode_fragment(fragment: HelloFragment) -> bytes:
    count = len(fragment.numels)
    sides = [side for matrix in fragment.matrices for side in matrix]
    return struct.pack(f"<BI{count + len(sides)}Q", fragment.mode, count, *fragment.numels, *sides)


def _check_count(fragments: int) -> None:
    if fragments > FRAGMENTS_MAX:
        raise ProtocolError(f"HELLO: P {fragments}, at most {FRAGMENTS_MAX} fragments are allowed")


def _decode_layout(reader: Reader) -> HelloLayout:
    count = reader.u32("P")
    _check_count(count)
    tensors = 0
    fragments = []
    for _ in range(count):
        # A count that lies is found at the first fragment that is not there, before memory is taken for it.
        number = reader.u8("mode")
        mode = _MODES.get(number)
        if mode is None:
            raise ProtocolError(f"HELLO: mode {number} must be one of {', '.join(map(str, _MODES))}")
        length = reader.u32("T")
        tensors += length
        if tensors > TENSORS_MAX:
            raise ProtocolError(f"HELLO: T, more than {TENSORS_MAX} tensors")
        numels = reader.u64s(length, "numel")
        matrices: tuple[tuple[int, int], ...] = ()
        if mode is MergeMode.ISO:
            sides = reader.u64s(2 * length, "rows and cols")
            matrices = tuple(zip(sides[0::2], sides[1::2], strict=True))
        fragments.append(HelloFragment(mode=mode, numels=numels, matrices=matrices))
    return HelloLayout(fragments=tuple(fragments))
