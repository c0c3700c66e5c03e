"""What travels, beside plain numbers."""

from __future__ import annotations

from attrs import define

from yeto.learner.exchanged import Answer
from yeto.sim.account import Push


def initial_digest(fragment: int) -> str:
    """Return the digest of a fragment's initial values: those of the seed, whoever draws them."""
    return f"{fragment:032x}"


@define(eq=False)
class PushMessage:
    """A push on its way: its header, what its bytes will turn out to hold, and its place in the account."""

    answer: Answer
    push: Push
    finite: bool
    is_copy: bool = False
    is_judged: bool = False
    """Whether the coordinator has heard of it: its bytes are read only then."""
    is_here: bool = False

    def copy(self) -> PushMessage:
        """Return the same push, sent once more."""
        return PushMessage(self.answer, self.push, self.finite, is_copy=True)
