"""From wire bytes to a merged outer gradient: what the syncer does with the pushes of one round.

A fragment is its tensors, flattened and laid end to end. Everything below is per tensor inside it, because a
norm or a direction over unrelated tensors means little: RDA and correction of each tensor on its own, iso of
each matrix on its own. Tensors of an AVG fragment (embeddings) are averaged, as is whatever is not a matrix
in an ISO fragment, and every tensor in a closing sweep.

The pass over a push that needs no other learner (digest, finiteness, norms, dot products with the momentum)
is made when the push arrives. After sealing, one accumulation pass decodes all pushes a few elements at a
time: decode -> negate -> correct -> accumulate, where the middle two are only coefficients of the last.
Beside the gradient itself no tensor of the fragment's size is ever made.

The momentum handed to the correction is the Nesterov buffer scaled to a mean gradient, by (1 - mu) unless
another scale is given; see ``yeto.merge.correction``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from attrs import frozen
from torch import Tensor

from yeto.core.weights import MAX_NORM
from yeto.errors import MergeError
from yeto.merge.blocks import Plan, plan
from yeto.merge.checks import require_f32
from yeto.merge.correction import EPSILON, correction
from yeto.merge.iso import isotropic
from yeto.merge.memory import empty_floats
from yeto.merge.outer import MergedGradient
from yeto.merge.passes import TensorFacts, examine, product_sums
from yeto.merge.reduction import Contribution, Reduced, reduce_into, shares
from yeto.merge.sources import Source, flatten, of_payload, of_tensor
from yeto.wire.digest import RunningDigest
from yeto.wire.layout import FragmentLayout, MergeMode
from yeto.wire.tensorbytes import Payload


@frozen(kw_only=True)
class PushFacts:
    """What one pass over a push finds, without any other learner's."""

    digest: str
    """Over the wire bytes."""
    finite: bool
    """False for NaN, infinity, or a norm above ``MAX_NORM``, 1e15."""
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


def examine_push(
    payload: Payload,
    dtype: str,
    numel: int,
    momentum: Tensor,
    layout: FragmentLayout | None = None,
    *,
    threads: int | None = None,
) -> PushFacts:
    """Examine a push when it arrives.

    Args:
        payload: the delta's wire bytes, exactly the encoded size of ``numel`` elements.
        dtype: ``f32``, ``bf16`` or ``q4``.
        numel: elements of the fragment.
        momentum: the fragment's Nesterov buffer, 1-D f32.
        layout: the fragment's tensors; when given, their facts are kept for the merge.
        threads: at most this many work at a time; None for one a core. It changes no bit.

    Raises:
        MergeError: a size does not fit.
    """
    require_f32("momentum", momentum)
    source = of_payload(payload, dtype, numel)
    _require_numel("layout", numel if layout is None else layout.numel, numel)
    _require_numel("momentum", momentum.numel(), numel)
    cut = plan((numel,)) if layout is None else _cut(layout)
    running, encoded = RunningDigest(), np.frombuffer(payload, dtype=np.uint8)

    def digest(block: int) -> None:
        # The bytes of the block, or nearly: what matters is that each byte has its turn.
        start, stop = cut.elements(block)
        running.update(encoded[encoded.size * start // numel : encoded.size * stop // numel])

    tensors = examine(source, flatten(momentum), cut, chains=[digest], threads=threads)
    squared, dot, momentum_squared = 0.0, 0.0, 0.0
    for facts in tensors:
        squared += facts.norm**2
        dot += facts.dot
        momentum_squared += facts.momentum_norm**2
    length, momentum_length = math.sqrt(squared), math.sqrt(momentum_squared)
    if not length <= MAX_NORM:  # also catches NaN
        return PushFacts(digest=running.hex(), finite=False, norm=None, cosine_to_momentum=None)
    directed = length >= EPSILON and momentum_length >= EPSILON
    return PushFacts(
        digest=running.hex(),
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
    momentum_scale: float | None = None,
    plain_average: bool = False,
    threads: int | None = None,
) -> MergedGradient:
    """Reduce the pushes of one sealed attempt.

    Args:
        pushes: accepted pushes **in learner-id order**, which is the order of accumulation; all finite.
        layout: the fragment's tensors and merge mode.
        momentum: the fragment's Nesterov buffer, 1-D f32.
        mu: outer momentum, in [0, 1).
        momentum_scale: what makes the buffer a mean gradient; None for 1 - mu.
        plain_average: closing sweep: weighted average of every tensor, nothing corrected.
        threads: at most this many work at a time; None for one a core. It changes no bit.

    Raises:
        MergeError: a size or weight does not fit, the weights sum to 0, or a decomposition failed.
    """
    radial = layout.mode is MergeMode.RDA and not plain_average
    parts = parts_of(
        pushes,
        layout,
        momentum,
        mu=mu,
        momentum_scale=momentum_scale,
        radial=radial,
        plain_average=plain_average,
        threads=threads,
    )
    out = empty_floats(layout.numel)
    reduced = reduce_into(
        out, parts.sources, parts.momentum, parts.tensors, parts.cut, radial=radial, threads=threads
    )
    if decomposes(layout, plain_average=plain_average):
        reduced = _isotropic(out, layout, reduced)
    return parts.merged(out, reduced)


def decomposes(layout: FragmentLayout, *, plain_average: bool) -> bool:
    """Return whether the merge of a fragment decomposes its matrices.

    Args:
        layout: the fragment's tensors and merge mode.
        plain_average: whether every tensor is averaged, whatever the mode.
    """
    return layout.mode is MergeMode.ISO and not plain_average


@frozen(kw_only=True, eq=False)
class Parts:
    """What every push contributes to every tensor, before any element is reduced."""

    sources: list[Source]
    momentum: Source | None
    """None if no correction asks for it."""
    tensors: list[tuple[Contribution, ...]]
    """For each tensor one contribution a push."""
    corrected: tuple[int, ...]
    """Indexes of the pushes in which the correction changed at least one tensor."""
    cut: Plan

    def merged(self, elements: Tensor, reduced: Sequence[Reduced]) -> MergedGradient:
        """Return what was reduced into ``elements``, tensor by tensor, as the gradient of the fragment."""
        squared = 0.0
        for tensor in reduced:
            squared += tensor.squared
        finite = math.isfinite(squared)
        return MergedGradient(
            finite=finite,
            norm=math.sqrt(squared) if finite else None,
            corrected=self.corrected,
            cut=self.cut,
            factors=tuple(tensor.factor for tensor in reduced),
            elements=elements,
        )


def parts_of(
    pushes: Sequence[PushInput],
    layout: FragmentLayout,
    momentum: Tensor,
    *,
    mu: float,
    momentum_scale: float | None = None,
    radial: bool,
    plain_average: bool = False,
    threads: int | None = None,
) -> Parts:
    """Find out what every push contributes; arguments as for ``merge_fragment``.

    Args:
        pushes: in learner-id order.
        layout: the fragment's tensors.
        momentum: the fragment's Nesterov buffer.
        mu: outer momentum.
        momentum_scale: what makes the buffer a mean gradient; None for 1 - mu.
        radial: whether norms are needed for a radial-directional average.
        plain_average: nothing is corrected.
        threads: at most this many work at a time.

    Raises:
        MergeError: a size or weight does not fit, or the weights sum to 0.
    """
    require_f32("momentum", momentum)
    _require_numel("momentum", momentum.numel(), layout.numel)
    buffer, cut = flatten(momentum), _cut(layout)
    sources = [of_payload(push.payload, push.dtype, layout.numel) for push in pushes]
    damping = 1.0 - mu if momentum_scale is None else momentum_scale
    correcting = [push.correct and not plain_average for push in pushes]
    contributions = [
        _contributions(
            _facts_of(push, source, buffer, cut, threads) if radial or corrects else None,
            share,
            cut.tensors,
            damping if corrects else None,
        )
        for push, source, share, corrects in zip(
            pushes, sources, shares([push.weight for push in pushes]), correcting, strict=True
        )
    ]
    corrected = tuple(
        index for index, tensors in enumerate(contributions) if any(part.momentum_scale for part in tensors)
    )
    return Parts(
        sources=sources,
        momentum=of_tensor(buffer) if corrected else None,
        tensors=list(zip(*contributions, strict=True)),
        corrected=corrected,
        cut=cut,
    )


def _contributions(
    facts: Sequence[TensorFacts] | None, share: float, tensors: int, damping: float | None
) -> list[Contribution]:
    """Return one learner's part in each tensor; a scale of -1 is the one negation of its delta.

    Args:
        facts: of its push; None when norms do not matter.
        share: w / W.
        tensors: how many there are.
        damping: what makes the momentum buffer the momentum of the correction; None: nothing is corrected.
    """
    if facts is None:
        return [Contribution(share, math.nan, -1.0)] * tensors
    parts = []
    for found in facts:
        decided = None
        if damping is not None:
            decided = correction(found.norm, -found.dot * damping, found.momentum_norm * damping)
        if decided is None or damping is None:
            parts.append(Contribution(share, found.norm, -1.0))
        else:
            parts.append(
                Contribution(share, decided.norm, -decided.delta_scale, decided.momentum_scale * damping)
            )
    return parts


def _facts_of(
    push: PushInput, source: Source, momentum: Tensor, cut: Plan, threads: int | None
) -> tuple[TensorFacts, ...]:
    if push.facts is not None and len(push.facts.tensors) == cut.tensors:
        return push.facts.tensors
    return examine(source, momentum, cut, threads=threads)


def _isotropic(out: Tensor, layout: FragmentLayout, averaged: Sequence[Reduced]) -> list[Reduced]:
    """Replace each averaged matrix by its isotropic merge, in place."""
    reduced = []
    for piece, result in zip(layout.slices(), averaged, strict=True):
        target, shape = out[piece.start : piece.stop], piece.tensor.shape
        if len(shape) == 2:
            target.copy_(isotropic(target.view(shape)).view(-1))
            result = Reduced(1.0, product_sums(target, target).norm ** 2)
        reduced.append(result)
    return reduced


def _cut(layout: FragmentLayout) -> Plan:
    return plan(tuple(tensor.numel for tensor in layout.tensors))


def _require_numel(name: str, numel: int, expected: int) -> None:
    if numel != expected:
        raise MergeError(f"{name} has {numel} elements, the fragment has {expected}")
