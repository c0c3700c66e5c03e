"""What a push counts in a merge: how much its learner did, times how much it did per step.

Decoupled DiLoCo (arXiv 2604.21428, section 3.2): quantity times quality,
``w = tokens * (tokens / steps)``. A learner without a step has no weight.
"""

from __future__ import annotations

MAX_NORM = 1e15
"""A delta above this norm is as useless as an infinite one: no training makes it, its square leaves f32."""


def learner_weight(tokens: int, steps: int) -> float:
    """Weight of one push.

    Args:
        tokens: Raw packed tokens since the learner's last anchor.
        steps: Inner steps since then.

    Returns:
        ``tokens**2 / steps``, and 0.0 when ``steps`` is 0. ``(100, 10)`` gives 1000.0.
    """
    return tokens * tokens / steps if steps > 0 else 0.0
