"""Frames between the syncer and an SVD worker: 48 bytes that say what follows, before anything is allocated.

::

    magic "YETOISO1" | version u32 | code u32 | request u64 | rows u64 | cols u64 | payload bytes u64

little-endian; then the payload. A request has code 0 and the matrix, f32 row-major. An answer repeats the
number of its request; with code 0 it has a matrix of the same shape, with any other no rows, no columns and a
sentence in UTF-8. One request is on its way at a time, so neither end needs a queue.

Both ends use these functions, and neither trusts the other. A request that is whole but wrong is answered and
forgotten: its payload is passed over, never kept. An answer that is wrong in any way ends the worker.

No I/O, no tensors: bytes to values and back.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from attrs import frozen

from yeto.errors import ProtocolError
from yeto.wire.frames import BytesLike

MAGIC: Final = b"YETOISO1"
VERSION: Final = 1
HEADER_BYTES: Final = 48
ELEMENT_BYTES: Final = 4

FRAME_BYTES_MAX: Final = 2 << 30
"""Default of the largest matrix: 16,384 x 32,768, more than any layer of today's models."""

MESSAGE_BYTES_MAX: Final = 4096
"""Longest sentence of an answer: a traceback's last lines, not a dump."""

_ISOTROPIC: Final = 0
"""Code of the only request there is: the isotropic merge of the matrix."""

_HEADER = struct.Struct("<8sIIQQQQ")
assert _HEADER.size == HEADER_BYTES


class Code(IntEnum):
    """What an answer says; the numbers are those of the frame."""

    OK = 0
    MALFORMED = 1
    UNSUPPORTED = 2
    BAD_SHAPE = 3
    BAD_LENGTH = 4
    NOT_FINITE = 5
    """The matrix that was sent is not."""
    FAILED = 6
    """The decomposition, or the device it should run on."""
    RESULT_NOT_FINITE = 7
    TOO_LARGE = 8

    @property
    def words(self) -> str:
        """The code as a person says it."""
        return self.name.lower().replace("_", " ")


_CODES: Final = {int(code): code for code in Code}


@frozen(kw_only=True)
class Request:
    """A matrix that is to be merged; its payload follows."""

    number: int
    rows: int
    cols: int

    @property
    def payload_bytes(self) -> int:
        """Size of the matrix."""
        return ELEMENT_BYTES * self.rows * self.cols


@frozen(kw_only=True)
class Refusal:
    """A request that gets no matrix: why, and how many bytes follow it all the same."""

    number: int
    code: Code
    message: str
    payload_bytes: int


@frozen(kw_only=True)
class Answer:
    """The beginning of an answer that belongs to the request: a matrix, or a sentence, follows."""

    code: Code
    payload_bytes: int


def encode_matrix_header(number: int, rows: int, cols: int) -> bytes:
    """Return what precedes a matrix: in a request, and in an answer of code 0 alike."""
    return _HEADER.pack(MAGIC, VERSION, Code.OK, number, rows, cols, ELEMENT_BYTES * rows * cols)


def encode_refusal(number: int, code: Code, message: str) -> bytes:
    """Return a whole answer without a matrix; the sentence is cut to ``MESSAGE_BYTES_MAX``."""
    text = message.encode("utf-8", "replace")[:MESSAGE_BYTES_MAX].decode("utf-8", "ignore").encode()
    return _HEADER.pack(MAGIC, VERSION, code, number, 0, 0, len(text)) + text


def decode_request(data: BytesLike, *, frame_bytes_max: int) -> Request | Refusal:
    """Judge the header of a request; every limit is looked at here, before there is a buffer.

    Args:
        data: exactly ``HEADER_BYTES`` bytes.
        frame_bytes_max: largest matrix, in bytes.
    """
    magic, version, code, number, rows, cols, payload_bytes = _HEADER.unpack(data)
    needed = ELEMENT_BYTES * rows * cols
    checks = (
        (magic == MAGIC, Code.MALFORMED, f"magic {magic!r} instead of {MAGIC!r}"),
        (version == VERSION, Code.UNSUPPORTED, f"version {version}; this worker speaks {VERSION}"),
        (code == _ISOTROPIC, Code.UNSUPPORTED, f"request code {code}; this worker knows {_ISOTROPIC}"),
        (rows > 0 and cols > 0, Code.BAD_SHAPE, f"a matrix of {rows} x {cols}"),
        (
            payload_bytes == needed,
            Code.BAD_LENGTH,
            f"{payload_bytes} bytes for a matrix of {rows} x {cols}, which has {needed}",
        ),
        (payload_bytes <= frame_bytes_max, Code.TOO_LARGE, too_large(rows, cols, frame_bytes_max)),
    )
    for good, refused, message in checks:
        if not good:
            return Refusal(number=number, code=refused, message=message, payload_bytes=payload_bytes)
    return Request(number=number, rows=rows, cols=cols)


def too_large(rows: int, cols: int, frame_bytes_max: int) -> str:
    """Return the sentence about a matrix above the limit."""
    mib = ELEMENT_BYTES * rows * cols / 2**20
    return (
        f"a matrix of {rows} x {cols} takes {mib:,.0f} MiB, the limit is {frame_bytes_max / 2**20:,.0f}; "
        "raise --iso-worker-frame-mib"
    )


def require_magic(start: BytesLike) -> None:
    """Check the first bytes of an answer as soon as they are there, be they one or all eight.

    Raises:
        ProtocolError: no answer begins like this; something else writes to the pipe.
    """
    seen = bytes(start[: len(MAGIC)])
    if not MAGIC.startswith(seen):
        raise ProtocolError(f"it wrote {bytes(start)!r}, which no answer begins with")


def decode_answer(data: BytesLike, request: Request) -> Answer:
    """Judge the header of an answer.

    Args:
        data: exactly ``HEADER_BYTES`` bytes.
        request: what was asked.

    Raises:
        ProtocolError: it is not an answer to this request.
    """
    require_magic(data)
    _, version, number, answered, rows, cols, payload_bytes = _HEADER.unpack(data)
    if version != VERSION:
        raise ProtocolError(f"it speaks version {version} instead of {VERSION}; install the same Yeto there")
    code = _CODES.get(number)
    if code is None:
        raise ProtocolError(f"it answered with the unknown code {number}")
    if answered != request.number:
        raise ProtocolError(f"it answered request {answered}")
    shape = (request.rows, request.cols) if code is Code.OK else (0, 0)
    if (rows, cols) != shape:
        raise ProtocolError(f"it answered with a matrix of {rows} x {cols}")
    fits = payload_bytes == request.payload_bytes if code is Code.OK else payload_bytes <= MESSAGE_BYTES_MAX
    if not fits:
        raise ProtocolError(f"it answered with {payload_bytes} bytes and the code {code.words}")
    return Answer(code=code, payload_bytes=payload_bytes)


def decode_message(data: BytesLike) -> str:
    """Return the sentence of an answer without a matrix.

    Raises:
        ProtocolError: it is not UTF-8.
    """
    try:
        return bytes(data).decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"it answered with a sentence that is not UTF-8 ({error.reason})") from error
