"""Timers: the earliest deadline in the state, as the event to feed back when it has passed.

The coordinator never asks what time it is. Its caller sleeps until :class:`Timer` ``.at`` and then tells
it, with the present time in the event. A deadline acts through its event only, so a recorded run replays
without a clock. A deadline that moved or went away meanwhile makes the event early or late, which the
coordinator records and ignores.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from yeto.core.events import (
    BudgetWaitPassed,
    Event,
    FinalAckTimeoutPassed,
    FirstEstimateDeadlinePassed,
    GateOpened,
    GraceElapsed,
    QuorumDeadlinePassed,
    RetryDue,
    StartTimeoutPassed,
    StopDeadlinePassed,
)
from yeto.core.opening import opening_time
from yeto.core.pacing import throttle_step
from yeto.core.parts import Phase, Round, Status
from yeto.core.state import State


@frozen(kw_only=True)
class Timer:
    """At ``at`` or later, feed ``event`` with the time it is then."""

    at: float
    event: Event


def next_timer(state: State) -> Timer | None:
    """The earliest deadline of the state, or None when only other facts can move it on."""
    earliest: Event | None = None
    for event in _deadlines(state):
        if earliest is None or event.at < earliest.at:
            earliest = event
    return None if earliest is None else Timer(at=earliest.at, event=earliest)


def _deadlines(state: State) -> Iterator[Event]:
    """Every deadline that is armed, as its event; at most two per open round and a handful beside."""
    phase = state.phase
    if phase in (Phase.RUNNING, Phase.STOPPING):
        for round_ in state.rounds:
            yield from _of_round(round_)
    if phase is Phase.RUNNING:
        at = opening_time(state)
        if at is not None:
            yield GateOpened(at=at, step=state.next_step)
        if state.blind_until is not None and not state.blind_over and throttle_step(state) is None:
            yield FirstEstimateDeadlinePassed(at=state.blind_until)
    if phase in (Phase.PROVISIONAL, Phase.WAITING) and state.start_deadline is not None:
        yield StartTimeoutPassed(at=state.start_deadline)
    if phase in (Phase.WAITING, Phase.RUNNING, Phase.BUDGET) and state.budget_deadline is not None:
        yield BudgetWaitPassed(at=state.budget_deadline)
    if phase is Phase.FINALISING and state.ack_deadline is not None:
        yield FinalAckTimeoutPassed(at=state.ack_deadline)
    if phase is Phase.STOPPING:
        if state.stop_gather_deadline is not None:
            yield StopDeadlinePassed(at=state.stop_gather_deadline)
        if state.stop_deadline is not None:
            yield StopDeadlinePassed(at=state.stop_deadline)


def _of_round(round_: Round) -> Iterator[Event]:
    if round_.status is Status.RETRY:
        if round_.retry_at is not None:
            yield RetryDue(at=round_.retry_at, step=round_.step, attempt=round_.attempt)
    elif round_.status is Status.GATHERING:
        if round_.grace_deadline is not None:
            yield GraceElapsed(at=round_.grace_deadline, step=round_.step, attempt=round_.attempt)
        if round_.sweep or len(round_.answers) < round_.quorum:
            yield QuorumDeadlinePassed(at=round_.deadline, step=round_.step, attempt=round_.attempt)
