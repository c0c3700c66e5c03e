"""The checksum of a line: whatever byte of it is changed later, the reader says so and names the line.

Much of what a tape holds no decision follows from: when something was, how long it took, who it was from,
the digests of files that are gone. Neither the strict form of a line nor a replay can notice that such a
fact became another one. So each line ends with a CRC-32 of all that stands before it. It finds every change
of up to 32 bits in a row, and one of four billion of the rest. Against somebody who changes a tape on
purpose it is no help.

Its place and its length are fixed, so it can be looked at before anything is parsed, and what is left is a
line without a checksum, as the lines of format 1 are.
"""

from __future__ import annotations

from zlib import crc32

SUMMED_FROM = 2
"""The first version of the format whose lines have a checksum."""

_BEGIN = b',"crc":"'
END_FORM = _BEGIN + b'%08x"}\n'
"""What a line ends with, given the CRC-32 of what stands before."""
LINE_FORM = b"%b" + END_FORM
"""A line, given what stands before its end and the CRC-32 of that."""
_END_BYTES = len(END_FORM % 0)
DAMAGE_REMEDY = (
    "look at the disk, bring the tape back from a copy, "
    "or go on without it (--resume with a new --event-tape)"
)
"""What to do about a tape that is not as it was written."""
MISMATCH = f"the checksum does not fit: this line was changed after it was written; {DAMAGE_REMEDY}"
"""What is wrong with a line that does not end with its checksum, and what to do."""


def summed(line: bytes) -> bytes:
    """Return a line with its checksum.

    Args:
        line: a JSON object with at least one key, no space at its end, and LF.
    """
    start = line[:-2]
    return LINE_FORM % (start, crc32(start))


def fits(line: bytes) -> bool:
    """Return whether a line, LF included, ends with its checksum."""
    return line[-_END_BYTES:] == END_FORM % crc32(line[:-_END_BYTES])


def without_sum(line: bytes) -> bytes | None:
    """Return a line without its checksum; None when it does not end with it, and LF."""
    start = line[:-_END_BYTES]
    if line[-_END_BYTES:] != END_FORM % crc32(start):
        return None
    return start + b"}\n"


def has_some_sum(line: bytes) -> bool:
    """Return whether a line ends like one with a checksum, be it the right one or not."""
    return line[-_END_BYTES:].startswith(_BEGIN)
