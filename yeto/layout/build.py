"""Named shapes to fragments: which tensors travel together, decided from names and sizes alone.

All learners must come to the same layout without talking to each other, so the result depends on the *set*
of named shapes and the three settings, never on the order in which a model lists its parameters. Tensors
are never split: a merge works on whole tensors.

Embeddings and output heads go into a fragment of their own, merged by plain average: their deltas are
sparse and far from orthogonal between learners, which is what the directional average of the rest assumes.

Two patterns for the rest. *binpack* evens out the sizes: largest tensor first, into the least filled bin.
*strided* deals transformer layers out in turn, so that each fragment has layers of all depths
(Streaming DiLoCo, arXiv 2501.18512 sec. 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from yeto.errors import ConfigError
from yeto.layout.names import is_embedding, layer_index, strip_wrappers
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec

PATTERNS: Final = ("binpack", "strided")

MATRIX_MERGES: Final[Mapping[str, MergeMode]] = {"rda": MergeMode.RDA, "iso": MergeMode.ISO}
"""How the tensors outside of the embedding fragment are reduced."""

EMBEDDING_RATIO: Final = 4
"""An embedding fragment larger than this many times the mean of the others is worth a word."""


def build_layout(
    named_shapes: Mapping[str, Sequence[int]],
    *,
    fragments: int = 8,
    pattern: str = "binpack",
    matrix_merge: str = "rda",
) -> Layout:
    """Return the layout of a set of tensors.

    Args:
        named_shapes: full dotted name to shape of every trainable tensor, wrapper pieces allowed.
        fragments: P that is wished for; small models get fewer, and one embedding fragment with P = 1 makes
            two.
        pattern: ``binpack`` or ``strided``.
        matrix_merge: ``rda``, or ``iso``, with which every tensor that is no matrix joins the embeddings.

    Returns:
        Fragment 0 holds the embeddings, if there are any.

    Raises:
        ConfigError: a setting is not one of those, there is no tensor, a tensor has no elements, or two names
            are the same without wrappers.
    """
    if fragments < 1:
        raise ConfigError(f"--fragments {fragments}: need at least 1")
    if pattern not in PATTERNS:
        raise ConfigError(f"--fragment-pattern {pattern}: must be one of {', '.join(PATTERNS)}")
    mode = MATRIX_MERGES.get(matrix_merge)
    if mode is None:
        raise ConfigError(f"--matrix-merge {matrix_merge}: must be one of {', '.join(MATRIX_MERGES)}")
    tensors = _specs(named_shapes)
    apart = [t for t in tensors if is_embedding(t.name) or (mode is MergeMode.ISO and len(t.shape) != 2)]
    names = {tensor.name for tensor in apart}
    rest = [tensor for tensor in tensors if tensor.name not in names]
    bins: list[list[TensorSpec]] = [[] for _ in range(max(1, min(fragments - bool(apart), len(rest))))]
    if pattern == "strided":
        rest = _deal_layers(rest, bins)
    _pack(rest, bins)
    result = [FragmentLayout(mode=mode, tensors=tuple(members)) for members in bins if members]
    if apart:
        result.insert(0, FragmentLayout(mode=MergeMode.AVG, tensors=tuple(apart)))
    return Layout(fragments=tuple(result))


def embedding_advice(layout: Layout) -> str | None:
    """Return what to say once about an embedding fragment much larger than the others; None if it is not.

    A round moves one fragment, so one large fragment makes every P-th round that much longer.
    """
    first, others = layout.fragments[0], layout.fragments[1:]
    if first.mode is not MergeMode.AVG or not others:
        return None
    total = sum(fragment.numel for fragment in others)
    ratio = first.numel * len(others) / total
    if ratio <= EMBEDDING_RATIO:
        return None
    fewer = max(1, EMBEDDING_RATIO * total // first.numel)
    advice = "LoRA that leaves embeddings and head alone avoids it"
    if fewer < len(others):
        advice = f"--fragments {fewer + 1} brings the rounds closer together; {advice}"
    return (
        f"fragment 0 (embeddings) has {first.numel:,} elements, {ratio:.1f} times the mean of the others, "
        f"and so has each of its rounds: {advice}"
    )


def _specs(named_shapes: Mapping[str, Sequence[int]]) -> list[TensorSpec]:
    """Return the tensors sorted by stripped name."""
    stripped: dict[str, str] = {}
    tensors = []
    for name, shape in named_shapes.items():
        plain = strip_wrappers(name)
        if plain in stripped:
            raise ConfigError(f"tensors {stripped[plain]} and {name} are both {plain} without wrappers")
        stripped[plain] = name
        if math.prod(shape) < 1:
            raise ConfigError(f"tensor {name} of shape {tuple(shape)} has no elements; do not train it")
        tensors.append(TensorSpec(name=plain, shape=tuple(int(side) for side in shape)))
    if not tensors:
        raise ConfigError("no trainable tensors: nothing to synchronise; check --tuning and --lora-targets")
    return sorted(tensors, key=lambda tensor: tensor.name)


def _deal_layers(tensors: Iterable[TensorSpec], bins: list[list[TensorSpec]]) -> list[TensorSpec]:
    """Deal the layers out to the bins in turn and return the tensors that are in none.

    Each bin is ordered by (layer, name).
    """
    layers: dict[int, list[TensorSpec]] = {}
    outside = []
    for tensor in tensors:
        layer = layer_index(tensor.name)
        if layer is None:
            outside.append(tensor)
        else:
            layers.setdefault(layer, []).append(tensor)
    for turn, layer in enumerate(sorted(layers)):
        bins[turn % len(bins)] += sorted(layers[layer], key=lambda tensor: tensor.name)
    return outside


def _pack(tensors: Iterable[TensorSpec], bins: list[list[TensorSpec]]) -> None:
    """Add each tensor, largest first, to the least filled bin; ties go by name and to the lowest bin."""
    filled = [sum(tensor.numel for tensor in members) for members in bins]
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.numel, tensor.name)):
        index = filled.index(min(filled))
        bins[index].append(tensor)
        filled[index] += tensor.numel
