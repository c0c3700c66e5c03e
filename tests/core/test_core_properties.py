"""Any sequence of facts a fleet can cause keeps the promises, and a fleet that behaves again ends the run.

A fake world obeys every decision, but late, twice, broken or not at all, as the drawn numbers say: it
loses learners, sends stale and empty pushes, gives NaN merges, fires timers early, stops and resumes.
After each fact the invariants hold; in the end the world behaves, and the session must finish.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve, fields_dict
from core_fleet import Session, config, generation, resumed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from yeto.core import Phase, State, initial_state, next_timer, step
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.parts import Round
from yeto.core.resume import version_at
from yeto.core.state import Draft
from yeto.core.step import settle
from yeto.core.timers import Timer

STATE_FIELDS = set(fields_dict(State))
ROUND_FIELDS = set(fields_dict(Round))
PATIENCE = 3000
"""Facts within which a fleet that behaves must end any run of these sizes."""


class World(Session):
    """A shell and a fleet that hold what they were told to do, and do it when the test says so."""

    def __init__(self, choices: dict[str, Any], num_fragments: int) -> None:
        super().__init__(config(**choices), num_fragments=num_fragments)
        self.pulls: list[tuple[int, str, int, int, int]] = []
        self.uploads: list[tuple[int, str, int, int]] = []
        self.merges: list[tuple[int, int]] = []
        self.outers: list[tuple[int, int]] = []
        self.checkpoints: list[int] = []
        self.dialled: set[int] = set()
        self.joined: set[int] = set()
        self.lefts: list[tuple[int, str]] = []
        self.acks: list[int] = []
        self.inits: list[int] = []
        self.draining = False
        self.saved: dict[int, tuple[tuple[Any, ...], int | None]] = {}
        # What the invariants need to remember, per timeline.
        self.members: dict[tuple[int, int], set[tuple[int, str]]] = {}
        self.accepted: dict[tuple[int, int], set[int]] = {}
        self.committed = 0
        self.sent: dict[int, int] = {}
        self.last_broadcast = 0

    # Obeying.

    def feed(self, event: ev.Event) -> tuple[de.Decision, ...]:
        before, before_text = self.state, repr(self.state) if len(self.events) % 16 == 0 else None
        decisions = super().feed(event)
        if before_text is not None:
            assert repr(before) == before_text, "an old state stays as it was"
        for decision in decisions:
            self._remember(decision)
            self._obey(decision)
        self._check(event)
        return decisions

    def _obey(self, decision: de.Decision) -> None:
        if isinstance(decision, de.AttemptOpened):
            for member in decision.members:
                pull = (member.learner, member.generation, decision.step, decision.attempt)
                self.pulls.append((*pull, decision.base_version))
        elif isinstance(decision, de.PushAdmitted):
            self.uploads.append((decision.learner, decision.generation, decision.step, decision.attempt))
        elif isinstance(decision, de.PushRefused) and decision.resend:
            round_ = self.state.find(decision.step)
            assert round_ is not None
            pull = (decision.learner, decision.generation, decision.step, decision.attempt)
            self.pulls.append((*pull, round_.base_version))
        elif isinstance(decision, de.MergeOrdered):
            self.merges.append((decision.step, decision.attempt))
        elif isinstance(decision, de.CommitOrdered):
            self.outers.append((decision.step, decision.attempt))
        elif isinstance(decision, de.CheckpointOrdered):
            self.checkpoints.append(decision.step)
            self.saved[decision.step] = (tuple(self.state.ledger.values()), decision.finish_target)
        elif isinstance(decision, de.LearnerRefused):
            self._cut_off(decision.learner, decision.generation)
        elif isinstance(decision, de.FinalCutOrdered):
            self.acks.extend(member.learner for member in decision.to)
        elif isinstance(decision, de.SessionEnding):
            self.draining = True

    def _cut_off(self, learner: int, gone: str) -> None:
        self.lefts.append((learner, gone))
        if learner in self.dials and self.gen(learner) == gone:
            self.dialled.discard(learner)
            self.joined.discard(learner)

    # Remembering and checking.

    def _remember(self, decision: de.Decision) -> None:
        if isinstance(decision, de.AttemptOpened):
            key = (decision.step, decision.attempt)
            assert key not in self.members, "attempts of a timeline are new"
            self.members[key] = {(member.learner, member.generation) for member in decision.members}
            self.accepted[key] = set()
            assert len(decision.members) >= decision.quorum == self.state.quorum
            assert decision.fragment == (decision.step - 1) % self.terms.num_fragments
        elif isinstance(decision, de.PushAccepted):
            key = (decision.step, decision.attempt)
            assert (decision.learner, decision.generation) in self.members[key]
            assert decision.learner not in self.accepted[key]
            self.accepted[key].add(decision.learner)
        elif isinstance(decision, de.GraceOpened):
            assert 0.0 <= decision.grace_seconds <= self.state.config.grace_cap_seconds
        elif isinstance(decision, de.AttemptDiscarded):
            key = (decision.step, decision.attempt)
            assert set(decision.lost) == self.accepted.pop(key), "a discard names what it loses"
        elif isinstance(decision, de.RoundCommitted):
            self._remember_commit(decision)
        elif isinstance(decision, de.BroadcastOrdered) and len(decision.fragments) == 1:
            (ref,) = decision.fragments
            if ref.version > 0:
                assert self.last_broadcast <= ref.version <= max(self.committed, self.state.step)
                self.last_broadcast = ref.version

    def _remember_commit(self, merge: de.RoundCommitted) -> None:
        assert merge.step == self.committed + 1, "commits have no gaps"
        self.committed = merge.step
        key = (merge.step, merge.attempt)
        learners = [responder.learner for responder in merge.responders]
        assert learners == sorted(set(learners))
        assert len(learners) >= merge.quorum
        assert set(learners) | set(merge.left_out) == self.accepted.pop(key), "nothing refused is merged"
        assert {(r.learner, r.generation) for r in merge.responders} <= self.members[key]
        assert merge.grace_seconds is None or merge.grace_seconds >= 0.0

    def _check(self, event: ev.Event) -> None:
        state, num_fragments = self.state, self.terms.num_fragments
        assert set(vars(state)) == STATE_FIELDS
        assert state.step == self.committed
        if state.versions:
            assert state.versions == tuple(
                version_at(state.step, p, num_fragments) for p in range(num_fragments)
            )
        assert [r.step for r in state.rounds] == [state.step + 1 + i for i in range(len(state.rounds))]
        assert len({r.fragment for r in state.rounds}) == len(state.rounds) <= max(state.depth, 0)
        for round_ in state.rounds:
            assert set(vars(round_)) == ROUND_FIELDS
            assert round_.step <= state.target
            assert round_.owing >= round_.excused >= 0
            assert not set(round_.answers) & set(round_.gone)
        for fragment, version in enumerate(state.broadcast):
            assert version <= state.versions[fragment]
            if state.config.checkpoint_every == 1 and version:
                assert version <= state.durable, "nothing leaves before it is durable"
        draft = Draft.of(state)
        settle(draft)
        assert draft.freeze() == (state, ()), "one pass reaches the fixed point"
        if isinstance(event, ev.SessionResumed):
            return
        timer = next_timer(state)
        assert timer is None or timer.at >= 0.0

    # Acting.

    def actions(self) -> list[Callable[[int], None]]:
        """What can happen next; each takes a number that says how."""
        found: list[Callable[[int], None]] = [self.pass_time, self.fire_timer, self.dial, self.beat]
        for pending, act in (
            (self.dialled, self.attach),
            (self.joined, self.lose),
            (self.lefts, self.report_left),
            (self.inits, self.initialise_one),
            (self.pulls, self.answer),
            (self.pulls, self.answer),
            (self.uploads, self.deliver),
            (self.uploads, self.deliver),
            (self.merges, self.merge),
            (self.outers, self.apply),
            (self.checkpoints, self.save),
            (self.acks, self.acknowledge),
        ):
            if pending:
                found.append(act)
        found.append(self.disturb)
        return found

    def pass_time(self, how: int) -> None:
        self.wait((0.0, 0.001, 0.3, 2.0, 61.0, 950.0)[how % 6])

    def fire_timer(self, how: int) -> None:
        timer = next_timer(self.state)
        if timer is None:
            return
        if how % 7 == 0:
            self.feed(evolve(timer.event, at=self.at))
            return
        self.at = max(self.at, timer.at)
        self.feed(evolve(timer.event, at=self.at))
        assert not self._same(timer), "a timer that fired does not fire again"

    def _same(self, timer: Timer) -> bool:
        after = next_timer(self.state)
        return after is not None and after == timer

    def dial(self, how: int) -> None:
        learner = how % self.config.num_learners
        self.joined.discard(learner)
        self.dialled.add(learner)
        changes = {"dtype": "f32"} if how % 31 == 30 and learner else {}
        self.hello(learner, **changes)

    def attach(self, how: int) -> None:
        learner = sorted(self.dialled)[how % len(self.dialled)]
        self.dialled.discard(learner)
        self.joined.add(learner)
        if learner == 0 and self.state.phase is Phase.PROVISIONAL:
            self.inits = list(range(self.terms.num_fragments))
        self.tell(ev.LearnerJoined, learner=learner, generation=self.gen(learner))

    def lose(self, how: int) -> None:
        learner = sorted(self.joined)[how % len(self.joined)]
        self.joined.discard(learner)
        self.leave(learner)

    def report_left(self, how: int) -> None:
        learner, gone = self.lefts.pop(how % len(self.lefts))
        self.tell(ev.LearnerLeft, learner=learner, generation=gone, reason="closed")

    def initialise_one(self, how: int) -> None:
        self.tell(
            ev.FragmentInitialised,
            learner=0,
            generation=self.gen(0),
            fragment=self.inits.pop(),
            digest="0" * 32,
            finite=how % 29 != 28,
        )

    def answer(self, how: int) -> None:
        learner, gen, step_, attempt, base = self.pulls.pop(how % len(self.pulls))
        kind = how % 19
        self.offer(
            learner,
            step_,
            attempt,
            generation=gen,
            base_version=base + 5 if kind == 15 else 0 if kind == 16 else base,
            c_steps=0 if kind == 17 else 1 + how % 5,
            c_tokens=0 if kind == 18 else 1 + how % 1000,
        )
        if kind == 14:
            self.pulls.append((learner, gen, step_, attempt, base))

    def deliver(self, how: int) -> None:
        learner, gen, step_, attempt = self.uploads.pop(how % len(self.uploads))
        finite = how % 17 != 16
        norm = float(1 + how % 50) if finite else None
        self.receive(learner, step_, attempt, generation=gen, finite=finite, norm=norm)

    def merge(self, how: int) -> None:
        step_, attempt = self.merges.pop(how % len(self.merges))
        if how % 23 == 22:
            self.tell(ev.MergeFailed, step=step_, attempt=attempt, message="broken")
        else:
            self.merged(step_, attempt, finite=how % 23 != 21, seconds=0.01)

    def apply(self, how: int) -> None:
        step_, attempt = self.outers.pop()
        self.applied(step_, attempt, finite=how % 19 != 18)

    def save(self, how: int) -> None:
        step_ = self.checkpoints.pop()
        if how % 97 == 96:
            self.tell(ev.CheckpointFailed, step=step_, message="disk full")
        else:
            self.written(step_, seconds=0.01)

    def acknowledge(self, how: int) -> None:
        self.ack(self.acks.pop(how % len(self.acks)))

    def beat(self, how: int) -> None:
        learner = how % self.config.num_learners
        if learner in self.dials:
            self.local_steps[learner] = self.local_steps.get(learner, 0) + how % 4
            self.tell(
                ev.Heartbeat,
                learner=learner,
                generation=self.gen(learner),
                local_step=self.local_steps[learner],
            )

    def disturb(self, how: int) -> None:
        """Rare and hostile facts."""
        kind = how % 11
        if kind == 0:
            self.offer(0, how % 9, 1, generation=generation(0, 99))
        elif kind == 1:
            self.tell(ev.GraceElapsed, step=how % 9, attempt=1 + how % 2)
        elif kind == 2:
            self.tell(ev.FinalAckReceived, learner=how % 5, generation="0" * 16, step=how % 5)
        elif kind == 3 and self.dials:
            learner = sorted(self.dials)[how % len(self.dials)]
            budget = self.config.learner_budget_steps or 7
            self.tell(ev.BudgetReported, learner=learner, generation=self.gen(learner), local_steps=budget)
        elif kind == 4 and how % 5 == 0:
            self.tell(ev.StopRequested, signal="SIGINT")
        elif kind == 5:
            self.resume(finish=how % 3 == 0)
        elif kind == 6 and self.draining:
            self.tell(ev.SvdPoolDrained)
        elif kind == 7 and self.uploads:
            learner, gen, step_, attempt = self.uploads[how % len(self.uploads)]
            fields: dict[str, Any] = {"learner": learner, "generation": gen, "received_bytes": 1}
            self.tell(ev.UploadProgress, step=step_, attempt=attempt, **fields)
        elif kind == 8:
            self.tell(ev.QuorumDeadlinePassed, step=how % 9, attempt=1)
        elif kind == 9:
            self.tell(ev.RetryDue, step=how % 9, attempt=1)
        else:
            self.tell(ev.GateOpened, step=how % 9)

    def resume(self, *, finish: bool) -> None:
        """The syncer dies and starts again from its newest durable checkpoint, perhaps as a finish."""
        durable = self.state.durable
        if durable < 0:
            return
        ledger, target = self.saved[durable]
        policy = self.state.config
        if finish and policy.learner_budget_steps is not None:
            policy = evolve(policy, budget_finish=True)
        for pending in (self.pulls, self.uploads, self.merges, self.outers, self.checkpoints):
            pending.clear()
        for more in (self.lefts, self.acks, self.inits):
            more.clear()
        self.dialled.clear()
        self.joined.clear()
        self.members.clear()
        self.accepted.clear()
        self.committed = durable
        self.last_broadcast = 0
        self.draining = False
        self.feed(resumed(self, durable, config=policy, ledger=ledger, finish_target=target))

    # Behaving.

    def behave(self, alive: list[int]) -> None:
        """These learners are there and do what they are told, the others are dead; it must end."""
        for learner in sorted(self.joined - set(alive)):
            self.lose(sorted(self.joined).index(learner))
        for _ in range(PATIENCE):
            if self.state.phase is Phase.ENDED:
                return
            self.next_good_fact(alive)
        raise AssertionError(f"the session did not end: {self.state}")

    def next_good_fact(self, alive: list[int]) -> None:
        """One step of a shell and of learners that behave."""
        current = self.state.current
        missing = [learner for learner in alive if learner not in current]
        budget = self.config.learner_budget_steps
        unreported = [learner for learner in current if learner not in self.state.reports]
        generations = {member.generation for member in current.values()}
        self.pulls = [pull for pull in self.pulls if pull[1] in generations]
        self.uploads = [upload for upload in self.uploads if upload[1] in generations]
        self.acks = [learner for learner in self.acks if learner in current]
        if self.state.phase in (Phase.FINALISING, Phase.STOPPING):
            missing = []
        if self.draining and self.config.svd_pool and not self.state.pool_drained:
            self.draining = False
            self.tell(ev.SvdPoolDrained)
        elif self.checkpoints:
            self.save(0)
        elif missing:
            self.dial(missing[0])
            self.attach(sorted(self.dialled).index(missing[0]))
        elif self.inits:
            self.initialise_one(0)
        elif self.outers:
            self.apply(0)
        elif self.merges:
            self.merge(0)
        elif self.uploads:
            self.deliver(0)
        elif self.pulls:
            self.answer(19 * len(self.pulls))
        elif self.acks:
            self.acknowledge(0)
        elif self.state.phase is Phase.BUDGET and unreported:
            fields: dict[str, Any] = {"learner": unreported[0], "generation": self.gen(unreported[0])}
            self.tell(ev.BudgetReported, local_steps=budget, **fields)
        elif next_timer(self.state) is not None:
            self.fire_timer(1)
        else:
            raise AssertionError(f"nothing is under way and no deadline is armed: {self.state}")


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A session of random but small settings."""
    learners = draw(st.integers(1, 4))
    quorum = draw(st.integers(1, learners))
    return World(
        {
            "num_learners": learners,
            "quorum": quorum,
            "wait_for": draw(st.integers(quorum, learners)),
            "total_steps": draw(st.integers(1, 8)),
            "pipeline": draw(st.integers(0, 4)),
            "checkpoint_every": draw(st.integers(0, 3)),
            "closing_sweep": draw(st.sampled_from(["plain", "off"])),
            "sync_interval_steps": draw(st.sampled_from([0.0, 24.0])),
            "min_round_interval_seconds": draw(st.sampled_from([0.0, 0.1])),
            "max_norm_ratio": draw(st.sampled_from([None, 2.0])),
            "max_base_lag": draw(st.sampled_from([None, 0, 2])),
            "learner_budget_steps": draw(st.sampled_from([None, None, 7])),
            "mark_final_checkpoint": draw(st.booleans()),
            "svd_pool": draw(st.booleans()),
        },
        num_fragments=draw(st.integers(1, 4)),
    )


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    world=worlds(),
    draws=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 65535)), min_size=20, max_size=200),
    well_started=st.booleans(),
    everybody=st.booleans(),
)
def test_the_promises_hold_and_every_run_ends(
    world: World, draws: list[tuple[int, int]], well_started: bool, everybody: bool
) -> None:
    fleet = list(range(world.config.num_learners))
    if well_started:
        for _ in range(world.config.num_learners + world.terms.num_fragments + 1):
            world.next_good_fact(fleet)
    for which, how in draws:
        actions = world.actions()
        actions[which % len(actions)](how)
    world.behave(fleet if everybody else fleet[: world.config.quorum])
    assert world.state.exit_code in (0, 1, 3, 4)
    _replays_to_the_same(world)


def _replays_to_the_same(world: World) -> None:
    """The same facts in the same order give the same decisions and the same state."""
    state: State = initial_state(world.config)
    decisions: list[de.Decision] = []
    for event in world.events:
        state, caused = step(state, event)
        decisions.extend(caused)
    assert decisions == world.decisions
    assert state == world.state
