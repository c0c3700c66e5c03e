"""What an export does about Nesterov's look-ahead, and what it says about it.

Until its closing sweep, a run with outer momentum stores the point at which its learners go on, which is
ahead of where they have come to (:mod:`yeto.state.lookahead`). Whoever takes a model out of the middle of a
run wants the latter.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

CHOICES = ("remove", "keep")
"""Of ``--lookahead``."""


@frozen(kw_only=True)
class Fate:
    """What became of the look-ahead."""

    word: str
    """``removed``, ``kept``, ``none`` or ``unknown``."""
    sentence: str


def removed(lookahead: float | None, choice: str) -> float:
    """Return how many times its momentum is added to a fragment."""
    return 0.0 if choice == "keep" or lookahead is None else lookahead


def fate_of(lookaheads: Sequence[float | None], choice: str) -> Fate:
    """Return what becomes of the look-ahead of a checkpoint.

    Args:
        lookaheads: of each fragment; 0 where there is none, None where the checkpoint does not say.
        choice: ``remove`` or ``keep``.
    """
    ahead = sum(1 for lookahead in lookaheads if lookahead)
    unknown = sum(1 for lookahead in lookaheads if lookahead is None)
    of_all = f"of {len(lookaheads)} fragments"
    rest = f"; of {unknown} the checkpoint does not say, and they are as stored" if unknown else ""
    if ahead and choice == "keep":
        return Fate(word="kept", sentence=f"kept in {ahead} {of_all}, which are ahead of the run{rest}")
    if ahead:
        return Fate(
            word="removed", sentence=f"removed from {ahead} {of_all}{rest} (--lookahead keep keeps it)"
        )
    if unknown:
        return Fate(
            word="unknown",
            sentence=f"the checkpoint does not say of {unknown} {of_all}, so they are as stored",
        )
    return Fate(word="none", sentence="there is none, the parameters are as stored")
