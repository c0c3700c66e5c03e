"""The account: where every unit of work ended, and the proof that none was merged twice.

One inner step of one learner adds one *unit* to every fragment. Units of a learner are numbered from 0 over
all its lives and never used again, so work is a set of whole numbers, and because it comes in order, a set
is a few spans ``[first, end)``. A push carries the units since its fragment's anchor was received. A commit
merges the units of its responders' pushes.

Between two receipts that reset a fragment's counters lies a *period*: the units that were counted in it, and
the pushes that carried some of them. When a period is over, its pushes have met their fate and nothing can
revive it (a saved state of the learner, a resume from an older checkpoint), its units are tallied and the
period is forgotten. So the account is as long as what is still undecided, not as the run.

A learner that carries its work over a merge resets nothing: a receipt that takes a push off ends the period
at that push's snapshot, in the past, and the next period begins there.

**No unit is merged twice on one timeline.** Anchors only move forward, so the units of the pushes that are
merged must ascend for each learner and fragment. A commit whose units begin before the end of what was
merged is reported with everything known about it. A resume from an older checkpoint takes the commits above
it back: their units may be merged again, if the learner still counts them.

What is not counted: after a roll-back a learner's weights still hold their alpha share of the commits that
were taken back. And the frozen learners of a budget finish state all their work in every answer, by design.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from enum import StrEnum

from attrs import define, field

from yeto.core.decisions import AttemptDiscarded, AttemptSealed, RoundCommitted

Span = tuple[int, int]


class Fate(StrEnum):
    """Where a unit ended."""

    MERGED = "merged"
    LOCAL = "local"
    """Still in the local weights only, when the run ended or the final cut replaced them."""
    BETWEEN = "between"
    """Done after a push and before the broadcast that reset the counters."""
    UNASKED = "unasked"
    """No push carried it before a broadcast reset the counters."""
    MISSED_SEAL = "missed_seal"
    """Pushed, and the attempt was sealed without it."""
    DISCARDED = "discarded"
    """Its attempt was discarded, and no later one was answered from the same anchor."""
    REFUSED = "refused"
    """Its push was refused; the reason follows behind a colon."""
    LEFT_OUT = "left_out"
    """Answered, and left out of the merge as an outlier or after an unusable merge."""
    LINK_LOST = "link_lost"
    """The connection ended before its push arrived."""
    SYNCER_LOST = "syncer_lost"
    """Its push was with the syncer when that crashed or stopped."""
    SUPERSEDED = "superseded"
    """In a commit that a resume from an older checkpoint took back."""
    ROLLED_BACK = "rolled_back"
    """Not pushed when its learner had to go back to an older version."""
    FROZEN = "frozen"
    """In weights that a budget froze: a finish merges all their work once more."""
    DIED = "died"
    """Not pushed when its learner died."""


class AccountError(AssertionError):
    """Some unit was merged twice, or lost without a trace: a bug of the rules."""


@define(eq=False)
class Push:
    """One answer to a pull: which units it carried, and what became of it."""

    learner: int
    fragment: int
    step: int
    attempt: int
    spans: tuple[Span, ...]
    made_at: float
    exempt: bool = False
    """The answer of a frozen learner: states all its work, carries nothing that is counted here."""
    arrived: bool = False
    accepted: bool = False
    fate: str | None = None
    commit: int | None = None
    """Step of the commit that merged it."""

    def __str__(self) -> str:
        units = ", ".join(f"{first}..{end - 1}" for first, end in self.spans)
        return (
            f"push of learner {self.learner} for round {self.step} attempt {self.attempt} made at "
            f"{self.made_at:g} s: units {units} of fragment {self.fragment}, "
            f"{self.fate or ('accepted' if self.accepted else 'under way')}"
        )


@define(eq=False)
class _Period:
    """Units counted from one anchor."""

    learner: int
    fragment: int
    spans: list[Span]
    """What was counted before the present life of the learner; the rest begins at ``begin``."""
    begin: int
    end: int | None = None
    """None while it is open."""
    fate: str = ""
    """Of the units that no push carried."""
    pushes: list[Push] = field(factory=list)
    saved: int = 0
    """Saved states that may revive it."""

    def all_spans(self, work: int) -> list[Span]:
        end = work if self.end is None else self.end
        return [*self.spans, (self.begin, end)] if end > self.begin else list(self.spans)

    def settled(self, floor: float) -> bool:
        """Whether nothing can change what became of its units any more."""
        if self.end is None or self.saved:
            return False
        for push in self.pushes:
            if push.fate is None or (push.commit is not None and push.commit > floor):
                return False
        return True

    def carried(self) -> int:
        """Return the unit behind the last one that a push carried; 0 without a push."""
        return self.pushes[-1].spans[-1][1] if self.pushes else 0


@define(eq=False)
class SavedWork:
    """The periods that were open when a learner saved its state."""

    learner: int
    work: int
    periods: tuple[_Period, ...]
    spans: tuple[tuple[Span, ...], ...]
    later: list[_Period] = field(factory=list)
    """Periods that were split off one of ``periods`` since, at a unit that was done before the saving."""


def _count(spans: Iterable[Span]) -> int:
    """Return how many units there are in ``spans``."""
    count = 0
    for first, end in spans:
        count += end - first
    return count


def _inside(spans: Iterable[Span], first: int, end: int) -> int:
    """Return how many units of ``spans`` lie in ``[first, end)``."""
    count = 0
    for low, high in spans:
        begin, behind = low if low > first else first, high if high < end else end
        if behind > begin:
            count += behind - begin
    return count


class Account:
    """Keeps the books of one run."""

    def __init__(self, num_learners: int, num_fragments: int, *, can_go_back: bool) -> None:
        """Start with no work done.

        Args:
            num_learners: M.
            num_fragments: P.
            can_go_back: whether a resume may take commits back; without, they are final at once.
        """
        self._num_fragments = num_fragments
        self._open: list[list[_Period | None]] = [[None] * num_fragments for _ in range(num_learners)]
        self._waiting: list[_Period] = []
        self._sweep_at = 64
        self._pushes: dict[tuple[int, int, int], Push] = {}
        """Undecided pushes by step, attempt and learner."""
        self._merged_end = [[0] * num_fragments for _ in range(num_learners)]
        self._commits: deque[tuple[int, list[tuple[Push, int]]]] = deque()
        """Commits above the floor, with each push and the end of what its learner had merged before."""
        self._floor = -1.0 if can_go_back else float("inf")
        self._tally: list[Counter[str]] = [Counter() for _ in range(num_learners)]
        self._done = [0] * num_learners
        self._saved: dict[int, SavedWork] = {}
        """The saved state of each learner that has one."""

    # -- learners ------------------------------------------------------------------------------------

    def reset(self, learner: int, fragment: int, work: int, fate: str) -> None:
        """The counters of a fragment start anew at ``work``; ``fate`` is that of units no push carried."""
        self._close(learner, fragment, work, fate)
        self._open[learner][fragment] = _Period(learner, fragment, [], work)

    def carried(self, learner: int, fragment: int, snapshot: int) -> None:
        """What was pushed at ``snapshot`` units was taken off; what was done since is still counted.

        Raises:
            AccountError: nothing was pushed there.
        """
        period, saved = self._open[learner][fragment], self._saved.get(learner)
        if period is None or all(push.spans[-1][1] != snapshot for push in period.pushes):
            raise AccountError(f"learner {learner}, fragment {fragment}: no push ended at unit {snapshot}")
        self.reset(learner, fragment, snapshot, Fate.UNASKED)
        if saved is not None and snapshot < saved.work and period in (*saved.periods, *saved.later):
            after = self._open[learner][fragment]
            assert after is not None, "it was opened by the reset"
            after.saved += 1
            saved.later.append(after)

    def begin(self, learner: int, fragment: int, work: int) -> None:
        """A fragment has its first anchor, unless it had one."""
        if self._open[learner][fragment] is None:
            self._open[learner][fragment] = _Period(learner, fragment, [], work)

    def close(self, learner: int, work: int, fate: str) -> None:
        """The learner's life is over, or its weights were replaced."""
        for fragment in range(self._num_fragments):
            self._close(learner, fragment, work, fate)
        self._done[learner] = work

    def pushed(
        self, learner: int, fragment: int, work: int, *, step: int, attempt: int, c_steps: int, now: float
    ) -> Push:
        """A learner answers a pull with everything since its anchor.

        Raises:
            AccountError: the learner states another number of steps.
        """
        period = self._open[learner][fragment]
        if period is None:
            raise AccountError(f"learner {learner} answers round {step} without an anchor")
        spans = tuple(period.all_spans(work)) if period.spans else ((period.begin, work),)
        push = Push(learner, fragment, step, attempt, spans, now)
        if _count(spans) != c_steps:
            raise AccountError(f"{push}: states {c_steps} steps")
        period.pushes.append(push)
        self._pushes[step, attempt, learner] = push
        return push

    def pushed_frozen(
        self, learner: int, fragment: int, work: int, *, step: int, attempt: int, now: float
    ) -> Push:
        """A frozen learner answers with all it ever did, once more."""
        push = Push(learner, fragment, step, attempt, ((0, work),), now, exempt=True)
        self._pushes[step, attempt, learner] = push
        return push

    def link_lost(self, pushes: Iterable[Push]) -> None:
        """A connection ended; what had not arrived never will."""
        for push in pushes:
            if push.fate is None and not push.arrived:
                self._decide(push, Fate.LINK_LOST)

    def saved(self, learner: int, work: int, before: SavedWork | None) -> SavedWork:
        """A learner saves its state; ``before`` is what this replaces."""
        if before is not None:
            self.forgotten(before)
        periods = tuple(period for period in self._open[learner] if period is not None)
        for period in periods:
            period.saved += 1
        saved = SavedWork(learner, work, periods, tuple(tuple(period.all_spans(work)) for period in periods))
        self._saved[learner] = saved
        return saved

    def forgotten(self, saved: SavedWork) -> None:
        """A saved state is gone: nobody can go on from it any more."""
        for period in (*saved.periods, *saved.later):
            period.saved -= 1
        if self._saved.get(saved.learner) is saved:
            del self._saved[saved.learner]

    def restored(self, saved: SavedWork, work: int) -> None:
        """A learner whose life was closed goes on from saved state: what was counted then counts again."""
        for period, spans in zip(saved.periods, saved.spans, strict=True):
            later = [other for other in saved.later if other.fragment == period.fragment]
            pushes = [push for one in (period, *later) for push in one.pushes]
            revived = _Period(saved.learner, period.fragment, list(spans), work, pushes=pushes)
            for one in (period, *later):
                # What it did after saving stays with the old period; what it had saved is the new one's.
                one.spans, one.begin = [], max(one.begin, min(saved.work, one.end or saved.work))
                one.saved -= 1
            revived.saved += 1
            self._open[saved.learner][period.fragment] = revived
        saved.periods = tuple(period for period in self._open[saved.learner] if period is not None)
        saved.later.clear()

    # -- the syncer ----------------------------------------------------------------------------------

    def accepted(self, push: Push) -> None:
        """A push counts as its learner's answer."""
        push.accepted, push.fate = True, None
        self._pushes[push.step, push.attempt, push.learner] = push

    def refused(self, push: Push, reason: str) -> None:
        """A push was refused. What was accepted before, or decided, stays as it is."""
        if not push.accepted and push.fate is None:
            self._decide(push, f"{Fate.REFUSED}:{reason}")

    def sealed(self, decision: AttemptSealed, members: Iterable[int]) -> None:
        """An attempt takes nothing more."""
        merged = {weighted.learner for weighted in decision.responders}
        for learner in members:
            if learner in merged:
                continue
            push = self._pushes.get((decision.step, decision.attempt, learner))
            if push is not None:
                out = learner in decision.left_out
                self._decide(push, Fate.LEFT_OUT if out else Fate.MISSED_SEAL)

    def discarded(self, decision: AttemptDiscarded, members: Iterable[int]) -> None:
        """An attempt was thrown away, with every answer in it."""
        for learner in members:
            push = self._pushes.get((decision.step, decision.attempt, learner))
            if push is not None:
                self._decide(push, Fate.DISCARDED)

    def committed(self, decision: RoundCommitted) -> None:
        """A round was committed: the units of its responders are in the global weights.

        Raises:
            AccountError: a unit was there already, or a responder has sent nothing.
        """
        entries: list[tuple[Push, int]] = []
        for responder in decision.responders:
            key = (decision.step, decision.attempt, responder.learner)
            push = self._pushes.get(key)
            if push is None or not push.accepted:
                raise AccountError(f"round {decision.step} merges learner {responder.learner}: {push}")
            self._decide(push, Fate.MERGED)
            push.commit = decision.step
            if push.exempt:
                continue
            before = self._merged_end[push.learner][push.fragment]
            if push.spans[0][0] < before:
                raise AccountError(self._story(push, before))
            self._merged_end[push.learner][push.fragment] = push.spans[-1][1]
            entries.append((push, before))
        if decision.step > self._floor:
            self._commits.append((decision.step, entries))

    def final_up_to(self, step: int) -> None:
        """No resume can take back a commit up to ``step`` any more."""
        if step > self._floor:
            self._floor = step
            while self._commits and self._commits[0][0] <= step:
                self._commits.popleft()

    def syncer_lost(self) -> None:
        """The syncer's process is gone, and every push that was with it or on its way."""
        for push in list(self._pushes.values()):
            self._decide(push, Fate.SYNCER_LOST)

    def resumed(self, step: int) -> None:
        """A session goes on from a checkpoint of ``step``: commits above it are taken back."""
        while self._commits and self._commits[-1][0] > step:
            _, entries = self._commits.pop()
            for push, before in reversed(entries):
                push.fate, push.commit = Fate.SUPERSEDED, None
                self._merged_end[push.learner][push.fragment] = before

    # -- the end -------------------------------------------------------------------------------------

    def closed(self, works: Iterable[int]) -> tuple[dict[str, int], ...]:
        """End the run; return for each learner how many units, of all fragments, ended where.

        Args:
            works: Units each learner has done for each fragment.

        Raises:
            AccountError: the fates do not add up to what was done.
        """
        works = tuple(works)
        for learner, work in enumerate(works):
            self.close(learner, work, Fate.LOCAL)
        for push in list(self._pushes.values()):
            self._decide(push, Fate.SYNCER_LOST)
        for period in self._waiting:
            period.saved = 0
        self._floor = float("inf")
        self._sweep()
        assert not self._waiting, "every period is settled at the end"
        for learner, (work, tally) in enumerate(zip(works, self._tally, strict=True)):
            if sum(tally.values()) != work * self._num_fragments:
                raise AccountError(
                    f"learner {learner} did {work} units for each of {self._num_fragments} fragments, "
                    f"of which {sum(tally.values())} are accounted for: {dict(tally)}"
                )
        return tuple(dict(sorted(tally.items())) for tally in self._tally)

    # -- inside --------------------------------------------------------------------------------------

    def _decide(self, push: Push, fate: str) -> None:
        push.fate = fate
        key = (push.step, push.attempt, push.learner)
        if self._pushes.get(key) is push:
            del self._pushes[key]

    def _close(self, learner: int, fragment: int, work: int, fate: str) -> None:
        period = self._open[learner][fragment]
        if period is None:
            return
        self._open[learner][fragment] = None
        period.end, period.fate = work, fate
        if period.settled(self._floor):
            self._settle(period)
            return
        self._waiting.append(period)
        if len(self._waiting) >= self._sweep_at:
            self._sweep()
            # As long again as what is left: sweeping stays linear in the number of periods.
            self._sweep_at = 64 + 2 * len(self._waiting)

    def _sweep(self) -> None:
        waiting = []
        for period in self._waiting:
            if period.settled(self._floor):
                self._settle(period)
            else:
                waiting.append(period)
        self._waiting = waiting

    def _settle(self, period: _Period) -> None:
        """Tally the units of a period whose fate is known."""
        tally = self._tally[period.learner]
        assert period.end is not None
        pushes, carried = period.pushes, period.carried()
        # No unit is in two of them: that was checked when they were committed.
        merged = [span for push in pushes if push.commit is not None for span in push.spans]
        if period.spans:
            spans = period.all_spans(period.end)
            total, behind = _count(spans), _inside(spans, carried, period.end)
            in_merge = sum(_inside(merged, first, end) for first, end in spans)
        else:
            # Every push carried what there was from the anchor on.
            begin, end = period.begin, period.end
            total, behind = end - begin, end - max(begin, min(end, carried))
            in_merge = _inside(merged, begin, end)
        if in_merge:
            tally[Fate.MERGED] += in_merge
        behind = min(behind, total - in_merge)
        if behind:
            tally[Fate.BETWEEN if pushes and period.fate == Fate.UNASKED else period.fate] += behind
        if total > in_merge + behind:
            tally[pushes[-1].fate or Fate.LOCAL] += total - in_merge - behind

    def _story(self, push: Push, before: int) -> str:
        lines = [
            f"learner {push.learner}, fragment {push.fragment}: units {push.spans[0][0]}..{before - 1} are "
            f"merged again by round {push.step}, everything below {before} was behind the commits so far",
            f"  {push}",
        ]
        for step, entries in self._commits:
            lines += [
                f"  commit {step}: {other}"
                for other, _ in entries
                if (other.learner, other.fragment) == (push.learner, push.fragment)
            ]
        period = self._open[push.learner][push.fragment]
        if period is not None:
            lines += [f"  this period: {other}" for other in period.pushes]
        return "\n".join(lines)
