"""The end: final cut, budget cut-off and stop, each with its own promise and exit code.

* After the last round the SVD pool is drained, the final checkpoint written, and every fragment is sent as
  exact f32 to everyone: the *final cut*. Exit 0 means that every awaited learner said it holds the cut; a
  missing one means exit 3 with its name, and the checkpoint is valid all the same.
* A learner that used up its *budget* closes the session to new rounds. When all have reported, an unmarked
  checkpoint ends it with exit 0.
* A *stop* saves what is committed and exits with 4, so that a supervisor starts it again.

Learners are told to shut down only after a final cut: after anything else they are still needed.
"""

from __future__ import annotations

from yeto.core.checkpoints import order_checkpoint
from yeto.core.decisions import FinalCutOrdered, LearnerReleased, SessionEnding
from yeto.core.events import (
    BudgetReported,
    BudgetWaitPassed,
    FinalAckReceived,
    FinalAckTimeoutPassed,
    StopDeadlinePassed,
    StopRequested,
    SvdPoolDrained,
    SvdPoolPoisoned,
)
from yeto.core.members import refuse
from yeto.core.parts import Phase, Status, replace
from yeto.core.rounds import drop_rounds, end_session, halt
from yeto.core.state import Draft, moment, names

AWAY_SECONDS = 60.0
"""A learner that left less than this before the final cut is awaited: it is probably redialling. One that was
refused for good is not."""


def settle_end(draft: Draft) -> None:
    """Do what the end of the session asks for next, if it has come."""
    if draft.step >= draft.target and not draft.rounds and draft.phase in (Phase.RUNNING, Phase.WAITING):
        _close(draft, Phase.DRAINING, "final", f"all {draft.target} rounds are committed")
    if draft.phase is Phase.DRAINING and _saved(draft, drain=True):
        _order_cut(draft)
    if draft.phase is Phase.FINALISING and not draft.awaited:
        _finish(draft)
    elif draft.phase is Phase.BUDGET:
        reported = len(draft.reports)
        if reported == draft.config.num_learners and _saved(draft, drain=True):
            why = (
                f"all {reported} learners reported their budget; the session is cut off at step {draft.step}"
            )
            end_session(draft, exit_code=0, why=why)
    elif draft.phase is Phase.STOPPING and _saved(draft, drain=False):
        end_session(draft, exit_code=draft.exit_code or 0, why=draft.exit_why)


def _close(draft: Draft, phase: Phase, name: str, why: str) -> None:
    draft.phase = phase
    draft.pool_drained = False
    draft.start_deadline = None
    draft.emit(SessionEnding(phase=name, why=why))


def _saved(draft: Draft, *, drain: bool) -> bool:
    """Whether everything committed is durable and nothing is under way; orders the checkpoint it lacks."""
    if draft.rounds or (drain and draft.config.svd_pool and not draft.pool_drained):
        return False
    if draft.writing is None and draft.durable < draft.step:
        order_checkpoint(draft, f"the last checkpoint of this session, at step {draft.step}", final=True)
    return draft.writing is None


def _order_cut(draft: Draft) -> None:
    """Send the final cut and say who is awaited."""
    awaited = draft.awaited
    for learner, left_at in draft.away.items():
        if draft.at - left_at < AWAY_SECONDS and learner not in draft.dismissed:
            awaited = awaited.set(learner, False)
    for learner in draft.current:
        awaited = awaited.set(learner, False)
        draft.cut_sent = draft.cut_sent.set(learner, True)
    if not awaited and not draft.acked:
        # Nobody has been here for a minute, yet somebody trained this: they are who should take it.
        for learner in draft.ledger:
            awaited = awaited.set(learner, False)
    for learner in draft.acked:
        awaited = awaited.delete(learner) if learner in awaited else awaited
    draft.awaited = awaited
    draft.phase = Phase.FINALISING
    draft.ack_deadline = moment(draft.at + draft.config.final_ack_timeout_seconds)
    draft.emit(
        FinalCutOrdered(
            step=draft.step,
            versions=draft.versions,
            to=draft.everyone(),
            awaited=tuple(sorted(awaited)),
            why=f"final cut of step {draft.step}; awaiting {names(awaited)} for at most "
            f"{draft.config.final_ack_timeout_seconds:g} s",
        )
    )


def _finish(draft: Draft) -> None:
    """Everybody awaited holds the cut: mark it, let everyone go."""
    why = f"{names(draft.acked)} hold the final cut of step {draft.step}"
    end_session(draft, exit_code=0, why=why, mark_final=draft.config.mark_final_checkpoint)
    for learner in sorted(draft.current):
        draft.emit(
            LearnerReleased(
                learner=learner,
                generation=draft.current[learner].generation,
                why=f"learner {learner} may end: the session is complete",
            )
        )


def on_final_ack(draft: Draft, event: FinalAckReceived) -> None:
    """A learner holds the final cut; once accepted, that stays."""
    learner = event.learner
    if event.step != draft.step or learner not in draft.cut_sent:
        draft.ignore(
            event,
            "other_cut",
            f"learner {learner} acknowledged step {event.step}, the cut it was sent is of step {draft.step}",
        )
        return
    if learner in draft.acked:
        draft.ignore(event, "repeated", f"learner {learner} acknowledged this cut before")
        return
    draft.acked = draft.acked.set(learner, True)
    draft.awaited = draft.awaited.delete(learner) if learner in draft.awaited else draft.awaited


def on_final_ack_timeout(draft: Draft, event: FinalAckTimeoutPassed) -> None:
    """Somebody never said that it holds the cut."""
    if draft.ack_deadline is None or draft.at < draft.ack_deadline:
        draft.ignore(event, "early", f"ACKs have until {draft.ack_deadline} s")
        return
    end_session(
        draft,
        exit_code=3,
        why=f"no final ACK from {names(draft.awaited)} within "
        f"{draft.config.final_ack_timeout_seconds:g} s; the checkpoint of step {draft.step} is valid",
    )


def on_pool_drained(draft: Draft, event: SvdPoolDrained) -> None:
    """The SVD pool holds no job any more."""
    if not draft.config.svd_pool or draft.pool_drained:
        draft.ignore(event, "repeated", "nothing waits for the SVD pool")
        return
    draft.pool_drained = True


def on_pool_poisoned(draft: Draft, event: SvdPoolPoisoned) -> None:
    """Results of a broken pool cannot be trusted: no further checkpoint, above all no final one."""
    end_session(
        draft,
        exit_code=1,
        why=f"the SVD pool failed for good ({event.message}); the checkpoint of step "
        f"{max(draft.durable, 0)} is the last valid one; repair the worker and start with --resume",
    )


def on_budget_reported(draft: Draft, event: BudgetReported) -> None:
    """A learner froze after its budget; the first report closes the session to new rounds."""
    learner, budget = event.learner, draft.config.learner_budget_steps
    # The newest connection, joined or not: a report goes out once on each, and may overtake its data streams.
    dial = draft.newest.get(learner)
    if budget is None or draft.config.budget_finish:
        draft.ignore(event, "no_budget", f"learner {learner} reported a budget; this run collects none")
    elif dial is None or dial.generation != event.generation:
        draft.ignore(event, "superseded", f"learner {learner} generation {event.generation} is gone")
    elif event.local_steps != budget:
        refuse(
            draft,
            learner,
            event.generation,
            "budget_differs",
            f"learner {learner} froze after {event.local_steps} steps, the syncer's "
            f"--learner-budget-steps is {budget}; start both with the same number",
        )
    elif learner in draft.reports:
        draft.ignore(event, "repeated", f"learner {learner} reported its budget before")
    else:
        draft.reports = draft.reports.set(learner, True)
        begin_budget(draft)


def begin_budget(draft: Draft) -> None:
    """Close the session to new rounds, once a report is there and the step-0 checkpoint is durable."""
    if not draft.reports or draft.durable < 0 or draft.phase not in (Phase.WAITING, Phase.RUNNING):
        return
    why = f"{names(draft.reports)} used up the budget of {draft.config.learner_budget_steps} steps"
    _close(draft, Phase.BUDGET, "budget", why)
    drop_rounds(draft, draft.step + 1, "budget")
    draft.budget_deadline = _next_absence(draft)


def on_budget_wait(draft: Draft, event: BudgetWaitPassed) -> None:
    """Perhaps a learner that is needed has been away too long.

    The deadline is a lower bound, set when somebody left: whether that learner came back meanwhile is
    looked at only now, so joins and leaves stay cheap.
    """
    if draft.budget_deadline is None or draft.at < draft.budget_deadline:
        draft.ignore(event, "early", f"the next look at absent learners is at {draft.budget_deadline} s")
        return
    limit = draft.config.start_timeout_seconds
    gone = [learner for learner in _absent(draft) if draft.at >= _absence_ends(draft, learner)]
    if gone:
        halt(
            draft,
            exit_code=3,
            why=f"{names(gone)} away for {limit:g} s (--start-timeout-s) and needed; start it again and "
            "resume, the checkpoint is valid",
        )
        return
    draft.budget_deadline = _next_absence(draft)
    draft.ignore(event, "back", "nobody needed has been away that long")


def _absent(draft: Draft) -> list[int]:
    """Configured learners that are not here and still needed."""
    return [
        learner
        for learner in range(draft.config.num_learners)
        if learner not in draft.current and learner not in draft.reports
    ]


def _absence_ends(draft: Draft, learner: int) -> float:
    since = draft.away.get(learner, draft.started_at)
    return moment(since + draft.config.start_timeout_seconds)


def _next_absence(draft: Draft) -> float | None:
    return min((_absence_ends(draft, learner) for learner in _absent(draft)), default=None)


def on_stop(draft: Draft, event: StopRequested) -> None:
    """A signal: open nothing, let what is nearly done end, save, exit 4."""
    why = f"{event.signal} at step {draft.step} of {draft.target}"
    if draft.phase is Phase.PROVISIONAL:
        end_session(draft, exit_code=4, why=f"{why}: stopped before anything was initialised")
        return
    if draft.phase is Phase.FINALISING:
        missing = f"{why}: stopped while waiting for the final ACK of {names(draft.awaited)}"
        end_session(draft, exit_code=3, why=f"{missing}; the checkpoint is valid")
        return
    _close(draft, Phase.STOPPING, "stop", f"{why}: rounds in flight end or are dropped, then a checkpoint")
    draft.exit_code = 4
    draft.exit_why = f"stopped by {event.signal} before the final cut; start again with --resume"
    budget = draft.config.stop_budget_seconds
    draft.stop_deadline = moment(draft.at + budget)
    draft.stop_gather_deadline = moment(draft.at + min(draft.config.grace_cap_seconds, budget))


def on_stop_deadline(draft: Draft, event: StopDeadlinePassed) -> None:
    """Gathering has the length of a grace, everything else the stop budget."""
    gather, budget = draft.stop_gather_deadline, draft.stop_deadline
    if gather is not None and draft.at >= gather:
        draft.stop_gather_deadline = None
        for round_ in draft.rounds:
            if round_.status is Status.GATHERING:
                draft.put(replace(round_, overdue=True))
    elif budget is None or draft.at < budget:
        draft.ignore(event, "early", "no part of the stop budget is used up")
    if budget is not None and draft.at >= budget:
        draft.stop_deadline = None
        drop_rounds(draft, draft.step + 1, "stopping")
