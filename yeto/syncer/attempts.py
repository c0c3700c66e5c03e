"""What one open attempt of a round holds: uploads, what is computed of them, the jobs that compute it.

An attempt owns the buffers its pushes are received into, and dies as one: when it ends, they are let go and
jobs that have not begun are cancelled. A cancel scope cannot stop a thread, so every result is held against
the attempt it was computed for before anything is done with it.
"""

from __future__ import annotations

import trio
from attrs import define, field

from yeto.core.values import Member
from yeto.merge import Agreement, MergedGradient, PushFacts
from yeto.state import FragmentVersion
from yeto.wire.striping import Buffer


@define(eq=False)
class Push:
    """One member's upload: its wire bytes, and what was found in them."""

    payload: Buffer
    facts: PushFacts | None = None


@define(eq=False)
class Attempt:
    """One open attempt of one round, with everything that is freed when it ends."""

    step: int
    fragment: int
    number: int
    pushes: dict[Member, Push] = field(factory=dict)
    gradient: MergedGradient | None = None
    agreement: Agreement | None = None
    """What the merge told of its learners; the commit adds how far it went ahead of them."""
    normalised: bool = False
    """Whether its step is divided by what the momentum buffer has gathered, and so leaves no look-ahead."""
    result: FragmentVersion | None = None
    encoded: memoryview | None = None
    """The result as it is broadcast, if the outer step made that on its way."""
    jobs: set[trio.CancelScope] = field(factory=set)
    recorded: trio.Event | None = None
    """Set when its pushes are on the disk; None when they are not recorded."""
    ended: bool = False

    def end(self) -> None:
        """Free the buffers and give up what has not begun."""
        self.ended = True
        self.pushes.clear()
        self.gradient = self.result = self.encoded = None
        for scope in self.jobs:
            scope.cancel()
