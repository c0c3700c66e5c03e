"""Commits: strictly in ascending global step, whatever the order in which merges finish.

The round that commits next is always ``rounds[0]``. Its outer step is ordered when its merge is there and
its turn has come; when the outer step is applied, version, ledger and global step move together, so every
checkpoint is a contiguous prefix of the run.

Broadcasts leave in commit order. A due checkpoint gates its own broadcast and, by that order, all later
ones: a learner never holds a version that a crash could take back. Checkpoints coalesce: one is written at
a time, and the next covers everything committed meanwhile, so a slow disk costs latency, not a queue.
"""

from __future__ import annotations

import math
from typing import TypeVar

from yeto.core.decisions import (
    BroadcastOrdered,
    CheckpointOrdered,
    CommitOrdered,
    MergeOrdered,
    RoundCommitted,
    SessionEnded,
)
from yeto.core.events import (
    CheckpointFailed,
    CheckpointWritten,
    Event,
    MergeFailed,
    MergeFinished,
    OuterStepApplied,
)
from yeto.core.outer import Outer
from yeto.core.pacing import smoothed
from yeto.core.parts import (
    COMMITTING,
    ENDED,
    MERGED,
    MERGING,
    RETRY,
    RUNNING,
    SEALED,
    Gated,
    Round,
    Sealed,
    made,
    replace,
)
from yeto.core.rounds import discard
from yeto.core.state import Draft
from yeto.core.values import FragmentMark, FragmentVersionRef, LedgerEntry, Member, Responder, Weighted
from yeto.errors import CoordinatorError

_T = TypeVar("_T")


def order_merges(draft: Draft) -> None:
    """Order the reduction of every attempt that was just sealed."""
    for round_ in draft.rounds:
        if round_.status is not SEALED:
            continue
        sealed = sealed_of(round_)
        if sealed.no_op:
            draft.put(replace(round_, status=MERGED))
            continue
        draft.put(replace(round_, status=MERGING))
        draft.emit(
            MergeOrdered(
                step=round_.step,
                fragment=round_.fragment,
                attempt=round_.attempt,
                responders=sealed.responders,
                plain_average=draft.is_plain(round_),
                momentum_scale=None
                if draft.is_plain(round_)
                else outer_of(draft).momentum_scale(draft.outer_marks[round_.fragment]),
                why=f"merge {len(sealed.responders)} answers of round {round_.step} in learner order",
            )
        )


def on_merge_finished(draft: Draft, event: MergeFinished) -> None:
    """The merged gradient is ready, or not usable."""
    _require_figure(event, "delta_cosine", event.delta_cosine, least=-1.0, most=1.0)
    _require_figure(event, "norm_ratio", event.norm_ratio)
    round_ = _merging(draft, event)
    if round_ is None:
        return
    if not event.finite:
        discard(draft, round_, "not_finite", "the merged gradient is not finite")
        return
    sealed = replace(
        sealed_of(round_),
        gradient_norm=event.gradient_norm or 0.0,
        corrected=event.corrected,
        merge_seconds=event.seconds,
        delta_cosine=event.delta_cosine,
        norm_ratio=event.norm_ratio,
    )
    draft.put(replace(round_, status=MERGED, sealed=sealed))


def _require_figure(
    event: Event, name: str, value: float | None, *, least: float = 0.0, most: float = math.inf
) -> None:
    """Raise when a figure is none that vectors can have."""
    if value is not None and not (least <= value <= most and math.isfinite(value)):
        raise CoordinatorError(f"{event.kind}: {name} {value} is impossible")


def on_merge_failed(draft: Draft, event: MergeFailed) -> None:
    """The merge could not be computed."""
    round_ = _merging(draft, event)
    if round_ is not None:
        discard(draft, round_, "merge_failed", f"the merge failed: {event.message}")


def _merging(draft: Draft, event: MergeFinished | MergeFailed) -> Round | None:
    """The round whose merge this is about; None, with the reason recorded, when it is of the past."""
    round_ = draft.find(event.step)
    if round_ is not None and round_.attempt == event.attempt and round_.status is MERGING:
        return round_
    unknown = event.step > draft.step and (
        round_ is None
        or event.attempt > round_.attempt
        or (event.attempt == round_.attempt and round_.status is not RETRY)
    )
    if unknown and draft.phase is RUNNING:
        raise CoordinatorError(
            f"{event.kind}: no merge of round {event.step} attempt {event.attempt} was ordered"
        )
    draft.ignore(event, "late", f"round {event.step} attempt {event.attempt} is no longer merging")
    return None


def order_commit(draft: Draft) -> None:
    """Order the outer step of the next round to commit, when its merge is there."""
    if not draft.rounds or draft.rounds[0].status is not MERGED:
        return
    round_ = draft.rounds[0]
    sealed = sealed_of(round_)
    draft.put(replace(round_, status=COMMITTING, sealed=replace(sealed, commit_ordered_at=draft.at)))
    lr, momentum = (
        (1.0, 0.0) if round_.sweep else outer_of(draft).coefficients(draft.outer_marks[round_.fragment])
    )
    if sealed.no_op:
        how = "all weights are 0, so only its version moves"
    elif round_.sweep:
        how = "closing sweep, lr 1 and no momentum"
    else:
        how = f"lr {lr:g}, momentum {momentum:g}"
    draft.emit(
        CommitOrdered(
            step=round_.step,
            fragment=round_.fragment,
            attempt=round_.attempt,
            lr=lr,
            momentum=momentum,
            sweep=round_.sweep,
            no_op=sealed.no_op,
            why=f"it is the turn of round {round_.step}: {how}",
        )
    )


def on_outer_step_applied(draft: Draft, event: OuterStepApplied) -> None:
    """The outer step was computed: commit the round, or discard its attempt."""
    _require_figure(event, "offset_ratio", event.offset_ratio)
    round_ = draft.find(event.step)
    if round_ is None or round_.attempt != event.attempt or round_.status is not COMMITTING:
        raise CoordinatorError(
            f"outer_step_applied: no commit of round {event.step} attempt {event.attempt} was ordered"
        )
    if not event.finite:
        round_ = replace(round_, status=MERGED)
        draft.put(round_)
        discard(draft, round_, "not_finite", "the outer step would not be finite")
        return
    if event.params_digest is None or event.momentum_digest is None:
        raise CoordinatorError(f"outer_step_applied: round {event.step} is finite but has no digests")
    _commit(draft, round_, event.params_digest, event.momentum_digest, event.offset_ratio)


def _commit(
    draft: Draft, round_: Round, params_digest: str, momentum_digest: str, offset_ratio: float | None
) -> None:
    sealed = sealed_of(round_)
    step, fragment = round_.step, round_.fragment
    draft.step = step
    draft.rounds = draft.rounds[1:]
    draft.versions = _put(draft.versions, fragment, step)
    mark = FragmentMark(
        fragment=fragment, version=step, params_digest=params_digest, momentum_digest=momentum_digest
    )
    draft.marks = _put(draft.marks, fragment, mark)
    if not round_.sweep and not sealed.no_op:
        outer_mark = outer_of(draft).advanced(draft.outer_marks[fragment])
        draft.outer_marks = _put(draft.outer_marks, fragment, outer_mark)
    responders = tuple([_responder(round_, sealed, weighted) for weighted in sealed.responders])
    _enter_ledger(draft, sealed)
    every = draft.config.checkpoint_every
    due = (every > 0 and step % every == 0) or step == draft.target
    sync_seconds = sealed.merge_seconds + (draft.at - sealed.commit_ordered_at)
    if not due:
        draft.xi_sync = smoothed(draft.xi_sync, sync_seconds)
    draft.gated = (
        *draft.gated,
        Gated(step=step, fragment=fragment, gate=step if due else None, sync_seconds=sync_seconds),
    )
    draft.emit(
        RoundCommitted(
            step=step,
            fragment=fragment,
            attempt=round_.attempt,
            base_version=round_.base_version,
            version=step,
            quorum=round_.quorum,
            members=sealed.members,
            responders=responders,
            missed=sealed.missed,
            left_out=sealed.left_out,
            quorum_seconds=round_.quorum_seconds,
            grace_seconds=round_.grace_seconds,
            merge_seconds=sealed.merge_seconds,
            sync_seconds=None if due else sync_seconds,
            gradient_norm=sealed.gradient_norm,
            params_digest=params_digest,
            momentum_digest=momentum_digest,
            no_op=sealed.no_op,
            delta_cosine=sealed.delta_cosine,
            norm_ratio=sealed.norm_ratio,
            offset_ratio=offset_ratio,
            why=f"round {step} of {draft.target} committed with {len(responders)} of "
            f"{len(sealed.members)} members" + (", no-op: all weights are 0" if sealed.no_op else ""),
        )
    )
    # The checkpoint of the last round is the final one: the SVD pool is drained before it.
    if due and step < draft.target:
        if draft.writing is None:
            order_checkpoint(draft, f"the checkpoint of step {step} is due")
        else:
            draft.due = step


def _put(items: tuple[_T, ...], index: int, item: _T) -> tuple[_T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _responder(round_: Round, sealed: Sealed, weighted: Weighted) -> Responder:
    answer = round_.answers[weighted.learner]
    return made(
        Responder,
        {
            "learner": weighted.learner,
            "generation": weighted.generation,
            "base_version": weighted.base_version,
            "staleness": weighted.staleness,
            "c_steps": weighted.c_steps,
            "c_tokens": weighted.c_tokens,
            "weight": weighted.weight,
            "contribution": 0.0 if sealed.no_op else weighted.weight / sealed.total_weight,
            "delta_norm": answer.norm,
            "cosine_to_momentum": answer.cosine,
            "corrected": weighted.learner in sealed.corrected,
        },
    )


def _enter_ledger(draft: Draft, sealed: Sealed) -> None:
    ledger = draft.ledger
    for weighted in sealed.responders:
        learner = weighted.learner
        entry = ledger.get(learner)
        merges, c_steps, c_tokens = (entry.merges, entry.c_steps, entry.c_tokens) if entry else (0, 0, 0)
        ledger = ledger.set(
            learner,
            made(
                LedgerEntry,
                {
                    "learner": learner,
                    "merges": merges + 1,
                    "c_steps": c_steps + weighted.c_steps,
                    "c_tokens": c_tokens + weighted.c_tokens,
                },
            ),
        )
    draft.ledger = ledger


def order_checkpoint(draft: Draft, why: str, *, final: bool = False) -> None:
    """Order the checkpoint of what is committed now; it covers everything due so far."""
    draft.writing = draft.step
    draft.due = None
    draft.emit(
        CheckpointOrdered(
            step=draft.step,
            final=final,
            finish_target=draft.target if draft.config.budget_finish else None,
            why=why,
        )
    )


def on_checkpoint_written(draft: Draft, event: CheckpointWritten) -> None:
    """A checkpoint is durable: what it gated may leave, and the next one may be written."""
    _expect_checkpoint(draft, event)
    draft.writing = None
    draft.durable = event.step
    for entry in draft.gated:
        if entry.gate is not None and entry.gate <= event.step:
            draft.xi_sync = smoothed(draft.xi_sync, entry.sync_seconds + event.seconds)
    if not draft.broadcast:
        draft.broadcast = (0,) * draft.num_fragments
        broadcast_all(draft, draft.everyone(), "the checkpoint of step 0 is durable")
    # At the end of the run the final checkpoint covers what is due, after the SVD pool is drained.
    if draft.due is not None and draft.step < draft.target:
        order_checkpoint(draft, f"the checkpoint of step {draft.due} was due while one was written")


def on_checkpoint_failed(draft: Draft, event: CheckpointFailed) -> None:
    """Nothing that is not durable may leave: the session ends here."""
    _expect_checkpoint(draft, event)
    draft.writing = None
    if draft.durable >= 0:
        left = f"the checkpoint of step {draft.durable} is intact and nothing later was broadcast"
        remedy = "make room and start with --resume"
    else:
        left, remedy = "there is no checkpoint yet", "make room and start with --resume-or-start"
    end_session(
        draft,
        exit_code=1,
        why=f"the checkpoint of step {event.step} could not be written ({event.message}); {left}; {remedy}",
    )


def _expect_checkpoint(draft: Draft, event: CheckpointWritten | CheckpointFailed) -> None:
    if draft.writing != event.step:
        raise CoordinatorError(f"{event.kind}: no checkpoint of step {event.step} is being written")


def release_broadcasts(draft: Draft) -> None:
    """Order, in commit order, the broadcasts that no checkpoint holds back any more."""
    while draft.gated:
        entry = draft.gated[0]
        if entry.gate is not None and entry.gate > draft.durable:
            return
        draft.gated = draft.gated[1:]
        draft.broadcast = _put(draft.broadcast, entry.fragment, entry.step)
        draft.emit(
            BroadcastOrdered(
                fragments=(FragmentVersionRef(fragment=entry.fragment, version=entry.step),),
                to=draft.everyone(),
                why=f"fragment {entry.fragment} is at version {entry.step}",
            )
        )


def broadcast_all(draft: Draft, to: tuple[Member, ...], why: str) -> None:
    """Order every fragment at the last version whose broadcast was ordered."""
    draft.emit(
        BroadcastOrdered(
            fragments=tuple(
                FragmentVersionRef(fragment=fragment, version=version)
                for fragment, version in enumerate(draft.broadcast)
            ),
            to=to,
            why=why,
        )
    )


def end_session(draft: Draft, *, exit_code: int, why: str, mark_final: bool = False) -> None:
    """Nothing follows: the process ends with ``exit_code``."""
    draft.phase = ENDED
    draft.exit_code = exit_code
    draft.exit_why = why
    draft.rounds = ()
    draft.emit(SessionEnded(exit_code=exit_code, step=draft.step, mark_final=mark_final, why=why))


def outer_of(draft: Draft) -> Outer:
    """The outer settings in force, once rounds have started."""
    assert draft.outer is not None
    return draft.outer


def sealed_of(round_: Round) -> Sealed:
    """What a round past its seal was sealed with."""
    assert round_.sealed is not None
    return round_.sealed
