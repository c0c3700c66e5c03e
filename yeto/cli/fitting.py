"""What the learners and the syncer of one run have to be told so that their settings fit each other.

For commands that start both; who starts them one by one says it by hand.
"""

from __future__ import annotations

from yeto.core import CoreConfig
from yeto.core.outer import resolved
from yeto.learner.config import CARRY


def fitting_merge_alpha(
    given: float | str | None, policy: CoreConfig, *, num_fragments: int, total_steps: int
) -> float | str | None:
    """Return ``--merge-alpha`` of the learners of a run; None for their default.

    Where a fragment becomes the average of its learners', a learner that keeps what it did meanwhile loses
    nothing, and was measured to do best.
    """
    if given is None and resolved(policy, num_fragments=num_fragments, target=total_steps).plain:
        return CARRY
    return given


def fitting_outer(given: str | None, matrix_merge: str) -> str | None:
    """Return ``--outer`` of the syncer of a run: the default averages, and so would make no iso merge."""
    return "stock" if given is None and matrix_merge == "iso" else given
