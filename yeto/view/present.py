"""From the fold to a moment: the one place where what is shown is put together."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TypeVar

from yeto.core import Phase, waiting_for
from yeto.core.opening import opening_time
from yeto.core.outer import resolved
from yeto.core.parts import Status
from yeto.core.state import State
from yeto.tape import Spread
from yeto.tape.summary import Refusal
from yeto.view.alerts import find_alerts, no_commit_after
from yeto.view.board import Board
from yeto.view.model import (
    AgreementMoment,
    CheckpointMoment,
    FragmentMoment,
    LearnerLive,
    LearnerMoment,
    Live,
    Moment,
    RefusalMoment,
    RoundMoment,
    SessionFacts,
    Wait,
)
from yeto.view.open_rounds import OpenRound

OVERDUE_SECONDS = 10.0
"""Shorter waits are hiccups of short rounds. An alert, which wakes people, comes later."""
_T = TypeVar("_T")
_NOBODY = LearnerLive()
_WAITED_FOR = {
    Phase.PROVISIONAL: "its initial fragments",
    Phase.WAITING: "the start",
    Phase.RUNNING: "the quorum",
    Phase.BUDGET: "its budget report",
    Phase.FINALISING: "its final ACK",
}


def present(
    board: Board, *, now: float | None = None, writer: str = "unknown", live: Live | None = None
) -> Moment:
    """Return the moment after the last record, as it is at ``now``.

    Args:
        board: the fold, which has seen the header.
        now: the session's time; that of the last record when nobody knows a later one.
        writer: whether the tape is being written; see :class:`~yeto.view.model.Moment`.
        live: what is known beside the tape.
    """
    shadow, summary = board.shadow, board.summary
    now = board.at if now is None else max(now, board.at)
    live = Live() if live is None else live
    if shadow.phase is Phase.ENDED:
        writer = "ended"
    state = shadow.state()
    wait = _wait(board, state, now)
    return Moment(
        at=board.at,
        now=now,
        silent_seconds=now - board.at,
        writer=writer,
        session=_session(board),
        phase=str(shadow.phase),
        wait=wait,
        step=summary.step,
        total_steps=shadow.target,
        committed=summary.commits,
        superseded=summary.superseded,
        no_ops=summary.no_ops,
        attempts=summary.attempts,
        discarded=dict(sorted(summary.discarded.items())),
        eta_seconds=_eta(board, now),
        merges_per_hour=_merges_per_hour(board, now),
        last_commit_at=max(board.committed_at.values(), default=None),
        staleness=dict(sorted(summary.staleness.items())),
        grace_seconds_mean=_mean(summary.grace_seconds),
        quorum_seconds_mean=_mean(summary.quorum_seconds),
        merge_seconds_mean=_mean(summary.merge_seconds),
        checkpoint=_checkpoint(board),
        learners=_learners(board, wait, live),
        fragments=tuple(
            FragmentMoment(
                fragment=fragment,
                version=version,
                committed_at=board.committed_at.get(fragment),
                broadcast=shadow.broadcast.get(fragment),
                **_told(board, fragment),
            )
            for fragment, version in sorted(shadow.versions.items())
        ),
        rounds=tuple(_round(round_, state, now) for round_ in shadow.rounds),
        refusals=_refusals(board),
        alerts=find_alerts(board, now=now, writer=writer, live=live),
        disk_free_bytes=live.disk_free_bytes,
        agreement=AgreementMoment(
            rounds=len(board.agreement.last),
            delta_cosine=board.agreement.mean(attrgetter("delta_cosine")),
            norm_ratio=board.agreement.mean(attrgetter("norm_ratio")),
            offset_ratio=board.agreement.mean(attrgetter("offset_ratio")),
        ),
    )


def _told(board: Board, fragment: int) -> dict[str, float | None]:
    """Return what the last commit of a fragment told of its learners."""
    told = board.agreement.by_fragment.get(fragment)
    if told is None:
        return {}
    return {
        "delta_cosine": told.delta_cosine,
        "norm_ratio": told.norm_ratio,
        "offset_ratio": told.offset_ratio,
    }


def _session(board: Board) -> SessionFacts:
    shadow, header = board.shadow, board.summary.header
    assert header is not None, "the header comes first"
    assert shadow.config is not None, "it is in the header"
    config, terms = shadow.config, shadow.terms
    return SessionFacts(
        session_id=header.session_id,
        software_version=header.software_version,
        wall_clock=header.wall_clock,
        num_learners=config.num_learners,
        quorum=shadow.quorum,
        num_fragments=None if terms is None else terms.num_fragments,
        dtype=None if terms is None else terms.dtype,
        outer=None
        if terms is None
        else resolved(config, num_fragments=terms.num_fragments, target=shadow.target).sentence,
        pipeline=config.pipeline,
        checkpoint_every=config.checkpoint_every,
        grace_cap_seconds=config.grace_cap_seconds,
        records=board.summary.records,
        restarts=len(board.summary.restarts),
        exit_code=shadow.exit_code,
    )


def _wait(board: Board, state: State, now: float) -> Wait:
    """Return what the session waits for, in the coordinator's words."""
    shadow, phase = board.shadow, state.phase
    sentence = waiting_for(state, now)
    absent = tuple(learner for learner in range(state.config.num_learners) if learner not in state.current)
    first = shadow.rounds.first()
    since: float | None = shadow.phase_at
    whom: tuple[int, ...] = ()
    until: float | None = None
    if phase is Phase.PROVISIONAL:
        whom, until = (0,), state.start_deadline
    elif phase is Phase.WAITING:
        whom, until = (absent if state.durable >= 0 else ()), state.start_deadline
    elif first is not None and phase in (Phase.RUNNING, Phase.STOPPING):
        whom, since, until = first.owing, first.since(), first.until(now)
        until = until if phase is Phase.RUNNING else state.stop_deadline
        if first.status is Status.RETRY and until is None and len(state.current) < state.quorum:
            whom = absent
    elif phase is Phase.RUNNING:
        since = shadow.rested_at
        if len(state.current) < state.quorum:
            whom = absent
        else:
            until = opening_time(state)
            until = state.blind_until if until is None and not state.gated else until
    elif phase is Phase.BUDGET:
        whom = tuple(learner for learner in range(state.config.num_learners) if learner not in state.reports)
    elif phase is Phase.FINALISING:
        whom, until = tuple(sorted(state.awaited)), state.ack_deadline
    elif phase is Phase.ENDED:
        since = None
    return Wait(sentence=sentence, whom=whom, since=since, until=until)


def _round(round_: OpenRound, state: State, now: float) -> RoundMoment:
    core = round_.as_core()
    # The coordinator speaks of the round that commits next; each of the others gets its own sentence so, too.
    alone = State(config=state.config, phase=Phase.RUNNING, rounds=(core,), current=state.current)
    return RoundMoment(
        step=round_.step,
        fragment=round_.fragment,
        attempt=round_.attempt,
        phase=round_.phase,
        wait=Wait(
            sentence=waiting_for(alone, now),
            whom=round_.owing,
            since=round_.since(),
            until=round_.until(now),
        ),
        opened_at=round_.attempt_at,
        quorum=round_.quorum,
        sweep=round_.sweep,
        members=tuple(sorted(round_.members)),
        answered=tuple(sorted(round_.answers)),
        gone=tuple(sorted(round_.gone)),
        owing=round_.owing,
    )


def _learners(board: Board, wait: Wait, live: Live) -> tuple[LearnerMoment, ...]:
    shadow, summary = board.shadow, board.summary
    waited: dict[int, tuple[float, str]] = {}
    for round_ in shadow.rounds:
        for learner in round_.owing:
            waited.setdefault(learner, (round_.attempt_at, f"round {round_.step} attempt {round_.attempt}"))
    if shadow.phase in _WAITED_FOR and wait.since is not None:
        for learner in wait.whom:
            waited.setdefault(learner, (wait.since, _WAITED_FOR[shadow.phase]))
    moments = []
    for learner in sorted(summary.learners):
        seat, row = shadow.seat(learner), summary.learners[learner]
        said = live.learners.get(learner, _NOBODY)
        since, what = waited.get(learner, (None, ""))
        link, why = seat.link, seat.link_why
        if link == "connected" and shadow.phase is Phase.ENDED:
            link, why = "away", "the session has ended"
        moments.append(
            LearnerMoment(
                learner=learner,
                link=link,
                link_since=seat.link_since,
                link_why=why,
                local_step=_first(said.local_step, seat.local_step),
                steps_per_second=seat.steps_per_second,
                tokens_per_second=_first(said.tokens_per_second, seat.tokens_per_second),
                merges=row.merges,
                c_steps=row.c_steps,
                c_tokens=row.c_tokens,
                contribution=summary.contribution(learner),
                missed=row.missed,
                missed_in_a_row=seat.missed_in_a_row,
                left_out=row.left_out,
                joins=row.joins,
                leaves=row.leaves,
                staleness=seat.staleness,
                staleness_mean=_mean(row.staleness),
                bytes_in=_first(said.bytes_in, seat.bytes_in),
                bytes_out=said.bytes_out,
                answered_at=seat.answered_at,
                reported_at=seat.report_at if seat.report_step is not None else None,
                waited_since=since,
                waited_for=what,
                phase=said.phase,
                loss=said.loss,
            )
        )
    return tuple(moments)


def _checkpoint(board: Board) -> CheckpointMoment:
    shadow, written = board.shadow, board.written
    if shadow.durable < 0:
        return CheckpointMoment(writing=shadow.writing)
    if written is None or written.step != shadow.durable:
        return CheckpointMoment(step=shadow.durable, writing=shadow.writing)
    return CheckpointMoment(
        step=written.step,
        at=written.at,
        written_bytes=written.written_bytes,
        seconds=written.seconds,
        writing=shadow.writing,
    )


def _refusals(board: Board) -> tuple[RefusalMoment, ...]:
    summary = board.summary
    pushes = [
        _refusal("push", reason, learner, refusal, board.refused_at)
        for (learner, reason), refusal in sorted(summary.refused_pushes.items())
    ]
    connections = [
        _refusal("connection", reason, None, refusal, board.refused_at)
        for reason, refusal in sorted(summary.refused_learners.items())
    ]
    return (*pushes, *connections)


def _refusal(
    what: str,
    reason: str,
    learner: int | None,
    refusal: Refusal,
    refused_at: Mapping[tuple[int | None, str], float],
) -> RefusalMoment:
    return RefusalMoment(
        what=what,
        reason=reason,
        learner=learner,
        count=refusal.count,
        seq=refusal.seq,
        why=refusal.why,
        at=refused_at.get((learner, reason)),
    )


def _eta(board: Board, now: float) -> float | None:
    """Return the time that the remaining rounds take at the present pace; None while that is unknown."""
    shadow, pace, limit = board.shadow, board.pace(), no_commit_after(board, OVERDUE_SECONDS)
    if shadow.step >= shadow.target > 0:
        return 0.0
    if shadow.phase is not Phase.RUNNING or pace is None or limit is None:
        return None
    since = now - board.commit_times[-1]
    if since > limit:
        # Whatever holds it up may last.
        return None
    return max(0.0, (shadow.target - shadow.step) * pace - min(since, pace))


def _merges_per_hour(board: Board, now: float) -> float | None:
    """Return the pace as a rate, which sinks while a commit is overdue."""
    pace, times = board.pace(), board.commit_times
    if pace is None or pace <= 0.0:
        return None
    overdue = max(0.0, now - times[-1] - pace) if board.shadow.phase is Phase.RUNNING else 0.0
    return 3600.0 * (len(times) - 1) / (times[-1] - times[0] + overdue)


def _mean(spread: Spread) -> float | None:
    return spread.total / spread.count if spread.count else None


def _first(*values: _T | None) -> _T | None:
    return next((value for value in values if value is not None), None)
