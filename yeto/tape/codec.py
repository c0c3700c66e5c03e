"""Records to lines and back: the border that lets nothing through that it did not write itself.

A line is one flat JSON object in ASCII, keys in a fixed order, without spaces, and the last of them is its
checksum. That is looked at before anything else. Lines that are just as we would write them take a quick way
(`yeto.tape.quick`), all others the strict one (`yeto.tape.strict`), which says what is wrong with them: with
file, line and field.
"""

from __future__ import annotations

import json
from typing import Any

from cattrs import ClassValidationError

from yeto.core.decisions import Decision
from yeto.core.events import Event
from yeto.errors import TapeError
from yeto.tape.checksum import DAMAGE_REMEDY, MISMATCH, SUMMED_FROM, has_some_sum, summed, without_sum
from yeto.tape.mirror import DecisionEnvelope
from yeto.tape.quick import read_line, write_line
from yeto.tape.records import FORMAT_VERSION, HEADER_KIND, Header, Record
from yeto.tape.rules import RULES, UPCASTS
from yeto.tape.sizes import SIZED, check_sizes
from yeto.tape.strict import (
    CLASSES,
    Refused,
    check_keys,
    field_of,
    first_fault,
    form_of,
    parse_object,
    shown,
    structure_float,
    structure_int,
)

Body = Header | Event | Decision
LINE_BYTES_MAX = 16 << 20
"""No record is longer: a ``merge`` record with 2,000 responders has less than 1 MiB."""


# ASCII only: no reader of whatever kind then finds a line break (U+2028, NEL) where there is none,
# and a cut never goes through a character.
_render = json.JSONEncoder(
    ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":")
).encode


def encode(*, seq: int, at: float, body: Body, because: int | None = None) -> bytes:
    """Return the line of a record, LF included.

    Args:
        seq: number of the record.
        at: seconds since the session began.
        body: header, event or decision.
        because: number of the event, for a decision; None otherwise.

    Raises:
        TapeError: a value cannot be written: NaN, Infinity, or not a plain JSON scalar.
    """
    line = write_line(seq, at, because, body)
    if line is None:
        line = summed(_encode_thoroughly(seq, at, because, body))
    if len(line) > LINE_BYTES_MAX:
        raise TapeError(f"record {seq} ({_kind_of(body)}) is longer than {LINE_BYTES_MAX} bytes")
    return line


def _encode_thoroughly(seq: int, at: float, because: int | None, body: Body) -> bytes:
    """Return the line of any record, without its checksum, or raise TapeError."""
    kind = _kind_of(body)
    envelope: dict[str, Any] = {"seq": seq, "at": at, "kind": kind}
    if because is not None:
        envelope["because"] = because
    try:
        envelope.update(form_of(kind).unstructure(body))
        return _render(envelope).encode("ascii") + b"\n"
    except (TypeError, ValueError) as error:
        raise TapeError(f"record {seq} ({kind}) cannot be written: {error}") from error


def _kind_of(body: Body) -> str:
    return HEADER_KIND if isinstance(body, Header) else body.kind


def out_of_order(found: int, due: int) -> str:
    """Return what is wrong with a record that has another number than its line, and what to do."""
    return f"field seq: found {found} where {due} is due: a record is missing or doubled; {DAMAGE_REMEDY}"


class Decoder:
    """Lines to records, one after the other, strict in form and in order.

    Args:
        name: the tape's name in messages, usually its path.
        line: number of the line before the one where decoding begins; 0 begins with the header.
        format_version: of the tape, for a decoder that does not begin with the header.
    """

    def __init__(self, name: str, *, line: int = 0, format_version: int = FORMAT_VERSION) -> None:
        self.name = name
        self._upcast = UPCASTS[format_version]
        self._is_summed = format_version >= SUMMED_FROM
        self.line = line
        """Number of the last line decoded; also the number of the record that comes next."""
        self.at = 0.0
        """``at`` of the last record."""
        self._event_seq = 0
        """Number of the last event; 0 before the first."""

    def decode(self, line: bytes) -> Record:
        """Return the record of the next line.

        Args:
            line: the line, LF included.

        Raises:
            TapeError: the line is damaged, of a newer version, or out of order; names file, line, field.
        """
        record = self._decode_quickly(line) or self._decode_thoroughly(line)
        if record.kind in SIZED:
            check_sizes(record.body, self.name, self.line + 1)
        self.line += 1
        self.at = record.at
        if record.because is None:
            self._event_seq = record.seq
        return record

    def _decode_quickly(self, line: bytes) -> Record | None:
        """Return the record of a line that is just as we would write it here; None for any other."""
        found = read_line(line, is_summed=self._is_summed) if self._upcast is None else None
        if found is None:
            return None
        envelope, read_body = found
        seq, at, because = envelope.seq, envelope.at, None
        if isinstance(envelope, DecisionEnvelope):
            because = envelope.because
            in_order = because == self._event_seq and because > 0 and at == self.at
        else:
            in_order = at >= self.at
        if not in_order or seq != self.line or seq == 0:
            return None
        return Record.of_line(seq, at, envelope.kind, because, line, read_body)

    def _decode_thoroughly(self, line: bytes) -> Record:
        """Return the record of a line, or raise TapeError with what is wrong with it."""
        try:
            return self._decode(self._first_without_sum(line) if self.line == 0 else self._without_sum(line))
        except Refused as error:
            raise TapeError(f"{self.name}: line {self.line + 1}: {error}") from None
        except ClassValidationError as error:
            path, cause = first_fault(error)
            raise TapeError(f"{self.name}: line {self.line + 1}: field {path}: {cause}") from None
        except (ValueError, RecursionError) as error:
            raise TapeError(f"{self.name}: line {self.line + 1}: not a JSON record: {error}") from None

    def _without_sum(self, line: bytes) -> bytes:
        plain = without_sum(line) if self._is_summed else line
        if plain is None:
            raise Refused(MISMATCH)
        return plain

    def _first_without_sum(self, line: bytes) -> bytes:
        """Return line 1, which says itself whether it has a checksum, without it."""
        plain = without_sum(line)
        if plain is None and has_some_sum(line):
            raise Refused(MISMATCH)
        fields = parse_object(line)
        if fields.get("kind") == HEADER_KIND:
            _check_versions(fields)
            self._upcast = UPCASTS[fields["format_version"]]
            self._is_summed = fields["format_version"] >= SUMMED_FROM
            if not self._is_summed:
                plain = line
            elif plain is None:
                raise Refused(MISMATCH)
        return plain or line  # what is no header is refused, whatever it is

    def _decode(self, line: bytes) -> Record:
        fields = parse_object(line)
        if self._upcast is not None:
            fields = self._upcast(fields)
        kind = fields.get("kind")
        if type(kind) is not str or kind not in CLASSES:
            raise Refused(f"field kind: {shown(kind)} is not a kind of record that this version knows")
        known = form_of(kind)
        if (kind == HEADER_KIND) != (self.line == 0):
            raise Refused("the header belongs on line 1 and nowhere else")
        check_keys(fields, known.keys, known.optional)
        seq = field_of(fields, "seq", structure_int)
        at = field_of(fields, "at", structure_float)
        because = field_of(fields, "because", structure_int) if known.is_decision else None
        if seq != self.line:
            raise Refused(out_of_order(seq, self.line))
        if at < self.at:
            raise Refused(f"field at: {at} lies before {self.at} of the record above")
        if because is not None and (because != self._event_seq or because == 0 or at != self.at):
            raise Refused(
                f"field because: a decision belongs directly behind its event, at the same time; "
                f"the last event is {self._event_seq} at {self.at}, found {because} at {at}"
            )
        return Record(seq=seq, at=at, kind=kind, because=because, body=known.fill(fields, None))


def _check_versions(fields: dict[str, object]) -> None:
    """Refuse a newer tape before anything else of it is looked at: its other fields may be new too."""
    for name, known in (("format_version", max(UPCASTS)), ("rules_version", max(RULES))):
        found = fields.get(name)
        if type(found) is int and found > known:
            software = shown(fields.get("software_version")).strip('"')
            raise Refused(
                f"{name} {found} is newer than {known}, the newest this version of Yeto knows; "
                f"read the tape with Yeto {software} or newer"
            )
        if type(found) is not int or found < 1:
            raise Refused(f"field {name}: expected a version from 1 to {known}, found {shown(found)}")
