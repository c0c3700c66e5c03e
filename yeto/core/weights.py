"""The weight of a learner in a merge: how much it did, times how much it did per step.

Decoupled DiLoCo (arXiv 2604.21428, section 3.2): quantity times quality,
``w = tokens * (tokens / steps)``. A learner without a step has no weight.
"""

from __future__ import annotations


def learner_weight(tokens: int, steps: int) -> float:
    """Weight of one push.

    Args:
        tokens: Raw packed tokens since the learner's last anchor.
        steps: Inner steps since then.

    Returns:
        ``tokens**2 / steps``, and 0.0 when ``steps`` is 0. ``(100, 10)`` gives 1000.0.
    """
    return tokens * tokens / steps if steps > 0 else 0.0
