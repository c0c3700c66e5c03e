"""Opening: rounds start, attempts freeze their members, retries come when they are due.

Opening an attempt freezes who is asked, how many must answer and the version they answer to. Freezing is
free: the members are the persistent map of current learners as it is at that moment. Joins and reconnects
count for attempts opened later.

Rounds open in ascending step and never skip: if round t cannot open, round t+1 does not either. A round
on fragment p opens only after the last broadcast of p was ordered, so no learner can be asked for work on
a version that it could not have got.
"""

from __future__ import annotations

import math

from immutables import Map

from yeto.core.decisions import AttemptOpened, RoundsStarted
from yeto.core.events import FirstEstimateDeadlinePassed, GateOpened, RetryDue, StartTimeoutPassed
from yeto.core.outer import resolved
from yeto.core.pacing import freeze_pace, gate, note_blind_opening, throttle_step
from yeto.core.parts import GATHERING, PROVISIONAL, RETRY, RUNNING, WAITING, Round, replace
from yeto.core.rounds import end_session, is_excused
from yeto.core.state import Draft, Fields, moment, names


def wait_for(state: Fields) -> int:
    """Learners that must be there before the first round opens."""
    if state.start_with_quorum or state.config.budget_finish:
        return state.quorum
    return state.config.wait_for


def start_rounds(draft: Draft) -> None:
    """Start the rounds when everything is initialised and durable and enough learners are there."""
    if draft.phase is not WAITING or draft.durable < 0 or draft.step >= draft.target:
        return
    here, needed = len(draft.current), wait_for(draft)
    if here < needed:
        return
    late = f", --start-timeout-s {draft.config.start_timeout_seconds:g} has passed"
    draft.phase = RUNNING
    draft.start_deadline = None
    draft.strangers = Map()
    outer = resolved(draft.config, num_fragments=draft.num_fragments, target=draft.target)
    draft.outer = outer
    draft.emit(
        RoundsStarted(
            step=draft.step + 1,
            learners=tuple(sorted(draft.current)),
            why=f"{here} of {draft.config.num_learners} learners are here, {needed} are enough"
            + (late if draft.start_with_quorum else "")
            + (f"; outer step {outer.sentence}" if outer.is_told else "")
            + "".join(f"; warning: {warning}" for warning in outer.warnings if outer.is_told),
            outer=outer.kind if outer.is_told else None,
        )
    )


def retry_rounds(draft: Draft) -> None:
    """Open the next attempt, in ascending step, of every discarded round whose wait is over."""
    for round_ in draft.rounds:
        if round_.status is RETRY and round_.retry_at is None and len(draft.current) >= draft.quorum:
            _open_attempt(draft, round_.step, round_)


def open_rounds(draft: Draft) -> None:
    """Open new rounds while their turn, their fragment, the quorum and the throttle allow it."""
    # The throttle first: it is what usually says no.
    draft.opens_at = gate(draft)
    while draft.at >= draft.opens_at and may_open(draft):
        note_blind_opening(draft)
        draft.last_open = draft.at
        _open_attempt(draft, draft.next_step, None)
        draft.opens_at = gate(draft)


def may_open(state: Fields) -> bool:
    """Whether only the throttle can still hold the next round back."""
    num_open = len(state.rounds)
    if state.phase is not RUNNING or num_open >= state.depth:
        return False
    step = state.step + num_open + 1
    if step > state.target or len(state.current) < state.quorum:
        return False
    fragment = state.fragment_of(step)
    return state.versions[fragment] == state.broadcast[fragment]


def opening_time(state: Fields) -> float | None:
    """When the throttle lets the next round open; None when it is not a matter of time."""
    if not may_open(state):
        return None
    at = gate(state)
    return None if math.isinf(at) else at


def _open_attempt(draft: Draft, step: int, discarded: Round | None) -> None:
    fragment = draft.fragment_of(step)
    attempt = 1 if discarded is None else discarded.attempt + 1
    deadline = moment(draft.at + draft.config.quorum_timeout_seconds)
    sweep = draft.is_sweep(step)
    round_ = Round(
        step=step,
        fragment=fragment,
        attempt=attempt,
        status=GATHERING,
        members=draft.current,
        quorum=draft.quorum,
        base_version=draft.versions[fragment],
        opened_at=draft.at,
        deadline=deadline,
        sweep=sweep,
        discards=discarded.discards if discarded else 0,
        failures=discarded.failures if discarded else 0,
    )
    if sweep and draft.sweep_missed:
        excused = sum(is_excused(draft, round_, learner) for learner in round_.members)
        round_ = replace(round_, excused=excused)
    if discarded is None:
        draft.rounds = (*draft.rounds, round_)
    else:
        draft.put(round_)
    freeze_pace(draft)
    members = draft.everyone()
    draft.emit(
        AttemptOpened(
            step=step,
            fragment=fragment,
            attempt=attempt,
            members=members,
            quorum=round_.quorum,
            base_version=round_.base_version,
            deadline=deadline,
            sweep=sweep,
            why=f"{'closing sweep ' if sweep else ''}round {step} attempt {attempt} pulls fragment "
            f"{fragment} from {names(draft.current)}: quorum {round_.quorum} of {len(members)}, "
            f"at most {draft.config.quorum_timeout_seconds:g} s",
        )
    )


def on_retry_due(draft: Draft, event: RetryDue) -> None:
    """The wait of a discarded round is over; it opens as soon as K learners are connected."""
    round_ = draft.find(event.step)
    if (
        round_ is None
        or round_.status is not RETRY
        or round_.attempt != event.attempt
        or round_.retry_at is None
    ):
        draft.ignore(event, "late", f"round {event.step} attempt {event.attempt} waits for no retry")
    elif draft.at < round_.retry_at:
        draft.ignore(event, "early", f"the retry of round {event.step} is due at {round_.retry_at:g} s")
    else:
        draft.put(replace(round_, retry_at=None))


def on_gate_opened(draft: Draft, event: GateOpened) -> None:
    """The throttle's wait is over, unless the estimates have changed meanwhile."""
    at = opening_time(draft)
    if at is None or event.step != draft.next_step:
        draft.ignore(event, "late", f"round {event.step} is not waiting for the throttle")
    elif draft.at < at:
        draft.ignore(event, "early", f"by present estimates round {event.step} may open at {at:g} s")


def on_first_estimate_deadline(draft: Draft, event: FirstEstimateDeadlinePassed) -> None:
    """No step-time estimate came in time: open without one."""
    if draft.blind_until is None or draft.blind_over or throttle_step(draft) is not None:
        draft.ignore(event, "late", "nothing waits for a first step-time estimate")
    elif draft.at < draft.blind_until:
        draft.ignore(event, "early", f"a first step-time estimate has until {draft.blind_until:g} s")
    else:
        draft.blind_over = True


def on_start_timeout(draft: Draft, event: StartTimeoutPassed) -> None:
    """From now on the quorum is enough; a fresh start without it has failed."""
    if draft.start_deadline is None:
        draft.ignore(event, "late", "nothing waits for the start any more")
        return
    if draft.at < draft.start_deadline:
        draft.ignore(event, "early", f"the start has until {draft.start_deadline:g} s")
        return
    draft.start_deadline = None
    draft.start_with_quorum = True
    if draft.resumed:
        return
    seconds = draft.config.start_timeout_seconds
    here = len(draft.current)
    if draft.phase is PROVISIONAL:
        end_session(
            draft,
            exit_code=1,
            why=f"learner 0 sent {len(draft.initial)} of {draft.num_fragments or 'an unknown number of'} "
            f"initial fragments within --start-timeout-s {seconds:g}; start learner 0 and check its log",
        )
    elif here < draft.quorum:
        absent = [learner for learner in range(draft.config.num_learners) if learner not in draft.current]
        end_session(
            draft,
            exit_code=1,
            why=f"{here} of --quorum {draft.quorum} learners came within --start-timeout-s {seconds:g}; "
            f"missing: {names(absent)}; start them or lower --quorum",
        )
