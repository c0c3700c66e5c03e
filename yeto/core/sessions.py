"""The session: who may take part, what all agree on, and where the first values come from.

A session is provisional until learner 0 has sent every initial value: until then learner 0 is the only
authority on what is trained, and it may be the wrong process. So a learner that differs is turned away
without a verdict while learner 0 may still be replaced, and with a permanent one afterwards. A checkpoint
fixes the terms before anybody connects.

The newest generation of an id is the current one, in the order of accepted HELLOs: the older group is
closed even when its sockets still look alive, since a half-open connection would lock its own learner
out. A generation that was used before is never used again, so a late packet cannot speak for a new group.

Nothing of version 0 leaves before the checkpoint of step 0 is durable: learners start to train from it.
"""

from __future__ import annotations

from immutables import Map

from yeto.core.checkpoints import broadcast_all, order_checkpoint
from yeto.core.decisions import FinalCutOrdered, LearnerRefused, SessionOpened
from yeto.core.events import FragmentInitialised, HelloReceived, LearnerJoined, LearnerLeft
from yeto.core.members import drop, refuse
from yeto.core.outer import unmoved
from yeto.core.parts import Dial, Link, Phase
from yeto.core.state import Draft
from yeto.core.values import FragmentMark, Member, SessionTerms

SEEN_GENERATIONS = 1024
"""Generations remembered per id: hours of redialling at the fastest back-off, 16 kB."""

_TERMS = ("dtype", "num_fragments", "fingerprint", "contract")
_REMEDY = {
    "dtype": "start every learner with the same --wire-dtype",
    "num_fragments": "start every learner with the same --fragments",
    "fingerprint": "every learner needs the same trainable tensors, fragments and merge modes",
    "contract": "every learner needs the same model, tuning, --seed and --num-learners",
    "profile": "start the learner with the syncer's profile",
}


def on_hello(draft: Draft, event: HelloReceived) -> None:
    """Admit a dial, or refuse it with the rule it breaks."""
    learner, generation = event.learner, event.generation

    def refused(reason: str, why: str, *, field: str | None = None, permanent: bool = True) -> None:
        refuse(draft, learner, generation, reason, why, field=field, permanent=permanent)

    if draft.phase is Phase.STOPPING:
        refused("ended", f"learner {learner}: the syncer is stopping; dial again later", permanent=False)
        return
    if not 0 <= learner < draft.config.num_learners:
        refused(
            "learner_out_of_range",
            f"learner {learner}: ids are 0 to {draft.config.num_learners - 1}; "
            "correct --learner-id or start the syncer with more --learners",
        )
        return
    seen = draft.seen.get(learner, ())
    if generation in seen:
        _refuse_reused(draft, event)
        return
    opens = learner == 0 and draft.phase is Phase.PROVISIONAL
    difference, sure = _operator_difference(draft, event.terms), True
    if difference is None and draft.terms is not None and not opens:
        # Until step 0 is durable learner 0 may be the wrong one: no verdict yet.
        difference, sure = _difference(draft.terms, event.terms), draft.durable >= 0
    if difference is not None:
        field, theirs, ours = difference
        why = f"learner {learner} states {field} {theirs}, the session has {ours}; {_REMEDY[field]}"
        if not sure:
            draft.strangers = draft.strangers.set(learner, why)
        refused("session_differs", why, field=field, permanent=sure)
        return
    draft.seen = draft.seen.set(learner, (*seen[-(SEEN_GENERATIONS - 1) :], generation))
    draft.strangers = draft.strangers.delete(learner) if learner in draft.strangers else draft.strangers
    draft.dismissed = draft.dismissed.delete(learner) if learner in draft.dismissed else draft.dismissed
    older = draft.newest.get(learner)
    if older is not None:
        refuse(
            draft,
            learner,
            older.generation,
            "superseded",
            f"learner {learner} connected again from {event.address}; two processes with one --learner-id?",
            replaced=True,
        )
    draft.newest = draft.newest.set(learner, Dial(generation=generation, terms=event.terms))
    if opens:
        _open(draft, event)


def _refuse_reused(draft: Draft, event: HelloReceived) -> None:
    """Refuse without forgetting anybody: the group that really drew this number may be alive."""
    draft.emit(
        LearnerRefused(
            learner=event.learner,
            generation=event.generation,
            reason="generation_reused",
            why=f"learner {event.learner}: generation {event.generation} was used before in this session; "
            "a learner draws a new one for every dial",
        )
    )


def _open(draft: Draft, event: HelloReceived) -> None:
    """Learner 0 decides; whoever is here already and differs is turned away."""
    draft.terms = event.terms
    draft.opener = event.generation
    draft.strangers = Map()
    draft.emit(
        SessionOpened(
            terms=event.terms,
            why=f"learner 0 decides: {event.terms.num_fragments} fragments, {event.terms.dtype} deltas",
        )
    )
    for learner in sorted(draft.newest):
        dial = draft.newest[learner]
        difference = _difference(event.terms, dial.terms)
        if difference is None:
            continue
        field, theirs, ours = difference
        why = f"learner {learner} states {field} {theirs}, learner 0 has {ours}; {_REMEDY[field]}"
        draft.strangers = draft.strangers.set(learner, why)
        refuse(draft, learner, dial.generation, "session_differs", why, field=field, permanent=False)


def _difference(ours: SessionTerms, theirs: SessionTerms) -> tuple[str, object, object] | None:
    """The first term that differs, with their value and ours. A profile counts when both state one."""
    for field in _TERMS:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return field, other, mine
    if ours.profile is not None and theirs.profile is not None and ours.profile != theirs.profile:
        return "profile", theirs.profile, ours.profile
    return None


def _operator_difference(draft: Draft, terms: SessionTerms) -> tuple[str, object, object] | None:
    """The first term that differs from what the operator demands of every learner."""
    config = draft.config
    if config.num_fragments is not None and terms.num_fragments != config.num_fragments:
        return "num_fragments", terms.num_fragments, config.num_fragments
    if config.require_profile is not None and terms.profile != config.require_profile:
        return "profile", terms.profile or "none", config.require_profile
    if terms.num_fragments < 1:
        return "num_fragments", terms.num_fragments, "at least 1"
    return None


def on_joined(draft: Draft, event: LearnerJoined) -> None:
    """All sockets of a group are there: it is current, and gets what it needs to catch up."""
    learner, generation = event.learner, event.generation
    dial = draft.newest.get(learner)
    if dial is None or dial.generation != generation:
        draft.ignore(event, "superseded", f"learner {learner} generation {generation} is not the newest")
        return
    if learner in draft.current:
        draft.ignore(event, "repeated", f"learner {learner} generation {generation} has joined already")
        return
    member = Member(learner=learner, generation=generation)
    draft.current = draft.current.set(learner, member)
    draft.links = draft.links.set(learner, Link(generation=generation))
    if draft.phase is Phase.FINALISING:
        _cut_for(draft, member)
    elif draft.broadcast:
        broadcast_all(draft, (member,), f"learner {learner} joined at step {draft.step}")


def _cut_for(draft: Draft, member: Member) -> None:
    """Whoever connects while finalising gets the final cut too, and is awaited while it stays."""
    learner = member.learner
    if learner not in draft.acked and learner not in draft.awaited:
        draft.awaited = draft.awaited.set(learner, True)
    draft.cut_sent = draft.cut_sent.set(learner, True)
    draft.emit(
        FinalCutOrdered(
            step=draft.step,
            versions=draft.versions,
            to=(member,),
            awaited=tuple(sorted(draft.awaited)),
            why=f"learner {learner} connected while finalising step {draft.step}",
        )
    )


def on_left(draft: Draft, event: LearnerLeft) -> None:
    """A group ended."""
    if not drop(draft, event.learner, event.generation):
        draft.ignore(
            event,
            "superseded",
            f"learner {event.learner} generation {event.generation} was closed or replaced before it left",
        )


def on_initialised(draft: Draft, event: FragmentInitialised) -> None:
    """One initial value; when the set is complete, order the checkpoint of step 0."""
    learner, generation, fragment = event.learner, event.generation, event.fragment
    if learner != 0 or generation != draft.opener or draft.terms is None:
        draft.ignore(
            event,
            "not_the_source",
            f"initial values come from learner 0's newest connection, "
            f"not from learner {learner} generation {generation}",
        )
        return
    if not 0 <= fragment < draft.num_fragments or fragment in draft.initial:
        draft.ignore(event, "repeated", f"fragment {fragment} of {draft.num_fragments} is unknown or here")
        return
    if not event.finite:
        refuse(
            draft,
            learner,
            generation,
            "init_not_finite",
            f"learner 0's initial fragment {fragment} holds NaN or Inf; check its model files",
        )
        return
    draft.initial = draft.initial.set(fragment, event.digest)
    if len(draft.initial) < draft.num_fragments:
        return
    draft.marks = tuple(
        FragmentMark(fragment=p, version=0, params_digest=draft.initial[p], momentum_digest="")
        for p in range(draft.num_fragments)
    )
    draft.outer_marks = unmoved(draft.num_fragments)
    draft.versions = (0,) * draft.num_fragments
    draft.phase = Phase.WAITING
    draft.opener = None
    order_checkpoint(draft, "every fragment is initialised; nothing is broadcast before step 0 is durable")
