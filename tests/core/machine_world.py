"""What can happen around a shell: learners come, push and go; merges, outer steps and checkpoints end.

Each method tells one fact, or a few that belong together, and spoils it if the mischief that waits says so.
"""

from __future__ import annotations

from typing import Any

from attrs import evolve
from machine_learner import Learner
from machine_mischief import CONTENTS, Mischief
from machine_shell import Shell
from oracle_rounds import Attempt

from yeto.core import CoreConfig, Phase, next_timer
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.values import Member, SessionTerms


class World(Shell):
    """A shell, its learners and the work under way."""

    def __init__(self, config: CoreConfig, num_fragments: int) -> None:
        super().__init__(config, num_fragments)
        self.mischief = Mischief()
        self.digests_made = 0

    # Learners.

    def publish(self, index: int = 0) -> None:
        """The oldest order to send something is durable: the learners get it."""
        seq, order = self.outgoing.pop(index)
        self.sync_to(seq)
        assert isinstance(order, de.BroadcastOrdered | de.FinalCutOrdered)
        for member in order.to:
            learner = self.learners[member.learner]
            if not learner.is_member(member):
                continue
            if isinstance(order, de.FinalCutOrdered):
                learner.owes_ack = True
                continue
            for ref in order.fragments:
                learner.send(ref.fragment, ref.version, self.digest(ref.fragment, ref.version))

    def dial(self, learner: Learner, **changes: object) -> None:
        """A HELLO; the older connection of this id, if any, does not know yet."""
        learner.redial(evolve(self.right_terms, **changes))
        self.hello(learner.number, learner.generation, learner.terms)

    def hello(self, learner: int, gen: str, stated: SessionTerms | None) -> None:
        address = f"10.0.0.{learner}:5000"
        terms = self.right_terms if stated is None else stated
        self.tell(ev.HelloReceived, learner=learner, generation=gen, address=address, terms=terms)

    @property
    def right_terms(self) -> SessionTerms:
        """What a learner has to state: what everybody meant, or what the session was made of for good."""
        fixed = self.state.terms if self.state.durable >= 0 else None
        return self.terms if fixed is None else fixed

    def attach(self, learner: Learner) -> None:
        """All its sockets are there."""
        learner.is_joined = True
        if learner.number == 0 and self.state.opener == learner.generation:
            # One source at a time: what an older connection had not sent is lost with it.
            self.inits = [(learner.generation, p) for p in range(self.terms.num_fragments)]
            for fragment in range(self.terms.num_fragments):
                learner.initialise(fragment, f"{fragment:032x}")
        self.tell(ev.LearnerJoined, learner=learner.number, generation=learner.generation)

    def come_back(self, learner: Learner) -> None:
        """It connects again, goes on training and says so, twice: its pace is known once more."""
        self.dial(learner)
        if not learner.is_dialled:
            return
        self.attach(learner)
        for _ in range(2):
            self.wait(0.2)
            learner.train(1, self.budget)
            self.beat(learner)

    def lose(self, learner: Learner) -> None:
        """Its connection ends, and the shell notices."""
        gone = learner.generation
        learner.hang_up()
        self.tell(ev.LearnerLeft, learner=learner.number, generation=gone, reason="EOF")

    def beat(self, learner: Learner, local_step: int | None = None) -> None:
        self.tell(
            ev.Heartbeat,
            learner=learner.number,
            generation=learner.generation,
            local_step=learner.local_step if local_step is None else local_step,
        )

    def initialise(self) -> None:
        gen, fragment = self.inits.pop(0)
        self.tell(
            ev.FragmentInitialised,
            learner=0,
            generation=gen,
            fragment=fragment,
            digest=f"{fragment:032x}",
            finite=not self.mischief.strikes("initial value not finite"),
        )

    def answer(self, learner: Learner, index: int = 0) -> None:
        """A learner answers one of the pulls it can answer."""
        pulls = learner.answerable()
        pull = pulls[index % len(pulls)]
        answer, work = learner.answer(pull)
        if not learner.is_frozen:
            self.works[pull.step, pull.attempt, learner.number] = work
        honest: dict[str, Any] = {
            "fragment": pull.fragment,
            "step": pull.step,
            "attempt": pull.attempt,
            "base_version": answer.base_version,
            "c_steps": answer.c_steps,
            "c_tokens": answer.c_tokens,
        }
        if self.mischief.strikes("silent"):
            return
        event = self.offer(learner, **self.mischief.lie(honest))
        if self.mischief.strikes("twice"):
            self.feed(event)
        if self.mischief.strikes("uploader dies") and learner.is_joined:
            self.lose(learner)
        if self.mischief.strikes("neighbour comes back"):
            self.come_back(self.learners[learner.number - 1])

    def offer(self, learner: Learner, /, **head: Any) -> ev.PushOffered:
        """The header of a push arrives."""
        who: dict[str, Any] = {"learner": learner.number, "generation": learner.generation}
        local: dict[str, Any] = {"local_step": learner.local_step, "payload_bytes": 64}
        event = ev.PushOffered(at=self.at, **{**who, **local, **head})
        self.feed(event)
        return event

    def deliver(self, index: int = 0) -> None:
        """An upload is whole, and was examined."""
        upload = self.uploads.pop(index % len(self.uploads))
        honest: dict[str, Any] = {"finite": True, "norm": 1.0, "cosine_to_momentum": None}
        if self.mischief.strikes("upload hangs"):
            return
        self.tell(
            ev.PushReceived,
            learner=upload.learner,
            generation=upload.generation,
            fragment=upload.fragment,
            step=upload.step,
            attempt=upload.attempt,
            payload_bytes=64,
            digest="d" * 32,
            **{**honest, **self.mischief.take(CONTENTS)},
        )

    def progress(self, index: int) -> None:
        """An upload goes on."""
        upload = self.uploads[index % len(self.uploads)]
        self.tell(
            ev.UploadProgress,
            learner=upload.learner,
            generation=upload.generation,
            step=upload.step,
            attempt=upload.attempt,
            received_bytes=1,
        )

    # The syncer's own work.

    def new_digest(self) -> str:
        self.digests_made += 1
        return f"{self.digests_made:032x}"

    def merge(self, index: int = 0, *, seconds: float = 0.01) -> None:
        """A merge was computed, or could not be."""
        order = self.merges.pop(index % len(self.merges))
        if self.mischief.strikes("merge fails"):
            self.tell(ev.MergeFailed, step=order.step, attempt=order.attempt, message="no convergence")
        else:
            self._merged(order, finite=not self.mischief.strikes("merge not finite"), seconds=seconds)

    def merge_late(self, index: int, *, finite: bool) -> None:
        """The result of a merge whose attempt was discarded while it was computed."""
        self._merged(self.old_merges.pop(index % len(self.old_merges)), finite=finite, seconds=0.0)

    def _merged(self, order: de.MergeOrdered, *, finite: bool, seconds: float) -> None:
        self.tell(
            ev.MergeFinished,
            step=order.step,
            attempt=order.attempt,
            finite=finite,
            gradient_norm=0.5 if finite else None,
            corrected=tuple(one.learner for one in order.responders if one.correct),
            seconds=seconds,
            delta_cosine=0.25 / order.step if finite else None,
            norm_ratio=1.25 if finite and order.attempt == 1 else None,
        )

    def apply(self) -> None:
        """The outer step that is due was computed."""
        seq, order = self.outers.pop(0)
        finite = not self.mischief.strikes("outer step not finite")
        self.sync_to(seq)
        decisions = self.tell(
            ev.OuterStepApplied,
            step=order.step,
            attempt=order.attempt,
            finite=finite,
            params_digest=self.new_digest() if finite else None,
            momentum_digest=self.new_digest() if finite else None,
            seconds=0.0,
            offset_ratio=0.5 * order.step if finite else None,
        )
        for decision in decisions:
            if isinstance(decision, de.RoundCommitted):
                self.promises.merge_work(decision, self.works)

    def save(self, *, seconds: float = 0.01) -> None:
        assert self.writing is not None
        self.put_on_disk(self.writing)
        saved, self.writing = self.writing, None
        self.tell(ev.CheckpointWritten, step=saved.step, written_bytes=100, seconds=seconds)

    def fail_save(self) -> None:
        assert self.writing is not None
        saved, self.writing = self.writing, None
        self.tell(ev.CheckpointFailed, step=saved.step, message="No space left on device")

    def acknowledge(self, learner: Learner) -> None:
        learner.owes_ack = False
        self.tell(
            ev.FinalAckReceived, learner=learner.number, generation=learner.generation, step=self.state.step
        )

    def report_budget(self, learner: Learner, steps: int) -> None:
        self.tell(ev.BudgetReported, learner=learner.number, generation=learner.generation, local_steps=steps)

    def fire(self, late: float = 0.0) -> None:
        """Sleep until the next deadline and tell that it has passed."""
        timer = next_timer(self.state)
        assert timer is not None
        self.at = round(max(self.at, timer.at) + late, 6)
        self.feed(evolve(timer.event, at=self.at))
        assert next_timer(self.state) != timer, "a timer that fired does not fire again"

    def tell_left(self, index: int) -> None:
        """A group that the shell closed is gone."""
        learner, gone = self.lefts.pop(index % len(self.lefts))
        self.tell(ev.LearnerLeft, learner=learner, generation=gone, reason="closed")

    @property
    def budget(self) -> int | None:
        """Local steps after which learners freeze."""
        return self.config.learner_budget_steps

    def waits_for_pool(self) -> bool:
        closing = self.state.phase in (Phase.DRAINING, Phase.BUDGET)
        return self.config.svd_pool and closing and not self.state.pool_drained

    def drain(self) -> None:
        self.tell(ev.SvdPoolDrained)

    def stop(self) -> None:
        self.tell(ev.StopRequested, signal="SIGTERM")

    # What cannot be.

    def impossible(self, kind: int) -> ev.Event | None:
        """A fact that cannot be, as things stand; None where this kind of it could."""
        at, state, past = self.at, self.state, self.oracle.past
        step_ = state.step + 1
        attempt = past.attempt(step_)
        number = 9 if attempt is None else attempt.opened.attempt + 1
        applied = {"finite": True, "params_digest": "", "momentum_digest": "", "seconds": 0.0}
        if kind == 0 and state.at > 0:
            return ev.SvdPoolDrained(at=state.at - 0.000001)
        if kind == 1 and state.phase is Phase.RUNNING:
            return ev.MergeFailed(at=at, step=step_, attempt=number, message="")
        if state.phase is Phase.ENDED:
            return None
        if kind == 2:
            return ev.OuterStepApplied(at=at, step=step_, attempt=number, **applied)
        if kind == 3 and not self.outers:
            return ev.OuterStepApplied(at=at, step=step_, attempt=1, **applied)
        if kind == 4:
            return ev.CheckpointWritten(at=at, step=step_, written_bytes=1, seconds=0.0)
        if kind == 5 and self.writing is None:
            return ev.CheckpointFailed(at=at, step=state.step, message="")
        if kind == 6 and attempt is not None and attempt.status == "gathering":
            for learner in sorted(attempt.owing - set(attempt.uploads)):
                return self._unoffered(attempt.members[learner], attempt)
        if kind == 7 and self.saved:
            return self._no_prefix()
        return None

    def _unoffered(self, member: Member, attempt: Attempt) -> ev.PushReceived:
        return ev.PushReceived(
            at=self.at,
            learner=member.learner,
            generation=member.generation,
            fragment=attempt.opened.fragment,
            step=attempt.step,
            attempt=attempt.opened.attempt,
            payload_bytes=1,
            digest="",
            finite=True,
            norm=1.0,
            cosine_to_momentum=None,
        )

    def _no_prefix(self) -> ev.SessionResumed:
        """A checkpoint with a fragment at a version that no contiguous run has."""
        event = self.resumed(self.saved[max(self.saved)], self.config)
        first, *others = event.fragments
        return evolve(event, fragments=(evolve(first, version=first.version + 1), *others))

    def assert_unchanged(self) -> None:
        """Nothing has happened to the state."""
        assert self.state == self.replayer.state
