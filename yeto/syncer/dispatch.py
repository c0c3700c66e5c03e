"""From decisions to deeds: one table, no judgement.

Each decision of the coordinator is one order to one part of the syncer. What may happen at once happens
here, inside the pump's uninterrupted stretch, so nothing in this module waits. What has to be durable first
comes back as an act, with everything it needs already looked up: values are those of the moment of the
decision, not of the moment of the fsync.

Whatever is worth a person's time is logged with the coordinator's own sentence, durable decisions only once
they are durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import trio

from yeto.core import State
from yeto.core.decisions import (
    AttemptDiscarded,
    AttemptOpened,
    AttemptSealed,
    BroadcastOrdered,
    CheckpointOrdered,
    CommitOrdered,
    Decision,
    FinalCutOrdered,
    Ignored,
    LearnerRefused,
    LearnerReleased,
    MergeOrdered,
    PushRefused,
    RoundCommitted,
    RoundsStarted,
    SessionEnded,
    SessionEnding,
    SessionOpened,
    SessionReleased,
)
from yeto.core.events import (
    Event,
    FragmentInitialised,
    HelloReceived,
    LearnerLeft,
    OuterStepApplied,
    PushReceived,
)
from yeto.core.values import Member
from yeto.syncer.broadcasts import Broadcasts
from yeto.syncer.checkpointer import Checkpointer
from yeto.syncer.pump import Act
from yeto.syncer.registry import Registry
from yeto.syncer.rounds import Rounds
from yeto.syncer.session import Session
from yeto.syncer.svd_merges import SvdMerges

log = logging.getLogger("yeto.syncer")


class Ending:
    """How the session ended, once it has."""

    def __init__(self) -> None:
        """Start without an end."""
        self.happened = trio.Event()
        self.decision: SessionEnded | None = None

    def come(self, decision: SessionEnded) -> None:
        """The session ended, and that is durable."""
        self.decision = decision
        self.happened.set()


class Orders:
    """Carries the coordinator's decisions out."""

    def __init__(
        self,
        *,
        session: Session,
        registry: Registry,
        rounds: Rounds,
        broadcasts: Broadcasts,
        checkpointer: Checkpointer,
        ending: Ending,
        svd: SvdMerges | None = None,
    ) -> None:
        """Give each order to one of these."""
        self._session = session
        self._registry = registry
        self._rounds = rounds
        self._broadcasts = broadcasts
        self._checkpointer = checkpointer
        self._ending = ending
        self._svd = svd

    def stepped(self, event: Event, decisions: tuple[Decision, ...]) -> None:
        """Move tensors that the coordinator has just taken, before anything is done with them."""
        match event:
            case FragmentInitialised():
                # The only words about an initial value are that it was not taken.
                taken = not any(isinstance(d, Ignored | LearnerRefused) for d in decisions)
                self._session.settle(_member(event), event.fragment, taken=taken)
            case OuterStepApplied(finite=True):
                if any(isinstance(decision, RoundCommitted) for decision in decisions):
                    version, encoded = self._rounds.take_result(event.step, event.attempt)
                    self._session.store.put(version)
                    if encoded is not None:
                        self._broadcasts.keep(version, encoded)
            case LearnerLeft():
                self._rounds.forget(_member(event))
            case _:
                pass

    def act(self, decision: Decision, *, event: Event, seq: int, state: State) -> Act | None:
        """Carry a decision out; of one that is marked durable, return what waits for its record ``seq``."""
        match decision:
            case AttemptOpened():
                log.debug("%s", decision.why)
                self._rounds.open(decision)
                for member in decision.members:
                    group = self._registry.find(member)
                    if group is not None:
                        group.pull(decision.fragment, decision.step, decision.attempt)
            case PushRefused():
                # To be late is ordinary; to send what no merge can use is not.
                unusable = decision.declined or decision.resend
                log.log(logging.WARNING if unusable else logging.INFO, "%s", decision.why)
                if isinstance(event, PushReceived):
                    self._rounds.drop_push(decision.step, decision.attempt, _member(decision))
                if decision.resend:
                    self._broadcasts.repeat(
                        _member(decision), decision.fragment, decision.step, decision.attempt
                    )
            case AttemptSealed():
                log.debug("%s", decision.why)
                keep = frozenset(_member(responder) for responder in decision.responders)
                self._rounds.seal(decision.step, decision.attempt, keep)
            case AttemptDiscarded():
                log.warning("%s", decision.why)
                self._rounds.discard(decision.step, decision.attempt)
            case MergeOrdered():
                self._rounds.merge(decision)
            case CommitOrdered():
                return _later(lambda: self._rounds.commit(decision))
            case RoundCommitted():
                return _later(lambda: log.info("%s", decision.why))
            case CheckpointOrdered():
                if decision.step == 0:
                    self._session.complete()
                return self._checkpointer.order(decision, seq=seq, state=state)
            case BroadcastOrdered():
                return self._broadcasts.publish(decision.fragments, decision.to)
            case FinalCutOrdered():
                log.info("%s", decision.why)
                return self._broadcasts.final_cut(decision)
            case LearnerRefused():
                self._refuse(decision, event)
            case LearnerReleased():
                return _later(lambda: self._release(decision))
            case SessionOpened():
                log.info("%s", decision.why)
                self._open(decision, event)
            case SessionReleased():
                log.warning("%s", decision.why)
                self._session.release()
            case SessionEnded():
                return self._end(decision)
            case RoundsStarted():
                self._say_how(decision, state)
                self._checkpointer.unmark()
            case SessionEnding():
                log.info("%s", decision.why)
                if self._svd is not None and decision.drains_pool:
                    self._svd.drain()
            case _:
                log.debug("%s", decision.why)
        return None

    def _say_how(self, decision: RoundsStarted, state: State) -> None:
        """Log how rounds are merged, and what there is to say against it."""
        assert state.outer is not None, "it is settled before rounds start"
        warnings = state.outer.warnings
        log.log(logging.WARNING if warnings else logging.INFO, "%s", decision.why)
        for warning in warnings if decision.outer is None else ():
            log.warning("%s", warning)  # which the sentence does not hold
        if state.outer.plain and self._session.asks_for_iso:
            log.warning(
                "learners ask for isotropic merges (--matrix-merge iso), but --outer direct averages "
                "every tensor: use --outer stock"
            )

    def _open(self, decision: SessionOpened, event: Event) -> None:
        if not isinstance(event, HelloReceived):
            return  # a checkpoint did, which has been loaded
        opener = self._registry.find(_member(event))
        assert opener is not None, "a group is registered before its HELLO is told"
        self._session.open(decision.terms, opener.hello.layout, opener.member)
        for group in self._registry.groups():
            if group.manifest is not None:
                self._session.offer_manifest(group.manifest)
            if group.hello.fingerprint == opener.hello.fingerprint and not self._session.fits(group.hello):
                group.refuse("its HELLO states other sizes under the session's fingerprint", permanent=False)

    def _refuse(self, decision: LearnerRefused, event: Event) -> None:
        member = _member(decision)
        if isinstance(event, HelloReceived) and _member(event) == member:
            return  # the listener, which asked, turns it away itself
        group = self._registry.find(member)
        if group is not None:
            log.warning("%s refused: %s", group.name, decision.why)
            group.refuse(decision.why, permanent=decision.permanent)

    def _release(self, decision: LearnerReleased) -> None:
        group = self._registry.find(_member(decision))
        if group is not None:
            group.release()

    def _end(self, decision: SessionEnded) -> Act:
        async def act() -> None:
            # Before any learner is told that the run is over: its release waits behind this act.
            if decision.mark_final:
                await self._checkpointer.mark(decision.step)
            self._ending.come(decision)

        return act


def _later(deed: Callable[[], object]) -> Act:
    """Return an act that does something which needs no waiting."""

    async def act() -> None:
        deed()

    return act


class _OfMember(Protocol):
    @property
    def learner(self) -> int: ...

    @property
    def generation(self) -> str: ...


def _member(value: _OfMember) -> Member:
    return Member(learner=value.learner, generation=value.generation)
