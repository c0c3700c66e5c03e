"""Any order of facts that a fleet can cause, each judged by an oracle; then the fleet behaves, and it ends.

Hypothesis draws what happens next: learners join, leave, connect again while the old connection still looks
alive, push with headers that are honest or wrong in any way, beat, acknowledge, use up their budgets; timers
fire early, on time or late; merges, outer steps and checkpoints succeed or fail; the syncer is stopped, or
dies with its tape cut at any byte that was not on the disk, and resumes from its newest checkpoint or the one
before. :class:`machine_world.World` checks everything after each fact. In the end the world behaves
(:mod:`machine_liveness`) and the session must end, and the tape, told again, must come out byte for byte.

The default run is the same on every machine. Others::

    YETO_MACHINE=full pytest tests/core/test_core_machine.py     # eight times as many, the same everywhere
    YETO_MACHINE=deep pytest tests/core/test_core_machine.py     # other facts each time, and far more of them
    YETO_MACHINE=first pytest tests/core/test_core_machine.py    # the default's first failure, unshrunk
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from attrs import evolve
from core_fleet import config, generation
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from machine_learner import Learner
from machine_liveness import behave, next_good_fact
from machine_mischief import BODIES, HEADERS, NAMES
from machine_world import World

from yeto.core import Phase as Session
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core import initial_state, next_timer, step
from yeto.errors import ConfigError, CoordinatorError
from yeto.tape import Header, Record, encode

MODE = os.environ.get("YETO_MACHINE", "")

index = st.integers(0, 11)
one_in_four = st.sampled_from([False, False, False, True])
pause = st.sampled_from([0.0, 0.0, 0.001, 0.017, 0.3, 1.7, 61.0])

POLICY: dict[str, st.SearchStrategy[Any]] = {
    "total_steps": st.integers(1, 7),
    "pipeline": st.integers(0, 4),
    "checkpoint_every": st.sampled_from([1, 1, 2, 3, 0]),
    "closing_sweep": st.sampled_from(["plain", "off"]),
    "outer": st.sampled_from(["stock", "stock", "direct", "normalised", "normalised", "auto"]),
    "outer_lr": st.sampled_from([None, None, 0.7]),
    "outer_momentum": st.sampled_from([None, None, 0.9, 0.5]),
    "sync_interval_steps": st.sampled_from([0.0, 24.0]),
    "min_round_interval_seconds": st.sampled_from([0.0, 0.1]),
    "learner_weight": st.sampled_from(["tokens2-over-steps", "equal"]),
    "delta_correction": st.sampled_from(["heloco", "heloco-all", "none"]),
    "max_norm_ratio": st.sampled_from([None, 2.0]),
    "max_base_lag": st.sampled_from([None, 0, 0, 2]),
    "quorum_timeout_seconds": st.sampled_from([900.0, 20.0]),
    "grace_cap_seconds": st.sampled_from([1.0, 0.0, 30.0]),
    "learner_budget_steps": st.sampled_from([None, None, 7]),
    "mark_final_checkpoint": st.booleans(),
    "svd_pool": st.booleans(),
    "require_profile": st.sampled_from([None, None, None, "a" * 64]),
}
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "total_steps": st.integers(1, 9),
    "closing_sweep": st.sampled_from(["plain", "off"]),
    "outer": st.sampled_from(["stock", "direct", "normalised", "auto"]),
    "checkpoint_every": st.integers(0, 2),
    "pipeline": st.integers(1, 3),
    "quorum": st.integers(1, 4),
}
WRONG_TERMS: list[dict[str, object]] = [
    {"dtype": "f32"},
    {"num_fragments": 5},
    {"num_fragments": 0},
    {"fingerprint": "0" * 64},
    {"contract": "1" * 64},
    {"profile": "b" * 64},
    {"profile": None},
]
MOVES = [
    *["train"] * 3,
    *["hear"] * 4,
    *["answer"] * 5,
    *["deliver"] * 5,
    *["progress"] * 2,
    *["merge"] * 2,
    "merge late",
    *["apply"] * 2,
    *["save"] * 2,
    "attach",
    *["come back"] * 2,
    "initialise",
    "left",
    "ack",
    "fire",
    "budget",
    "save learner",
]
BARE_TIMERS = (
    ev.FirstEstimateDeadlinePassed,
    ev.StartTimeoutPassed,
    ev.FinalAckTimeoutPassed,
    ev.StopDeadlinePassed,
    ev.BudgetWaitPassed,
)
STRAYS = [
    "nobody",
    "reused generation",
    "old connection",
    "old heartbeat",
    "initial value",
    "push",
    "contents",
    "ack",
    "budget",
    "named timer",
    "timer",
    "gate",
    "impossible",
    "impossible",
]


class Machine(RuleBasedStateMachine):
    """What can happen to a session and to those who take part."""

    world: World

    @initialize(
        learners=st.integers(1, 4),
        quorum=st.integers(1, 4),
        wait_for=st.integers(1, 4),
        num_fragments=st.integers(1, 4),
        policy=st.fixed_dictionaries(POLICY),
        good_facts=st.sampled_from([0, 15, 30, 45, 60]),
    )
    def begin(
        self,
        learners: int,
        quorum: int,
        wait_for: int,
        num_fragments: int,
        policy: dict[str, Any],
        good_facts: int,
    ) -> None:
        """A session of small settings that begins well."""
        quorum = min(quorum, learners)
        wait_for = min(max(wait_for, quorum), learners)
        chosen = config(num_learners=learners, quorum=quorum, wait_for=wait_for, **policy)
        self.world = World(chosen, num_fragments)
        self.world.terms = evolve(self.world.terms, profile=chosen.require_profile)
        self.go_well(good_facts)

    @property
    def is_over(self) -> bool:
        return self.world.state.phase is Session.ENDED

    def learner(self, index: int) -> Learner:
        return self.world.learners[index % len(self.world.learners)]

    # What is due happens, well or not.

    @precondition(lambda self: not self.is_over)
    @rule(facts=st.integers(1, 8))
    def go_well(self, facts: int) -> None:
        """For a while everybody does what is asked for."""
        for _ in range(facts):
            if self.world.mischief.strikes("stop"):
                self.world.stop()
            if self.is_over or not next_good_fact(self.world, self.world.learners):
                break

    @precondition(lambda self: not self.is_over)
    @rule(facts=st.integers(10, 40), wrong=st.lists(st.sampled_from(NAMES), min_size=2, max_size=8))
    def go_wrong(self, facts: int, wrong: list[str]) -> None:
        """The same, but some of it is wrong."""
        self.world.mischief.plan(wrong)
        self.go_well(facts)
        self.world.mischief.plan([])

    @precondition(lambda self: not self.is_over)
    @rule(facts=st.integers(10, 30), wrong=st.lists(st.sampled_from(HEADERS), min_size=2, max_size=8))
    def push_wrong(self, facts: int, wrong: list[str]) -> None:
        """The same, but some headers are wrong."""
        self.go_wrong(facts, wrong)

    @precondition(lambda self: not self.is_over)
    @rule(facts=st.integers(10, 30), wrong=st.lists(st.sampled_from(BODIES), min_size=2, max_size=8))
    def deliver_wrong(self, facts: int, wrong: list[str]) -> None:
        """The same, but some pushes hold what no merge can use, or take for ever."""
        self.go_wrong(facts, wrong)

    @precondition(lambda self: not self.is_over)
    @rule(moves=st.lists(st.tuples(st.sampled_from(MOVES), index), min_size=1, max_size=12), after=pause)
    def go_anyhow(self, moves: list[tuple[str, int]], after: float) -> None:
        """The same, in any order, and taking its time."""
        for move, which in moves:
            self.world.wait(after)
            make_move(self.world, move, which)

    @precondition(lambda self: not self.is_over)
    @rule(
        moves=st.lists(st.tuples(st.sampled_from(MOVES), index), min_size=1, max_size=12),
        wrong=st.lists(st.sampled_from(NAMES), min_size=1, max_size=6),
    )
    def go_anyhow_and_wrong(self, moves: list[tuple[str, int]], wrong: list[str]) -> None:
        """The same, in any order, and some of it wrong."""
        self.world.mischief.plan(wrong)
        self.go_anyhow(moves, 0.0)
        self.world.mischief.plan([])

    @precondition(lambda self: next_timer(self.world.state) is not None)
    @rule(late=st.sampled_from([0.0, 0.0, 0.000001, 0.4, 70.0]), early=one_in_four)
    def fire(self, late: float, early: bool) -> None:
        """The next deadline's event; early when the deadline has moved while it was in the queue."""
        timer = next_timer(self.world.state)
        assert timer is not None
        if early:
            self.world.feed(evolve(timer.event, at=self.world.at))
        else:
            self.world.fire(late)

    # Connections.

    @precondition(lambda self: not self.is_over)
    @rule(who=index, after=pause, wrong=st.sampled_from([{}, {}, {}, *WRONG_TERMS]), attached=st.booleans())
    def dial(self, who: int, after: float, wrong: dict[str, object], attached: bool) -> None:
        """A HELLO, perhaps of one who was started with another flag; an older connection is half open."""
        self.world.wait(after)
        learner = self.learner(who)
        self.world.dial(learner, **wrong)
        if attached and learner.is_dialled:
            self.world.attach(learner)

    @precondition(lambda self: any(one.is_dialled for one in self.world.learners))
    @rule(who=index, relaunched=st.booleans(), after=pause)
    def lose(self, who: int, relaunched: bool, after: float) -> None:
        """A connection ends, with its process or without."""
        self.world.wait(after)
        there = [one for one in self.world.learners if one.is_dialled]
        learner = there[who % len(there)]
        self.world.lose(learner)
        if relaunched:
            learner.relaunch()

    @precondition(lambda self: not self.is_over)
    @rule(lost=st.lists(index, min_size=1, max_size=4), fires=st.integers(1, 4))
    def outage(self, lost: list[int], fires: int) -> None:
        """Several are gone for a while."""
        for learner in {self.learner(who).number: self.learner(who) for who in lost}.values():
            if learner.is_dialled:
                self.world.lose(learner)
        for _ in range(fires):
            if next_timer(self.world.state) is not None:
                self.world.fire()

    # Rare and hostile.

    @rule(kind=st.sampled_from(STRAYS), who=index, step_=st.integers(0, 9), more=index)
    def stray(self, kind: str, who: int, step_: int, more: int) -> None:
        """A fact that comes late, from an old connection, or from nowhere; one that cannot be raises."""
        if kind != "impossible":
            tell_stray(self.world, kind, self.learner(who), step_, more)
            return
        event = self.world.impossible(more)
        if event is not None:
            with pytest.raises((CoordinatorError, ConfigError)):
                step(self.world.state, event)
            self.world.assert_unchanged()

    @precondition(lambda self: not self.is_over)
    @rule(luck=st.integers(0, 5), how=st.sampled_from(["stop", "stop", "disk full", "poison", "drain"]))
    def disaster(self, luck: int, how: str) -> None:
        """What most runs are spared."""
        if luck != 3:
            return
        if how == "stop":
            self.world.stop()
        elif how == "disk full" and self.world.writing is not None:
            self.world.fail_save()
        elif how == "poison":
            self.world.tell(ev.SvdPoolPoisoned, message="worker cuda:1 timed out")
        elif how == "drain":
            self.world.drain()

    @rule(
        happens=one_in_four,
        cut=st.integers(0, 1 << 16),
        survives=st.booleans(),
        fall_back=st.integers(0, 1),
        changes=st.fixed_dictionaries({}, optional=CHANGES),
        finish=st.booleans(),
    )
    def crash(
        self, happens: bool, cut: int, survives: bool, fall_back: int, changes: dict[str, Any], finish: bool
    ) -> None:
        """The syncer dies, or has ended, and starts again, perhaps with other flags."""
        if happens or self.is_over:
            self.world.crash(cut, checkpoint_survives=survives)
            finish = finish and self.world.budget is not None
            self.world.start_again(fall_back, budget_finish=finish, **changes)

    # The end.

    def teardown(self) -> None:
        if not hasattr(self, "world") or not self.world.is_whole:
            return
        world = self.world
        phase, here = world.state.phase, list(world.learners)
        crowd = len(world.lines) % 2 == 0
        behave(world, here if crowd else here[: world.state.quorum])
        code = world.state.exit_code
        assert code in (0, 1, 3, 4)
        if crowd and phase in (Session.PROVISIONAL, Session.WAITING, Session.RUNNING, Session.BUDGET):
            assert code == 0, f"everybody behaved, and it ended with {code}: {world.state.exit_why}"
        assert retold(world.records) == world.lines


def retold(records: list[Record]) -> list[bytes]:
    """The lines of a tape made anew from its facts; where a process died, what it left stands."""
    lines: list[bytes] = []
    header = records[0].body
    assert isinstance(header, Header)
    state = initial_state(header.config)
    decisions: list[de.Decision] = []
    for record in records:
        because = record.because
        body = record.body
        if isinstance(body, ev.Event):
            assert not decisions or isinstance(body, ev.SessionResumed)
            state, due = step(state, body)
            decisions = list(due)
        elif isinstance(body, de.Decision):
            body = decisions.pop(0)
        lines.append(encode(seq=len(lines), at=record.at, body=body, because=because))
    return lines


def make_move(world: World, move: str, which: int) -> None:
    """Let one thing happen that is due, if there is one of that kind."""

    def choose(found: list[Learner]) -> list[Learner]:
        return [found[which % len(found)]] if found else []

    everybody = world.learners
    match move:
        case "train":
            for learner in everybody if which % 4 == 3 else choose(everybody):
                learner.train(1 + which % 3, world.budget)
                world.beat(learner)
        case "hear":
            while world.outgoing and which % 2:
                world.publish()
            for learner in everybody if which % 3 == 0 else choose([one for one in everybody if one.inbox]):
                while learner.inbox:
                    learner.hear(overtake=which % 4 == 0)
        case "answer":
            for learner in choose([one for one in everybody if one.pulls]):
                if not learner.answerable():
                    learner.train(1, world.budget)
                if learner.answerable():
                    world.answer(learner, which)
        case "deliver" if world.uploads:
            world.deliver(which)
        case "progress" if world.uploads:
            world.wait((0.0, 59.0, 400.0)[which % 3])
            world.progress(which)
        case "merge" if world.merges:
            world.merge(which, seconds=0.01 * which)
        case "merge late" if world.old_merges:
            world.merge_late(which, finite=which % 2 == 0)
        case "apply" if world.outers:
            world.apply()
        case "save" if world.writing is not None:
            world.save(seconds=0.125 * which)
        case "attach":
            for learner in choose([one for one in everybody if one.is_dialled and not one.is_joined]):
                world.attach(learner)
        case "come back":
            for learner in choose(everybody):
                world.come_back(learner)
        case "initialise" if world.inits:
            world.initialise()
        case "left" if world.lefts:
            world.tell_left(which)
        case "ack":
            for learner in choose([one for one in everybody if one.owes_ack]):
                world.acknowledge(learner)
        case "fire" if next_timer(world.state) is not None:
            world.fire()
        case "budget" if world.budget is not None and which < 3:
            for learner in choose(everybody):
                learner.train(world.budget, world.budget)
                world.report_budget(learner, world.budget + which % 2)
        case "save learner":
            for learner in choose(everybody):
                learner.save()


def tell_stray(world: World, kind: str, learner: Learner, step_: int, more: int) -> None:
    """Tell a fact that nobody waits for."""
    attempt = 1 + more % 3
    gen = generation(learner.number, max(learner.dial - more % 3, 0))
    who: dict[str, Any] = {"learner": learner.number, "generation": gen}
    name: dict[str, Any] = {"step": step_, "attempt": attempt}
    fragment = (step_ - 1) % world.terms.num_fragments
    match kind:
        case "nobody":
            world.hello((-1, 4, 99)[more % 3], "f" * 16, None)
        case "reused generation":
            if learner.dial - more % 3 > 0:
                world.hello(learner.number, gen, None)
        case "old connection":
            if gen == learner.generation:
                return
            if step_ % 2:
                world.tell(ev.LearnerLeft, reason="timed out", **who)
            else:
                world.tell(ev.LearnerJoined, **who)
        case "old heartbeat":
            world.tell(ev.Heartbeat, local_step=step_, **who)
        case "initial value":
            # Twice, of no such fragment, or of somebody else.
            due = gen == world.state.opener and fragment not in world.state.initial
            if learner.number != 0 or not due:
                world.tell(ev.FragmentInitialised, fragment=fragment, digest="e" * 32, finite=True, **who)
        case "push":
            head = {"fragment": fragment, "base_version": more, "c_steps": more, "c_tokens": 100 * more}
            world.offer(learner, **name, **head)
        case "contents":
            found = world.oracle.past.attempt(step_)
            if found is None or learner.number not in found.owing - set(found.uploads):
                head = {"fragment": fragment, "payload_bytes": 1, "digest": "d" * 32}
                contents = {"finite": True, "norm": 1.0, "cosine_to_momentum": None}
                world.tell(ev.PushReceived, **who, **name, **head, **contents)
        case "ack":
            world.tell(ev.FinalAckReceived, step=world.state.step + more % 2, **who)
        case "budget":
            world.tell(ev.BudgetReported, local_steps=7, **who)
        case "named timer":
            timers = (ev.GraceElapsed, ev.QuorumDeadlinePassed, ev.RetryDue)
            world.tell(timers[more % 3], **name)
        case "timer":
            world.tell(BARE_TIMERS[more % len(BARE_TIMERS)])
        case "gate":
            world.tell(ev.GateOpened, step=step_)


PROFILES = {
    "": settings(max_examples=50, stateful_step_count=35, derandomize=True),
    "full": settings(max_examples=400, stateful_step_count=35, derandomize=True),
    "first": settings(
        max_examples=100, stateful_step_count=35, derandomize=True, phases=[Phase.explicit, Phase.generate]
    ),
    "deep": settings(max_examples=2000, stateful_step_count=150, print_blob=True),
}

TestMachine = Machine.TestCase
TestMachine.settings = settings(
    PROFILES[MODE],
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TestMachine.pytestmark = [pytest.mark.timeout(0 if MODE == "deep" else 600)]
