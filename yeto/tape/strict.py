"""The strict border between an object of JSON and a record's body: what types say, and nothing else.

A value that is silently bent here would show up much later as a decision nobody can explain: a missing,
unknown or doubled key, a wrong scalar type (``"1"`` or ``true`` for a number, ``1.0`` for a count), NaN and
Infinity are all refused, with the field. The one liberty: a whole number may stand where a real number is
meant if it converts without loss, since JSON does not tell ``1`` from ``1.0``.
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

from yeto.core.decisions import DECISIONS
from yeto.core.events import EVENTS
from yeto.core.later import later_fields
from yeto.tape.records import HEADER_KIND, Header

Hook = Callable[[Any, Any], Any]
"""Makes a value from what JSON gave; cattrs' shape: the value, then its type."""


class Refused(Exception):
    """A value that the tape's border does not let through."""


_FAULTS = (Refused, ClassValidationError, IterableValidationError)


def shown(value: object) -> str:
    """Return a value for a sentence: as JSON, cut when it is long."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else text[:77] + "..."


def structure_int(value: object, _: object) -> int:
    """Return a whole number, if it is one."""
    # type() and not isinstance(): bool is an int to Python and must not be one here.
    if type(value) is int:
        return value
    raise Refused(f"expected a whole number, found {shown(value)}")


def structure_float(value: object, _: object) -> float:
    """Return a finite real number, if it is one."""
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int:
        try:
            exact = float(value)
        except OverflowError:
            exact = math.inf
        if exact == value:
            return exact
        raise Refused(f"the whole number {shown(value)} does not fit a float exactly")
    # json reads 1e999 as Infinity, so finiteness is checked here and not only by the parser.
    raise Refused(f"expected a finite number, found {shown(value)}")


def _structure_str(value: object, _: object) -> str:
    if type(value) is str:
        return value
    raise Refused(f"expected a string, found {shown(value)}")


def _structure_bool(value: object, _: object) -> bool:
    if type(value) is bool:
        return value
    raise Refused(f"expected true or false, found {shown(value)}")


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
            raise Refused(f"expected a list, found {shown(value)}")
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
            raise Refused(f"expected an object, found {shown(value)}")
        check_keys(value, names, optional)
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


def check_keys(value: dict[str, object], names: frozenset[str], optional: frozenset[str]) -> None:
    """Refuse an object that has other keys than these names, of which the optional ones may be missing."""
    if value.keys() != names:
        missing, unknown = sorted(names - value.keys() - optional), sorted(value.keys() - names)
        if not missing and not unknown:
            return
        raise Refused(
            f"missing key {', '.join(missing)}" if missing else f"unknown key {shown(', '.join(unknown))}"
        )


def _make_converter() -> Converter:
    """Return the one converter of this border. Order matters: the classes' hooks use the scalars'."""
    converter = Converter(detailed_validation=True)
    converter.register_structure_hook(int, structure_int)
    converter.register_structure_hook(float, structure_float)
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
class Form:
    """How the bodies of one kind are read and written."""

    is_decision: bool
    keys: frozenset[str]
    optional: frozenset[str]
    """Of these, the ones that joined later and need not be there."""
    fill: Hook
    unstructure: Callable[[Any], dict[str, Any]]


CLASSES: dict[str, Any] = {HEADER_KIND: Header, **EVENTS, **DECISIONS}
_CONVERTER = _make_converter()


@cache
def form_of(kind: str) -> Form:
    """Return how a kind is read and written: compiled once, and only if the tape has any of it."""
    cls = CLASSES[kind]
    is_decision = kind in DECISIONS
    envelope = {"seq", "at", "kind", "because"} if is_decision else {"seq", "at", "kind"}
    fields = set(attrs.fields_dict(cls))
    # Lines are flat, so a field must not be called like a key of the envelope; ``at`` of an event is both.
    assert not fields & envelope - ({"at"} if kind in EVENTS else set()), kind
    return Form(
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
        raise ValueError(f"key {shown(doubled)} stands there twice")
    return result


_parse = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant).raw_decode


def parse_object(line: bytes) -> dict[str, Any]:
    """Return the object that a line is."""
    text = line.strip(b" \t\r\n").decode("utf-8")
    fields, end = _parse(text)
    if end != len(text):
        raise Refused(f"data after the record: {shown(text[end:])}")
    if type(fields) is not dict:
        raise Refused(f"expected an object, found {shown(fields)}")
    return fields


def field_of(fields: dict[str, object], name: str, hook: Hook) -> Any:
    """Return one field of an object, made by a hook whose refusal is to name it."""
    try:
        return hook(fields[name], None)
    except Refused as error:
        raise Refused(f"field {name}: {error}") from None


def first_fault(error: BaseException) -> tuple[str, str]:
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
