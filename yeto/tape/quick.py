"""The quick way for lines that are just as we would write them, which nearly all are.

The thorough way (:mod:`yeto.tape.strict`) looks at every key and value in Python and can name what is wrong.
Here a library written in C does the work, and its answer counts only if the way back gives the same:

* A line that is read must be, key for key in our order, what the annotations of its kind say, and written
  again it must be the very same bytes. So no key stands there twice or beside the known ones, and no number
  was bent to fit.
* A line that is written must hold nothing but values of the very types that their fields are annotated with,
  no subclass and no whole number for a real one. So there is nothing in it that JSON lacks or that would read
  otherwise. And there must be nothing that the library writes otherwise than Python does: DEL, what lies
  beyond ASCII, the smallest and the greatest floats.

A line that is read may have its checksum: then the one that is computed for it anew must be the same too.
A line that is written has it.

In any other case, so in every case of doubt, the thorough way takes over. What the quick way takes the
thorough one takes too, with the same result; tests compare them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

from yeto.core.decisions import DECISIONS
from yeto.core.events import EVENTS
from yeto.tape.checksum import LINE_FORM
from yeto.tape.mirror import Envelope, Kind, encode

DEL = 0x7F

_CLASSES: dict[bytes, Any] = {name.encode(): cls for name, cls in (*EVENTS.items(), *DECISIONS.items())}


class _Kinds(dict[Any, Kind]):
    """What is known of just a class, made when it is first asked for; KeyError for one that is no kind."""

    def __missing__(self, cls: Any) -> Kind:
        if cls not in _CLASSES.values():
            raise KeyError(cls)
        kind = self[cls] = Kind(cls)
        return kind


_KINDS = _Kinds()


def read_line(line: bytes, *, is_summed: bool) -> tuple[Envelope, Callable[[bytes], Any]] | None:
    """Return a line's envelope, and what makes its body of it.

    Args:
        line: the line, LF included.
        is_summed: whether it has to have a checksum.

    Returns:
        None when it is not just as we would write it.
    """
    begin = line.find(b'"kind":"') + 8
    cls = _CLASSES.get(line[begin : line.find(b'"', begin)])
    if cls is None:
        return None
    kind = _KINDS[cls]
    try:
        envelope = kind.read_line(line)
        written = encode(envelope)
        if is_summed:
            start = written[:-1]
            written = LINE_FORM % (start, crc32(start))
        else:
            written += b"\n"
        return (envelope, kind.read_body) if written == line else None
    except (ValueError, RecursionError):
        return None


def write_line(seq: int, at: float, because: int | None, body: object) -> bytes | None:
    """Return the line of a record, with its checksum, LF included.

    Returns:
        None when it holds what the library writes otherwise.
    """
    try:
        line = _KINDS[type(body)].write(seq, at, because, body)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        return None
    if not line.isascii() or DEL in line:
        return None
    start = line[:-1]
    return LINE_FORM % (start, crc32(start))
