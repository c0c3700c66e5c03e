"""Handing flags on: a command that starts other commands takes their flags and passes them through.

``yeto run --role local`` is a syncer and its learners; whatever can be said to one of those can be said to
it. So its flags are theirs, taken from the same classes, and a flag is passed on only when it differs from
its default.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import attrs
from cyclopts import Group, Parameter
from docstring_parser import parse_from_object


def flags_without(flags: type[Any], left_out: Collection[str], *, name: str, group: str | Group) -> type[Any]:
    """Return a class with the flags of another, except those that the caller decides itself.

    Args:
        flags: attrs class whose fields are cyclopts parameters, explained by ``help`` or a docstring.
        left_out: field names that are not offered.
        name: name of the new class.
        group: heading in the help text of the flags that have none yet.
    """
    hints = get_type_hints(flags, include_extras=True)
    # Docstrings of fields are found in the source, which the new class does not have.
    explained = {
        entry.arg_name: entry.description
        for base in reversed(flags.__mro__[:-1])
        for entry in parse_from_object(base).params
    }
    heading = group if isinstance(group, Group) else Group(group)
    fields = {}
    for field in attrs.fields(flags):
        if field.name in left_out:
            continue
        hint = hints[field.name]
        inner, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        # Goes first, so that what the flag says of itself prevails.
        found = Parameter(group=heading, help=explained.get(field.name))
        annotated: Any = Annotated[(inner, found, *extras)]
        fields[field.name] = attrs.field(type=annotated, default=field.default)
    made = attrs.make_class(name, fields, frozen=True, kw_only=True)
    made.__doc__ = flags.__doc__
    return made


def to_words(flags: Any) -> list[str]:
    """Return the command-line words that give the same flags again, defaults left out."""
    words: list[str] = []
    for field in attrs.fields(type(flags)):
        value = getattr(flags, field.name)
        if value == field.default or value is None:
            continue
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, tuple | list):
            words += [f"{flag}={item}" for item in value]
        else:
            words.append(f"{flag}={value}")
    return words
