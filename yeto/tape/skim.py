"""Skimming a tape: only the records, and of the frequent ones only the fields, that a fold asks for.

A tape of a long run has some fifty records a round, most of them about single pushes. Strict reading
(:mod:`yeto.tape.codec`) looks at every byte of each; a view that folds a hundred thousand rounds before it
shows anything cannot wait for that. The checksum of every line is looked at; beyond it, lines of kinds that
are not asked for are counted and nothing else: ``yeto replay`` is what verifies a tape. What is asked for is
typed as its fields are annotated (values inside come as mirrors of their classes, made in a third of the
time), and a line that is no record, or has another number than it stands on, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, get_type_hints

import msgspec

from yeto.core.decisions import DECISIONS
from yeto.core.events import EVENTS
from yeto.core.later import later_fields
from yeto.errors import TapeError
from yeto.tape.checksum import MISMATCH, SUMMED_FROM, fits
from yeto.tape.codec import Decoder, out_of_order
from yeto.tape.mirror import mirrored
from yeto.tape.records import Header, Record
from yeto.tape.rules import UPCASTS
from yeto.tape.sizes import SIZED, check_sizes

EVERYTHING: Final = ()
"""In place of field names: the whole record."""

_KINDS = {**EVENTS, **DECISIONS}
_HEAD_BYTES = 80
"""The kind stands within the first of these, in a line that we wrote."""


class Skimmed(msgspec.Struct, gc=False):
    """A record of which only some fields were read; they are attributes of it and of its ``body``."""

    seq: int
    at: float
    kind: str

    @property
    def because(self) -> None:
        """Return nothing: the event behind it was not read."""

    @property
    def body(self) -> Any:
        """Return what has the fields: this."""
        return self


Item = Record | Skimmed
"""What a fold takes: a whole record, or as much of it as it asks for."""


class _Envelope(msgspec.Struct, gc=False):
    seq: int
    at: float
    kind: str
    because: int | None = None


_read_envelope = msgspec.json.Decoder(_Envelope).decode


class Skimmer:
    """Reads the lines of one tape, in order.

    Args:
        name: the tape's name in messages, usually its path.
        wanted: kinds that are asked for, with the names of the fields that are, or EVERYTHING.
    """

    def __init__(self, name: str, wanted: Mapping[str, tuple[str, ...]]) -> None:
        self.name = name
        self.line = 0
        """Lines taken so far; also the number of the record that comes next."""
        self._decoder = Decoder(name)
        self._strict = False
        self._is_summed = True
        self._readers: dict[bytes, Callable[[bytes], Record | Skimmed] | None] = {
            kind.encode(): None for kind in _KINDS
        }
        """By kind; None for those that are passed over."""
        for kind, names in wanted.items():
            self._readers[kind.encode()] = _whole(kind) if names == EVERYTHING else _some_of(kind, names)

    def take(self, line: bytes, *, is_checked: bool = False) -> Record | Skimmed | None:
        """Return what is asked for of the next line; None when it is nothing.

        Args:
            line: the line, LF included.
            is_checked: whether its checksum was looked at.

        Raises:
            TapeError: the line is damaged or out of order; names file and line.
        """
        self.line += 1
        if self.line == 1 or self._strict:
            return self._take_strictly(line)
        if self._is_summed and not is_checked and not fits(line):
            raise self._damage(MISMATCH)
        begin = line.find(b'"kind":"', 0, _HEAD_BYTES) + 8
        try:
            read = self._readers[line[begin : line.find(b'"', begin)]]
            if read is None:
                return None
            item = read(line)
        except KeyError:
            return self._take_oddly_written(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._damage(f"not a record: {error}") from None
        if item.seq != self.line - 1:
            raise self._damage(out_of_order(item.seq, self.line - 1))
        if item.kind in SIZED:
            check_sizes(item.body, self.name, self.line)
        return item

    def check(self, line: bytes) -> None:
        """Pass over the next line, whatever it holds.

        Raises:
            TapeError: it was changed after it was written.
        """
        self.line += 1
        if self._is_summed and not fits(line):
            raise self._damage(MISMATCH)

    def time_of(self, line: bytes) -> float:
        """Return the ``at`` of a line, whatever its kind.

        Raises:
            TapeError: it is no record.
        """
        try:
            return _read_envelope(line).at
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._damage(f"not a record: {error}") from None

    def _damage(self, what: str) -> TapeError:
        return TapeError(f"{self.name}: line {self.line}: {what}")

    def _take_oddly_written(self, line: bytes) -> Record | Skimmed | None:
        """Take a line whose keys are in another order, or spaced; no writer of ours makes such."""
        try:
            head = _read_envelope(line)
            fields = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._damage(f"not a record: {error}") from None
        if head.kind not in _KINDS:
            raise self._damage(f"field kind: {head.kind!r} is not a kind of record that this version knows")
        self.line -= 1
        orderly = msgspec.json.encode({"seq": head.seq, "at": head.at, "kind": head.kind} | fields)
        return self.take(orderly, is_checked=True)

    def _take_strictly(self, line: bytes) -> Record:
        record = self._decoder.decode(line)
        if isinstance(record.body, Header):
            version = record.body.format_version
            # Lines of an older format are turned into the present one before anything else.
            self._strict = UPCASTS[version] is not None
            self._is_summed = version >= SUMMED_FROM
        return record


@cache
def _some_of(kind: str, names: tuple[str, ...]) -> Callable[[bytes], Skimmed]:
    cls = _KINDS[kind]
    hints = get_type_hints(cls)
    later = later_fields(cls)
    fields = [
        (name, mirrored(hints[name]), later[name]) if name in later else (name, mirrored(hints[name]))
        for name in sorted(names, key=later.__contains__)
    ]
    struct: Any = msgspec.defstruct(cls.__name__, fields, bases=(Skimmed,), gc=False)
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(struct)
    return decoder.decode


@cache
def _whole(kind: str) -> Callable[[bytes], Record]:
    cls: Any = _KINDS[kind]
    read_body: Callable[[bytes], Any] = msgspec.json.Decoder(cls).decode

    def read(line: bytes) -> Record:
        head = _read_envelope(line)
        body = read_body(line)
        return Record(seq=head.seq, at=head.at, kind=head.kind, because=head.because, body=body)

    return read
