"""What the session waits for, in one line for people."""

from __future__ import annotations

from yeto.core.opening import opening_time, wait_for
from yeto.core.parts import Phase, Round, Status
from yeto.core.state import Fields, State, names


def waiting_for(state: State, at: float) -> str:
    """One line: what or whom the session waits for, and for how long at most.

    Args:
        state: The present state.
        at: The present time, in seconds since the session began.
    """
    line = _LINES[state.phase](state, at)
    if state.strangers and state.phase in (Phase.PROVISIONAL, Phase.WAITING):
        line += "; turned away: " + "; ".join(state.strangers[learner] for learner in sorted(state.strangers))
    return line


def _left(deadline: float | None, at: float) -> str:
    return "" if deadline is None else f", at most {max(deadline - at, 0.0):.0f} s"


def _provisional(state: Fields, at: float) -> str:
    if state.terms is None:
        return "waiting for learner 0, which decides the session" + _left(state.start_deadline, at)
    received = f"{len(state.initial)} of {state.num_fragments} are here"
    return f"waiting for learner 0's initial fragments: {received}" + _left(state.start_deadline, at)


def _waiting(state: Fields, at: float) -> str:
    if state.durable < 0:
        return "waiting for the checkpoint of step 0"
    needed = wait_for(state)
    missing = needed - len(state.current)
    return f"waiting for {missing} of {needed}: {_absent(state)}" + _left(state.start_deadline, at)


def _absent(state: Fields) -> str:
    return names(learner for learner in range(state.config.num_learners) if learner not in state.current)


def _running(state: Fields, at: float) -> str:
    if state.rounds:
        return _round(state, state.rounds[0], at)
    if len(state.current) < state.quorum:
        there = f"{len(state.current)} of {state.quorum} learners are connected"
        return f"waiting for a quorum: {there}, without {_absent(state)}"
    opens = opening_time(state)
    if opens is not None:
        return f"round {state.next_step} opens in {max(opens - at, 0.0):.1f} s (sync interval)"
    if state.gated:
        return f"waiting for the checkpoint of step {state.gated[0].gate}"
    return "waiting for a first step-time estimate" + _left(state.blind_until, at)


def _round(state: Fields, round_: Round, at: float) -> str:
    head = f"round {round_.step} attempt {round_.attempt}: "
    if round_.status is Status.GATHERING:
        owing = [
            learner for learner, member in round_.members.items() if round_.owes(learner, member.generation)
        ]
        in_grace = round_.grace_deadline is not None
        limit = round_.grace_deadline if in_grace else round_.deadline
        what = "grace for" if in_grace else "waiting for"
        return f"{head}{what} {len(owing)} of {len(round_.members)}: {names(owing)}" + _left(limit, at)
    if round_.status is Status.RETRY:
        if round_.retry_at is not None and round_.retry_at > at:
            return f"{head}discarded, next attempt in {round_.retry_at - at:.0f} s"
        there = f"{len(state.current)} are connected"
        return f"{head}discarded, waiting for {state.quorum} learners, {there}, without {_absent(state)}"
    return head + {
        Status.MERGING: "merging",
        Status.MERGED: "merged",
        Status.COMMITTING: "waiting for the outer step",
    }.get(round_.status, str(round_.status))


def _budget(state: Fields, at: float) -> str:
    missing = [learner for learner in range(state.config.num_learners) if learner not in state.reports]
    if missing:
        return f"waiting for the budget report of {names(missing)}"
    return "all budgets are used up; waiting for the last checkpoint"


def _draining(state: Fields, at: float) -> str:
    if state.config.svd_pool and not state.pool_drained:
        return "all rounds are committed; waiting for the SVD pool to drain"
    return f"all rounds are committed; waiting for the checkpoint of step {state.step}"


def _finalising(state: Fields, at: float) -> str:
    return f"waiting for the final ACK of {names(state.awaited)}" + _left(state.ack_deadline, at)


def _stopping(state: Fields, at: float) -> str:
    if state.rounds:
        return "stopping; " + _round(state, state.rounds[0], at) + _left(state.stop_deadline, at)
    return f"stopping; waiting for the checkpoint of step {state.step}"


def _ended(state: Fields, at: float) -> str:
    return f"ended with exit code {state.exit_code}: {state.exit_why}"


_LINES = {
    Phase.PROVISIONAL: _provisional,
    Phase.WAITING: _waiting,
    Phase.RUNNING: _running,
    Phase.BUDGET: _budget,
    Phase.DRAINING: _draining,
    Phase.FINALISING: _finalising,
    Phase.STOPPING: _stopping,
    Phase.ENDED: _ended,
}
