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

import torch
from attrs import frozen
from torch import Tensor

from yeto.errors import MergeError
from yeto.merge.chunks import (
    Source,
    TensorSource,
    combine,
    norm,
    require_f32,
    rescale,
    tensor_digest,
)

CANCELLED: Final = 1e-6
"""|u| lies in [0, 1]; below this, directions cancel to within f32 rounding."""


@frozen
class Contribution:
    """One learner's part in one tensor: ``scale * source + momentum_scale * momentum``."""

    source: Source
    share: float
    """w / W."""
    norm: float
    """L2 norm of the contribution as corrected; unused by the average."""
    scale: float = 1.0
    momentum_scale: float = 0.0


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


def average_into(
    out: Tensor, offset: int, contributions: Sequence[Contribution], momentum: Source | None = None
) -> float:
    """Write the weighted average to ``out`` (1-D f32) and return its sum of squares.

    Args:
        out: overwritten.
        offset: where in the sources ``out`` begins.
        contributions: in learner order.
        momentum: needed only if a contribution was corrected.
    """
    return _weighted(out, offset, [(part, part.share) for part in contributions], momentum)


def radial_into(
    out: Tensor, offset: int, contributions: Sequence[Contribution], momentum: Source | None = None
) -> float:
    """Write the radial-directional average to ``out``; otherwise as ``average_into``."""
    directed = [part for part in contributions if part.share > 0 and part.norm > 0]
    if len(directed) < 2:
        return average_into(out, offset, contributions, momentum)
    radius = 0.0
    for part in directed:
        radius += part.share * part.norm
    squared = _weighted(out, offset, [(part, part.share / part.norm) for part in directed], momentum)
    length = math.sqrt(squared)
    if length < CANCELLED:
        return average_into(out, offset, contributions, momentum)
    return rescale(out, radius / length)


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
    parts = _contributions(deltas, weights, with_norms=False)
    out = torch.empty(deltas[0].shape, dtype=torch.float32)
    average_into(out.view(-1), 0, parts)
    return out


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
    parts = [parts[index] for index in sorted(range(len(parts)), key=keys.__getitem__)]
    out = torch.empty(deltas[0].shape, dtype=torch.float32)
    radial_into(out.view(-1), 0, parts)
    return out


def _weighted(
    out: Tensor,
    offset: int,
    weighted: Sequence[tuple[Contribution, float]],
    momentum: Source | None,
) -> float:
    """Combine contributions with coefficients; the momentum of all of them is added once, at the end."""
    terms = [(part.source, coefficient * part.scale) for part, coefficient in weighted if coefficient]
    along = 0.0
    for part, coefficient in weighted:
        along += coefficient * part.momentum_scale
    if momentum is not None and along:
        terms.append((momentum, along))
    return combine(out, offset, terms)


def _contributions(
    deltas: Sequence[Tensor], weights: Sequence[float], *, with_norms: bool
) -> list[Contribution]:
    if len(deltas) != len(weights):
        raise MergeError(f"{len(deltas)} deltas but {len(weights)} weights")
    for index, delta in enumerate(deltas):
        require_f32(f"delta {index}", delta, deltas[0])
    return [
        Contribution(TensorSource(delta), share, norm(delta) if with_norms else math.nan)
        for delta, share in zip(deltas, shares(weights), strict=True)
    ]
