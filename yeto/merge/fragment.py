"""From wire bytes to a merged outer gradient: what the syncer does with the pushes of one round.

A fragment is its tensors, flattened and laid end to end. Everything below is per tensor inside it, because a
norm or a direction over unrelated tensors means little: RDA and correction of each tensor on its own, iso of
each matrix on its own. Tensors of an AVG fragment (embeddings) are averaged, as is whatever is not a matrix
in an ISO fragment, and every tensor in a closing sweep.

The pass over a push that needs no other learner (digest, finiteness, norms, dot products with the momentum)
is made when the push arrives. After sealing, one accumulation pass decodes each push chunk by chunk:
decode -> negate -> correct -> accumulate, where the middle two are only coefficients of the last. Beside
the gradient itself no tensor of the fragment's size is ever made.

The momentum handed to the correction is (1 - mu) times the Nesterov buffer; see ``yeto.merge.correction``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from yeto.errors import MergeError
from yeto.merge.chunks import (
    PayloadSource,
    ProductSum,
    TensorSource,
    chunk_bounds,
    product_sum,
    require_f32,
    wide_buffer,
    widen,
)
from yeto.merge.correction import EPSILON, correction
from yeto.merge.isotropic import isotropic
from yeto.merge.reduction import Contribution, average_into, radial_into, shares
from yeto.wire.digest import digest
from yeto.wire.errors import NonFiniteError
from yeto.wire.layout import FragmentLayout, MergeMode, TensorSpec
from yeto.wire.tensorbytes import Payload

NORM_MAX: Final = 1e15
"""A push with a larger norm counts as not finite: no training makes one, and its squares leave f32."""


@frozen
class TensorFacts:
    """What one pass over one tensor of a push finds."""

    norm: float
    """L2 norm of the learner delta d."""
    dot: float
    """d . momentum buffer."""


@frozen(kw_only=True)
class PushFacts:
    """What one pass over a push finds, without any other learner's."""

    digest: str
    """Over the wire bytes."""
    finite: bool
    """False for NaN, infinity, or a norm above 1e15."""
    norm: float | None
    """L2 norm over the whole fragment; None when not finite."""
    cosine_to_momentum: float | None
    """Cosine of the outer gradient (-d) to the momentum; None when not finite or either is nearly 0."""
    tensors: tuple[TensorFacts, ...] = ()
    """One a tensor when the layout was given; saves the merge a pass."""


@frozen(kw_only=True, eq=False)
class PushInput:
    """One learner's push as the merge takes it."""

    payload: Payload
    """Wire bytes of the fragment's delta."""
    dtype: str
    """``f32``, ``bf16`` or ``q4``."""
    weight: float
    correct: bool
    """Whether delta correction is to be applied."""
    facts: PushFacts | None = None
    """What ``examine_push`` found, with the layout and against the same momentum; else computed again."""


@frozen(kw_only=True, eq=False)
class MergedGradient:
    """The merged outer gradient of one fragment."""

    gradient: Tensor
    """1-D f32 in layout order."""
    finite: bool
    norm: float | None
    """L2 norm over the whole fragment; None when not finite."""
    corrected: tuple[int, ...]
    """Indexes of the pushes in which the correction changed at least one tensor."""


def examine_push(
    payload: Payload,
    dtype: str,
    numel: int,
    momentum: Tensor,
    layout: FragmentLayout | None = None,
) -> PushFacts:
    """Examine a push when it arrives.

    Args:
        payload: the delta's wire bytes, exactly the encoded size of ``numel`` elements.
        dtype: ``f32``, ``bf16`` or ``q4``.
        numel: elements of the fragment.
        momentum: the fragment's Nesterov buffer, 1-D f32.
        layout: the fragment's tensors; when given, their facts are kept for the merge.

    Raises:
        MergeError: a size does not fit.
    """
    require_f32("momentum", momentum)
    source = PayloadSource(payload, dtype, numel)
    spans = [(0, numel)] if layout is None else [(start, stop) for _, start, stop in _spans(layout)]
    _require_numel("layout", spans[-1][1] if spans else 0, numel)
    _require_numel("momentum", momentum.numel(), numel)
    bytes_digest = digest(payload)
    try:
        tensors = _tensor_facts(source, spans, momentum)
    except NonFiniteError:
        return PushFacts(digest=bytes_digest, finite=False, norm=None, cosine_to_momentum=None)
    squared, dot = 0.0, 0.0
    for facts in tensors:
        squared += facts.norm**2
        dot += facts.dot
    length = math.sqrt(squared)
    if not length <= NORM_MAX:  # also catches NaN
        return PushFacts(digest=bytes_digest, finite=False, norm=None, cosine_to_momentum=None)
    momentum_length = math.sqrt(product_sum(momentum, momentum))
    directed = length >= EPSILON and momentum_length >= EPSILON
    return PushFacts(
        digest=bytes_digest,
        finite=True,
        norm=length,
        cosine_to_momentum=-dot / (length * momentum_length) if directed else None,
        tensors=() if layout is None else tensors,
    )


def merge_fragment(
    pushes: Sequence[PushInput],
    layout: FragmentLayout,
    momentum: Tensor,
    *,
    mu: float,
    plain_average: bool = False,
) -> MergedGradient:
    """Reduce the pushes of one sealed attempt.

    Args:
        pushes: accepted pushes **in learner-id order**, which is the order of accumulation; all finite.
        layout: the fragment's tensors and merge mode.
        momentum: the fragment's Nesterov buffer, 1-D f32.
        mu: outer momentum, in [0, 1).
        plain_average: closing sweep: weighted average of every tensor, nothing corrected.

    Raises:
        MergeError: a size or weight does not fit, the weights sum to 0, or a decomposition failed.
        NonFiniteError: a q4 push was given that ``examine_push`` calls not finite.
    """
    require_f32("momentum", momentum)
    numel = layout.numel
    _require_numel("momentum", momentum.numel(), numel)
    sources = [PayloadSource(push.payload, push.dtype, numel) for push in pushes]
    parts = shares([push.weight for push in pushes])
    correcting = not plain_average and any(push.correct for push in pushes)
    need_norms = correcting or (layout.mode is MergeMode.RDA and not plain_average)
    facts = [
        _facts_of(push, source, layout, momentum) if need_norms else None
        for push, source in zip(pushes, sources, strict=True)
    ]
    buffer = TensorSource(momentum)
    gradient = torch.empty(numel, dtype=torch.float32)
    corrected: set[int] = set()
    squared = 0.0
    for index, (tensor, start, stop) in enumerate(_spans(layout)):
        momentum_norm = 0.0
        if correcting:
            momentum_norm = math.sqrt(product_sum(momentum[start:stop], momentum[start:stop]))
        contributions = []
        for number, push in enumerate(pushes):
            found = facts[number]
            contribution = _contribution(
                sources[number],
                parts[number],
                None if found is None else found[index],
                momentum_norm if correcting and push.correct else 0.0,
                1.0 - mu,
            )
            if contribution.momentum_scale:
                corrected.add(number)
            contributions.append(contribution)
        mode = MergeMode.AVG if plain_average else layout.mode
        squared += _reduce(gradient[start:stop], start, tensor, mode, contributions, buffer)
    finite = math.isfinite(squared)
    return MergedGradient(
        gradient=gradient,
        finite=finite,
        norm=math.sqrt(squared) if finite else None,
        corrected=tuple(sorted(corrected)),
    )


def _contribution(
    source: PayloadSource, share: float, facts: TensorFacts | None, momentum_norm: float, damping: float
) -> Contribution:
    """Return one learner's part in one tensor; a scale of -1 is the one negation of its delta."""
    if facts is None:
        return Contribution(source, share, math.nan, -1.0)
    decided = correction(facts.norm, -facts.dot * damping, momentum_norm * damping)
    if decided is None:
        return Contribution(source, share, facts.norm, -1.0)
    return Contribution(source, share, decided.norm, -decided.delta_scale, decided.momentum_scale * damping)


def _reduce(
    out: Tensor,
    offset: int,
    tensor: TensorSpec,
    mode: MergeMode,
    contributions: Sequence[Contribution],
    momentum: TensorSource,
) -> float:
    """Merge one tensor into ``out`` and return its sum of squares."""
    if mode is MergeMode.RDA:
        return radial_into(out, offset, contributions, momentum)
    squared = average_into(out, offset, contributions, momentum)
    if mode is MergeMode.ISO and len(tensor.shape) == 2:
        out.copy_(isotropic(out.view(tensor.shape)).view(-1))
        squared = product_sum(out, out)
    return squared


def _facts_of(
    push: PushInput, source: PayloadSource, layout: FragmentLayout, momentum: Tensor
) -> tuple[TensorFacts, ...]:
    if push.facts is not None and len(push.facts.tensors) == len(layout.tensors):
        return push.facts.tensors
    return _tensor_facts(source, [(start, stop) for _, start, stop in _spans(layout)], momentum)


def _tensor_facts(
    source: PayloadSource, spans: Sequence[tuple[int, int]], momentum: Tensor
) -> tuple[TensorFacts, ...]:
    """Return norm and dot product of each span, in one pass over the payload."""
    longest = max((end - begin for begin, end in spans), default=0)
    squares, dots = ProductSum(longest), ProductSum(longest)
    wide_delta, wide_momentum = wide_buffer(longest), wide_buffer(longest)
    found = []
    for begin, end in spans:
        for start, stop in chunk_bounds(end - begin):
            start, stop = begin + start, begin + stop
            delta = widen(source.chunk(start, stop), wide_delta)
            squares.add(delta, delta)
            dots.add(delta, widen(momentum[start:stop], wide_momentum))
        found.append(TensorFacts(math.sqrt(squares.take()), dots.take()))
    return tuple(found)


def _spans(layout: FragmentLayout) -> Iterator[tuple[TensorSpec, int, int]]:
    """Yield each tensor with the range of elements it takes in the fragment."""
    start = 0
    for tensor in layout.tensors:
        yield tensor, start, start + tensor.numel
        start += tensor.numel


def _require_numel(name: str, numel: int, expected: int) -> None:
    if numel != expected:
        raise MergeError(f"{name} has {numel} elements, the fragment has {expected}")
