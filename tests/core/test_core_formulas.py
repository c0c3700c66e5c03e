"""The formulas, case by case."""

import math
import random

import pytest
from core_fleet import Session, config

from yeto.core import events as ev
from yeto.core import learner_weight
from yeto.core.pacing import (
    build_slowest,
    grace_seconds,
    open_interval,
    put_slowest,
    root_of,
    step_estimate,
)
from yeto.core.resume import version_at
from yeto.core.state import moment, names


@pytest.mark.parametrize(
    ("xi_step", "xi_quorum", "xi_sync", "cap", "expected"),
    [
        (None, 0.1, 0.1, 1.0, 1.0),
        (1.0, 0.5, 0.5, 1.0, 0.8),
        (0.1, 1.0, 1.0, 1.0, 0.0),
        (60.0, 0.0, 0.0, 1.0, 1.0),
    ],
)
def test_grace_is_the_compute_slack(xi_step, xi_quorum, xi_sync, cap, expected):
    seconds = grace_seconds(
        gamma=0.8, tau=2.0, xi_step=xi_step, xi_quorum=xi_quorum, xi_sync=xi_sync, cap=cap
    )
    assert seconds == pytest.approx(expected)


def test_step_estimate_is_seeded_then_smoothed_and_capped():
    first = step_estimate(None, 5.0, 10)
    assert first == 0.5
    assert step_estimate(first, 10.0, 2) == 1.25


@pytest.mark.parametrize(
    ("steps", "xi_step", "expected"),
    [(24.0, 1.0, 6.0), (24.0, 0.005, 0.1), (0.0, 1.0, 0.1), (24.0, None, 0.1)],
)
def test_open_interval(steps, xi_step, expected):
    settings = config(sync_interval_steps=steps, min_round_interval_seconds=0.1)
    assert open_interval(settings, 4, xi_step) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tokens", "steps", "weight"), [(100, 10, 1000.0), (0, 10, 0.0), (100, 0, 0.0), (7, 2, 24.5)]
)
def test_learner_weight(tokens, steps, weight):
    assert learner_weight(tokens, steps) == weight


def test_learner_weight_of_the_largest_counters_is_finite():
    assert math.isfinite(learner_weight(2**64 - 1, 1))


def test_versions_of_a_contiguous_cut():
    for num_fragments in (1, 3, 4):
        versions = [0] * num_fragments
        for step_ in range(1, 20):
            versions[(step_ - 1) % num_fragments] = step_
            assert [version_at(step_, p, num_fragments) for p in range(num_fragments)] == versions


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_the_tournament_tree_knows_the_maximum(size):
    draw = random.Random(size)
    values = [draw.random() for _ in range(size)]
    tree = build_slowest(values)
    for _ in range(50):
        index = draw.randrange(size)
        values[index] = draw.choice([-1.0, draw.random()])
        tree = put_slowest(tree, size, index, values[index])
        assert root_of(tree) == max(values)


def test_deadlines_lie_on_the_grid_and_never_early():
    assert moment(1.1) == 1.1
    assert moment(0.1 + 0.2) == 0.3
    assert moment(1.2345671) == 1.234568
    draw = random.Random(1)
    for _ in range(200):
        exact = draw.random() * 1e4
        assert exact - 1e-9 <= moment(exact) <= exact + 1.001e-6
        assert round(moment(exact), 6) == moment(exact)


def test_names_stay_short():
    assert names([]) == "nobody"
    assert names([3]) == "learner 3"
    assert names([2, 0]) == "learners 0, 2"
    assert names(range(10)) == "learners 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_the_step_estimate_counts_only_reports_that_advance():
    session = Session()
    session.start()

    def beat(local_step):
        session.tell(ev.Heartbeat, learner=0, generation=session.gen(0), local_step=local_step)
        return session.state.links[0].xi_step

    assert beat(10) is None
    session.wait(1.0)
    assert beat(10) is None
    session.wait(4.0)
    assert beat(20) == 0.5
    session.wait(10.0)
    assert beat(22) == 1.25
    assert beat(23) == 1.25  # no time has passed: nothing to learn, nothing to break
    session.wait(1.0)
    assert beat(24) == pytest.approx(0.5 * 1.25 + 0.5 * 0.5)


def test_pushes_are_reports_too_and_estimates_go_with_the_generation():
    session = Session()
    session.start()
    session.offer(0, 1, local_step=5)
    session.wait(2.0)
    session.offer(0, 2, local_step=9)
    assert session.state.links[0].xi_step == 0.5
    session.leave(0)
    session.join(0)
    assert session.state.links[0].xi_step is None
