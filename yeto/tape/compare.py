"""Two tapes side by side: where they part.

Two runs of the same events must give the same bytes. What merely names a run (session id, wall clock,
software version) differs always and is not looked at; the settings in the header are.
"""

from __future__ import annotations

from itertools import islice, zip_longest
from os import PathLike
from typing import Any

import attrs
from attrs import frozen

from yeto.tape.reader import read
from yeto.tape.records import Header, Record


@frozen(kw_only=True)
class Difference:
    """The first record in which two tapes differ; a side is None where that tape has ended."""

    line: int
    left: Record | None
    right: Record | None

    def fields(self) -> tuple[tuple[str, object, object], ...]:
        """Return (field, left, right) of what differs, when both records are of one kind."""
        if self.left is None or self.right is None or self.left.kind != self.right.kind:
            return ()
        left, right = _values(self.left), _values(self.right)
        return tuple((name, left[name], right[name]) for name in left if left[name] != right[name])


def first_difference(
    left: str | PathLike[str], right: str | PathLike[str], *, until: int | None = None
) -> Difference | None:
    """Return the first record that differs between two tapes, or None.

    Args:
        left: one tape.
        right: the other.
        until: number of the last record to look at; None looks at all.

    Raises:
        TapeError: one of them is missing or damaged up to there.
    """
    pairs = zip_longest(read(left), read(right))
    for line, (mine, theirs) in enumerate(islice(pairs, None if until is None else until + 1), 1):
        if _comparable(mine) != _comparable(theirs):
            return Difference(line=line, left=_comparable(mine), right=_comparable(theirs))
    return None


def _comparable(record: Record | None) -> Record | None:
    if record is not None and isinstance(record.body, Header):
        anonymous = attrs.evolve(record.body, software_version="", wall_clock="", session_id="")
        return attrs.evolve(record, body=anonymous)
    return record


def _values(record: Record) -> dict[str, object]:
    """Return the fields of a line: the envelope's and the body's."""
    values: dict[str, object] = {"seq": record.seq, "at": record.at, "because": record.because}
    body = record.body
    cls: Any = type(body)
    values.update((name, getattr(body, name)) for name in attrs.fields_dict(cls))
    return values
