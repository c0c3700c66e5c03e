"""Commits: strictly in ascending global step, whatever the order in which merges finish.

The round that commits next is always ``rounds[0]``. Its outer step is ordered when its merge is there and
its turn has come; when the outer step is applied, version, ledger and global step move together, so every
checkpoint is a contiguous prefix of the run. When learners get the new version is for
:mod:`yeto.core.checkpoints` to say.
"""

from __future__ import annotations

import math

from yeto.core.checkpoints import hold_broadcast, is_due
from yeto.core.decisions import CommitOrdered, MergeOrdered, RoundCommitted
from yeto.core.events import Event, MergeFailed, MergeFinished, OuterStepApplied
from yeto.core.outer import Outer
from yeto.core.parts import (
    COMMITTING,
    MERGED,
    MERGING,
    RETRY,
    RUNNING,
    SEALED,
    Round,
    Sealed,
    made,
    put_at,
    replace,
)
from yeto.core.rounds import discard
from yeto.core.state import Draft
from yeto.core.values import FragmentMark, LedgerEntry, Responder, Weighted
from yeto.errors import CoordinatorError


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
    draft.versions = put_at(draft.versions, fragment, step)
    mark = FragmentMark(
        fragment=fragment, version=step, params_digest=params_digest, momentum_digest=momentum_digest
    )
    draft.marks = put_at(draft.marks, fragment, mark)
    if not round_.sweep and not sealed.no_op:
        outer_mark = outer_of(draft).advanced(draft.outer_marks[fragment])
        draft.outer_marks = put_at(draft.outer_marks, fragment, outer_mark)
    responders = tuple([_responder(round_, sealed, weighted) for weighted in sealed.responders])
    _enter_ledger(draft, sealed)
    sync_seconds = sealed.merge_seconds + (draft.at - sealed.commit_ordered_at)
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
            sync_seconds=None if is_due(draft) else sync_seconds,
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
    hold_broadcast(draft, fragment, sync_seconds)


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


def outer_of(draft: Draft) -> Outer:
    """The outer settings in force, once rounds have started."""
    assert draft.outer is not None
    return draft.outer


def sealed_of(round_: Round) -> Sealed:
    """What a round past its seal was sealed with."""
    assert round_.sealed is not None
    return round_.sealed
