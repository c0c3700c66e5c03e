"""What has become possible: sealing, merging, committing, sending, opening, ending. And what is armed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import evolve
from oracle_history import BLIND_SECONDS, grid
from oracle_rounds import Attempt
from oracle_rules import LIVE, OPEN_SESSION, Rules

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.values import FragmentVersionRef, Weighted


class Dues(Rules):
    """The stages of the rules; each decision is part of the past when the next one is looked for."""

    def close_for_budget(self) -> Iterator[de.Decision]:
        past = self.past
        if past.reports() and past.durable() >= 0 and past.phase() in ("waiting", "running"):
            dropped = self.drop(past.step() + 1, "budget")
            yield de.SessionEnding(phase="budget", why="")
            yield from dropped

    def seal_or_discard(self) -> Iterator[de.Decision]:
        """In ascending step, over and over: whom a sweep round misses, an earlier one waits for no more."""
        more = True
        while more:
            more = False
            for decision in self._seal_or_discard_once():
                more = True
                yield decision

    def _seal_or_discard_once(self) -> Iterator[de.Decision]:
        past = self.past
        last = past.step() + past.depth
        for step in range(past.step() + 1, last + 1):
            attempt = past.attempt(step)
            if attempt is not None and attempt.status == "gathering":
                yield from self._seal_or_discard(attempt)
            elif attempt is not None and attempt.status == "retry" and past.phase() == "stopping":
                yield from self._drop_above(step)

    def _drop_above(self, step: int) -> Iterator[de.Decision]:
        """Nothing is retried any more, so what lies above can never be committed."""
        above = (self.past.attempt(t) for t in range(step + 1, step + 1 + self.past.depth))
        for attempt in [attempt for attempt in above if attempt is not None and attempt.status in LIVE]:
            yield self.discarded(attempt, "stopping", None)

    def _seal_or_discard(self, attempt: Attempt) -> Iterator[de.Decision]:
        past, quorum = self.past, attempt.opened.quorum
        answers, owing = len(attempt.answers), attempt.owing
        if answers < quorum:
            if answers + len(owing) < quorum:
                yield from self.discard(attempt, "unreachable")
            elif attempt.overdue:
                stopping = past.phase() == "stopping"
                yield from self.discard(attempt, "stopping" if stopping else "quorum_timeout")
            return
        if owing and not attempt.overdue:
            if past.is_sweep(attempt.step):
                missed = past.missed_in_sweep()
                if any(attempt.members[learner] not in missed for learner in owing):
                    return
            elif attempt.grace is not None:
                return
            else:
                grace = self._grace(attempt)
                yield grace
                if grace.grace_seconds > 0:
                    return
        yield self._sealed(attempt)

    def _grace(self, attempt: Attempt) -> de.GraceOpened:
        past, config, pace = self.past, self.past.config, self.past.pace()
        here = past.people().here
        present = tuple(m for m in attempt.opened.members if here.get(m.learner) == m)
        xi_step = pace.slowest(present)
        latencies = sorted(
            pace.latency_then[attempt.step, attempt.opened.attempt, learner] for learner in attempt.answers
        )
        xi_quorum = latencies[attempt.opened.quorum - 1]
        xi_sync = past.xi_sync()
        seconds = config.grace_cap_seconds
        if xi_step is not None:
            slack = config.grace_tau * xi_step - xi_quorum - (xi_sync or 0.0)
            seconds = min(max(config.grace_gamma * slack, 0.0), config.grace_cap_seconds)
        return de.GraceOpened(
            step=attempt.step,
            attempt=attempt.opened.attempt,
            grace_seconds=seconds,
            gamma=config.grace_gamma,
            tau=config.grace_tau,
            xi_step=xi_step,
            xi_quorum=xi_quorum,
            xi_sync=xi_sync,
            cap=config.grace_cap_seconds,
            deadline=grid(self.at + seconds),
            why="",
        )

    def _sealed(self, attempt: Attempt) -> de.AttemptSealed:
        left_out = self._left_out(attempt)
        return de.AttemptSealed(
            step=attempt.step,
            fragment=attempt.opened.fragment,
            attempt=attempt.opened.attempt,
            responders=tuple(
                self._weighted(attempt, learner)
                for learner in sorted(attempt.answers)
                if learner not in left_out
            ),
            missed=tuple(sorted(set(attempt.members) - set(attempt.answers))),
            left_out=tuple(sorted(left_out)),
            why="",
        )

    def _weighted(self, attempt: Attempt, learner: int) -> Weighted:
        config, head = self.past.config, attempt.answers[learner].head
        staleness = max(attempt.opened.base_version - head.base_version, 0)
        weight = 1.0 if config.learner_weight == "equal" else head.c_tokens * head.c_tokens / head.c_steps
        stale_enough = {"heloco": staleness >= 1, "heloco-all": True, "none": False}
        correct = stale_enough[config.delta_correction] and not self.past.is_plain(attempt.step)
        return Weighted(
            learner=learner,
            generation=head.generation,
            base_version=head.base_version,
            staleness=staleness,
            c_steps=head.c_steps,
            c_tokens=head.c_tokens,
            weight=weight,
            correct=correct,
        )

    def _left_out(self, attempt: Attempt) -> set[int]:
        """The largest norm after an unusable merge, and outliers, largest first; never below the quorum."""
        ratio = self.past.config.max_norm_ratio
        left_out: set[int] = set()
        norms = {learner: answered.norm for learner, answered in attempt.answers.items()}
        lower_median = sorted(norms.values())[(len(norms) - 1) // 2]
        retried = self.past.failures(attempt.step) > 0
        while len(norms) > attempt.opened.quorum:
            largest = max(norms, key=lambda learner: (norms[learner], learner))
            is_outlier = ratio is not None and norms[largest] > ratio * lower_median
            if not is_outlier and not (retried and not left_out):
                break
            left_out.add(largest)
            del norms[largest]
        return left_out

    def order_merges(self) -> Iterator[de.Decision]:
        past = self.past
        for attempt in past.open_attempts():
            sealed = attempt.sealed
            if attempt.status != "merging" or sealed is None:
                continue
            step, number = attempt.step, attempt.opened.attempt
            if not past.all(de.MergeOrdered, step=step, attempt=number):
                yield de.MergeOrdered(
                    step=step,
                    fragment=attempt.opened.fragment,
                    attempt=number,
                    responders=sealed.responders,
                    plain_average=past.is_plain(step),
                    momentum_scale=past.momentum_scale(step),
                    why="",
                )

    def order_commit(self) -> Iterator[de.Decision]:
        past = self.past
        attempt = past.open_attempt(past.step() + 1)
        if attempt is None or attempt.status != "merged":
            return
        sweep = past.is_sweep(attempt.step)
        lr, momentum = past.coefficients(attempt.step)
        yield de.CommitOrdered(
            step=attempt.step,
            fragment=attempt.opened.fragment,
            attempt=attempt.opened.attempt,
            lr=lr,
            momentum=momentum,
            sweep=sweep,
            no_op=attempt.total_weight == 0,
            why="",
        )

    def broadcast(self) -> Iterator[de.Decision]:
        past = self.past
        first = 1 if past.resumed is None else past.resumed.step + 1
        for step in range(first, past.step() + 1):
            if past.sent()[past.fragment_of(step)] >= step:
                continue
            if past.is_due(step) and step > past.durable():
                return
            ref = FragmentVersionRef(fragment=past.fragment_of(step), version=step)
            yield de.BroadcastOrdered(fragments=(ref,), to=past.people().members, why="")

    def start(self) -> Iterator[de.Decision]:
        past = self.past
        if past.phase() != "waiting" or past.durable() < 0 or past.step() >= past.target:
            return
        needed = past.config.wait_for
        if self.start_deadline() is None:
            needed = past.quorum
        if len(past.people().here) >= needed:
            yield de.RoundsStarted(
                step=past.step() + 1,
                learners=tuple(sorted(past.people().here)),
                outer=past.stated_kind(),
                why="",
            )

    def retry(self) -> Iterator[de.Decision]:
        past = self.past
        if past.phase() != "running" or len(past.people().here) < past.quorum:
            return
        for attempt in past.open_attempts():
            if attempt.status == "retry" and (attempt.retry_told or not self.waits_to_retry(attempt)):
                yield self._opened(attempt.step, attempt.opened.attempt + 1)

    def open(self) -> Iterator[de.Decision]:
        while self.may_open() and self.at >= self.past.gate():
            yield self._opened(self.next_round(), 1)

    def _opened(self, step: int, attempt: int) -> de.AttemptOpened:
        past = self.past
        return de.AttemptOpened(
            step=step,
            fragment=past.fragment_of(step),
            attempt=attempt,
            members=past.people().members,
            quorum=past.quorum,
            base_version=past.versions()[past.fragment_of(step)],
            deadline=grid(self.at + past.config.quorum_timeout_seconds),
            sweep=past.is_sweep(step),
            why="",
        )

    def end(self) -> Iterator[de.Decision]:
        past = self.past
        if past.phase() in ("running", "waiting") and past.step() >= past.target and not past.open_attempts():
            yield de.SessionEnding(phase="final", why="")
        if past.phase() == "draining" and past.is_drained():
            yield from self._last_checkpoint()
            if self._is_saved():
                yield self.final_cut(past.people().members, self._awaited())
        cut = past.cut()
        if past.phase() == "finalising" and cut is not None and not cut.awaited:
            yield self.ended(0)
            for member in past.people().members:
                yield de.LearnerReleased(learner=member.learner, generation=member.generation, why="")
        everyone = len(past.reports()) == past.config.num_learners
        if past.phase() == "budget" and everyone and past.is_drained():
            yield from self._last_checkpoint()
            if self._is_saved():
                yield self.ended(0)
        if past.phase() == "stopping":
            yield from self._last_checkpoint()
            if self._is_saved():
                yield self.ended(self._exit_code())

    def _last_checkpoint(self) -> Iterator[de.Decision]:
        past = self.past
        if not past.open_attempts() and past.writing() is None and past.durable() < past.step():
            yield evolve(self.checkpoint(past.step()), final=True)

    def _is_saved(self) -> bool:
        past = self.past
        return not past.open_attempts() and past.writing() is None and past.durable() == past.step()

    def _exit_code(self) -> int:
        """4 after a signal, 3 when somebody needed stayed away, 1 when merges were unusable."""
        stopping = max(
            index
            for index, (_, thing) in enumerate(self.past.things)
            if isinstance(thing, de.SessionEnding) and thing.phase == "stop"
        )
        cause = next(t for _, t in reversed(self.past.things[:stopping]) if isinstance(t, ev.Event))
        if isinstance(cause, ev.StopRequested):
            return 4
        return 3 if isinstance(cause, ev.BudgetWaitPassed) else 1

    def _awaited(self) -> set[int]:
        past, people = self.past, self.past.people()
        acked = past.acked_before()
        awaited: set[int] = set()
        if past.resumed is not None and past.resumed.step == past.target:
            awaited |= set(past.resumed.awaited)
        awaited |= {
            learner
            for learner, left_at in people.left_at.items()
            if self.at - left_at < 60.0 and learner not in people.turned_away
        }
        awaited |= set(people.here)
        if not awaited and not acked:
            awaited = set(past.ledger())
        return awaited - acked

    # Deadlines.

    def deadlines(self) -> list[ev.Event]:
        """Every deadline that is armed, as the event that says it has passed."""
        return list(self._deadlines())

    def _deadlines(self) -> Iterator[ev.Event]:
        past, phase = self.past, self.past.phase()
        if phase in OPEN_SESSION:
            for attempt in past.open_attempts():
                name = {"step": attempt.step, "attempt": attempt.opened.attempt}
                if attempt.status == "retry" and self.waits_to_retry(attempt) and not attempt.retry_told:
                    assert attempt.discarded is not None
                    assert attempt.discarded.retry_at is not None
                    yield ev.RetryDue(at=attempt.discarded.retry_at, **name)
                if attempt.status == "gathering":
                    if attempt.grace is not None:
                        yield ev.GraceElapsed(at=attempt.grace.deadline, **name)
                    if past.is_sweep(attempt.step) or len(attempt.answers) < attempt.opened.quorum:
                        yield ev.QuorumDeadlinePassed(at=past.deadline(attempt), **name)
        if phase == "running":
            if self.may_open() and past.gate() < math.inf:
                yield ev.GateOpened(at=past.gate(), step=self.next_round())
            pace = past.pace()
            if pace.blind_since is not None and not pace.blind_over:
                yield ev.FirstEstimateDeadlinePassed(at=grid(pace.blind_since + BLIND_SECONDS))
        start = self.start_deadline()
        if start is not None:
            yield ev.StartTimeoutPassed(at=start)
        if phase in ("waiting", "running", "budget"):
            for since in self.awaited_back().values():
                yield ev.BudgetWaitPassed(at=grid(since + past.config.start_timeout_seconds))
        cut = past.cut()
        if phase == "finalising" and cut is not None:
            yield ev.FinalAckTimeoutPassed(at=grid(cut.at + past.config.final_ack_timeout_seconds))
        if phase == "stopping":
            passed = [at for at, _ in past.times(ev.StopDeadlinePassed)]
            for deadline in past.stop_deadlines():
                if deadline < math.inf and not any(at >= deadline for at in passed):
                    yield ev.StopDeadlinePassed(at=deadline)
