"""Open rounds: members that go, attempts that are discarded, rounds that are dropped.

A frozen member cannot come back to its attempt: a reconnected learner is another member. So the moment
when fewer than K members can still answer, waiting gains nothing; the attempt is discarded and the round
retried with the learners that are there then. No work is lost by that, because learners reset their
counters on receipt of a broadcast only.

How long a retry waits depends on what went wrong: declined members need time to do better (2, 4, 8, ... at
most 60 seconds), a disconnected fleet a second, a slow one nothing. Of several causes the longest wait
holds.

While the session is stopping, or a learner's budget has closed it, nothing is retried: commits are strictly
in order, so a discard takes every later round with it whose commit was not ordered. A round that comes to
nothing too often ends the session, so how one ends early, and at all, is here, too.
"""

from __future__ import annotations

from yeto.core.decisions import AttemptDiscarded, SessionEnded, SessionEnding
from yeto.core.parts import Phase, Round, Status, replace
from yeto.core.state import Draft, moment, names

MAX_RETRY_SECONDS = 60.0
DISCONNECT_RETRY_SECONDS = 1.0
MAX_FAILURES = 3
"""Unusable merges of one round after which the session stops."""

_LIVE = frozenset({Status.GATHERING, Status.SEALED, Status.MERGING, Status.MERGED})
_NO_RETRY = {Phase.STOPPING: "stopping", Phase.BUDGET: "budget"}


def mark_gone(draft: Draft, round_: Round, learner: int, *, declined: bool) -> None:
    """Nobody waits for this member of a gathering attempt any more."""
    excused = is_excused(draft, round_, learner)
    draft.put(
        replace(
            round_,
            gone=round_.gone.set(learner, declined),
            uploads=round_.uploads.delete(learner) if learner in round_.uploads else round_.uploads,
            declined=round_.declined + declined,
            excused=round_.excused - excused,
        )
    )


def member_left(draft: Draft, learner: int, generation: str) -> None:
    """A generation is gone: free its uploads; answers that were accepted stay."""
    for round_ in draft.rounds:
        if round_.status is Status.GATHERING and round_.owes(learner, generation):
            mark_gone(draft, round_, learner, declined=False)


def is_excused(draft: Draft, round_: Round, learner: int) -> bool:
    """Whether a closing sweep round does not wait for this member, because the last one had to miss it."""
    return round_.sweep and draft.sweep_missed.get(learner) == round_.members[learner].generation


def discard(draft: Draft, round_: Round, reason: str, why: str) -> None:
    """Throw the present attempt away; the round is retried later, or dropped when nothing is retried."""
    unusable = reason in ("not_finite", "merge_failed")
    failures = round_.failures + unusable
    retried = draft.phase not in _NO_RETRY and failures < MAX_FAILURES
    discards = round_.discards + 1
    wait = _retry_wait(round_, discards, unusable)
    retry_at = moment(draft.at + wait) if retried else None
    then = f"next attempt not before {wait:g} s from now" if retried else "it is not retried"
    _emit_discarded(draft, round_, reason, f"discarded: {why}; {then}", retry_at)
    if draft.phase in _NO_RETRY:
        drop_rounds(draft, round_.step, _NO_RETRY[draft.phase], announced=round_.step)
        return
    # A fresh record: what the discarded attempt had gathered is freed here.
    draft.put(
        Round(
            step=round_.step,
            fragment=round_.fragment,
            attempt=round_.attempt,
            status=Status.RETRY,
            quorum=round_.quorum,
            base_version=round_.base_version,
            opened_at=round_.opened_at,
            deadline=round_.deadline,
            sweep=round_.sweep,
            discards=discards,
            failures=failures,
            retry_at=retry_at if wait > 0.0 else None,
        )
    )
    if failures >= MAX_FAILURES:
        halt(
            draft,
            exit_code=1,
            why=f"round {round_.step} gave an unusable merge {failures} times, last from "
            f"{names(round_.answers)}: {why}; look at these learners' losses, lower --inner-lr or "
            "restart them from the checkpoint",
        )


def _retry_wait(round_: Round, discards: int, unusable: bool) -> float:
    wait = 0.0
    if len(round_.gone) > round_.declined:
        wait = DISCONNECT_RETRY_SECONDS
    if round_.declined or unusable:
        wait = max(wait, min(MAX_RETRY_SECONDS, 2.0 ** min(discards, 6)))
    return wait


def drop_rounds(draft: Draft, first: int, reason: str, *, announced: int | None = None) -> None:
    """Drop round ``first`` and all later ones whose commit was not ordered.

    Args:
        draft: The draft.
        first: The lowest step to drop.
        reason: For the discards of their attempts.
        announced: A step whose discard is on the tape already.
    """
    kept = tuple(
        round_ for round_ in draft.rounds if round_.step < first or round_.status is Status.COMMITTING
    )
    for round_ in draft.rounds[len(kept) :]:
        if round_.status in _LIVE and round_.step != announced:
            why = f"dropped: the session is closing ({reason}) and its commit was not ordered"
            _emit_discarded(draft, round_, reason, why, None)
    draft.rounds = kept


def _emit_discarded(draft: Draft, round_: Round, reason: str, why: str, retry_at: float | None) -> None:
    draft.emit(
        AttemptDiscarded(
            step=round_.step,
            attempt=round_.attempt,
            reason=reason,
            lost=tuple(sorted(round_.answers)),
            retry_at=retry_at,
            why=f"round {round_.step} attempt {round_.attempt} {why}",
        )
    )


def halt(draft: Draft, *, exit_code: int, why: str) -> None:
    """End the session early: drop what was not commit-ordered; checkpoint and exit follow."""
    draft.phase = Phase.STOPPING
    draft.exit_code = exit_code
    draft.exit_why = why
    draft.emit(SessionEnding(phase="stop", why=why))
    drop_rounds(draft, draft.step + 1, "stopping")


def end_session(draft: Draft, *, exit_code: int, why: str, mark_final: bool = False) -> None:
    """Nothing follows: the process ends with ``exit_code``."""
    draft.phase = Phase.ENDED
    draft.exit_code = exit_code
    draft.exit_why = why
    draft.rounds = ()
    draft.emit(SessionEnded(exit_code=exit_code, step=draft.step, mark_final=mark_final, why=why))
