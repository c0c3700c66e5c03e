"""Delta correction (HeLoCo, arXiv 2606.00271 Alg. 1): what a stale delta may not undo.

A delta that was computed against an old base may push back against what the others have moved since, which
shows as a negative cosine to the outer momentum. Such a delta loses part of its component along the
momentum; one that is merely sideways is turned a little towards it, keeping its length; one that agrees is
left alone. How much depends on how large the delta is beside the momentum (its *confidence*).

Every case is a linear combination of the delta and the momentum. So the decision needs three numbers (two
norms, one dot product), and the correction itself costs nothing beyond the accumulation that follows anyway.
"""

from __future__ import annotations

import math
from typing import Final

from attrs import frozen
from torch import Tensor

from yeto.merge.blocks import plan
from yeto.merge.checks import require_f32
from yeto.merge.memory import empty_floats
from yeto.merge.passes import accumulate, product_sums
from yeto.merge.sources import of_tensor

COSINE_OK: Final = 0.2
SHRINK: Final = 0.5
"""k_s of the paper."""
TURN: Final = 1.0
"""k_d of the paper."""
SHRINK_MAX: Final = 0.5
"""beta_max of the paper."""
MOMENTUM_WEIGHT: Final = 3.0
"""kappa of the paper."""
EPSILON: Final = 1e-8
"""Norms below this have no direction to speak of."""


@frozen
class Correction:
    """The corrected delta is ``delta_scale * D + momentum_scale * m``; its norm is known beforehand."""

    delta_scale: float
    momentum_scale: float
    norm: float


def correction(delta_norm: float, dot: float, momentum_norm: float) -> Correction | None:
    """Decide how a delta is corrected.

    Args:
        delta_norm: |D|, f64.
        dot: D . m, f64.
        momentum_norm: |m|, f64.

    Returns:
        The linear combination, or None when the delta is left as it is.
    """
    if not (delta_norm >= EPSILON and momentum_norm >= EPSILON):
        return None
    cosine = dot / (delta_norm * momentum_norm)
    if not cosine < COSINE_OK:
        return None
    confidence = delta_norm / (delta_norm + MOMENTUM_WEIGHT * momentum_norm + EPSILON)
    if cosine < 0:
        beta = min(SHRINK * -cosine * confidence, SHRINK_MAX)
        along = beta * -cosine * delta_norm / momentum_norm
        # |D + along m|**2 by the cosine rule; beta <= 1/2 keeps it above a quarter of |D|**2.
        squared = delta_norm**2 + 2 * along * dot + (along * momentum_norm) ** 2
        return Correction(1.0, along, math.sqrt(squared))
    turn = min(TURN * (1 - cosine) * confidence, 1.0)
    length = math.sqrt((1 - turn) ** 2 + turn**2 + 2 * turn * (1 - turn) * cosine)
    return Correction((1 - turn) / length, turn * delta_norm / (momentum_norm * length), delta_norm)


def correct_delta(delta: Tensor, momentum: Tensor) -> Tensor:
    """Return the corrected outer gradient of one learner for one tensor.

    Args:
        delta: f32 outer gradient D (the negated learner delta), any shape.
        momentum: f32, same shape. The paper's is a moving average; a Nesterov buffer is a sum, up to
            1 / (1 - mu) larger, so callers hand in (1 - mu) * buffer.

    Returns:
        A new tensor of the same shape; equal to ``delta`` when its cosine to the momentum is at least 0.2
        or when either is nearly zero.

    Raises:
        MergeError: a dtype or shape does not fit.
    """
    require_f32("delta", delta)
    require_f32("momentum", momentum, delta)
    facts = product_sums(delta, momentum)
    decided = correction(facts.norm, facts.dot, facts.momentum_norm)
    if decided is None:
        return delta.detach().clone()
    corrected = empty_floats(delta.numel())
    accumulate(
        [of_tensor(delta), of_tensor(momentum)],
        [[decided.delta_scale, decided.momentum_scale]],
        corrected,
        plan((delta.numel(),)),
    )
    return corrected.view(delta.shape)
