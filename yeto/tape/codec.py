"""Records to lines and back: the border that lets nothing through that it did not write itself.

A line is one flat JSON object in ASCII, keys in a fixed order, without spaces, and the last of them is its
checksum. That is looked at before anything else. Reading is strict all the same, because
a value that is silently bent at this border would show up much later as a decision nobody can explain: a
missing, unknown or doubled key, a wrong scalar type (``"1"`` or ``true`` for a number, ``1.0`` for a
count), NaN and Infinity are all refused with file, line and field. The one liberty: a whole number may
stand where a real number is meant if it converts without loss, since JSON does not tell ``1`` from ``1.0``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args

import attrs
from attrs import frozen
from cattrs import (
    AttributeValidationNote,
    ClassValidationError,
    Converter,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from yeto.core.decisions import DECISIONS, Decision
from yeto.core.events import EVENTS, Event
from yeto.core.later import later_fields
from yeto.errors import TapeError
from yeto.tape.checksum import MISMATCH, SUMMED_FROM, has_some_sum, summed, without_sum
from yeto.tape.mirror import DecisionEnvelope
from yeto.tape.quick import read_line, write_line
from yeto.tape.records import FORMAT_VERSION, HEADER_KIND, Header, Record
from yeto.tape.rules import RULES, UPCASTS
from yeto.tape.sizes import SIZED, check_sizes

Body = Header | Event | Decision
Hook = Callable[[Any, Any], Any]
"""Makes a value from what JSON gave; cattrs' shape: the value, then its type."""

LINE_BYTES_MAX = 16 << 20
"""No record is longer: a ``merge`` record with 2,000 responders has less than 1 MiB."""


class _Refused(Exception):
    """A value that the tape's border does not let through."""


_FAULTS = (_Refused, ClassValidationError, IterableValidationError)


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else text[:77] + "..."


def _structure_int(value: object, _: object) -> int:
    # type() and not isinstance(): bool is an int to Python and must not be one here.
    if type(value) is int:
        return value
    raise _Refused(f"expected a whole number, found {_shown(value)}")


def _structure_float(value: object, _: object) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int:
        try:
            exact = float(value)
        except OverflowError:
            exact = math.inf
        if exact == value:
            return exact
        raise _Refused(f"the whole number {_shown(value)} does not fit a float exactly")
    # json reads 1e999 as Infinity, so finiteness is checked here and not only by the parser.
    raise _Refused(f"expected a finite number, found {_shown(value)}")


def _structure_str(value: object, _: object) -> str:
    if type(value) is str:
        return value
    raise _Refused(f"expected a string, found {_shown(value)}")


def _structure_bool(value: object, _: object) -> bool:
    if type(value) is bool:
        return value
    raise _Refused(f"expected true or false, found {_shown(value)}")


def _is_tuple(type_: Any) -> bool:
    return getattr(type_, "__origin__", None) is tuple


def _tuple_hook(type_: Any, converter: Converter) -> Hook:
    """Return the hook for ``tuple[X, ...]``: a JSON list of X and nothing else (not a string, not a map)."""
    item_type, ellipsis = get_args(type_)
    if ellipsis is not Ellipsis:
        raise TypeError(f"{type_}: records hold tuples of one type only")
    item_hook = converter.get_structure_hook(item_type)

    def structure(value: object, _: object) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _Refused(f"expected a list, found {_shown(value)}")
        try:
            return tuple([item_hook(item, item_type) for item in value])
        except _FAULTS:
            _blame_item(value, type_, item_hook, item_type)

    return structure


def _blame_item(value: list[object], type_: Any, item_hook: Hook, item_type: Any) -> NoReturn:
    """Structure a list once more, item by item, to name the one at fault (the fast way does not know)."""
    for index, item in enumerate(value):
        try:
            item_hook(item, item_type)
        except _FAULTS as error:
            error.add_note(IterableValidationNote(f"item {index}", index, item_type))
            raise IterableValidationError("list", [error], type_) from None
    raise AssertionError("a list item failed only once")


def _is_optional(type_: Any) -> bool:
    return isinstance(type_, UnionType) and len(get_args(type_)) == 2 and NoneType in get_args(type_)


def _optional_hook(type_: Any, converter: Converter) -> Hook:
    """Return the hook for ``X | None``; cattrs' own looks X's hook up again for every value."""
    (inner_type,) = (part for part in get_args(type_) if part is not NoneType)
    inner = converter.get_structure_hook(inner_type)

    def structure(value: object, _: object) -> Any:
        return None if value is None else inner(value, inner_type)

    return structure


def _object_hook(cls: Any, converter: Converter) -> Hook:
    """Return the hook for an attrs class: an object of its fields; only those that joined later may lack."""
    fill = _filler(cls, converter)
    names = frozenset(attrs.fields_dict(cls))
    optional = frozenset(later_fields(cls))

    def structure(value: object, _: object) -> Any:
        if type(value) is not dict:
            raise _Refused(f"expected an object, found {_shown(value)}")
        _check_keys(value, names, optional)
        return fill(value, cls)

    return structure


def _filler(cls: Any, converter: Converter) -> Hook:
    """Return the function that makes a class from an object whose keys are in order.

    The quick way does not know where a fault is; so once there is a fault, a thorough one is made and run
    to name the field.
    """
    quick = make_dict_structure_fn(cls, converter, _cattrs_detailed_validation=False)

    def fill(value: Any, _: object) -> Any:
        try:
            return quick(value, cls)
        except _FAULTS:
            return make_dict_structure_fn(cls, converter, _cattrs_detailed_validation=True)(value, cls)

    return fill


def _check_keys(value: dict[str, object], names: frozenset[str], optional: frozenset[str]) -> None:
    if value.keys() != names:
        missing, unknown = sorted(names - value.keys() - optional), sorted(value.keys() - names)
        if not missing and not unknown:
            return
        raise _Refused(
            f"missing key {', '.join(missing)}" if missing else f"unknown key {_shown(', '.join(unknown))}"
        )


def _make_converter() -> Converter:
    """Return the one converter of this border. Order matters: the classes' hooks use the scalars'."""
    converter = Converter(detailed_validation=True)
    converter.register_structure_hook(int, _structure_int)
    converter.register_structure_hook(float, _structure_float)
    converter.register_structure_hook(str, _structure_str)
    converter.register_structure_hook(bool, _structure_bool)
    converter.register_structure_hook_factory(_is_tuple, lambda type_: _tuple_hook(type_, converter))
    converter.register_structure_hook_factory(_is_optional, lambda type_: _optional_hook(type_, converter))
    converter.register_structure_hook_factory(attrs.has, lambda cls: _object_hook(cls, converter))
    converter.register_unstructure_hook_factory(attrs.has, lambda cls: _unstructurer(cls, converter))
    return converter


def _unstructurer(cls: Any, converter: Converter) -> Callable[[Any], dict[str, Any]]:
    """Return the function that makes an object of an attrs class; see ``yeto.core.later``."""
    omitted: Any = {name: override(omit_if_default=True) for name in later_fields(cls)}
    return make_dict_unstructure_fn(cls, converter, **omitted)


@frozen(kw_only=True)
class _Kind:
    """How the bodies of one kind are read and written."""

    is_decision: bool
    keys: frozenset[str]
    optional: frozenset[str]
    """Of these, the ones that joined later and need not be there."""
    fill: Hook
    unstructure: Callable[[Any], dict[str, Any]]


_CLASSES: dict[str, Any] = {HEADER_KIND: Header, **EVENTS, **DECISIONS}
_CONVERTER = _make_converter()


@cache
def _kind(kind: str) -> _Kind:
    """Return how a kind is read and written: compiled once, and only if the tape has any of it."""
    cls = _CLASSES[kind]
    is_decision = kind in DECISIONS
    envelope = {"seq", "at", "kind", "because"} if is_decision else {"seq", "at", "kind"}
    fields = set(attrs.fields_dict(cls))
    # Lines are flat, so a field must not be called like a key of the envelope; ``at`` of an event is both.
    assert not fields & envelope - ({"at"} if kind in EVENTS else set()), kind
    return _Kind(
        is_decision=is_decision,
        keys=frozenset(envelope | fields),
        optional=frozenset(later_fields(cls)),
        fill=_filler(cls, _CONVERTER),
        unstructure=_unstructurer(cls, _CONVERTER),
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON knows")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {_shown(doubled)} stands there twice")
    return result


_parse = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant).raw_decode
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
        envelope.update(_kind(kind).unstructure(body))
        return _render(envelope).encode("ascii") + b"\n"
    except (TypeError, ValueError) as error:
        raise TapeError(f"record {seq} ({kind}) cannot be written: {error}") from error


def _kind_of(body: Body) -> str:
    return HEADER_KIND if isinstance(body, Header) else body.kind


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
        except _Refused as error:
            raise TapeError(f"{self.name}: line {self.line + 1}: {error}") from None
        except ClassValidationError as error:
            path, cause = _first_fault(error)
            raise TapeError(f"{self.name}: line {self.line + 1}: field {path}: {cause}") from None
        except (ValueError, RecursionError) as error:
            raise TapeError(f"{self.name}: line {self.line + 1}: not a JSON record: {error}") from None

    def _without_sum(self, line: bytes) -> bytes:
        plain = without_sum(line) if self._is_summed else line
        if plain is None:
            raise _Refused(MISMATCH)
        return plain

    def _first_without_sum(self, line: bytes) -> bytes:
        """Return line 1, which says itself whether it has a checksum, without it."""
        plain = without_sum(line)
        if plain is None and has_some_sum(line):
            raise _Refused(MISMATCH)
        fields = _object(line)
        if fields.get("kind") == HEADER_KIND:
            _check_versions(fields)
            self._upcast = UPCASTS[fields["format_version"]]
            self._is_summed = fields["format_version"] >= SUMMED_FROM
            if not self._is_summed:
                plain = line
            elif plain is None:
                raise _Refused(MISMATCH)
        return plain or line  # what is no header is refused, whatever it is

    def _decode(self, line: bytes) -> Record:
        fields = _object(line)
        if self._upcast is not None:
            fields = self._upcast(fields)
        kind = fields.get("kind")
        if type(kind) is not str or kind not in _CLASSES:
            raise _Refused(f"field kind: {_shown(kind)} is not a kind of record that this version knows")
        known = _kind(kind)
        if (kind == HEADER_KIND) != (self.line == 0):
            raise _Refused("the header belongs on line 1 and nowhere else")
        _check_keys(fields, known.keys, known.optional)
        seq = _named("seq", _structure_int, fields)
        at = _named("at", _structure_float, fields)
        because = _named("because", _structure_int, fields) if known.is_decision else None
        if seq != self.line:
            raise _Refused(f"field seq: found {seq} where {self.line} is due: a record is missing or doubled")
        if at < self.at:
            raise _Refused(f"field at: {at} lies before {self.at} of the record above")
        if because is not None and (because != self._event_seq or because == 0 or at != self.at):
            raise _Refused(
                f"field because: a decision belongs directly behind its event, at the same time; "
                f"the last event is {self._event_seq} at {self.at}, found {because} at {at}"
            )
        return Record(seq=seq, at=at, kind=kind, because=because, body=known.fill(fields, None))


def _object(line: bytes) -> dict[str, Any]:
    """Return the object that a line is."""
    text = line.strip(b" \t\r\n").decode("utf-8")
    fields, end = _parse(text)
    if end != len(text):
        raise _Refused(f"data after the record: {_shown(text[end:])}")
    if type(fields) is not dict:
        raise _Refused(f"expected an object, found {_shown(fields)}")
    return fields


def _named(name: str, hook: Hook, fields: dict[str, object]) -> Any:
    try:
        return hook(fields[name], None)
    except _Refused as error:
        raise _Refused(f"field {name}: {error}") from None


def _check_versions(fields: dict[str, object]) -> None:
    """Refuse a newer tape before anything else of it is looked at: its other fields may be new too."""
    for name, known in (("format_version", max(UPCASTS)), ("rules_version", max(RULES))):
        found = fields.get(name)
        if type(found) is int and found > known:
            software = _shown(fields.get("software_version")).strip('"')
            raise _Refused(
                f"{name} {found} is newer than {known}, the newest this version of Yeto knows; "
                f"read the tape with Yeto {software} or newer"
            )
        if type(found) is not int or found < 1:
            raise _Refused(f"field {name}: expected a version from 1 to {known}, found {_shown(found)}")


def _first_fault(error: BaseException) -> tuple[str, str]:
    """Return path and reason of the first fault in cattrs' tree of errors."""
    path = ""
    while isinstance(error, ClassValidationError | IterableValidationError):
        error = error.exceptions[0]
        for note in getattr(error, "__notes__", ()):
            if isinstance(note, AttributeValidationNote):
                path += f".{note.name}" if path else note.name
            elif isinstance(note, IterableValidationNote):
                path += f"[{note.index}]"
    return path, str(error)
