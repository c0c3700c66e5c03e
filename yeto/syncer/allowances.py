"""How often a learner may say something: what it can add to the tape, and cost the others, is bounded.

A key tells who may take part, not that everybody who has it behaves. Each fact becomes a line that is kept
for good, so facts that say nothing new (a step that did not advance, an ACK once more) are dropped where they
arrive, and what is new is metered: so many at once, so many a second in the long run. Whoever sends more than
any learner has reason to is disconnected, and may dial again. What is left belongs to the learner id, not to
the connection: a new one does not fill it up.

In the long run an id can cause 10 events a second (5 control messages, 1 push that was not asked for, 1 dial
with its coming and going, and a HELLO of before now and then), each with a decision or two. One that did all
of it at once added 11 lines a second, 2 kB.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import trio
from attrs import define, field, frozen


@frozen
class Rate:
    """How much is granted."""

    burst: float
    """At once, after a pause."""
    per_second: float
    """In the long run."""


HEARTBEATS: Final = Rate(8, 1)
"""So many are told to the coordinator, further ones are dropped. A learner sends one every 5 s, and three
when it connects."""

CONTROL: Final = Rate(64, 5)
"""Control messages of any kind; more of them end the group. A learner that loses its connection every second
sends as many."""

PUSHES: Final = Rate(16, 1)
"""Pushes beyond what was asked for; more of them end the group. Some are no offence: answers that come late,
and what other implementations repeat."""

PUSHES_A_PULL: Final = 2
"""Pushes that a pull grants: its answer, and that answer once more."""

DIALS: Final = Rate(60, 1)
"""HELLOs; the connections of further ones are closed. With its jittered waits a learner dials about once a
second at most, and a minute of that may arrive at once when the network has held it back."""

REPLAYS: Final = Rate(8, 0.1)
"""HELLOs of a generation that was told of before. They have a rate of their own: whoever recorded one on the
way can send it as often as it likes, and must not use up what the true learner has."""

GENERATIONS: Final = 1024
"""Generations remembered for that: as many as the coordinator remembers."""


@define(eq=False)
class Allowance:
    """What is left of a rate (a token bucket on Trio's clock)."""

    rate: Rate
    refused: int = field(default=0, init=False)
    """How often it was refused since it was last granted; the first time is worth a line of log."""
    _left: float = field(init=False)
    _since: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._left = self.rate.burst
        self._since = trio.current_time()

    def take(self) -> bool:
        """Use one, if there is one."""
        now = trio.current_time()
        if self._left < self.rate.burst:
            more = (now - self._since) * self.rate.per_second
            self._left = min(self.rate.burst, self._left + more)
        self._since = now
        if self._left < 1:
            self.refused += 1
            return False
        self._left -= 1
        self.refused = 0
        return True

    def grant(self, count: float) -> None:
        """Add some, beyond a burst, too."""
        self._left += count


@define(eq=False)
class Allowances:
    """Of one learner id, over all its connections."""

    heartbeats: Allowance = field(factory=lambda: Allowance(HEARTBEATS))
    control: Allowance = field(factory=lambda: Allowance(CONTROL))
    pushes: Allowance = field(factory=lambda: Allowance(PUSHES))
    dials: Allowance = field(factory=lambda: Allowance(DIALS))
    replays: Allowance = field(factory=lambda: Allowance(REPLAYS))
    _generations: deque[int] = field(factory=lambda: deque(maxlen=GENERATIONS))

    def of_dial(self, generation: int) -> Allowance:
        """Return what a HELLO of this generation is to be taken from."""
        if generation in self._generations:
            return self.replays
        self._generations.append(generation)
        return self.dials
