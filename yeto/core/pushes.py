"""Pushes: admitted by their header before a buffer is taken, accepted by what their bytes turned out to be.

Identity comes from the connection and the frozen member set, never from what a push claims. Refusals that
the content caused decline the member for this attempt: nobody waits for it any more. Two get a second
chance first, because the sender only missed a broadcast: a base that is too old or too new is answered
with the fragment and the same pull once more. When enough answers are in is for :mod:`yeto.core.sealing`.
"""

from __future__ import annotations

from yeto.core.decisions import PushAccepted, PushAdmitted, PushRefused, QuorumReached
from yeto.core.events import Heartbeat, PushOffered, PushReceived, UploadProgress
from yeto.core.members import refuse
from yeto.core.pacing import absorb_report, smoothed
from yeto.core.parts import GATHERING, Answer, Link, Round, Upload, made, replace
from yeto.core.rounds import is_excused, mark_gone
from yeto.core.state import Draft, moment
from yeto.core.weights import MAX_NORM
from yeto.errors import CoordinatorError

MAX_BAD_RUN = 3
PROGRESS_SECONDS = 60.0
"""An upload that advanced this recently holds the quorum deadline back."""
PROGRESS_SLACK_SECONDS = 5.0
"""Progress is told at most once a minute: the next word of a live upload may be this late."""
MAX_DEADLINES = 4.0
"""The quorum deadline moves to at most this many times its length."""

_SECOND_CHANCE = frozenset({"stale_base", "future_base"})
_DECLINES = frozenset({"stale_base", "future_base", "no_work", "non_finite"})


def on_push_offered(draft: Draft, event: PushOffered) -> None:
    """The header of a push: take its bytes, or drain them."""
    learner = event.learner
    link = _link(draft, learner, event.generation)
    if link is not None:
        absorb_report(draft, learner, link, event.local_step)
    round_ = _gathering(draft, event)
    if round_ is None:
        _refuse(draft, event, None, "out_of_round", "no open attempt of that round and fragment")
        return
    if _is_outsider(round_, event):
        _refuse(draft, event, round_, "unexpected_member", "not a member of the attempt, or no longer")
        return
    staleness = max(round_.base_version - event.base_version, 0)
    lag = draft.config.max_base_lag
    budget = draft.config.learner_budget_steps
    if budget is not None and not draft.config.budget_finish and event.c_steps == budget:
        _refuse(draft, event, None, "out_of_round", f"it used up its budget of {budget} steps")
    elif event.base_version > round_.base_version:
        why = f"base version {event.base_version} is above the attempt's {round_.base_version}"
        _refuse(draft, event, round_, "future_base", why)
    elif lag is not None and staleness > lag:
        why = f"base version {event.base_version} is {staleness} steps old, --max-base-lag {lag}"
        _refuse(draft, event, round_, "stale_base", why)
    elif learner in round_.answers or learner in round_.uploads:
        _refuse(draft, event, round_, "duplicate", "it answered already or is uploading")
    elif event.c_steps == 0:
        _refuse(draft, event, round_, "no_work", "it has not taken a step since its last anchor")
    else:
        _admit(draft, event, round_, staleness)


def _admit(draft: Draft, event: PushOffered, round_: Round, staleness: int) -> None:
    learner, c_steps = event.learner, event.c_steps
    upload = made(
        Upload,
        {
            "base_version": event.base_version,
            "staleness": staleness,
            "local_step": event.local_step,
            "c_steps": c_steps,
            "c_tokens": event.c_tokens,
        },
    )
    uploads = round_.uploads.set(learner, upload)
    draft.put(replace(round_, uploads=uploads, deadline=_held(draft, round_)))
    draft.emit(
        made(
            PushAdmitted,
            {
                "why": f"learner {learner} answers with {c_steps} steps, {staleness} versions stale",
                "learner": learner,
                "generation": event.generation,
                "step": event.step,
                "attempt": event.attempt,
                "staleness": staleness,
            },
        )
    )


def on_upload_progress(draft: Draft, event: UploadProgress) -> None:
    """An upload advanced: hold the quorum deadline back, up to a bound."""
    round_ = draft.find_gathering(event.step, event.attempt)
    if (
        round_ is None
        or event.learner not in round_.uploads
        or round_.members[event.learner].generation != event.generation
    ):
        draft.ignore(
            event, "late", f"learner {event.learner} has no upload in an open attempt of round {event.step}"
        )
        return
    draft.put(replace(round_, deadline=_held(draft, round_)))


def _held(draft: Draft, round_: Round) -> float:
    return held_deadline(
        draft.at,
        opened_at=round_.opened_at,
        deadline=round_.deadline,
        timeout_seconds=draft.config.quorum_timeout_seconds,
    )


def held_deadline(at: float, *, opened_at: float, deadline: float, timeout_seconds: float) -> float:
    """Return the quorum deadline of an attempt after an upload advanced: the same one, or a later.

    The header of an upload counts as its first advance.

    Args:
        at: when it advanced; all times are seconds since the session began.
        opened_at: when the attempt was opened.
        deadline: the deadline before.
        timeout_seconds: length of the deadline as configured.
    """
    held = at + PROGRESS_SECONDS + PROGRESS_SLACK_SECONDS
    if held <= deadline:
        return deadline
    return max(deadline, moment(min(held, opened_at + MAX_DEADLINES * timeout_seconds)))


def on_push_received(draft: Draft, event: PushReceived) -> None:
    """A whole push: it counts as its member's answer, or is refused for what it holds."""
    learner = event.learner
    round_ = _gathering(draft, event)
    if round_ is None:
        _refuse(draft, event, None, "out_of_round", "its attempt closed while it was uploaded")
        return
    if _is_outsider(round_, event):
        _refuse(draft, event, round_, "unexpected_member", "not a member of the attempt, or no longer")
        return
    if learner in round_.answers:
        _refuse(draft, event, round_, "duplicate", "it answered already")
        return
    upload = round_.uploads.get(learner)
    if upload is None:
        raise CoordinatorError(
            f"push_received: learner {learner} has no admitted upload in round {event.step} "
            f"attempt {event.attempt}"
        )
    link = _link(draft, learner, event.generation)
    assert link is not None, "a member that still owes an answer is current"
    if not event.finite or event.norm is None or not event.norm <= MAX_NORM:
        _refuse(draft, event, round_, "non_finite", "it holds NaN or Inf, or its norm is above 1e15")
        _count_bad(draft, event, link, upload)
        return
    _accept(draft, event, round_, upload, link, event.norm)


def _accept(
    draft: Draft, event: PushReceived, round_: Round, upload: Upload, link: Link, norm: float
) -> None:
    learner = event.learner
    xi_quorum = smoothed(link.xi_quorum, draft.at - round_.opened_at)
    draft.links = draft.links.set(learner, replace(link, xi_quorum=xi_quorum, bad_run=0, bad_step=None))
    if learner in draft.sweep_missed:
        _wait_again(draft, learner)
        round_ = draft.rounds[round_.step - draft.step - 1]
    answer = made(
        Answer,
        {"upload": upload, "norm": norm, "cosine": event.cosine_to_momentum, "xi_quorum": xi_quorum},
    )
    answers = round_.answers.set(learner, answer)
    count, step = len(answers), event.step
    draft.emit(
        made(
            PushAccepted,
            {
                "why": f"answer {count} of {len(round_.members)} to round {step}, quorum {round_.quorum}",
                "learner": learner,
                "generation": event.generation,
                "step": step,
                "attempt": event.attempt,
            },
        )
    )
    round_ = replace(round_, answers=answers, uploads=round_.uploads.delete(learner))
    if count == round_.quorum:
        seconds = draft.at - round_.opened_at
        round_ = replace(round_, quorum_seconds=seconds)
        draft.emit(
            QuorumReached(
                step=event.step,
                attempt=event.attempt,
                quorum_seconds=seconds,
                why=f"round {event.step} has its quorum of {count} after {seconds:g} s",
            )
        )
    draft.put(round_)


def _wait_again(draft: Draft, learner: int) -> None:
    """A learner that a sweep round had to miss has answered: later rounds wait for it again."""
    for round_ in draft.rounds:
        if (
            round_.status is GATHERING
            and learner in round_.members
            and round_.owes(learner, round_.members[learner].generation)
            and is_excused(draft, round_, learner)
        ):
            draft.put(replace(round_, excused=round_.excused - 1))
    draft.sweep_missed = draft.sweep_missed.delete(learner)


def _refuse(
    draft: Draft, event: PushOffered | PushReceived, round_: Round | None, reason: str, why: str
) -> None:
    """Refuse a push; for its content, decline the member unless it has a second chance or an answer."""
    learner = event.learner
    resend = declined = False
    if round_ is not None and reason in _DECLINES:
        uploading = isinstance(event, PushOffered) and learner in round_.uploads
        if learner not in round_.answers and not uploading:
            resend = reason in _SECOND_CHANCE and learner not in round_.chances
            declined = not resend
    draft.emit(
        PushRefused(
            learner=learner,
            generation=event.generation,
            fragment=event.fragment,
            step=event.step,
            attempt=event.attempt,
            reason=reason,
            declined=declined,
            resend=resend,
            why=f"push of learner {learner} for round {event.step} attempt {event.attempt} refused: {why}",
        )
    )
    if round_ is not None and resend:
        draft.put(replace(round_, chances=round_.chances.set(learner, True)))
    elif round_ is not None and declined:
        mark_gone(draft, round_, learner, declined=True)


def _count_bad(draft: Draft, event: PushReceived, link: Link, upload: Upload) -> None:
    """Count a non-finite push, once per local step; the third in a row closes the connection."""
    if link.bad_step == upload.local_step:
        return
    run = link.bad_run + 1
    draft.links = draft.links.set(event.learner, replace(link, bad_run=run, bad_step=upload.local_step))
    if run >= MAX_BAD_RUN:
        refuse(
            draft,
            event.learner,
            event.generation,
            "non_finite",
            f"learner {event.learner} sent {run} non-finite pushes in a row; its training has diverged: "
            "lower --inner-lr, check its data, and start it afresh",
        )


def on_heartbeat(draft: Draft, event: Heartbeat) -> None:
    """A learner's local step advanced."""
    link = _link(draft, event.learner, event.generation)
    if link is None:
        draft.ignore(event, "superseded", f"learner {event.learner} generation {event.generation} is gone")
    elif link.report_step is not None and event.local_step <= link.report_step:
        draft.ignore(event, "repeated", f"learner {event.learner} has reported step {link.report_step}")
    else:
        absorb_report(draft, event.learner, link, event.local_step)


def _link(draft: Draft, learner: int, generation: str) -> Link | None:
    link = draft.links.get(learner)
    return link if link is not None and link.generation == generation else None


def _gathering(draft: Draft, event: PushOffered | PushReceived) -> Round | None:
    """The open attempt that a push names, or None."""
    round_ = draft.find_gathering(event.step, event.attempt)
    return None if round_ is None or round_.fragment != event.fragment else round_


def _is_outsider(round_: Round, event: PushOffered | PushReceived) -> bool:
    """Whether the sender is no frozen member of the attempt, or one that nobody waits for any more."""
    member = round_.members.get(event.learner)
    return member is None or member.generation != event.generation or event.learner in round_.gone
