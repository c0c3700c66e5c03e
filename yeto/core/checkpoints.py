"""Checkpoints and broadcasts: a learner never holds a version that a crash could take back.

Broadcasts leave in commit order. A due checkpoint gates its own broadcast and, by that order, all later
ones. Checkpoints coalesce: one is written at a time, and the next covers everything committed meanwhile, so
a slow disk costs latency, not a queue.
"""

from __future__ import annotations

from yeto.core.decisions import BroadcastOrdered, CheckpointOrdered
from yeto.core.events import CheckpointFailed, CheckpointWritten
from yeto.core.pacing import smoothed
from yeto.core.parts import Gated, put_at
from yeto.core.rounds import end_session
from yeto.core.state import Draft
from yeto.core.values import FragmentVersionRef, Member
from yeto.errors import CoordinatorError


def is_due(draft: Draft) -> bool:
    """Whether the step that was just committed asks for a checkpoint."""
    every = draft.config.checkpoint_every
    return (every > 0 and draft.step % every == 0) or draft.step == draft.target


def hold_broadcast(draft: Draft, fragment: int, sync_seconds: float) -> None:
    """Have the fragment that was just committed broadcast in its turn, behind its checkpoint if one is due.

    ``sync_seconds`` is what its merge and outer step took.
    """
    step, due = draft.step, is_due(draft)
    if not due:
        draft.xi_sync = smoothed(draft.xi_sync, sync_seconds)
    draft.gated = (
        *draft.gated,
        Gated(step=step, fragment=fragment, gate=step if due else None, sync_seconds=sync_seconds),
    )
    # The checkpoint of the last round is the final one: the SVD pool is drained before it.
    if due and step < draft.target:
        if draft.writing is None:
            order_checkpoint(draft, f"the checkpoint of step {step} is due")
        else:
            draft.due = step


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
        draft.broadcast = put_at(draft.broadcast, entry.fragment, entry.step)
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
