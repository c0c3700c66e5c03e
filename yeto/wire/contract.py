"""The session contract and the training manifest it is made from.

The contract is 32 opaque bytes that name the experiment: a hash over the layout fingerprint and everything
else that must be equal for an average to mean anything (model, tuning, seed, number of learners). Opaque
means that a mismatch says *that* two learners differ and not *where*; so a learner also sends its manifest,
the plain text behind the hash, and a refusal can name the field and both values.

Hashing wants one spelling of equal things: keys sorted, no spaces, UTF-8, and no floats, whose text
differs between languages. What a peer sends is parsed strictly (no duplicate keys, NaN, deep nesting or lone
surrogates), because a manifest that two readers understand differently proves nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeAlias

from attrs import frozen

from yeto.errors import ConfigError, ProtocolError
from yeto.wire.fingerprint import layout_fingerprint
from yeto.wire.frames import BytesLike, MessageType
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec
from yeto.wire.legality import MANIFEST_BYTES_MAX
from yeto.wire.messages import FRAGMENT_NUMEL_MAX
from yeto.wire.strictjson import parse_json

JSON: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None
"""A parsed JSON value."""

RANK_MAX: Final = 64
"""Dimensions of a tensor; no library has more."""

DEPTH_MAX: Final = 8
"""Nesting of a manifest: fragments > fragment > tensors > tensor > shape is five."""

ABSENT: Final = "(absent)"
"""What ``first_difference`` gives for a field that one side does not have."""

SHARED_CHARS: Final = 20
"""How much is shown of what two texts share before they part."""

_KEYS: Final = frozenset({"binding", "fragments", "merge_alpha"})
_MODES: Final = {mode.name.lower(): mode for mode in MergeMode}


def canonical_json(value: JSON) -> bytes:
    """Return the one spelling of a value: sorted keys, no spaces, UTF-8, no floats.

    Raises:
        ConfigError: it holds a float, a key that is no string, or anything else that JSON does not have.
    """
    _refuse_floats(value, "binding")
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"binding: cannot be written as canonical JSON ({error})") from error


def session_contract(fingerprint: bytes, binding: Mapping[str, Any]) -> bytes:
    """Return SHA-256 over the 32 bytes of the fingerprint and the canonical JSON of the binding.

    Raises:
        ConfigError: the binding has no canonical JSON.
    """
    return hashlib.sha256(fingerprint + canonical_json(dict(binding))).digest()


def first_difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first field, in the order of sorted keys, in which two bindings differ.

    Objects are descended into, lists are compared whole.

    Returns:
        The dotted path of the field and its two values, ``ABSENT`` for a missing one; None if there is no
        difference.
    """
    for key in sorted(left.keys() | right.keys()):
        a, b = left.get(key, ABSENT), right.get(key, ABSENT)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            inner = first_difference(a, b)
            if inner is not None:
                return (f"{key}.{inner[0]}", *inner[1:])
        elif (key in left) != (key in right) or _spelled(a) != _spelled(b):
            return key, a, b
    return None


def from_where_they_part(left: str, right: str) -> tuple[str, str]:
    """Return two texts that differ, without most of a long beginning that they share.

    Whoever cuts them to fit a line still shows the difference: two chat templates may have it on their last.
    """
    both = zip(left, right, strict=False)
    shared = next((at for at, (a, b) in enumerate(both) if a != b), min(len(left), len(right)))
    start = shared - SHARED_CHARS
    return (left, right) if start <= 0 else (f"...{left[start:]}", f"...{right[start:]}")


@frozen(kw_only=True)
class TrainingManifest:
    """Message MANIFEST, learner to syncer: what the contract stands for, in plain text."""

    TYPE: ClassVar = MessageType.MANIFEST

    binding: dict[str, Any]
    """What must be equal in all learners; no floats, no paths."""
    merge_alpha: float | str
    """Shown, not binding: a number in [0, 1) or ``carry``."""
    layout: Layout
    """Names and shapes of all tensors."""

    def contract(self) -> bytes:
        """Return the 32 bytes that this manifest hashes to, names and shapes included."""
        return session_contract(layout_fingerprint(self.layout), self.binding)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object; ``from_dict`` reads it."""
        return {
            "binding": self.binding,
            "merge_alpha": self.merge_alpha,
            "fragments": [
                {
                    "mode": fragment.mode.name.lower(),
                    "tensors": [[tensor.name, list(tensor.shape)] for tensor in fragment.tensors],
                }
                for fragment in self.layout.fragments
            ],
        }

    def encode(self) -> bytes:
        """Return the payload.

        Raises:
            ConfigError: it has no canonical binding, or is larger than a MANIFEST may be.
        """
        canonical_json(self.binding)
        data = json.dumps(self.to_dict(), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        if len(data) > MANIFEST_BYTES_MAX:
            raise ConfigError(
                f"training manifest: {len(data)} bytes, at most {MANIFEST_BYTES_MAX} are allowed; "
                "start the learners with --no-manifest"
            )
        return data

    @classmethod
    def decode(cls, payload: BytesLike) -> TrainingManifest:
        """Read a payload strictly.

        Raises:
            ProtocolError: too long, no strict JSON, or no manifest; the message names the field.
        """
        if len(payload) > MANIFEST_BYTES_MAX:
            raise ProtocolError(f"MANIFEST: {len(payload)} bytes, at most {MANIFEST_BYTES_MAX} are allowed")
        return cls.from_dict(_strict_json(payload))

    @classmethod
    def from_dict(cls, value: object) -> TrainingManifest:
        """Return the manifest in a JSON object.

        Raises:
            ProtocolError: no manifest; the message names the field.
        """
        if not isinstance(value, dict) or value.keys() != _KEYS:
            raise ProtocolError(f"MANIFEST: must be an object with exactly {', '.join(sorted(_KEYS))}")
        binding, alpha = value["binding"], value["merge_alpha"]
        if not isinstance(binding, dict):
            raise ProtocolError("MANIFEST: binding must be an object")
        try:
            canonical_json(binding)
        except ConfigError as error:
            raise ProtocolError(f"MANIFEST: {error}") from error
        number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
        if not (alpha == "carry" or (number and 0 <= alpha < 1)):
            raise ProtocolError("MANIFEST: merge_alpha must be a number in [0, 1) or carry")
        return cls(binding=binding, merge_alpha=alpha, layout=_layout(value["fragments"]))

    def first_difference(self, other: TrainingManifest) -> tuple[str, Any, Any] | None:
        """Return the first field in which two sessions differ, as the function of that name does.

        The binding comes first; a layout that differs with equal bindings is told tensor by tensor.
        """
        difference = first_difference(self.binding, other.binding)
        if difference is not None:
            return difference
        left, right = _tensor_lines(self.layout), _tensor_lines(other.layout)
        for field in sorted(left.keys() | right.keys()):
            a, b = left.get(field, ABSENT), right.get(field, ABSENT)
            if a != b:
                return field, a, b
        return None


def _spelled(value: Any) -> str:
    """Return a value as JSON, in which true is not 1."""
    return json.dumps(value, sort_keys=True)


def _tensor_lines(layout: Layout) -> dict[str, str]:
    """Return where each named tensor is, in words that fit a refusal."""
    lines = {}
    for index, fragment in enumerate(layout.fragments):
        for place, tensor in enumerate(fragment.tensors):
            where = f"fragment {index} ({fragment.mode.name.lower()}), place {place}"
            lines[f"tensor {tensor.name}"] = f"shape {tensor.shape} in {where}"
    return lines


def _refuse_floats(value: JSON, path: str) -> None:
    if isinstance(value, float):
        raise ConfigError(f"{path}: {value} is a float, which has no canonical text; write it as a string")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path}: key {key!r} is no string")
            _refuse_floats(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_floats(item, f"{path}[{index}]")


def _strict_json(payload: BytesLike) -> object:
    try:
        value: object = parse_json(payload)
        # Escapes can spell half a surrogate pair, which is text that nothing can write again.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ProtocolError(f"MANIFEST: no strict JSON ({reason})") from error
    if _deeper_than(value, DEPTH_MAX):
        raise ProtocolError(f"MANIFEST: nested too deeply, at most {DEPTH_MAX} levels are allowed")
    return value


def _deeper_than(value: object, depth: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return depth == 0 or any(_deeper_than(item, depth - 1) for item in value)


def _layout(value: object) -> Layout:
    if not isinstance(value, list) or not value:
        raise ProtocolError("MANIFEST: fragments must be a list that is not empty")
    fragments = []
    for index, item in enumerate(value):
        path = f"fragments[{index}]"
        if not isinstance(item, dict) or item.keys() != {"mode", "tensors"}:
            raise ProtocolError(f"MANIFEST: {path} must be an object with exactly mode, tensors")
        mode, tensors = item["mode"], item["tensors"]
        if not isinstance(mode, str) or mode not in _MODES:
            raise ProtocolError(f"MANIFEST: {path}.mode must be one of {', '.join(_MODES)}")
        if not isinstance(tensors, list) or not tensors:
            raise ProtocolError(f"MANIFEST: {path}.tensors must be a list that is not empty")
        fragments.append(
            FragmentLayout(
                mode=_MODES[mode],
                tensors=tuple(_tensor(tensor, f"{path}.tensors[{n}]") for n, tensor in enumerate(tensors)),
            )
        )
    names = [tensor.name for fragment in fragments for tensor in fragment.tensors]
    if len(set(names)) != len(names):
        raise ProtocolError("MANIFEST: two tensors have the same name")
    return Layout(fragments=tuple(fragments))


def _tensor(value: object, path: str) -> TensorSpec:
    match value:
        case [str(name), list(shape)] if len(shape) <= RANK_MAX and all(map(_is_side, shape)):
            spec = TensorSpec(name=name, shape=tuple(shape))
            if spec.numel <= FRAGMENT_NUMEL_MAX:
                return spec
    raise ProtocolError(f"MANIFEST: {path} must be [name, [positive integers]] of a tensor that can exist")


def _is_side(value: object) -> bool:
    return type(value) is int and 1 <= value <= FRAGMENT_NUMEL_MAX  # not isinstance: true is no size
