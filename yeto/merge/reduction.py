"""How the contributions of several learners become one: weighted average, or radial-directional average.

**Average**: sum of (w / W) D, W the sum of all weights.

**Radial-directional average** (RDA, Decoupled DiLoCo arXiv 2604.21428 App. D.2): deltas of different learners
are nearly orthogonal, so their average is shorter than any of them, and the more learners, the shorter. RDA
averages lengths and directions apart: R = sum(w |D|) / W, u = sum over non-zero D of (w / W) D / |D|, result
R u / |u|. A zero delta has no direction but counts as a length of 0, so it shortens the result. Where fewer
than two deltas have a direction both formulas agree, and the average, which is exact then, is taken.
Directions that cancel (|u| below 1e-6) leave f32 noise; scaling noise to full length would be worse than any
average, so the average is taken there too.

Norms come first (they are known from the arrival of a push); then one pass accumulates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from attrs import frozen
from torch import Tensor

from yeto.errors import MergeError
from yeto.merge.blocks import Plan, plan
from yeto.merge.checks import require_f32
from yeto.merge.memory import empty_floats
from yeto.merge.passes import accumulate, norm, tensor_digest
from yeto.merge.sources import Source, of_tensor

CANCELLED: Final = 1e-6
"""|u| lies in [0, 1]; below this, directions cancel to within f32 rounding."""


@frozen
class Contribution:
    """One learner's part in one tensor: ``scale * source + momentum_scale * momentum``."""

    share: float
    """w / W."""
    norm: float
    """L2 norm of the contribution as corrected; unused by the average."""
    scale: float = 1.0
    momentum_scale: float = 0.0


@frozen
class Reduced:
    """A tensor that was reduced, up to a factor."""

    factor: float
    """What the elements that were written are still to be multiplied by."""
    squared: float
    """Sum of squares of what they are then."""


def shares(weights: Sequence[float]) -> list[float]:
    """Return w / W for each weight, in f64.

    Raises:
        MergeError: no weight, one that is negative or not finite, or all of them 0.
    """
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise MergeError(f"weight {index} is {weight}; weights are finite and not negative")
    total = math.fsum(weights)
    if total <= 0:
        raise MergeError(f"the {len(weights)} weights sum to {total}; there is nothing to merge")
    return [weight / total for weight in weights]


def reduce_into(
    out: Tensor,
    sources: Sequence[Source],
    momentum: Source | None,
    tensors: Sequence[Sequence[Contribution]],
    cut: Plan,
    *,
    radial: bool,
    threads: int | None = None,
) -> list[Reduced]:
    """Reduce every tensor of a fragment.

    The length of a radial-directional average is known only when its direction is, so what is written is the
    direction; whoever reads it next multiplies by the factor.

    Args:
        out: 1-D f32, overwritten.
        sources: in learner order.
        momentum: needed only if a contribution was corrected.
        tensors: for each tensor, one contribution a source.
        cut: the tensors.
        radial: radial-directional average instead of the weighted average.
        threads: as for ``yeto.merge.blocks.run``.
    """
    everything = [*sources] if momentum is None else [*sources, momentum]
    with_momentum = momentum is not None
    radii = [_radius(parts) if radial else None for parts in tensors]
    table = [
        _average(parts, with_momentum) if radius is None else _directions(parts, with_momentum)
        for parts, radius in zip(tensors, radii, strict=True)
    ]
    squared = accumulate(everything, table, out, cut, threads=threads)
    cancelled = [
        index
        for index, radius in enumerate(radii)
        if radius is not None and math.sqrt(squared[index]) < CANCELLED
    ]
    if cancelled:
        for index in cancelled:
            radii[index] = None
            table[index] = _average(tensors[index], with_momentum)
        again = accumulate(everything, table, out, cut.only(cancelled), threads=threads)
        for index in cancelled:
            squared[index] = again[index]
    return [
        Reduced(1.0, square) if radius is None else Reduced(radius / math.sqrt(square), radius**2)
        for radius, square in zip(radii, squared, strict=True)
    ]


def average(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted average of one tensor's outer gradients.

    Args:
        deltas: f32, one shape, in learner order, which is the order of accumulation.
        weights: one a delta, finite, not negative; only their ratios matter.

    Returns:
        A new f32 tensor of that shape.

    Raises:
        MergeError: a dtype, shape, count or weight does not fit, or all weights are 0.
    """
    return _merged(deltas, _contributions(deltas, weights, with_norms=False), radial=False)


def radial_directional_average(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the radial-directional average of one tensor's outer gradients.

    The order of the arguments changes no bit: without learner ids to go by, contributions are taken in an
    order of their own (share, norm, digest).

    Args:
        deltas: f32, one shape.
        weights: one a delta, finite, not negative; only their ratios matter.

    Returns:
        A new f32 tensor of that shape.

    Raises:
        MergeError: a dtype, shape, count or weight does not fit, or all weights are 0.
    """
    parts = _contributions(deltas, weights, with_norms=True)
    keys = [(part.share, part.norm, tensor_digest(delta)) for part, delta in zip(parts, deltas, strict=True)]
    order = sorted(range(len(parts)), key=keys.__getitem__)
    return _merged([deltas[index] for index in order], [parts[index] for index in order], radial=True)


def _radius(parts: Sequence[Contribution]) -> float | None:
    """Return the weighted mean length; None where fewer than two contributions have a direction."""
    radius, directed = 0.0, 0
    for part in parts:
        if part.share > 0 and part.norm > 0:
            directed += 1
            radius += part.share * part.norm
    return radius if directed >= 2 else None


def _average(parts: Sequence[Contribution], with_momentum: bool) -> list[float]:
    return _coefficients(parts, [part.share for part in parts], with_momentum)


def _directions(parts: Sequence[Contribution], with_momentum: bool) -> list[float]:
    weights = [part.share / part.norm if part.share > 0 and part.norm > 0 else 0.0 for part in parts]
    return _coefficients(parts, weights, with_momentum)


def _coefficients(
    parts: Sequence[Contribution], weights: Sequence[float], with_momentum: bool
) -> list[float]:
    """Return one coefficient a source; the momentum of all contributions is added once, at the end."""
    row = [weight * part.scale for part, weight in zip(parts, weights, strict=True)]
    if with_momentum:
        along = 0.0
        for part, weight in zip(parts, weights, strict=True):
            along += weight * part.momentum_scale
        row.append(along)
    return row


def _merged(deltas: Sequence[Tensor], parts: Sequence[Contribution], *, radial: bool) -> Tensor:
    cut = plan((deltas[0].numel(),))
    out = empty_floats(deltas[0].numel())
    [reduced] = reduce_into(out, [of_tensor(delta) for delta in deltas], None, [parts], cut, radial=radial)
    if reduced.factor != 1.0:
        accumulate([of_tensor(out)], [[reduced.factor]], out, cut)
    return out.view(deltas[0].shape)


def _contributions(
    deltas: Sequence[Tensor], weights: Sequence[float], *, with_norms: bool
) -> list[Contribution]:
    if len(deltas) != len(weights):
        raise MergeError(f"{len(deltas)} deltas but {len(weights)} weights")
    for index, delta in enumerate(deltas):
        require_f32(f"delta {index}", delta, deltas[0])
    return [
        Contribution(share, norm(delta) if with_norms else math.nan)
        for delta, share in zip(deltas, shares(weights), strict=True)
    ]
