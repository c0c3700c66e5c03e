"""A simulated learner: steps, meets the network at step boundaries, dies and comes back.

At a boundary everything happens as in a real learner, with the real book: a final cut ends training, received
broadcasts are taken in order, pulls are answered, held or dropped. What there is no need to simulate is the
weights; the account knows what they contain.

A life is one process. It begins with nothing or with what an earlier life saved, and ends with a failure, an
ERROR, or the end of the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from attrs import frozen

from yeto.learner.anchors import SavedBook
from yeto.learner.exchanged import Broadcast, Pull, Taken, Verdict, newest
from yeto.sim.account import Fate, SavedWork
from yeto.sim.agenda import Deviates, spell
from yeto.sim.client import Client
from yeto.sim.config import LearnerSpec
from yeto.sim.messages import PushMessage, initial_digest
from yeto.sim.pace import Pace
from yeto.sim.world import World

if TYPE_CHECKING:
    from yeto.learner.exchanged import Values
    from yeto.sim.network import Connection

NO_VALUES = cast("Values", ())
"""The book wants values and looks at none of them; without an array, nothing brings numpy."""

FINAL_PATIENCE_SECONDS = 60.0
"""How long SHUTDOWN is waited for after the final cut was acknowledged, from the last connect."""

UNLIMITED = 1 << 62
"""More steps than any simulation takes."""


@frozen(kw_only=True, eq=False)
class Saved:
    """What a life left in its state folder."""

    steps: int
    book: SavedBook
    work: SavedWork


class Learner:
    """One learner over all its lives."""

    def __init__(self, world: World, number: int, spec: LearnerSpec) -> None:
        """Describe learner ``number``; ``begin`` plans its first life."""
        self.number = number
        self.spec = spec
        self.world = world
        self.work = 0
        """Steps done over all lives."""
        self.stepped_seconds = 0.0
        """Time that they took, those of the present life not included."""
        self.is_done = False
        """Whether it has left for good."""
        self._life = 0
        self._rng = world.chance(f"life/{number}")
        self._faults = world.chance(f"faults/{number}")
        self._deviates = Deviates(world.chance(f"steps/{number}"))
        self._budget = world.config.core.learner_budget_steps
        self._save_every = spec.state_every_steps if spec.keeps_state else None
        self._tokens_per_step = spec.tokens_per_step
        self._saved: Saved | None = None
        self._client = Client(world, self)
        self._is_alive = False
        self._reset()

    def _reset(self) -> None:
        """Forget what a process knows."""
        self.steps = 0
        self.is_frozen = False
        self.final_step: int | None = None
        self._book = self.world.make_book()
        self._pace = Pace(self.spec, self._deviates)
        self._is_started = False
        self._broadcasts: dict[int, Broadcast] = {}
        self._pulls: dict[int, Pull] = {}
        self._final: int | None = None
        self._awaited: dict[int, int] = {}
        """Rounds whose broadcast a lockstep learner waits for, by fragment."""
        self._plan = 0
        self._is_planned = False
        self._patience = 0

    # -- what is asked of it -------------------------------------------------------------------------

    @property
    def boundary(self) -> float:
        """When its present step ends; infinite while it takes none. Ask after ``advance``."""
        return self._pace.boundary

    @property
    def total_stepped_seconds(self) -> float:
        """Time spent in finished steps, over all lives."""
        return self.stepped_seconds + self._pace.stepped_seconds

    @property
    def sent_bytes(self) -> int:
        """Bulk bytes sent."""
        return self._client.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bulk bytes received, or under way."""
        return self._client.received_bytes

    # -- lives ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Plan the first life and, if it ends, the last."""
        agenda = self.world.agenda
        agenda.at(self.spec.joins_at, self._live)
        if self.spec.leaves_at is not None:
            agenda.at(self.spec.leaves_at, self._leave)

    def _live(self) -> None:
        """A process starts."""
        if self.is_done:
            return
        world, agenda = self.world, self.world.agenda
        self._life += 1
        self._is_alive = True
        self._reset()
        if self._saved is not None:
            world.note("restored")
            self.steps = self._saved.steps
            self._book.restore(self._saved.book)
            self.is_frozen = self._saved.book.frozen_work is not None
            if not self.is_frozen:
                world.account.restored(self._saved.work, self.work)
        elif self.number == 0:
            for fragment in range(world.config.num_fragments):
                self._book.adopt_init(fragment, NO_VALUES, initial_digest(fragment))
        if not world.is_calm():
            agenda.at(agenda.now + spell(self._rng, self.spec.mean_up_seconds), self._fail, self._life)
        self._client.start()
        self._start_when_ready()

    def _fail(self, life: int) -> None:
        """The machine fails, or is taken away."""
        if life != self._life or not self._is_alive or self.is_done or self.world.is_calm():
            return
        self.world.note("died")
        self._die(keeps=self._rng.random() < self.spec.keeps_state)

    def refused(self) -> None:
        """The syncer said ERROR: the process ends, and its supervisor starts a new one, afresh."""
        self.world.note("refused")
        self._die(keeps=False)

    def _die(self, *, keeps: bool) -> None:
        half_open = self._rng.random() < self.world.config.faults.half_open and not self.world.is_calm()
        self._end_life(half_open=half_open)
        if not keeps and self._saved is not None:
            self.world.account.forgotten(self._saved.work)
            self._saved = None
        self.world.agenda.after(spell(self._rng, self.spec.mean_repair_seconds), self._live)

    def _leave(self) -> None:
        """It goes, and does not come back."""
        if not self.is_done:
            self.is_done = True
            if self._is_alive:
                self._end_life(half_open=False)

    def _end_life(self, *, half_open: bool) -> None:
        self.advance()
        self._halt()
        self.world.account.close(self.number, self.work, Fate.DIED)
        self.stepped_seconds += self._pace.stepped_seconds
        self._pace = Pace(self.spec, self._deviates)
        self._is_alive = False
        self._client.end(half_open=half_open)

    def _halt(self) -> None:
        """No more steps are taken in this life."""
        if self._is_started:
            self._is_started = False
            self.world.measures.training(-1, self.world.agenda.now)
        self._pace.stop()
        self._unplan()

    # -- stepping ------------------------------------------------------------------------------------

    def advance(self) -> int:
        """Finish the steps that end until now; return the local step."""
        pace, now = self._pace, self.world.agenda.now
        if pace.boundary > now:
            return self.steps
        every, budget = self._save_every, self._budget
        if every is None and budget is None:
            self._count(pace.advance(now, UNLIMITED))
            return self.steps
        while pace.boundary <= now:
            limit = UNLIMITED
            if every is not None:
                limit = every - self.steps % every
            if budget is not None:
                limit = min(limit, budget - self.steps)
            self._count(pace.advance(now, limit))
            if self.steps == budget:
                self._freeze()
            elif every is not None and self.steps % every == 0:
                self._save()
        return self.steps

    def _count(self, steps: int) -> None:
        self.steps += steps
        self.work += steps
        self._book.count_step(steps * self._tokens_per_step, steps)

    def _freeze(self) -> None:
        """The budget is used up: never step again."""
        self.is_frozen = True
        self._halt()
        self._book.freeze(self.steps, self.steps * self.spec.tokens_per_step)
        if self.spec.keeps_state:
            self._save()
        self.world.account.close(self.number, self.work, Fate.FROZEN)
        self.world.note("frozen")
        if self._client.connection is not None:
            self._report_budget(self._client.connection)

    def _save(self) -> None:
        before = None if self._saved is None else self._saved.work
        work = self.world.account.saved(self.number, self.work, before)
        self._saved = Saved(steps=self.steps, book=self._book.saved(), work=work)

    def _start_when_ready(self) -> None:
        """Training starts when every fragment has an anchor."""
        if self._is_started or self.is_frozen or self.final_step is not None or not self._book.is_complete:
            return
        self._is_started = True
        self.world.measures.training(1, self.world.agenda.now)
        self._pace.start(self.world.agenda.now)
        self._client.report_early()
        if self._budget is not None:
            self._wake()

    # -- what arrives --------------------------------------------------------------------------------

    def connected(self) -> None:
        """A new generation: pulls of the one before die with it, broadcasts that came over it stay."""
        self._pulls.clear()
        self._final = None

    def introduced(self, connection: Connection) -> None:
        """Say what every connection is told first."""
        world = self.world
        if self.number == 0 and not self._book.is_complete:
            finite = self._faults.random() >= world.config.faults.not_finite or world.is_calm()
            for fragment in range(world.config.num_fragments):
                connection.up.put(
                    ("init", fragment),
                    world.config.broadcast_bytes,
                    None,
                    world.syncer.init_arrived,
                    connection,
                    fragment,
                    finite,
                )
        if self.is_frozen:
            self._report_budget(connection)
        if self.final_step is not None:
            self._be_patient()

    def _report_budget(self, connection: Connection) -> None:
        connection.send_up(self.world.syncer.budget_reported, self.steps)

    def pull(self, connection: Connection, fragment: int, step: int, attempt: int) -> None:
        """A pull arrived; an older one of the fragment gives way."""
        if self.final_step is None:
            generation = connection.generation
            self._pulls[fragment] = Pull(generation=generation, fragment=fragment, step=step, attempt=attempt)
            self._wake()

    def broadcast(self, connection: Connection, fragment: int, version: int, digest: str) -> None:
        """A broadcast arrived; one that still waits may have to give way."""
        if not connection.down.is_open or self.final_step is not None:
            return
        connection.was_heard = True
        arrived = Broadcast(
            generation=connection.generation,
            fragment=fragment,
            version=version,
            digest=digest,
            values=NO_VALUES,
        )
        if newest(self._broadcasts.get(fragment), arrived) is arrived:
            self._broadcasts.pop(fragment, None)
            self._broadcasts[fragment] = arrived
            self._wake()

    def final_cut(self, connection: Connection, step: int) -> None:
        """The final cut is here whole: it interrupts even a step."""
        if not connection.down.is_open:
            return
        connection.was_heard = True
        self.advance()
        if self.final_step is None:
            self.world.account.close(self.number, self.work, Fate.LOCAL)
        self._halt()
        self.final_step = step
        self._broadcasts.clear()
        self._pulls.clear()
        connection.send_up(self.world.syncer.ack, step)
        self._be_patient()

    def released(self) -> None:
        """SHUTDOWN: its part is done, unless a budget froze it and a finish will want it."""
        if not (self.is_frozen and self.final_step is None):
            self._depart()

    def _be_patient(self) -> None:
        self._patience += 1
        self.world.agenda.after(FINAL_PATIENCE_SECONDS, self._lose_patience, self._life, self._patience)

    def _lose_patience(self, life: int, patience: int) -> None:
        if life == self._life and self._is_alive and patience == self._patience:
            self._depart()

    def _depart(self) -> None:
        self.is_done = True
        self._end_life(half_open=False)

    # -- the boundary --------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Have the mail looked at: at the next boundary, or at once by a learner that does not step."""
        pace = self._pace
        if not pace.is_running:
            self._cross()
        elif not self._is_planned:
            self.advance()
            if pace.is_running:
                self._is_planned = True
                self.world.agenda.at(pace.boundary, self._cross_planned, self._life, self._plan)

    def _unplan(self) -> None:
        self._plan += 1
        self._is_planned = False

    def _cross_planned(self, life: int, plan: int) -> None:
        if life == self._life and plan == self._plan:
            self._is_planned = False
            self.advance()
            self._cross()

    def _cross(self) -> None:
        """Take what has arrived, in the order of the step boundary."""
        if self._broadcasts:
            for broadcast in self._book.due(tuple(self._broadcasts.values())):
                self._receive(broadcast)
            self._broadcasts.clear()
        wants_step = False
        if self._pulls:
            for pull in tuple(self._pulls.values()):
                verdict = (
                    Verdict.DROP if pull.generation != self._client.generation else self._book.verdict(pull)
                )
                if verdict is Verdict.HOLD:
                    if not self._book.work(pull.fragment)[0]:
                        wants_step = True
                    else:
                        self.world.note("pull_held")
                    continue
                del self._pulls[pull.fragment]
                if verdict is Verdict.ANSWER:
                    self._answer(pull)
        # A round that waits for a step of this learner would never broadcast what the learner waits for.
        if self._awaited and not wants_step:
            if self._pace.is_running:
                self._pace.stop()
                self._unplan()
        elif self._is_started and not self._pace.is_running:
            self._pace.start(self.world.agenda.now)
        if not self._is_started:
            self._start_when_ready()
        if (wants_step or self._budget is not None) and self._pace.is_running:
            self._wake()

    def _receive(self, broadcast: Broadcast) -> None:
        receipt = self._book.receive(broadcast)
        taken = receipt.taken
        account, fragment = self.world.account, broadcast.fragment
        if self.is_frozen:
            pass
        elif taken is Taken.BLENDED or taken is Taken.OVERWROTE:
            account.reset(self.number, fragment, self.work, Fate.UNASKED)
            self._pace.new_stretch()
        elif taken is Taken.CARRIED:
            self.world.note("carried")
            if receipt.carry is not None and receipt.carry.pushed is not None:
                account.carried(self.number, fragment, self.work - self._book.work(fragment)[0])
            self._pace.new_stretch()
        elif taken is Taken.ROLLED_BACK:
            self.world.note("rolled_back")
            if receipt.carry is None:
                account.reset(self.number, fragment, self.work, Fate.ROLLED_BACK)
        elif taken is Taken.UNCHANGED:
            account.begin(self.number, fragment, self.work)
        else:
            self.world.note("overtaken")
        if fragment in self._awaited and (
            taken is Taken.ROLLED_BACK or broadcast.version >= self._awaited[fragment]
        ):
            del self._awaited[fragment]

    def _answer(self, pull: Pull) -> None:
        world, number = self.world, self.number
        answer = self._book.answer(pull, self.steps)
        now = world.agenda.now
        if self.is_frozen:
            push = world.account.pushed_frozen(
                number, pull.fragment, self.work, step=pull.step, attempt=pull.attempt, now=now
            )
        else:
            push = world.account.pushed(
                number,
                pull.fragment,
                self.work,
                step=pull.step,
                attempt=pull.attempt,
                c_steps=answer.c_steps,
                now=now,
            )
        faults, strikes = world.config.faults, self._faults.random
        finite = True
        if faults.not_finite and strikes() < faults.not_finite and not world.is_calm():
            world.note("not_finite")
            finite = False
        if answer.sent is not None and finite:
            answer.sent.fill(NO_VALUES)
        message = PushMessage(answer, push, finite)
        self._client.send_push(message)
        if faults.duplicate and strikes() < faults.duplicate and not world.is_calm():
            world.note("duplicate")
            self._client.send_push(message.copy())
        if faults.broken_upload and strikes() < faults.broken_upload and not world.is_calm():
            world.note("broken_upload")
            self._client.tear_upload()
        if self.spec.lockstep and not self.is_frozen:
            self._awaited[pull.fragment] = pull.step
