"""The simulated syncer: the pump around the real ``step``, its crashes and its restarts.

Order of duties as in the real one, for every fact and without anything in between: stamp it, append it, step,
append the decisions, act. What is durable acts only when its record is. A crash takes everything that was not
on the disk: the tape's tail from any byte on, whatever was computing, every connection. The next process goes
on from the newest checkpoint, with the one event that the real syncer would make of it and of the tape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve, frozen

from yeto import __version__
from yeto.core import Phase, State, initial_state, next_timer, step
from yeto.core import events as ev
from yeto.core.decisions import CheckpointOrdered, Decision, LearnerRefused, SessionEnded
from yeto.core.parts import made
from yeto.core.timers import next_deadline
from yeto.core.values import FragmentMark, LedgerEntry, Member, OuterMark, SessionTerms
from yeto.sim.agenda import INFINITY, spell
from yeto.sim.messages import PushMessage, initial_digest
from yeto.sim.network import Connection, SharedRate
from yeto.sim.orders import Act, Orders
from yeto.sim.tape import SimTape, Tail
from yeto.sim.world import World
from yeto.tape import Header, Mark

WALL_CLOCK = "2000-01-01T00:00:00+00:00"
"""Nothing is computed from it, and two runs must give the same bytes."""


@frozen(kw_only=True)
class Cut:
    """A checkpoint on the simulated disk."""

    step: int
    seq: int
    marks: tuple[FragmentMark, ...]
    ledger: tuple[LedgerEntry, ...]
    outer_marks: tuple[OuterMark, ...]
    finish_target: int | None

    def mark(self) -> Mark:
        """Return what a tape would say of it."""
        digests = {mark.fragment: mark.params_digest for mark in self.marks}
        return Mark(step=self.step, digests=digests, seq=self.seq)


Then = Callable[[tuple[Decision, ...]], None]


class Syncer:
    """The syncer over all its processes."""

    def __init__(self, world: World, tape: SimTape) -> None:
        """Prepare; ``start`` begins."""
        spec = world.config.syncer
        self.world = world
        self.tape = tape
        self.spec = spec
        self.core = world.config.core
        self.up_rate = SharedRate(spec.up_rate)
        self.down_rate = SharedRate(spec.down_rate)
        self.is_up = False
        self.process = 0
        """Counts processes."""
        self.wake = INFINITY
        """When the coordinator's earliest deadline is, on the simulated clock."""
        self.registry: dict[str, Connection] = {}
        """Connections by generation, from their HELLO until their end is known."""
        self.cuts: list[Cut] = []
        """Checkpoints on the disk: the newest and the one before."""
        self.was_cut = False
        """Whether a final cut was ever sent."""
        self.ending = ""
        """Why the last process ended: ``final``, ``budget`` or ``stop``."""
        self.message: PushMessage | None = None
        """The push that the present fact is about."""
        self._rng = world.chance("syncer")
        self._queue_rng = world.chance("queue")
        self._restarts = 0
        self._queue_seconds = spec.queue_seconds
        self._queued_until = 0.0
        self._offset = 0.0
        self._at = 0.0
        self._terms = SessionTerms(
            dtype="bf16",
            num_fragments=world.config.num_fragments,
            fingerprint="f" * 64,
            contract="c" * 64,
        )
        self._orders = Orders(world, self)
        self.state: State = initial_state(self.core)

    # -- processes -----------------------------------------------------------------------------------

    def start(self) -> None:
        """The first process starts, on a new tape."""
        self._begin_afresh()
        for moment in self.world.config.operator.stops_at:
            self.world.agenda.at(moment, self._stop)

    def _begin_afresh(self) -> None:
        header = Header(
            software_version=__version__,
            wall_clock=WALL_CLOCK,
            session_id=f"simulated-{self.world.config.seed}",
            config=self.core,
        )
        if self.world.observer is not None:
            self.world.observer.began(header)
        self.tape.begin(header)
        self.state = initial_state(self.core)
        self._run(0.0)
        self.wake = next_deadline(self.state) + self._offset

    def _run(self, begin_at: float) -> None:
        """A process runs; its session goes on from ``begin_at``."""
        agenda = self.world.agenda
        self.process += 1
        self.is_up = True
        self._at = begin_at
        self._offset = agenda.now - begin_at
        self._queued_until = 0.0
        if not self.world.is_calm():
            agenda.at(agenda.now + spell(self._rng, self.spec.mean_up_seconds), self._crash, self.process)

    def _stop(self) -> None:
        if self.is_up:
            self.world.note("stop")
            self.tell(ev.StopRequested, {"signal": "SIGTERM"})

    def _crash(self, process: int) -> None:
        if process != self.process or not self.is_up or self.world.is_calm():
            return
        self.world.note("crash")
        tail = self.tape.crash(self.world.agenda.now, self._rng)
        self._leave_everything(tail)
        self.world.agenda.after(spell(self._rng, self.spec.mean_restart_seconds), self._resume, tail)

    def exit(self, decision: SessionEnded) -> None:
        """The process ends in order."""
        tail = self.tape.flush()
        operator, code = self.world.config.operator, decision.exit_code
        self._leave_everything(tail)
        if operator.budget_finish and code == 0 and self.ending == "budget":
            self.core = evolve(self.core, budget_finish=True)
            self.world.note("budget_finish")
        elif code not in operator.restarts_after or self._restarts >= operator.restarts_max:
            self.world.exit_code = code
            self.world.is_over = True
            return
        else:
            self._restarts += 1
            self.world.note(f"restart_after_{code}")
        self.world.agenda.after(spell(self._rng, self.spec.mean_restart_seconds), self._resume, tail)

    def _leave_everything(self, tail: Tail) -> None:
        """What a process held is gone with it."""
        world = self.world
        self.is_up = False
        self.wake = INFINITY
        if world.observer is not None:
            world.observer.stopped(tail.last_seq)
        world.account.syncer_lost()
        for connection in self.registry.values():
            if connection.is_released:
                # The process waits for the last words to be read.
                connection.up.is_open = False
                continue
            connection.break_off()
            world.agenda.after(connection.delay(), connection.client.closed, connection)
        self.registry.clear()
        self._orders.forget()

    def _resume(self, tail: Tail) -> None:
        """A supervisor starts the next process."""
        if not self.cuts:
            # Nothing was durable: the tape is set aside, and learner 0 decides anew.
            self.world.note("fresh_restart")
            self._begin_afresh()
            return
        if len(self.cuts) > 1 and not self.was_cut and self._rng.random() < self.spec.older_checkpoint:
            self.world.note("older_checkpoint")
            self.cuts.pop()
        cut = self.cuts[-1]
        del self.cuts[:-1]
        self.tape.resume()
        past = self.tape.past.past(cut.step, cut.seq)
        event = ev.SessionResumed(
            at=tail.last_at,
            wall_clock=WALL_CLOCK,
            config=evolve(self.core, wait_for=self.core.quorum),
            terms=self._terms,
            step=cut.step,
            fragments=cut.marks,
            ledger=cut.ledger,
            checkpoint_seq=past.checkpoint_seq,
            awaited=past.awaited,
            acked=past.acked,
            finish_target=cut.finish_target,
            outer_marks=cut.outer_marks,
        )
        if self.world.observer is not None:
            self.world.observer.resuming(event, cut.mark())
        self.world.account.resumed(cut.step)
        self.world.note("resumed")
        self.state = initial_state(event.config)
        self._run(tail.last_at)
        self._feed(event)

    # -- the pump ------------------------------------------------------------------------------------

    def tell(
        self,
        kind: type[ev.Event],
        fields: dict[str, Any],
        message: PushMessage | None = None,
        then: Then | None = None,
    ) -> None:
        """Tell the coordinator a fact, when its turn comes.

        Args:
            kind: the event's class.
            fields: its fields, all of them, but for the time.
            message: the push it is about.
            then: told what was decided.
        """
        if self._queue_seconds:
            now = self.world.agenda.now
            turn = now + self._queue_rng.uniform(0.0, self._queue_seconds)
            self._queued_until = turn = max(turn, self._queued_until)
            self.world.agenda.at(turn, self._take, self.process, kind, fields, message, then)
        elif self.is_up:
            self._hear(kind, fields, message, then)

    def _take(
        self,
        process: int,
        kind: type[ev.Event],
        fields: dict[str, Any],
        message: PushMessage | None,
        then: Then | None,
    ) -> None:
        if process == self.process and self.is_up:
            self._hear(kind, fields, message, then)

    def _hear(
        self, kind: type[ev.Event], fields: dict[str, Any], message: PushMessage | None, then: Then | None
    ) -> None:
        self.message = message
        decisions = self._feed(made(kind, {"at": self._now(), **fields}))
        self.message = None
        if then is not None:
            then(decisions)

    def later(self, seconds: float, deed: Callable[..., None], *details: Any) -> None:
        """Plan a deed of the present process: it does not happen once that is gone."""
        self.world.agenda.after(seconds, self._do, self.process, deed, details)

    def _do(self, process: int, deed: Callable[..., None], details: tuple[Any, ...]) -> None:
        if process == self.process and self.is_up:
            deed(*details)

    def fire(self) -> None:
        """The earliest deadline has come."""
        timer = next_timer(self.state)
        assert timer is not None
        self._feed(evolve(timer.event, at=max(self._now(), timer.at)))

    def _now(self) -> float:
        at = round(self.world.agenda.now - self._offset, 6)
        return at if at > self._at else self._at

    def _feed(self, event: ev.Event) -> tuple[Decision, ...]:
        """Append, step, append, act: one uninterrupted stretch."""
        world, tape = self.world, self.tape
        self._at = event.at
        seq = tape.append_event(event)
        self.state, decisions = step(self.state, event)
        if decisions:
            tape.append_decisions(decisions, because=seq, at=event.at)
        if world.observer is not None:
            world.observer.told(seq, event, decisions, self.state)
        acts: list[tuple[Decision, int, Act]] | None = None
        orders = self._orders.table
        for place, decision in enumerate(decisions, seq + 1):
            obey = orders.get(type(decision))
            act = None if obey is None else obey(decision, event, place)
            if act is not None:
                acts = [] if acts is None else acts
                acts.append((decision, place, act))
        durable_at = tape.durable_at(world.agenda.now)
        if acts is not None:
            world.agenda.at(durable_at, self._act, self.process, acts)
        self.wake = next_deadline(self.state) + self._offset
        return decisions

    def _act(self, process: int, acts: list[tuple[Decision, int, Act]]) -> None:
        """Do what waited for the disk."""
        if process != self.process or not self.is_up:
            return
        if self.world.observer is not None:
            durable_seq = self.tape.durable_seq(self.world.agenda.now)
            for decision, seq, _ in acts:
                self.world.observer.acted(decision, seq, durable_seq)
        for _, _, act in acts:
            act()

    # -- what arrives --------------------------------------------------------------------------------

    def hello(self, connection: Connection) -> None:
        """A HELLO arrived, if the process it was sent to still lives."""
        if not self.is_up or connection.process != self.process:
            connection.break_off()
            self.world.agenda.after(connection.delay(), connection.client.closed, connection)
            return
        member = connection.member
        self.registry[member.generation] = connection
        fields = {
            "learner": member.learner,
            "generation": member.generation,
            "address": f"10.0.{member.learner >> 8}.{member.learner & 255}:40000",
            "terms": self._terms,
        }
        self.tell(ev.HelloReceived, fields, then=lambda decisions: self._greeted(connection, decisions))

    def _greeted(self, connection: Connection, decisions: tuple[Decision, ...]) -> None:
        member = connection.member
        for decision in decisions:
            if isinstance(decision, LearnerRefused) and _is_about(decision, member):
                self.registry.pop(member.generation, None)
                self.turn_away(connection, permanent=decision.permanent)
                return
        if self._hears(connection):
            self.world.agenda.after(connection.delay(), self._joined, connection)
            connection.client.introduced(connection)

    def _joined(self, connection: Connection) -> None:
        if self._hears(connection) and connection.up.is_open:
            if self.state.phase is Phase.RUNNING:
                self.world.note("joined_late")
            self.tell(ev.LearnerJoined, connection.who)

    def noticed(self, connection: Connection, reason: str) -> None:
        """A connection is found to be lost."""
        if self._hears(connection):
            del self.registry[connection.member.generation]
            self.tell(ev.LearnerLeft, {**connection.who, "reason": reason})

    def close(self, connection: Connection, *, permanent: bool, reason: str) -> None:
        """End a connection from this side, soon."""
        self.turn_away(connection, permanent=permanent)
        self.world.agenda.after(0.0, self.noticed, connection, reason)

    def turn_away(self, connection: Connection, *, permanent: bool) -> None:
        """Read nothing more from a peer, and tell it why only when it is not to come back."""
        connection.up.is_open = False
        client = connection.client
        connection.send_down(client.refused if permanent else client.closed)

    def init_arrived(self, connection: Connection, fragment: int, finite: bool) -> None:
        """An initial value is here whole."""
        state, member = self.state, connection.member
        if self._hears(connection) and state.opener == member.generation and fragment not in state.initial:
            fields = {
                **connection.who,
                "fragment": fragment,
                "digest": initial_digest(fragment),
                "finite": finite,
            }
            self.tell(ev.FragmentInitialised, fields)

    def heartbeat(self, connection: Connection, local_step: int) -> None:
        """A heartbeat arrived."""
        if local_step > connection.known_step and self._hears(connection):
            connection.known_step = local_step
            self.tell(ev.Heartbeat, {**connection.who, "local_step": local_step})

    def push_begun(self, connection: Connection, message: PushMessage) -> None:
        """The head of a push arrived."""
        if not connection.up.is_open or not self._hears(connection):
            return
        push, answer, member = message.push, message.answer, connection.member
        if answer.local_step > connection.known_step:
            connection.known_step = answer.local_step
        fields = {
            "learner": member.learner,
            "generation": member.generation,
            "fragment": push.fragment,
            "step": push.step,
            "attempt": push.attempt,
            "base_version": answer.base_version,
            "local_step": answer.local_step,
            "c_steps": answer.c_steps,
            "c_tokens": answer.c_tokens,
            "payload_bytes": self.world.config.push_bytes,
        }
        self.tell(ev.PushOffered, fields, message, lambda _: self._judged(connection, message))

    def _judged(self, connection: Connection, message: PushMessage) -> None:
        message.is_judged = True
        if message.is_here:
            self.push_arrived(connection, message)

    def push_arrived(self, connection: Connection, message: PushMessage) -> None:
        """A push is here whole; only one that was admitted has a buffer."""
        if not connection.up.is_open or not self._hears(connection):
            return
        push, member = message.push, connection.member
        push.arrived = message.is_here = True
        if not message.is_judged:
            return
        if not self._orders.has_buffer(member.generation, message):
            return
        self.tell(ev.PushReceived, self._orders.examined(connection, message), message)

    def budget_reported(self, connection: Connection, local_steps: int) -> None:
        """A learner used up its budget."""
        if self._hears(connection):
            self.tell(ev.BudgetReported, {**connection.who, "local_steps": local_steps})

    def ack(self, connection: Connection, step: int) -> None:
        """A learner holds the final cut."""
        if self._hears(connection):
            self.tell(ev.FinalAckReceived, {**connection.who, "step": step})

    def _hears(self, connection: Connection) -> bool:
        return self.registry.get(connection.member.generation) is connection

    # -- the disk ------------------------------------------------------------------------------------

    def cut_of(self, order: CheckpointOrdered, seq: int) -> Cut:
        """Return the checkpoint that an order means, as of now."""
        state = self.state
        return Cut(
            step=order.step,
            seq=seq,
            marks=state.marks,
            ledger=tuple(state.ledger[learner] for learner in sorted(state.ledger)),
            outer_marks=state.outer_marks,
            finish_target=order.finish_target,
        )

    def keep(self, cut: Cut) -> None:
        """A checkpoint is durable."""
        self.cuts.append(cut)
        del self.cuts[:-2]
        self.world.account.final_up_to(self.cuts[0 if self.spec.older_checkpoint else -1].step)


def _is_about(decision: LearnerRefused, member: Member) -> bool:
    return decision.learner == member.learner and decision.generation == member.generation
