"""Strategies for bodies of every kind, from the annotations of their classes."""

import types
import typing

import attrs
from hypothesis import strategies as st

from yeto.core import CoreConfig
from yeto.core.config import FRAGMENTS_MAX, LEARNERS_MAX
from yeto.core.decisions import DECISIONS
from yeto.core.events import EVENTS
from yeto.core.values import SessionTerms
from yeto.tape import Header

CLASSES = {"header": Header, **EVENTS, **DECISIONS}
SIZES = {
    (CoreConfig, "num_learners"): st.integers(-(2**63), LEARNERS_MAX),
    (CoreConfig, "num_fragments"): st.none() | st.integers(-(2**63), FRAGMENTS_MAX),
    (SessionTerms, "num_fragments"): st.integers(-(2**63), FRAGMENTS_MAX),
}
"""Fields that a reader holds against a bound, by class and name."""


def values_of(type_):
    """Return a strategy for the values of a field's type."""
    if type_ is int:
        return st.integers(-(2**63), 2**64)
    if type_ is float:
        # Whole numbers are written without a point and must come back as the same number.
        return st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)
    if type_ is str:
        return st.text(max_size=8)
    if type_ is bool:
        return st.booleans()
    if isinstance(type_, types.UnionType):
        return st.one_of(*(values_of(part) for part in typing.get_args(type_)))
    if type_ is types.NoneType:
        return st.none()
    if typing.get_origin(type_) is tuple:
        return st.lists(values_of(typing.get_args(type_)[0]), max_size=2).map(tuple)
    return bodies(type_)


def bodies(cls):
    """Return a strategy for the instances of a class."""
    hints = typing.get_type_hints(cls)
    values = {field.name: values_of(hints[field.name]) for field in attrs.fields(cls)}
    return st.builds(cls, **{name: SIZES.get((cls, name), of_type) for name, of_type in values.items()})
