"""A cursor over received bytes that never reads, nor allocates, beyond what is there.

Every decoder of a variable-length payload goes through it, so truncation, trailing bytes and absurd counts
are found in one place, and the error names the field that was being read.
"""

from __future__ import annotations

import struct

from yeto.errors import ProtocolError
from yeto.wire.frames import BytesLike

_U8 = struct.Struct("<B")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Reader:
    """Reads little-endian fields one after the other.

    Args:
        data: the whole payload.
        message: the name that errors start with.
    """

    def __init__(self, data: BytesLike, message: str) -> None:
        self._data = memoryview(data)
        self._message = message
        self._offset = 0

    @property
    def remaining(self) -> int:
        """Bytes not read yet."""
        return len(self._data) - self._offset

    def u8(self, field: str) -> int:
        """Read one byte."""
        return self._scalar(_U8, field)

    def u16(self, field: str) -> int:
        """Read two bytes."""
        return self._scalar(_U16, field)

    def u32(self, field: str) -> int:
        """Read four bytes."""
        return self._scalar(_U32, field)

    def u64(self, field: str) -> int:
        """Read eight bytes."""
        return self._scalar(_U64, field)

    def u64s(self, count: int, field: str) -> tuple[int, ...]:
        """Read ``count`` u64; a count larger than the bytes that are left is refused first."""
        return struct.unpack(f"<{count}Q", self.raw(8 * count, field))

    def raw(self, size: int, field: str) -> memoryview:
        """Return the next ``size`` bytes, not copied.

        Raises:
            ProtocolError: fewer bytes are left.
        """
        if size > self.remaining:
            raise ProtocolError(
                f"{self._message}: truncated, {field} at byte {self._offset} needs {size} bytes "
                f"and {self.remaining} are left"
            )
        start = self._offset
        self._offset += size
        return self._data[start : self._offset]

    def finish(self) -> None:
        """Refuse bytes behind the last field."""
        if self.remaining:
            raise ProtocolError(f"{self._message}: {self.remaining} bytes too many")

    def _scalar(self, packer: struct.Struct, field: str) -> int:
        value: int = packer.unpack(self.raw(packer.size, field))[0]
        return value
