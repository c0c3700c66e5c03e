"""Timers: the earliest deadline in the state, as the event to feed back when it has passed.

The coordinator never asks what time it is. Its caller sleeps until :class:`Timer` ``.at`` and then tells
it, with the present time in the event. A deadline acts through its event only, so a recorded run replays
without a clock. A deadline that moved or went away meanwhile makes the event early or late, which the
coordinator records and ignores.
"""

from __future__ import annotations

import math
from typing import TypeAlias

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
from yeto.core.opening import may_open
from yeto.core.pacing import gate, throttle_step
from yeto.core.parts import (
    BUDGET,
    FINALISING,
    GATHERING,
    PROVISIONAL,
    RETRY,
    RUNNING,
    STOPPING,
    WAITING,
    Phase,
    Round,
)
from yeto.core.state import State


@frozen(kw_only=True)
class Timer:
    """At ``at`` or later, feed ``event`` with the time it is then."""

    at: float
    event: Event


_ARMED: dict[Phase, tuple[tuple[str, type[Event]], ...]] = {
    PROVISIONAL: (("start_deadline", StartTimeoutPassed),),
    WAITING: (("start_deadline", StartTimeoutPassed), ("budget_deadline", BudgetWaitPassed)),
    RUNNING: (("budget_deadline", BudgetWaitPassed),),
    BUDGET: (("budget_deadline", BudgetWaitPassed),),
    FINALISING: (("ack_deadline", FinalAckTimeoutPassed),),
    STOPPING: (("stop_gather_deadline", StopDeadlinePassed), ("stop_deadline", StopDeadlinePassed)),
}
"""Fields that are deadlines in a phase, and their events; beside those of rounds and openings."""

_Deadline: TypeAlias = tuple[float, type[Event] | None, Round | None]
"""A deadline, the class of its event, and the round it belongs to, if it belongs to one."""


def next_deadline(state: State) -> float:
    """When the earliest deadline of the state is; infinite when only other facts can move it on.

    For a caller that asks after every event, and for whom a timer seldom comes first. The state must be one
    that ``step`` has returned, or an initial one.
    """
    return _earliest(state, state.opens_at)[0]


def next_timer(state: State) -> Timer | None:
    """The earliest deadline of the state, or None when only other facts can move it on."""
    at, kind, round_ = _earliest(state, gate(state) if state.phase is RUNNING else math.inf)
    if kind is None:
        return None
    fields: dict[str, int] = {}
    if round_ is not None:
        fields = {"step": round_.step, "attempt": round_.attempt}
    elif kind is GateOpened:
        fields = {"step": state.next_step}
    return Timer(at=at, event=kind(at=at, **fields))


def _earliest(state: State, opens: float) -> _Deadline:
    """The earliest deadline that is armed; of several at one moment, the first that is looked at.

    ``opens`` is when the throttle lets the next round open.
    """
    phase = state.phase
    earliest = math.inf
    kind: type[Event] | None = None
    whose: Round | None = None
    if phase is RUNNING or phase is STOPPING:
        for round_ in state.rounds:
            status = round_.status
            if status is GATHERING:
                grace = round_.grace_deadline
                if grace is not None and grace < earliest:
                    earliest, kind, whose = grace, GraceElapsed, round_
                counts = round_.sweep or len(round_.answers) < round_.quorum
                if counts and round_.deadline < earliest:
                    earliest, kind, whose = round_.deadline, QuorumDeadlinePassed, round_
            elif status is RETRY:
                retry = round_.retry_at
                if retry is not None and retry < earliest:
                    earliest, kind, whose = retry, RetryDue, round_
    if phase is RUNNING:
        if opens < earliest and may_open(state):
            earliest, kind, whose = opens, GateOpened, None
        blind = state.blind_until
        if blind is not None and blind < earliest and not state.blind_over and throttle_step(state) is None:
            earliest, kind, whose = blind, FirstEstimateDeadlinePassed, None
    for name, armed in _ARMED.get(phase, ()):
        at: float | None = getattr(state, name)
        if at is not None and at < earliest:
            earliest, kind, whose = at, armed, None
    return earliest, kind, whose
