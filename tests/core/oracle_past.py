"""A timeline that can be asked everything, up to its end."""

from __future__ import annotations

from attrs import define
from oracle_history import question
from oracle_rounds import Rounds

from yeto.core import decisions as de
from yeto.core import events as ev


@define
class Cut:
    """Who was sent the final cut, who is awaited and who holds it."""

    at: float
    awaited: set[int]
    guests: set[int]
    """Awaited only while they are connected."""
    sent: set[int]
    acked: set[int]


@define
class Past(Rounds):
    """A timeline, asked about its end."""

    @question
    def reports(self) -> set[int]:
        """Learners whose budget report was taken."""
        return {report.learner for _, report in self.taken(ev.BudgetReported)}

    def needed_but_absent(self) -> dict[int, float]:
        """Configured learners that are not here and did not report, and since when."""
        people = self.people()
        begin = 0.0 if self.resumed is None else self.resumed.at
        return {
            learner: people.left_at.get(learner, begin)
            for learner in range(self.config.num_learners)
            if learner not in people.here and learner not in self.reports()
        }

    @question
    def is_drained(self) -> bool:
        """Whether the pool was drained after the session closed."""
        drained = not self.config.svd_pool
        for index, (_, thing) in enumerate(self.things):
            if isinstance(thing, de.SessionEnding):
                drained = not self.config.svd_pool
            elif isinstance(thing, ev.SvdPoolDrained) and self.was_taken(index):
                drained = True
        return drained

    @question
    def cut(self) -> Cut | None:
        cut: Cut | None = None
        for index, at, thing, people in self.story():
            if isinstance(thing, de.FinalCutOrdered):
                if cut is None:
                    cut = Cut(at, set(thing.awaited), set(), set(), self.acked_before())
                cut.guests |= set(thing.awaited) - cut.awaited
                cut.awaited = set(thing.awaited)
                cut.sent |= {member.learner for member in thing.to}
            elif cut is not None:
                if isinstance(thing, ev.FinalAckReceived) and self.was_taken(index):
                    cut.acked.add(thing.learner)
                    cut.awaited.discard(thing.learner)
                cut.awaited -= {learner for learner in cut.guests if learner not in people.here}
        return cut

    def acked_before(self) -> set[int]:
        """Who held this very cut already when the session was resumed."""
        if self.resumed is None or self.resumed.step != self.target:
            return set()
        return set(self.resumed.acked)
