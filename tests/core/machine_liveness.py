"""A world that behaves again: whatever happened before, the session must come to its end.

Shell and learners do at once what they are asked for, the dead stay away, and time passes only when nothing
else can happen: then the next deadline fires. A bounded number of facts must do.
"""

from __future__ import annotations

from collections.abc import Iterator

from machine_learner import Learner
from machine_world import World

from yeto.core import Phase, next_timer

FACTS_PER_ROUND = 60
"""Four learners that join, answer three attempts and hear of it, and the shell's part, with room to spare."""
FACTS_BESIDE = 150
STEP_SECONDS = 0.05


def behave(world: World, alive: list[Learner]) -> None:
    """Let the world behave until the session has ended."""
    world.mischief.plan([])
    for learner in world.learners:
        if learner not in alive and learner.is_dialled:
            world.lose(learner)
    state = world.state
    left = FACTS_BESIDE + FACTS_PER_ROUND * max(state.target - state.step, 0)
    commits_by = None
    step = -1
    while world.state.phase is not Phase.ENDED:
        assert left > 0, f"the session does not end: {world.state}"
        left -= 1
        happened = next_good_fact(world, alive)
        assert happened, f"nothing is under way and no deadline is armed: {world.state}"
        if world.state.phase is not Phase.RUNNING or len(world.state.current) < world.state.quorum:
            commits_by = None
        elif world.state.step != step or commits_by is None:
            step, commits_by = world.state.step, world.at + _patience(world)
        assert commits_by is None or world.at <= commits_by, "K learners answer, yet nothing is committed"


def _patience(world: World) -> float:
    """Seconds within which learners that answer bring the next commit about.

    What an open attempt still waits for (its deadline may have moved), the longest retry, the wait for a
    first estimate, and the throttle.
    """
    state = world.state
    config = state.config
    timers = 4 * config.quorum_timeout_seconds + 60.0 + 10.0 + config.grace_cap_seconds
    slowest = max((link.xi_step or 0.0 for link in state.links.values()), default=0.0)
    throttle = config.sync_interval_steps * slowest + config.min_round_interval_seconds
    return timers + throttle + 10.0


def next_good_fact(world: World, alive: list[Learner]) -> bool:
    """Let the next thing happen that a behaving world brings about; False when there is nothing."""
    return any(_good_facts(world, alive))


def _good_facts(world: World, alive: list[Learner]) -> Iterator[bool]:
    """Try one thing after the other; True when it told a fact."""
    live = {learner.generation for learner in world.learners if learner.is_joined}
    world.uploads = [upload for upload in world.uploads if upload.generation in live]
    yield _shell(world)
    for learner in alive:
        yield _connect(world, learner)
    while world.outgoing:
        world.publish()
    for learner in alive:
        yield learner.is_joined and _learner(world, learner)
    if world.lefts:
        world.tell_left(0)
        yield True
    if next_timer(world.state) is not None:
        world.fire()
        yield True


def _shell(world: World) -> bool:
    """What the syncer itself has to do."""
    if world.waits_for_pool():
        world.drain()
    elif world.writing is not None and not world.mischief.strikes("disk slow"):
        world.save()
    elif world.inits and world.learners[0].generation == world.inits[0][0]:
        world.initialise()
    elif world.outers:
        world.apply()
    elif world.merges:
        world.merge()
    elif world.uploads and world.mischief.strikes("upload slow"):
        world.wait(59.0)
        world.progress(0)
    elif world.uploads:
        world.deliver()
    else:
        return False
    return True


def _connect(world: World, learner: Learner) -> bool:
    if learner.is_dialled and learner.terms != world.right_terms:
        # Started with a wrong flag: it is started again.
        world.lose(learner)
        return True
    if learner.is_joined:
        return False
    if learner.is_dialled:
        world.attach(learner)
        return True
    if world.state.phase is Phase.STOPPING:
        return False
    if learner.was_refused:
        learner.relaunch()
    world.dial(learner)
    return True


def _learner(world: World, learner: Learner) -> bool:
    """What a connected learner does next: hear, answer, acknowledge, report, or train."""
    while learner.inbox:
        learner.hear()
    budget = world.budget
    if learner.owes_ack:
        world.acknowledge(learner)
    elif budget is not None and _owes_report(world, learner, budget):
        learner.train(budget, budget)
        world.report_budget(learner, budget)
    elif learner.answerable():
        world.answer(learner)
    elif (
        learner.pulls
        and not learner.is_frozen
        and any(not learner.book.work(fragment)[0] for fragment in learner.pulls)
    ):
        world.wait(STEP_SECONDS)
        learner.train(1, budget)
        world.beat(learner)
    else:
        return False
    return True


def _owes_report(world: World, learner: Learner, budget: int) -> bool:
    """Whether it has to say that its budget is used up: once frozen, and all of them in the end."""
    if world.config.budget_finish or learner.number in world.state.reports:
        return False
    if world.state.phase is Phase.BUDGET:
        return True
    return learner.local_step >= budget and world.state.phase in (Phase.WAITING, Phase.RUNNING)
