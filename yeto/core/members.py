"""Generations that end: left, superseded or refused, always with the same consequences.

Whatever ends a generation, its unfinished uploads are freed, its estimates are dropped, its accepted
answers stay, and when it was the one that fixed a still provisional session, the session is released.
"""

from __future__ import annotations

from immutables import Map

from yeto.core.decisions import LearnerRefused, SessionReleased
from yeto.core.pacing import forget_pace
from yeto.core.parts import Phase
from yeto.core.rounds import member_left
from yeto.core.state import Draft, moment


def refuse(
    draft: Draft,
    learner: int,
    generation: str,
    reason: str,
    why: str,
    *,
    field: str | None = None,
    permanent: bool = True,
    replaced: bool = False,
) -> None:
    """Close a group, and forget it when it is the newest of its id.

    Who is refused for good does not dial again, unless it is ``replaced``: then another group of its id is
    here already.
    """
    draft.emit(
        LearnerRefused(
            learner=learner,
            generation=generation,
            reason=reason,
            field=field,
            permanent=permanent,
            why=why,
        )
    )
    if drop(draft, learner, generation) and permanent and not replaced:
        draft.dismissed = draft.dismissed.set(learner, True)


def drop(draft: Draft, learner: int, generation: str) -> bool:
    """Forget a generation; False when it is not the newest of its id, so that nothing depends on it."""
    dial = draft.newest.get(learner)
    if dial is None or dial.generation != generation:
        return False
    draft.newest = draft.newest.delete(learner)
    if learner in draft.current:
        draft.current = draft.current.delete(learner)
        draft.links = draft.links.delete(learner)
        draft.away = draft.away.set(learner, draft.at)
        forget_pace(draft, learner)
        member_left(draft, learner, generation)
        if draft.awaited.get(learner):
            draft.awaited = draft.awaited.delete(learner)
        _watch_absence(draft, learner)
    if learner == 0 and draft.phase is Phase.PROVISIONAL and draft.opener == generation:
        release(draft, generation)
    return True


def release(draft: Draft, generation: str) -> None:
    """The generation that fixed a provisional session is gone: its INIT set goes too."""
    received, expected = len(draft.initial), draft.num_fragments
    draft.terms = None
    draft.opener = None
    draft.initial = Map()
    draft.emit(
        SessionReleased(
            learner=0,
            generation=generation,
            why=f"learner 0 left after {received} of {expected} initial fragments; "
            "its next connection decides the session anew",
        )
    )


def _watch_absence(draft: Draft, learner: int) -> None:
    """Where every configured learner is needed, start the clock of the one that left."""
    needed = draft.config.budget_finish or (draft.phase is Phase.BUDGET and learner not in draft.reports)
    if needed and draft.budget_deadline is None:
        draft.budget_deadline = moment(draft.at + draft.config.start_timeout_seconds)
