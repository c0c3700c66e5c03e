"""The quick way for lines that are just as we would write them, which nearly all are.

The thorough way (:mod:`yeto.tape.codec`) looks at every key and value in Python and can name what is wrong.
Here a library written in C does the work, and its answer counts only if the way back gives the same:

* A line that is read must be, key for key in our order, what the annotations of its kind say, and written
  again it must be the very same bytes. So no key stands there twice or beside the known ones, and no number
  was bent to fit.
* A line that is written must hold nothing but values of the very types that their fields are annotated with,
  no subclass and no whole number for a real one. So there is nothing in it that JSON lacks or that would read
  otherwise. And there must be nothing that the library writes otherwise than Python does: DEL, what lies
  beyond ASCII, the smallest and the greatest floats.

A line that is read may have its checksum: then the one that is computed for it anew must be the same too.
Lines are written without one here.

In any other case, so in every case of doubt, the thorough way takes over. What the quick way takes the
thorough one takes too, with the same result; tests compare them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter, is_
from types import GenericAlias, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints
from zlib import crc32

import attrs
import msgspec

from yeto.core.decisions import DECISIONS, Decision
from yeto.core.events import EVENTS
from yeto.core.later import later_fields
from yeto.tape.checksum import END_FORM

LEAST_FLOAT, FLOAT_BOUND = 1e-4, 1e16
"""From the one up to the other, the library writes a float as Python does; exponents it writes otherwise."""
DEL = 0x7F

_encode = msgspec.json.Encoder().encode


class Envelope(msgspec.Struct, gc=False):
    """What every line begins with; the lines of a kind are a subclass with all other fields."""

    seq: int
    at: float
    kind: str


class DecisionEnvelope(Envelope):
    """What every decision's line begins with."""

    because: int


class _Shape:
    """A class of values and its mirror: a type of the library's own, with an order of fields.

    The only defaults are those of fields that joined later, which are left out where they say nothing.
    """

    def __init__(self, cls: type, base: type[msgspec.Struct] = msgspec.Struct) -> None:
        hints = get_type_hints(cls)
        names = [name for name in attrs.fields_dict(cls) if name not in base.__struct_fields__]
        later = later_fields(cls)
        fields = [
            (name, _mirrored(hints[name]), later[name]) if name in later else (name, _mirrored(hints[name]))
            for name in names
        ]
        self.mirror: Callable[..., Any] = msgspec.defstruct(
            cls.__name__, fields, bases=(base,), gc=False, omit_defaults=True
        )
        self._values = _getter(names)
        self._types = [_types_of(hints[name]) for name in names]
        self._floats = [index for index, types in enumerate(self._types) if float in types]
        self._later = [(index, later[name]) for index, name in enumerate(names) if name in later]
        self._inner = [(i, inner) for i, name in enumerate(names) if (inner := _reflector(hints[name]))]
        self._seen: set[tuple[type, ...]] = set()
        """Types of values, in the order of fields, that are all as annotated: few, and looked at once."""
        self._last: tuple[tuple[Any, ...], list[Any]] = ((), [])

    def reflect(self, instance: Any, *head: object) -> Any:
        """Return an instance's mirror; ``head`` are the fields that stand before its own.

        Raises:
            TypeError: a value is not of the very type that is annotated.
            ValueError: the library writes one of its floats otherwise.
        """
        values = self._values(instance)
        types = tuple(map(type, values))
        if types not in self._seen:
            self._see(types)
        for index in self._floats:
            number = values[index]
            # NaN lies nowhere.
            if number and not LEAST_FLOAT <= abs(number) < FLOAT_BOUND:
                raise ValueError(number)
        if self._inner or self._later:
            values = list(values)
            for index, inner in self._inner:
                values[index] = inner(values[index])
            for index, default in self._later:
                # The library omits the very object that is the default, not whatever equals it.
                if values[index] == default:
                    values[index] = default
        return self.mirror(*head, *values)

    def reflect_all(self, instances: tuple[Any, ...]) -> list[Any]:
        """Return the mirrors of instances, which are often just those of the last time."""
        last, mirrors = self._last
        if len(last) != len(instances) or not all(map(is_, last, instances)):
            mirrors = [self.reflect(instance) for instance in instances]
            self._last = instances, mirrors
        return mirrors

    def _see(self, types: tuple[type, ...]) -> None:
        for type_, annotated in zip(types, self._types, strict=True):
            if type_ not in annotated:
                raise TypeError(type_)
        self._seen.add(types)


class _Kind(_Shape):
    """How the lines of one kind are read and written."""

    def __init__(self, cls: Any) -> None:
        super().__init__(cls, DecisionEnvelope if issubclass(cls, Decision) else Envelope)
        self.name: str = cls.kind
        self.read_line = msgspec.json.Decoder(self.mirror).decode
        self.read_body = msgspec.json.Decoder(cls).decode


_CLASSES: dict[bytes, Any] = {name.encode(): cls for name, cls in (*EVENTS.items(), *DECISIONS.items())}
_REGISTERED = frozenset(_CLASSES.values())


@cache
def _kind_of(cls: Any) -> _Kind | None:
    """Return what is known of just this class; None for one that is not registered."""
    return _Kind(cls) if cls in _REGISTERED else None


@cache
def _shape_of(cls: type) -> _Shape:
    return _Shape(cls)


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
    kind = None if cls is None else _kind_of(cls)
    if kind is None:
        return None
    try:
        envelope = kind.read_line(line)
        written = _encode(envelope)
        if is_summed:
            start = written[:-1]
            written = start + END_FORM % crc32(start)
        else:
            written += b"\n"
        return (envelope, kind.read_body) if written == line else None
    except (ValueError, RecursionError):
        return None


def write_line(seq: int, at: float, because: int | None, body: object) -> bytes | None:
    """Return the line of a record, without its checksum, LF included.

    Returns:
        None when it holds what the library writes otherwise.
    """
    cls: Any = type(body)
    kind = _kind_of(cls)
    if kind is None:
        return None
    try:
        if because is None:
            mirror = kind.reflect(body, seq, at, kind.name)
        else:
            mirror = kind.reflect(body, seq, at, kind.name, because)
        if type(at) is not float or (at and not LEAST_FLOAT <= at < FLOAT_BOUND):
            return None
        line: bytes = _encode(mirror) + b"\n"
        return line if line.isascii() and DEL not in line else None
    except (AttributeError, OverflowError, RecursionError, TypeError, ValueError):
        return None


def _getter(names: list[str]) -> Callable[[object], Sequence[Any]]:
    """Return the function that gives these attributes of an object; also of one or none."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda instance: [getattr(instance, name) for name in names]


def _types_of(type_: Any) -> tuple[type, ...]:
    """Return the types that the values of a field may have."""
    if isinstance(type_, UnionType):
        return tuple(type_ for part in get_args(type_) for type_ in _types_of(part))
    return (get_origin(type_) or type_,)


def _reflector(type_: Any) -> Callable[[Any], Any] | None:
    """Return the function that mirrors values of a type; None when they hold no others."""
    if attrs.has(type_):
        return _shape_of(type_).reflect
    if get_origin(type_) is tuple:
        return _items_reflector(get_args(type_)[0])
    parts = [inner for part in get_args(type_) if (inner := _reflector(part))]
    if not parts:
        return None
    (inner,) = parts
    return lambda value: None if value is None else inner(value)


def _items_reflector(type_: Any) -> Callable[[Any], Any]:
    """Return the function that mirrors tuples of a type."""
    if attrs.has(type_):
        return _shape_of(type_).reflect_all
    types = frozenset(_types_of(type_))

    def checked(values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not types.issuperset(map(type, values)) or float in types:
            raise TypeError(values)
        return values

    return checked


def _mirrored(type_: Any) -> Any:
    """Return a field's type with mirrors for classes."""
    if attrs.has(type_):
        return _shape_of(type_).mirror
    parts = tuple(_mirrored(part) for part in get_args(type_) if part is not ...)
    if isinstance(type_, UnionType):
        return Union[parts]  # noqa: UP007
    return GenericAlias(tuple, (*parts, ...)) if parts else type_
