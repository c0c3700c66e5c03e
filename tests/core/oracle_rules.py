"""What several rules have in common: waits that are open, and decisions that are made in several places."""

from __future__ import annotations

from oracle_history import grid
from oracle_past import Past
from oracle_rounds import Attempt

from yeto.core import CoreConfig
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.values import FragmentVersionRef, Member

Due = list[de.Decision]

OPEN_SESSION = ("running", "stopping")
LIVE = ("gathering", "merging", "merged")


class Rules:
    """The past, the present moment, and what both halves of the rules need."""

    def __init__(self, config: CoreConfig) -> None:
        self.past = Past(config)
        self.at = 0.0

    # What is waited for.

    def waits_to_retry(self, attempt: Attempt) -> bool:
        """Whether the retry of a discarded attempt is a matter of time at all."""
        assert attempt.discarded is not None
        return attempt.discarded.retry_at != attempt.discarded_at

    def awaited_back(self) -> dict[int, float]:
        """Learners without whom this session cannot end well, and since when they are away."""
        past = self.past
        if past.config.budget_finish or past.phase() == "budget":
            return past.needed_but_absent()
        return {}

    def start_deadline(self) -> float | None:
        """Until when learners are waited for at the start; None once that is over."""
        past = self.past
        if past.config.budget_finish or past.phase() not in ("provisional", "waiting"):
            return None
        begin = 0.0 if past.resumed is None else past.resumed.at
        deadline = grid(begin + past.config.start_timeout_seconds)
        told = any(at >= deadline for at, _ in past.times(ev.StartTimeoutPassed))
        return None if told else deadline

    def next_round(self) -> int:
        return self.past.step() + len(self.past.open_attempts()) + 1

    def may_open(self) -> bool:
        """Whether only the throttle can still hold the next round back."""
        past, step = self.past, self.next_round()
        if past.phase() != "running" or len(past.open_attempts()) >= past.depth or step > past.target:
            return False
        fragment = past.fragment_of(step)
        return len(past.people().here) >= past.quorum and past.versions()[fragment] == past.sent()[fragment]

    # Decisions.

    def ended(self, exit_code: int) -> de.SessionEnded:
        mark = exit_code == 0 and self.past.phase() == "finalising" and self.past.config.mark_final_checkpoint
        return de.SessionEnded(exit_code=exit_code, step=self.past.step(), mark_final=mark, why="")

    def final_cut(self, to: tuple[Member, ...], awaited: set[int]) -> de.FinalCutOrdered:
        past = self.past
        return de.FinalCutOrdered(
            step=past.step(), versions=past.versions(), to=to, awaited=tuple(sorted(awaited)), why=""
        )

    def checkpoint(self, step: int) -> de.CheckpointOrdered:
        target = self.past.target if self.past.config.budget_finish else None
        return de.CheckpointOrdered(step=step, final=False, finish_target=target, why="")

    @staticmethod
    def broadcast_of(versions: tuple[int, ...], to: tuple[Member, ...]) -> de.BroadcastOrdered:
        refs = tuple(FragmentVersionRef(fragment=p, version=version) for p, version in enumerate(versions))
        return de.BroadcastOrdered(fragments=refs, to=to, why="")

    def discard(self, attempt: Attempt, reason: str) -> Due:
        """Throw an attempt away; with it what a closing session or a third unusable merge takes along."""
        past, phase, step = self.past, self.past.phase(), attempt.step
        closing = {"stopping": "stopping", "budget": "budget"}.get(phase)
        unusable = reason in ("not_finite", "merge_failed")
        failures = past.failures(step) + unusable
        waits = [0.0]
        if attempt.gone:
            waits.append(1.0)
        if attempt.declined or unusable:
            waits.append(min(60.0, 2.0 ** (past.discards(step) + 1)))
        retried = closing is None and failures < 3
        due: Due = [self.discarded(attempt, reason, grid(self.at + max(waits)) if retried else None)]
        if closing is not None:
            due += self.drop(step + 1, closing)
        elif failures == 3:
            due.append(de.SessionEnding(phase="stop", why=""))
            due += [d for d in self.drop(past.step() + 1, "stopping") if d.step != step]
        return due

    def drop(self, first: int, reason: str) -> list[de.AttemptDiscarded]:
        """Drop all rounds from ``first`` on whose commit was not ordered."""
        return [
            self.discarded(attempt, reason, None)
            for attempt in self.past.open_attempts()
            if attempt.step >= first and attempt.status in LIVE
        ]

    @staticmethod
    def discarded(attempt: Attempt, reason: str, retry_at: float | None) -> de.AttemptDiscarded:
        return de.AttemptDiscarded(
            step=attempt.step,
            attempt=attempt.opened.attempt,
            reason=reason,
            lost=tuple(sorted(attempt.answers)),
            retry_at=retry_at,
            why="",
        )
