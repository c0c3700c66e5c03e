"""Sealing: when an attempt has enough, with whom it is merged, and when waiting gains nothing.

An attempt seals at once when nobody owes an answer any more and at least K are in; with K in and some
owing it opens a grace and seals when that has elapsed. It is discarded when K cannot be reached any more
or the quorum deadline passes below K. A closing sweep round has no grace: it waits for every live member
up to the quorum deadline, except for one that the sweep round before had to miss.

Who is merged is decided here, from norms alone and in learner order, so that no arrival order and no
tensor can change it. The merge is ordered by :mod:`yeto.core.commits`.
"""

from __future__ import annotations

from immutables import Map

from yeto.core.config import CoreConfig
from yeto.core.decisions import AttemptSealed, GraceOpened
from yeto.core.events import GraceElapsed, QuorumDeadlinePassed
from yeto.core.pacing import grace_seconds
from yeto.core.parts import (
    COMMITTING,
    GATHERING,
    MERGING,
    RETRY,
    SEALED,
    STOPPING,
    Round,
    Sealed,
    made,
    replace,
)
from yeto.core.rounds import discard, drop_rounds
from yeto.core.state import Draft, moment, names
from yeto.core.values import Weighted
from yeto.core.weights import learner_weight


def at_rest(rounds: tuple[Round, ...]) -> bool:
    """Whether every open round gathers on below its quorum or waits for a merge or an outer step.

    That is how they stand after nearly every event. Then there is nothing to seal, discard, commit or retry,
    and one look is enough.
    """
    for round_ in rounds:
        status = round_.status
        if status is GATHERING:
            quorum = round_.quorum
            if (
                round_.overdue
                or len(round_.answers) >= quorum
                or len(round_.members) - len(round_.gone) < quorum
            ):
                return False
        elif status is not MERGING and status is not COMMITTING:
            return False
    return True


def settle_attempts(draft: Draft) -> bool:
    """Seal or discard, in ascending step, every attempt for which it is time.

    Returns:
        Whether an attempt was sealed, so that its merge is to be ordered.
    """
    sealed = False
    step = draft.step + 1
    # Looked up one by one: settling a round may drop later ones or excuse their members.
    while (round_ := draft.find(step)) is not None:
        step += 1
        if round_.status is GATHERING:
            if _settle(draft, round_):
                sealed = True
                # Whom a sweep round had to miss, an earlier one that was retried does not wait for either.
                step = draft.step + 1 if round_.sweep else step
        elif round_.status is RETRY and draft.phase is STOPPING:
            drop_rounds(draft, round_.step, "stopping")
    return sealed


def _settle(draft: Draft, round_: Round) -> bool:
    """Settle one gathering attempt; True when it was sealed."""
    answers, owing = len(round_.answers), round_.owing
    if answers < round_.quorum:
        if answers + owing < round_.quorum:
            discard(
                draft,
                round_,
                "unreachable",
                f"{answers} answered and {owing} still may, quorum {round_.quorum} is out of reach "
                f"({round_.declined} declined, {len(round_.gone) - round_.declined} disconnected)",
            )
        elif round_.overdue and draft.phase is STOPPING:
            discard(draft, round_, "stopping", f"{answers} of {round_.quorum} answered before the stop")
        elif round_.overdue:
            seconds = draft.at - round_.opened_at
            why = f"{answers} of quorum {round_.quorum} answered within {seconds:g} s"
            discard(draft, round_, "quorum_timeout", why)
        return False
    if owing == 0:
        why = "nobody owes an answer any more"
    elif round_.overdue:
        why = "it waited long enough"
    elif round_.sweep:
        if owing > round_.excused:
            return False
        why = "whoever is missing was missed in the sweep round before, too"
    else:
        if round_.grace_deadline is not None:
            return False
        round_ = _open_grace(draft, round_)
        if round_.grace_seconds != 0.0:
            return False
        why = "there is no slack to wait in"
    _seal(draft, round_, why)
    return True


def _open_grace(draft: Draft, round_: Round) -> Round:
    """Size the wait for stragglers to the compute slack of the fleet."""
    config = draft.config
    xi_step: float | None = None
    for learner, member in round_.members.items():
        link = draft.links.get(learner)
        if link is None or link.generation != member.generation or link.xi_step is None:
            continue
        xi_step = link.xi_step if xi_step is None else max(xi_step, link.xi_step)
    latencies = sorted(answer.xi_quorum for answer in round_.answers.values())
    xi_quorum = latencies[round_.quorum - 1]
    seconds = grace_seconds(
        gamma=config.grace_gamma,
        tau=config.grace_tau,
        xi_step=xi_step,
        xi_quorum=xi_quorum,
        xi_sync=draft.xi_sync or 0.0,
        cap=config.grace_cap_seconds,
    )
    deadline = moment(draft.at + seconds)
    owing = round_.owing
    draft.emit(
        GraceOpened(
            step=round_.step,
            attempt=round_.attempt,
            grace_seconds=seconds,
            gamma=config.grace_gamma,
            tau=config.grace_tau,
            xi_step=xi_step,
            xi_quorum=xi_quorum,
            xi_sync=draft.xi_sync,
            cap=config.grace_cap_seconds,
            deadline=deadline,
            why=f"round {round_.step} waits {seconds:g} s more for {owing} of {len(round_.members)}",
        )
    )
    round_ = replace(round_, grace_seconds=seconds, grace_deadline=deadline)
    draft.put(round_)
    return round_


def _seal(draft: Draft, round_: Round, why: str) -> None:
    config, answers = draft.config, round_.answers
    left_out, plain = _left_out(draft, round_), draft.is_plain(round_)
    responders = tuple(
        [
            _weighted(config, round_, learner, plain=plain)
            for learner in sorted(answers)
            if learner not in left_out
        ]
    )
    members = tuple(sorted(round_.members))
    missed = tuple([learner for learner in members if learner not in answers])
    sealed = Sealed(
        members=members,
        responders=responders,
        missed=missed,
        left_out=left_out,
        total_weight=sum([weighted.weight for weighted in responders]),
    )
    draft.put(replace(round_, status=SEALED, uploads=Map(), sealed=sealed))
    if round_.sweep:
        _excuse(draft, round_, missed)
    who = f"{len(responders)} of {len(members)}"
    who += f", missed {names(missed)}" if missed else ""
    who += f", left out {names(left_out)}" if left_out else ""
    draft.emit(
        AttemptSealed(
            step=round_.step,
            fragment=round_.fragment,
            attempt=round_.attempt,
            responders=responders,
            missed=missed,
            left_out=left_out,
            why=f"round {round_.step} sealed with {who}: {why}",
        )
    )


def _weighted(config: CoreConfig, round_: Round, learner: int, *, plain: bool) -> Weighted:
    upload = round_.answers[learner].upload
    equal = config.learner_weight == "equal"
    correct = config.delta_correction == "heloco-all" or (
        config.delta_correction == "heloco" and upload.staleness >= 1
    )
    return made(
        Weighted,
        {
            "learner": learner,
            "generation": round_.members[learner].generation,
            "base_version": upload.base_version,
            "staleness": upload.staleness,
            "c_steps": upload.c_steps,
            "c_tokens": upload.c_tokens,
            "weight": 1.0 if equal else learner_weight(upload.c_tokens, upload.c_steps),
            "correct": correct and not plain,
        },
    )


def _left_out(draft: Draft, round_: Round) -> tuple[int, ...]:
    """Answers that are not merged: the largest after an unusable merge, and outliers; never below K.

    The outlier rule compares with the lower median of all norms of the attempt, so that of two answers
    the larger one is the suspect.
    """
    ratio = draft.config.max_norm_ratio
    if round_.failures == 0 and ratio is None:
        return ()
    by_norm = sorted(((answer.norm, learner) for learner, answer in round_.answers.items()), reverse=True)
    spare = len(by_norm) - round_.quorum
    count = min(1 if round_.failures else 0, spare)
    if ratio is not None:
        limit = ratio * by_norm[len(by_norm) // 2][0]
        while count < spare and by_norm[count][0] > limit:
            count += 1
    return tuple(sorted(learner for _, learner in by_norm[:count]))


def _excuse(draft: Draft, sealed: Round, missed: tuple[int, ...]) -> None:
    """The sweep waits only once for a member that does not answer; other open rounds learn it here."""
    for learner in missed:
        generation = sealed.members[learner].generation
        if draft.sweep_missed.get(learner) == generation:
            continue
        draft.sweep_missed = draft.sweep_missed.set(learner, generation)
        for round_ in draft.rounds:
            if round_.status is GATHERING and round_.sweep and round_.owes(learner, generation):
                draft.put(replace(round_, excused=round_.excused + 1))


def on_grace_elapsed(draft: Draft, event: GraceElapsed) -> None:
    """The grace of an attempt is over: it seals with what is there."""
    round_ = draft.find_gathering(event.step, event.attempt)
    if round_ is None or round_.grace_deadline is None:
        draft.ignore(event, "late", f"round {event.step} attempt {event.attempt} is in no grace")
    elif draft.at < round_.grace_deadline:
        draft.ignore(event, "early", f"the grace of round {event.step} ends at {round_.grace_deadline:g} s")
    else:
        draft.put(replace(round_, overdue=True))


def on_quorum_deadline(draft: Draft, event: QuorumDeadlinePassed) -> None:
    """The quorum deadline of an attempt passed."""
    round_ = draft.find_gathering(event.step, event.attempt)
    if round_ is None:
        draft.ignore(event, "late", f"round {event.step} attempt {event.attempt} is not gathering")
    elif draft.at < round_.deadline:
        draft.ignore(event, "early", f"the deadline of round {event.step} is at {round_.deadline:g} s")
    elif not round_.sweep and len(round_.answers) >= round_.quorum:
        draft.ignore(event, "late", f"round {event.step} has its quorum; its grace decides")
    else:
        draft.put(replace(round_, overdue=True))
