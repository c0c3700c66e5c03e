"""The one function that changes state.

``step`` works one event into a draft by the handler of its class, then settles what has become possible,
in one fixed order: seal or discard in ascending step, merges, commits, broadcasts, retries, openings, the
end. Each stage can only enable stages after it, so one pass reaches the fixed point.

The table says in which phases an event means anything. Outside them it is recorded and ignored: delays
make every fact late some day. Illegal, and raised, is only what no delay and no peer can cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from yeto.core import checkpoints, commits, ending, opening, pushes, sealing, sessions
from yeto.core import events as ev
from yeto.core.decisions import Decision, SessionOpened
from yeto.core.parts import ENDED, RUNNING, Phase
from yeto.core.resume import resumed_state
from yeto.core.state import Draft, State
from yeto.errors import CoordinatorError

_ALIVE = frozenset(Phase) - {Phase.ENDED}
_GATHERING = frozenset({Phase.RUNNING, Phase.STOPPING})
_BEFORE_CUT = _ALIVE - {Phase.FINALISING, Phase.STOPPING}
_OPENING = frozenset({Phase.RUNNING})

_TABLE: dict[type[ev.Event], tuple[frozenset[Phase], Callable[[Draft, Any], None]]] = {
    ev.HelloReceived: (_ALIVE, sessions.on_hello),
    ev.LearnerJoined: (_ALIVE, sessions.on_joined),
    ev.LearnerLeft: (_ALIVE, sessions.on_left),
    ev.FragmentInitialised: (frozenset({Phase.PROVISIONAL}), sessions.on_initialised),
    ev.PushOffered: (_ALIVE, pushes.on_push_offered),
    ev.UploadProgress: (_ALIVE, pushes.on_upload_progress),
    ev.PushReceived: (_ALIVE, pushes.on_push_received),
    ev.Heartbeat: (_ALIVE, pushes.on_heartbeat),
    ev.QuorumDeadlinePassed: (_GATHERING, sealing.on_quorum_deadline),
    ev.GraceElapsed: (_GATHERING, sealing.on_grace_elapsed),
    ev.GateOpened: (_OPENING, opening.on_gate_opened),
    ev.FirstEstimateDeadlinePassed: (_OPENING, opening.on_first_estimate_deadline),
    ev.RetryDue: (_OPENING, opening.on_retry_due),
    ev.StartTimeoutPassed: (frozenset({Phase.PROVISIONAL, Phase.WAITING}), opening.on_start_timeout),
    ev.FinalAckTimeoutPassed: (frozenset({Phase.FINALISING}), ending.on_final_ack_timeout),
    ev.StopDeadlinePassed: (frozenset({Phase.STOPPING}), ending.on_stop_deadline),
    ev.BudgetWaitPassed: (frozenset({Phase.WAITING, Phase.RUNNING, Phase.BUDGET}), ending.on_budget_wait),
    ev.SvdPoolDrained: (frozenset({Phase.BUDGET, Phase.DRAINING}), ending.on_pool_drained),
    ev.SvdPoolPoisoned: (_BEFORE_CUT, ending.on_pool_poisoned),
    ev.MergeFinished: (_GATHERING, commits.on_merge_finished),
    ev.MergeFailed: (_GATHERING, commits.on_merge_failed),
    ev.OuterStepApplied: (_ALIVE, commits.on_outer_step_applied),
    ev.CheckpointWritten: (_ALIVE, checkpoints.on_checkpoint_written),
    ev.CheckpointFailed: (_ALIVE, checkpoints.on_checkpoint_failed),
    ev.FinalAckReceived: (frozenset({Phase.FINALISING}), ending.on_final_ack),
    ev.BudgetReported: (_BEFORE_CUT, ending.on_budget_reported),
    ev.StopRequested: (_ALIVE - {Phase.STOPPING}, ending.on_stop),
}


def step(state: State, event: ev.Event) -> tuple[State, tuple[Decision, ...]]:
    """Work one fact in.

    Args:
        state: What is known so far; stays valid and unchanged.
        event: The fact; its time is not before the state's.

    Returns:
        The new state and the decisions the fact caused, in the order in which to act on them.

    Raises:
        CoordinatorError: The event is impossible even with delays; nothing has changed.
        ConfigError: The settings of a ``session_resumed`` are impossible; nothing has changed.
    """
    at = event.at
    if not state.at <= at < math.inf:
        raise CoordinatorError(f"{event.kind}: time {at} is none at or after {state.at}")
    entry = _TABLE.get(type(event))
    if entry is None:
        if isinstance(event, ev.SessionResumed):
            return _resume(event)
        raise CoordinatorError(f"{type(event).__name__} is not an event of the coordinator")
    phases, handle = entry
    draft = Draft.of(state)
    draft.at = at
    if draft.phase in phases:
        handle(draft, event)
    else:
        draft.ignore(event, "phase", f"{event.kind} means nothing while the session is {draft.phase}")
    settle(draft)
    return draft.freeze()


def settle(draft: Draft) -> None:
    """Do everything that has become possible, in the order of the rules.

    Also after an event that meant nothing: it has brought the time with it.
    """
    if draft.phase is ENDED:
        return
    restless = not sealing.at_rest(draft.rounds)
    if restless:
        if sealing.settle_attempts(draft):
            commits.order_merges(draft)
        commits.order_commit(draft)
    if draft.gated:
        checkpoints.release_broadcasts(draft)
    if draft.phase is not RUNNING:
        ending.begin_budget(draft)
        opening.start_rounds(draft)
    if draft.phase is RUNNING:
        if restless:
            opening.retry_rounds(draft)
        opening.open_rounds(draft)
    if draft.phase is not RUNNING or draft.step >= draft.target:
        ending.settle_end(draft)


def _resume(event: ev.SessionResumed) -> tuple[State, tuple[Decision, ...]]:
    draft = Draft.of(resumed_state(event))
    draft.emit(
        SessionOpened(
            terms=event.terms,
            why=f"resumed at step {event.step} of {draft.target}; the checkpoint fixes the session",
        )
    )
    settle(draft)
    return draft.freeze()
