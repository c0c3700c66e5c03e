"""The one border between JSON on disk and values: strict, because a value bent here would be believed.

Refused: unknown and doubled keys, ``"1"``, ``1.0`` or ``true`` for a whole number, a string for a list, NaN
and numbers too large for a float. A key may be missing only if its field has a default, which is how
manifests written before the field existed stay readable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_origin

import attrs
from cattrs import BaseValidationError, Converter, transform_error
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn

from yeto.wire import strictjson

T = TypeVar("T")


class NotStrict(Exception):
    """The data is not what it must be; the message names the path of each fault."""


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        NotStrict: it is none, or has doubled keys, NaN or an infinite number.
    """
    try:
        return strictjson.parse_json(data)
    except ValueError as error:
        raise NotStrict(f"no strict JSON: {error}") from error


def structure(value: object, cls: type[T]) -> T:
    """Return an attrs object from a parsed JSON value.

    Raises:
        NotStrict: a key or a type is wrong.
    """
    try:
        return _CONVERTER.structure(value, cls)
    except _Refused as error:
        raise NotStrict(str(error)) from error
    except BaseValidationError as error:
        faults: list[str] = transform_error(error, path="$", format_exception=_fault_text)
        raise NotStrict("; ".join(faults)) from error


class _Refused(Exception):
    """A value that the border does not let through."""


def _exactly(kind: type[Any]) -> Callable[[object, object], Any]:
    """Return the hook of a JSON type; ``type()`` because bool is an int to isinstance."""

    def structure(value: object, _: object) -> Any:
        if type(value) is not kind:
            raise _Refused(f"expected {kind.__name__}, found {type(value).__name__}")
        return value

    return structure


def _tuple_hook(type_: Any, converter: Converter) -> Callable[[object, object], tuple[Any, ...]]:
    item_type = get_args(type_)[0]

    def structure(value: object, _: object) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _Refused(f"expected list, found {type(value).__name__}")
        return tuple(converter.structure(value, list[item_type]))  # type: ignore[valid-type]

    return structure


def _object_hook(cls: Any, converter: Converter) -> Callable[[object, object], Any]:
    inner = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)

    def structure(value: object, _: object) -> Any:
        if type(value) is not dict:
            raise _Refused(f"expected object, found {type(value).__name__}")
        return inner(value, cls)

    return structure


def _is(origin: object) -> Callable[[Any], bool]:
    return lambda type_: get_origin(type_) == origin


def _make_converter() -> Converter:
    """Return the one converter of this border. Order matters: the classes' hooks use the scalars'."""
    converter = Converter(detailed_validation=True)
    for kind in (int, float, str, bool):
        converter.register_structure_hook(kind, _exactly(kind))
    converter.register_structure_hook_factory(_is(dict), lambda _: _exactly(dict))
    converter.register_structure_hook_factory(_is(tuple), lambda type_: _tuple_hook(type_, converter))
    converter.register_structure_hook_factory(attrs.has, lambda cls: _object_hook(cls, converter))
    return converter


def _fault_text(fault: BaseException, _: type | None) -> str:
    match fault:
        case ForbiddenExtraKeysError():
            return f"unknown key {', '.join(sorted(fault.extra_fields))}"
        case KeyError():
            return "a key is missing"
    return str(fault)


_CONVERTER = _make_converter()
