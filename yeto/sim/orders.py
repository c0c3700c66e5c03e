"""From decisions to deeds, in the simulated syncer: one table, no judgement.

Everything takes its time and comes back as a fact. What has to be durable first is returned as an act, with
what it needs looked up at the moment of the decision, as in the real syncer. Results of attempts that have
ended meanwhile are dropped; those that were queued already are told, and the coordinator ignores them.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from math import log
from typing import TYPE_CHECKING, Any

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.values import FragmentVersionRef
from yeto.sim.messages import PushMessage
from yeto.sim.world import World

if TYPE_CHECKING:
    from yeto.sim.network import Connection
    from yeto.sim.syncer import Cut, Syncer

Act = Callable[[], None]
Attempt = tuple[int, int]

PROGRESS_SECONDS = 60.0
"""How often the progress of a long upload is told."""
FINAL_BYTES = 2
"""A fragment of the final cut (f32) is this many times as long as its broadcast (bf16)."""


class _Open:
    """One open attempt: its members, and who may upload or has."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.uploads: dict[str, PushMessage] = {}
        self.result = ""


class Orders:
    """Carries the coordinator's decisions out."""

    def __init__(self, world: World, syncer: Syncer) -> None:
        """Act on the facts and connections of ``syncer``."""
        self._world = world
        self._syncer = syncer
        self._rng = world.chance("tensors")
        self._faults_rng = world.chance("jobs")
        self._attempts: dict[Attempt, _Open] = {}
        self._published: dict[int, tuple[int, str]] = {}
        self._serial = 0
        rate = min(spec.up_rate for spec in world.config.learners)
        # An upload waits for the one before it, and for what the others send.
        self._uploads_are_long = (
            world.config.push_bytes
            * world.config.core.num_learners
            / min(rate, world.config.syncer.down_rate)
            > PROGRESS_SECONDS / 10.0
        )
        self.table: dict[type[de.Decision], Callable[[Any, ev.Event, int], Act | None]] = {
            de.AttemptOpened: self._open,
            de.PushAdmitted: self._admit,
            de.PushAccepted: self._accept,
            de.PushRefused: self._refuse_push,
            de.AttemptSealed: self._seal,
            de.AttemptDiscarded: self._discard,
            de.MergeOrdered: self._merge,
            de.CommitOrdered: self._commit,
            de.RoundCommitted: self._committed,
            de.CheckpointOrdered: self._checkpoint,
            de.BroadcastOrdered: self._broadcast,
            de.FinalCutOrdered: self._final_cut,
            de.LearnerRefused: self._refuse,
            de.LearnerReleased: self._release,
            de.SessionEnding: self._ending,
            de.SessionEnded: self._end,
        }
        """By the decision's class, what carries it out. Takes the decision, its event and the number of its
        record; returns what must wait until that is durable, if anything must."""

    def forget(self) -> None:
        """The process is gone."""
        self._attempts.clear()
        self._published.clear()

    # -- pushes --------------------------------------------------------------------------------------

    def has_buffer(self, generation: str, message: PushMessage) -> bool:
        """Whether an upload was admitted and its attempt still wants it."""
        open_ = self._attempts.get((message.push.step, message.push.attempt))
        return open_ is not None and open_.uploads.get(generation) is message

    def examined(self, connection: Connection, message: PushMessage) -> dict[str, Any]:
        """Return what is found in a push."""
        push, member, finite = message.push, connection.member, message.finite
        self._serial += 1
        chance = self._rng.random
        # Exponential: most norms are alike, and now and then one is an outlier.
        norm = 0.1 - log(1.0 - chance())
        return {
            "learner": member.learner,
            "generation": member.generation,
            "fragment": push.fragment,
            "step": push.step,
            "attempt": push.attempt,
            "payload_bytes": self._world.config.push_bytes,
            "digest": f"{self._serial:032x}",
            "finite": finite,
            "norm": norm if finite else None,
            "cosine_to_momentum": 1.4 * chance() - 0.5 if finite else None,
        }

    def _admit(self, decision: de.PushAdmitted, event: ev.Event, seq: int) -> None:
        open_, message = self._attempts.get((decision.step, decision.attempt)), self._syncer.message
        if open_ is not None and message is not None:
            open_.uploads[decision.generation] = message
            if self._uploads_are_long:
                self._world.agenda.after(PROGRESS_SECONDS, self._progress, decision.generation, message)

    def _progress(self, generation: str, message: PushMessage) -> None:
        """Tell of an upload that has been under way for another minute."""
        push = message.push
        if generation in self._syncer.registry and not push.arrived and self.has_buffer(generation, message):
            fields = {
                "learner": push.learner,
                "generation": generation,
                "step": push.step,
                "attempt": push.attempt,
                "received_bytes": self._world.config.push_bytes // 2,
            }
            self._syncer.tell(ev.UploadProgress, fields)
            self._world.agenda.after(PROGRESS_SECONDS, self._progress, generation, message)

    def _accept(self, decision: de.PushAccepted, event: ev.Event, seq: int) -> None:
        if self._syncer.message is not None:
            self._world.account.accepted(self._syncer.message.push)

    def _refuse_push(self, decision: de.PushRefused, event: ev.Event, seq: int) -> None:
        message = self._syncer.message
        if message is not None and not message.is_copy:
            self._world.account.refused(message.push, decision.reason)
        if decision.resend:
            self._world.note("resend")
            connection = self._syncer.registry.get(decision.generation)
            if connection is not None:
                version, digest = self._published[decision.fragment]
                self._send(connection, decision.fragment, version, digest)
                self._pull(connection, decision.fragment, decision.step, decision.attempt)

    # -- rounds --------------------------------------------------------------------------------------

    def _open(self, decision: de.AttemptOpened, event: ev.Event, seq: int) -> None:
        self._world.measures.attempts += 1
        members = decision.members
        self._attempts[decision.step, decision.attempt] = _Open(tuple(member.learner for member in members))
        registry = self._syncer.registry
        for member in members:
            connection = registry.get(member.generation)
            if connection is not None:
                self._pull(connection, decision.fragment, decision.step, decision.attempt)

    def _pull(self, connection: Connection, fragment: int, step: int, attempt: int) -> None:
        learner = self._world.learners[connection.member.learner]
        connection.send_down(learner.pull, fragment, step, attempt)

    def _seal(self, decision: de.AttemptSealed, event: ev.Event, seq: int) -> None:
        open_ = self._attempts[decision.step, decision.attempt]
        open_.uploads.clear()
        self._world.account.sealed(decision, open_.members)

    def _discard(self, decision: de.AttemptDiscarded, event: ev.Event, seq: int) -> None:
        open_ = self._attempts.pop((decision.step, decision.attempt))
        self._world.measures.discarded += 1
        self._world.note(f"discarded_{decision.reason}")
        self._world.account.discarded(decision, open_.members)

    def _merge(self, decision: de.MergeOrdered, event: ev.Event, seq: int) -> None:
        # What comes out depends on what goes in: the pushes, in order.
        pushes = [(part.learner, part.generation, part.base_version) for part in decision.responders]
        text = f"{decision.step}/{decision.attempt}/{pushes}"
        self._attempts[decision.step, decision.attempt].result = text
        corrected = tuple(part.learner for part in decision.responders if part.correct)
        self._syncer.later(
            self._syncer.spec.merge_seconds, self._merged, decision.step, decision.attempt, corrected
        )

    def _merged(self, step: int, attempt: int, corrected: tuple[int, ...]) -> None:
        if (step, attempt) not in self._attempts:
            return
        faults = self._world.config.faults
        if self._strikes(faults.merge_failed, "merge_failed"):
            fields = {"step": step, "attempt": attempt, "message": "the worker failed"}
            self._syncer.tell(ev.MergeFailed, fields)
            return
        finite = not self._strikes(faults.merge_not_finite, "merge_not_finite")
        self._syncer.tell(
            ev.MergeFinished,
            {
                "step": step,
                "attempt": attempt,
                "finite": finite,
                "gradient_norm": self._rng.uniform(0.5, 2.0) if finite else None,
                "corrected": corrected,
                "seconds": self._syncer.spec.merge_seconds,
                "delta_cosine": None,  # there are no tensors here to compare
                "norm_ratio": None,
            },
        )

    def _commit(self, decision: de.CommitOrdered, event: ev.Event, seq: int) -> Act:
        base = self._syncer.state.marks[decision.fragment]

        def act() -> None:
            self._syncer.later(self._syncer.spec.outer_seconds, self._applied, decision, base.params_digest)

        return act

    def _applied(self, decision: de.CommitOrdered, base: str) -> None:
        open_ = self._attempts.get((decision.step, decision.attempt))
        if open_ is None:
            return
        finite = not self._strikes(self._world.config.faults.outer_not_finite, "outer_not_finite")
        digest = base if decision.no_op else _digest(f"{base}{open_.result}")
        self._syncer.tell(
            ev.OuterStepApplied,
            {
                "step": decision.step,
                "attempt": decision.attempt,
                "finite": finite,
                "params_digest": digest if finite else None,
                "momentum_digest": digest if finite else None,
                "seconds": self._syncer.spec.outer_seconds,
                "offset_ratio": None,
            },
        )

    def _committed(self, decision: de.RoundCommitted, event: ev.Event, seq: int) -> None:
        del self._attempts[decision.step, decision.attempt]
        self._world.account.committed(decision)
        self._world.measures.committed(decision)

    # -- checkpoints and broadcasts ------------------------------------------------------------------

    def _checkpoint(self, decision: de.CheckpointOrdered, event: ev.Event, seq: int) -> Act:
        cut = self._syncer.cut_of(decision, seq)

        def act() -> None:
            self._syncer.later(self._syncer.spec.checkpoint_seconds, self._written, cut)

        return act

    def _written(self, cut: Cut) -> None:
        if self._strikes(self._world.config.faults.checkpoint_failed, "checkpoint_failed"):
            self._syncer.tell(ev.CheckpointFailed, {"step": cut.step, "message": "no space left on device"})
            return
        self._syncer.keep(cut)
        fields = {
            "step": cut.step,
            "written_bytes": 2 * FINAL_BYTES * self._world.config.broadcast_bytes,
            "seconds": self._syncer.spec.checkpoint_seconds,
        }
        self._syncer.tell(ev.CheckpointWritten, fields)

    def _broadcast(self, decision: de.BroadcastOrdered, event: ev.Event, seq: int) -> Act:
        versions = [(ref.fragment, *self._resolve(ref)) for ref in decision.fragments]
        for fragment, version, digest in versions:
            self._published[fragment] = (version, digest)

        def act() -> None:
            registry = self._syncer.registry
            for member in decision.to:
                connection = registry.get(member.generation)
                if connection is not None:
                    for fragment, version, digest in versions:
                        self._send(connection, fragment, version, digest)

        return act

    def _resolve(self, ref: FragmentVersionRef) -> tuple[int, str]:
        """Return the version that is meant: the committed one, or the one broadcast before it."""
        mark = self._syncer.state.marks[ref.fragment]
        if mark.version == ref.version:
            return mark.version, mark.params_digest
        version, digest = self._published[ref.fragment]
        assert version == ref.version, f"fragment {ref.fragment} version {ref.version} is gone"
        return version, digest

    def _send(self, connection: Connection, fragment: int, version: int, digest: str) -> None:
        learner = self._world.learners[connection.member.learner]
        size = self._world.config.broadcast_bytes
        connection.down.put(fragment, size, None, learner.broadcast, connection, fragment, version, digest)

    # -- the end -------------------------------------------------------------------------------------

    def _final_cut(self, decision: de.FinalCutOrdered, event: ev.Event, seq: int) -> Act:
        config = self._world.config
        size = FINAL_BYTES * config.num_fragments * config.broadcast_bytes

        def act() -> None:
            self._syncer.was_cut = True
            for member in decision.to:
                connection = self._syncer.registry.get(member.generation)
                if connection is not None:
                    learner = self._world.learners[member.learner]
                    connection.down.put("final", size, None, learner.final_cut, connection, decision.step)

        return act

    def _refuse(self, decision: de.LearnerRefused, event: ev.Event, seq: int) -> None:
        if isinstance(event, ev.HelloReceived) and decision.generation == event.generation:
            return  # whoever asked turns it away itself
        connection = self._syncer.registry.get(decision.generation)
        if connection is not None:
            self._syncer.close(connection, permanent=decision.permanent, reason=decision.reason)

    def _release(self, decision: de.LearnerReleased, event: ev.Event, seq: int) -> Act:
        def act() -> None:
            connection = self._syncer.registry.get(decision.generation)
            if connection is not None:
                connection.is_released = True
                connection.send_down(connection.client.shut_down)

        return act

    def _ending(self, decision: de.SessionEnding, event: ev.Event, seq: int) -> None:
        syncer = self._syncer
        syncer.ending = decision.phase
        if syncer.core.svd_pool and decision.drains_pool:
            syncer.later(syncer.spec.pool_seconds, syncer.tell, ev.SvdPoolDrained, {})

    def _end(self, decision: de.SessionEnded, event: ev.Event, seq: int) -> Act:
        def act() -> None:
            # Behind the releases of the same event.
            self._syncer.later(0.0, self._syncer.exit, decision)

        return act

    def _strikes(self, probability: float, fault: str) -> bool:
        """Whether a fault happens now."""
        if not probability or self._faults_rng.random() >= probability or self._world.is_calm():
            return False
        self._world.note(fault)
        return True


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
