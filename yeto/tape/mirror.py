"""Mirrors: what stands in for records and their values before the library written in C.

A mirror is a type of the library's own with the fields of a class, in their order. The library writes it at
several times the speed of Python, and what is left to do here, for each of millions of records, is to look
at the type of every field and hand its value over. A loop over the fields does that in twice the time in
which a function does that was written for the class. So such a function is written the first time that a
class is met, and compiled. Of ``Heartbeat`` it is::

    def write(seq, at, because, value):
        local_step = value.local_step
        ...
        if because is not None or type(local_step) is not int or ...:
            raise Unfit(value)
        return encode(mirror(seq, at, 'heartbeat', ..., local_step))

All code that is made at run time is made in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from operator import is_
from types import GenericAlias, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs
import msgspec

from yeto.core.decisions import Decision
from yeto.core.later import later_fields

LEAST_FLOAT, FLOAT_BOUND = 1e-4, 1e16
"""From the one up to the other, the library writes a float as Python does; exponents it writes otherwise."""

encode = msgspec.json.Encoder().encode


class Unfit(ValueError):
    """A value is not of the very type that its field is annotated with, or is written otherwise in C."""


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
        later = later_fields(cls)
        self._types = {
            name: hints[name] for name in attrs.fields_dict(cls) if name not in base.__struct_fields__
        }
        fields = [
            (name, mirrored(type_), later[name]) if name in later else (name, mirrored(type_))
            for name, type_ in self._types.items()
        ]
        self.mirror: Callable[..., Any] = msgspec.defstruct(
            cls.__name__, fields, bases=(base,), gc=False, omit_defaults=True
        )
        self._scope: dict[str, Any] = {"Unfit": Unfit, "encode": encode, "mirror": self.mirror}
        self._later = later

    def _taken(self, faults: list[str]) -> Iterator[str]:
        """Write the lines that take the fields of ``value`` and look at them.

        Args:
            faults: conditions on what is there already, any of which makes the value unfit.
        """
        faults, bent = list(faults), []
        for name, type_ in self._types.items():
            yield f"{name} = value.{name}"
            faults.append(_fault(name, type_, self._scope))
            if reflect := _reflector(type_):
                self._scope[f"reflect_{name}"] = reflect
                bent.append(f"{name} = None if {name} is None else reflect_{name}({name})")
            if name in self._later:
                # The library omits the very object that is the default, not whatever equals it.
                self._scope[f"default_{name}"] = default = self._later[name]
                if default is not None:
                    bent.append(f"if {name} == default_{name}: {name} = default_{name}")
        if faults:
            yield f"if {' or '.join(faults)}:"
            yield "    raise Unfit(value)"
        yield from bent

    def _compiled(self, head: str, lines: Iterator[str]) -> Any:
        """Return the function of this head and of these lines; the head names it."""
        taken = {"value", "seq", "at", "because", "type", "map", *self._scope}
        assert taken.isdisjoint(self._types), f"a field is called like what is used beside it: {taken}"
        source = "\n".join([f"def {head}:", *(f"    {line}" for line in lines)])
        exec(compile(source, f"<{self.mirror.__name__} of {__name__}>", "exec"), self._scope)
        return self._scope[head[: head.index("(")]]


class Shape(_Shape):
    """A class of the values inside records."""

    def __init__(self, cls: type) -> None:
        super().__init__(cls)
        self._reflect_each: Callable[[tuple[Any, ...]], list[Any]] = self._compiled(
            "reflect_each(values)", self._lines()
        )
        self._last: tuple[tuple[Any, ...], Any] = ((), msgspec.Raw(b"[]"))

    def _lines(self) -> Iterator[str]:
        yield "mirrors = []"
        yield "for value in values:"
        for line in self._taken([]):
            yield f"    {line}"
        yield f"    mirrors.append(mirror({', '.join(self._types)}))"
        yield "return mirrors"

    def reflect(self, instance: Any) -> Any:
        """Return an instance's mirror.

        Raises:
            Unfit: the library would not take it as it is, or write it otherwise.
        """
        return self._reflect_each((instance,))[0]

    def reflect_all(self, instances: tuple[Any, ...]) -> Any:
        """Return what is written for instances, which are often just those of the last time.

        Raises:
            Unfit: as ``reflect``.
        """
        last, written = self._last
        if len(last) != len(instances) or not all(map(is_, last, instances)):
            written = msgspec.Raw(encode(self._reflect_each(instances)))
            self._last = instances, written
        return written


class Kind(_Shape):
    """How the lines of one kind are read and written."""

    def __init__(self, cls: Any) -> None:
        is_decision = issubclass(cls, Decision)
        super().__init__(cls, DecisionEnvelope if is_decision else Envelope)
        self.read_line = msgspec.json.Decoder(self.mirror).decode
        self.read_body = msgspec.json.Decoder(cls).decode
        self.write: Callable[[int, float, int | None, Any], bytes] = self._compiled(
            "write(seq, at, because, value)", self._lines(cls.kind, is_decision=is_decision)
        )
        """Takes ``seq``, ``at``, ``because`` and the body; returns the object of the line."""

    def _lines(self, kind: str, *, is_decision: bool) -> Iterator[str]:
        order = "because is None" if is_decision else "because is not None"
        yield from self._taken([order, _fault("at", float, self._scope)])
        head = ["seq", "at", repr(kind), *(["because"] if is_decision else [])]
        yield f"return encode(mirror({', '.join([*head, *self._types])}))"


@cache
def _shape_of(cls: type) -> Shape:
    return Shape(cls)


def _fault(name: str, type_: Any, scope: dict[str, Any]) -> str:
    """Write the condition on which the value called ``name`` is not what its field may hold."""
    if isinstance(type_, UnionType):
        return f"({' and '.join(_fault(name, part, scope) for part in get_args(type_))})"
    if type_ is NoneType:
        return f"{name} is not None"
    if type_ is float:
        # NaN lies nowhere.
        fits = (
            f"({LEAST_FLOAT} <= {name} < {FLOAT_BOUND} or {name} == 0.0 "
            f"or {-FLOAT_BOUND} < {name} <= {-LEAST_FLOAT})"
        )
        return f"(type({name}) is not float or not {fits})"
    exact = get_origin(type_) or type_
    scope[exact.__name__] = exact
    fault = f"type({name}) is not {exact.__name__}"
    if exact is tuple and not attrs.has(item := get_args(type_)[0]):
        assert item in (int, str), f"no record has tuples of {item}"
        scope[f"are_{item.__name__}"] = frozenset({item}).issuperset
        fault = f"({fault} or not are_{item.__name__}(map(type, {name})))"
    return fault


def _reflector(type_: Any) -> Callable[[Any], Any] | None:
    """Return the function that mirrors values of a type; None when they hold no others."""
    if attrs.has(type_):
        return _shape_of(type_).reflect
    if get_origin(type_) is tuple:
        (item, _) = get_args(type_)
        return _shape_of(item).reflect_all if attrs.has(item) else None
    parts = [reflect for part in get_args(type_) if (reflect := _reflector(part))]
    assert len(parts) <= 1, f"{type_}: a field holds values of one class at most"
    return parts[0] if parts else None


def mirrored(type_: Any) -> Any:
    """Return a field's type with mirrors for classes."""
    if attrs.has(type_):
        return _shape_of(type_).mirror
    parts = tuple(mirrored(part) for part in get_args(type_) if part is not ...)
    if isinstance(type_, UnionType):
        return Union[parts]  # noqa: UP007
    return GenericAlias(tuple, (*parts, ...)) if parts else type_
