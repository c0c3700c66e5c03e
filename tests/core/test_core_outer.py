"""The outer settings: what each kind orders, what it comes to on tensors, and how counting goes on."""

import math

import attrs
import numpy as np
import pytest
import torch
from core_fleet import Session, config, resumed
from hypothesis import given
from hypothesis import strategies as st

from yeto.core import decisions as de
from yeto.core.outer import (
    Outer,
    choose,
    derived,
    is_normalised,
    lookahead,
    planned_merges,
    resolved,
    unmoved,
    with_numbers,
)
from yeto.core.values import OuterMark
from yeto.errors import ConfigError, CoordinatorError
from yeto.merge import outer_step
from yeto.state.lookahead import derived as told_by_settings

STOCK = Outer(kind="stock", lr=0.7, momentum=0.9)
NORMALISED = Outer(kind="normalised", lr=1.0, momentum=0.9)
FRESH = OuterMark(fragment=0, merges=0, gain=0.0)


def coefficients(outer, merges):
    """The numbers of the first commits of a fragment, with the gain of its buffer after each."""
    mark = FRESH
    for _ in range(merges):
        lr, momentum = outer.coefficients(mark)
        mark = outer.advanced(mark)
        yield lr, momentum, mark.gain


def started(num_fragments=2, **changes):
    session = Session(config(**changes), num_fragments=num_fragments)
    session.start()
    return session


# The numbers.


def test_the_first_commits_of_normalised_momentum():
    found = list(coefficients(NORMALISED, 4))
    # k = 0 is direct averaging; mu_k = k / (k + 1) until 0.9; by hand, as fractions.
    assert found == [
        (1.0, 0.0, 1.0),
        (pytest.approx(1 / (1 + 1 / 2 * 3 / 2)), 1 / 2, 3 / 2),
        (pytest.approx(1 / (1 + 2 / 3 * 2)), 2 / 3, pytest.approx(2.0)),
        (pytest.approx(1 / (1 + 3 / 4 * 5 / 2)), 3 / 4, pytest.approx(5 / 2)),
    ]
    lr, momentum, gain = list(coefficients(NORMALISED, 400))[-1]
    assert momentum == 0.9
    assert (gain, lr) == (pytest.approx(10.0), pytest.approx(0.1))


def test_stock_and_direct_order_the_same_numbers_for_ever():
    assert [found[:2] for found in coefficients(STOCK, 3)] == [(0.7, 0.9)] * 3
    assert [gain for _, _, gain in coefficients(STOCK, 3)] == [1.0, 1.9, pytest.approx(2.71)]
    direct = Outer(kind="direct", lr=1.0, momentum=0.0)
    assert list(coefficients(direct, 3)) == [(1.0, 0.0, 1.0)] * 3


@given(
    lr=st.floats(0.1, 2.0),
    momentum=st.floats(0.0, 0.99),
    merges=st.integers(1, 300),
)
def test_a_gradient_that_stays_the_same_is_applied_once_a_merge(lr, momentum, merges):
    outer = Outer(kind="normalised", lr=lr, momentum=momentum)
    buffer = 0.0
    for step_lr, mu, gain in coefficients(outer, merges):
        buffer = mu * buffer + 1.0
        assert step_lr * (1.0 + mu * buffer) == pytest.approx(lr, rel=1e-12)
        assert gain == buffer


@given(
    gradients=st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=40),
    momentum=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
)
def test_the_real_outer_step_by_these_numbers_is_the_formula(gradients, momentum):
    """theta -= lr (D + mu_k buf) / (1 + mu_k g), in f64 and as published, against what the shell computes."""
    outer = Outer(kind="normalised", lr=0.8, momentum=momentum)
    theta, buf, g = 0.0, 0.0, 0.0
    params, buffer, mark = torch.zeros(1), torch.zeros(1), FRESH
    for k, gradient in enumerate(gradients):
        mu_k = min(momentum, 1 - 1 / (k + 1))
        buf = mu_k * buf + gradient
        g = mu_k * g + 1
        theta -= 0.8 * (gradient + mu_k * buf) / (1 + mu_k * g)
        lr, mu = outer.coefficients(mark)
        params, buffer = outer_step(params, buffer, torch.tensor([gradient]), lr=lr, mu=mu)
        mark = outer.advanced(mark)
    scale = 1e-6 * (1 + sum(map(abs, gradients)))
    np.testing.assert_allclose(float(params), theta, atol=scale)
    np.testing.assert_allclose(float(buffer), buf, atol=scale)
    assert (mark.merges, mark.gain) == (len(gradients), pytest.approx(g))


def test_the_scale_of_the_correction_makes_the_buffer_a_mean():
    assert STOCK.momentum_scale(OuterMark(fragment=0, merges=5, gain=4.1)) is None
    assert NORMALISED.momentum_scale(FRESH) == 1.0  # the buffer is 0, whatever it is scaled by
    buffer, mark = 0.0, FRESH
    for _ in range(30):
        _, mu = NORMALISED.coefficients(mark)
        buffer, mark = mu * buffer + 0.25, NORMALISED.advanced(mark)
        assert buffer * NORMALISED.momentum_scale(mark) == pytest.approx(0.25)


# What is chosen, and what is said.


@pytest.mark.parametrize(
    ("interval", "merges", "learners", "kind"),
    [
        (4.0, 24, 2, "direct"),
        (8.0, 1000, 2, "direct"),
        (0.0, 1000, 2, "direct"),
        (12.0, 100, 4, "direct"),
        (16.0, 6, 2, "normalised"),
        (16.0, 6, 4, "normalised"),
        (16.0, 3, 4, "direct"),
        (24.0, 4, 2, "normalised"),
        (24.0, 100, 1, "direct"),
    ],
)
def test_auto_goes_by_what_was_measured(interval, merges, learners, kind):
    assert choose(interval=interval, merges=merges, num_learners=learners)[0] == kind
    outer = resolved(
        config(outer="auto", sync_interval_steps=interval, num_learners=learners, quorum=1),
        num_fragments=8,
        target=8 * merges,
    )
    assert outer.kind == kind
    assert outer.sentence.startswith(f"{kind}, lr 1, momentum ")
    assert "(auto: " in outer.sentence
    assert not outer.warnings


def test_a_budget_limits_the_planned_merges():
    settings = config(learner_budget_steps=96, sync_interval_steps=24.0)
    assert planned_merges(settings, num_fragments=8, target=8000) == 4
    assert planned_merges(settings, num_fragments=8, target=16) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sync_interval_steps": 24.0}, ["applies a steady gradient 7.0 times"]),
        ({"sync_interval_steps": 4.0}, ["4 steps apart was found to train worse"]),
        ({"sync_interval_steps": 0.0}, ["without a sync interval was found to train worse"]),
        ({"sync_interval_steps": 24.0, "outer_momentum": 0.5}, []),
        ({"sync_interval_steps": 24.0, "total_steps": 8000}, []),
        ({"sync_interval_steps": 24.0, "outer_lr": 1.0, "outer_momentum": 0.0}, []),
        (
            {"sync_interval_steps": 24.0, "outer_momentum": 0.5, "closing_sweep": "off"},
            ["without a closing sweep"],
        ),
        ({"outer": "direct"}, []),
        ({"outer": "direct", "outer_momentum": 0.9, "sync_interval_steps": 16.0}, ["10.0 times"]),
        ({"outer": "normalised", "sync_interval_steps": 4.0}, ["never measured"]),
        ({"outer": "normalised", "sync_interval_steps": 24.0}, []),
        ({"budget_finish": True}, []),
    ],
)
def test_what_is_said_against_settings(changes, words):
    settings = config(**{"closing_sweep": "plain", "total_steps": 48, **changes})
    found = resolved(settings, num_fragments=8, target=settings.total_steps).warnings
    assert len(found) == len(words)
    assert all(word in warning for word, warning in zip(words, found, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outer": "nesterov"}, "--outer nesterov: must be one of stock, direct, normalised, auto"),
        ({"outer_lr": 0.0}, "--outer-lr 0.0"),
        ({"outer_momentum": 1.0}, "--outer-momentum 1.0"),
        ({"outer_momentum": math.nan}, "--outer-momentum nan"),
    ],
)
def test_impossible_settings(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes).validated()


def test_the_numbers_of_a_kind_can_be_stated():
    assert with_numbers(config()) == config(outer_lr=0.7, outer_momentum=0.9)
    assert with_numbers(config(outer="direct", outer_lr=0.8)) == config(
        outer="direct", outer_lr=0.8, outer_momentum=0.0
    )
    assert with_numbers(config(outer="auto")) == config(outer="auto")


# In a session.


def test_a_configuration_of_old_is_spoken_of_as_ever_and_decides_as_ever():
    old, new = started(outer_lr=0.7, outer_momentum=0.9), started()
    begun = old.only(de.RoundsStarted)
    assert (begun.outer, begun.why) == (None, "2 of 2 learners are here, 2 are enough")
    assert old.state.outer.warnings == new.state.outer.warnings != ()
    assert new.only(de.RoundsStarted).outer == "stock"
    for session in (old, new):
        for step in (1, 2, 3):
            session.commit(step)
    assert old.all(de.CommitOrdered) == new.all(de.CommitOrdered)
    assert old.all(de.MergeOrdered) == new.all(de.MergeOrdered)
    assert {(order.lr, order.momentum) for order in old.all(de.CommitOrdered)} == {(0.7, 0.9)}
    assert {order.momentum_scale for order in old.all(de.MergeOrdered)} == {None}


def test_direct_averages_every_round_and_corrects_nothing():
    session = started(outer="direct", delta_correction="heloco-all", total_steps=6)
    for step in (1, 2, 3):
        session.commit(step)
    for merge in session.all(de.MergeOrdered):
        assert merge.plain_average
        assert not any(part.correct for part in merge.responders)
    assert [(order.lr, order.momentum, order.sweep) for order in session.all(de.CommitOrdered)] == [
        (1.0, 0.0, False)
    ] * 3
    # No grace is lost on it, and nobody is waited for as in a sweep.
    assert not any(opened.sweep for opened in session.all(de.AttemptOpened))


def test_each_fragment_counts_its_own_merges_and_the_sweep_counts_none():
    session = started(outer="normalised", closing_sweep="plain", total_steps=6)
    for step in range(1, 7):
        session.commit(step)
    orders = session.all(de.CommitOrdered)
    assert [order.momentum for order in orders] == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0]
    assert [order.sweep for order in orders] == [False] * 4 + [True] * 2
    assert session.state.outer_marks == tuple(OuterMark(fragment=p, merges=2, gain=1.5) for p in (0, 1))
    assert [merge.momentum_scale for merge in session.all(de.MergeOrdered)] == [1.0] * 4 + [None] * 2


@pytest.mark.parametrize("kind", ["stock", "direct", "normalised"])
def test_a_checkpoints_settings_tell_the_lookahead_that_commits_leave(kind):
    """A checkpoint of old has only settings to go by; they tell the same at every step, sweep included."""
    session = started(outer=kind, closing_sweep="plain", total_steps=8, outer_lr=0.5, outer_momentum=0.25)
    settings, lookaheads = attrs.asdict(session.state.config), [0.0, 0.0]
    for step in range(1, 9):
        session.commit(step)
        commit, merge = session.all(de.CommitOrdered)[-1], session.all(de.MergeOrdered)[-1]
        assert (commit.step, merge.step) == (step, step)
        lookaheads[commit.fragment] = lookahead(commit, normalised=is_normalised(merge))
        versions = session.state.versions
        told = told_by_settings(settings, versions, marks=session.state.outer_marks, finish_target=None)
        assert told == tuple(lookaheads)
        ahead = {"stock": 0.125, "direct": 0.125, "normalised": 0.0}[kind]
        assert lookaheads[commit.fragment] == (0.0 if step > 6 else ahead)


@pytest.mark.parametrize("kind", ["stock", "direct", "normalised"])
def test_a_resume_goes_on_counting(kind):
    whole, halves = (started(outer=kind, sync_interval_steps=0.0) for _ in range(2))
    for step in range(1, 10):
        whole.commit(step)
    for step in range(1, 6):
        halves.commit(step)
    halves.feed(resumed(halves, 5, outer_marks=halves.state.outer_marks))
    for learner in (0, 1):
        halves.join(learner)
    for step in range(6, 10):
        halves.commit(step)
    assert halves.state.outer_marks == whole.state.outer_marks
    numbers = [[(o.step, o.lr, o.momentum) for o in s.all(de.CommitOrdered)] for s in (halves, whole)]
    assert numbers[0] == numbers[1]


def test_a_checkpoint_without_counters_has_them_derived_from_its_versions():
    session = started(3, outer_momentum=0.5)
    for step in range(1, 6):
        session.commit(step)
    counted = session.state.outer_marks
    assert derived(session.config, session.state.versions) == counted
    session.feed(resumed(session, 5))
    assert session.state.outer_marks == counted
    assert derived(config(), (0, 0)) == unmoved(2)
    # The gain ends at its limit, and the counting with it.
    (mark,) = derived(config(), (10**9,))
    assert (mark.merges, mark.gain) == (10**9, pytest.approx(10.0))


def test_counters_of_other_fragments_are_no_prefix_of_a_run():
    session = started()
    with pytest.raises(CoordinatorError, match="the counters of the outer step"):
        session.feed(resumed(session, 0, outer_marks=unmoved(3)))


@pytest.mark.parametrize(
    ("merges", "gain"), [(-1, 0.0), (0, 1.0), (1, 0.0), (1, -1.0), (1, 1.5), (2, 1e308), (3, 2.0)]
)
def test_counters_that_no_two_commits_make_are_no_prefix_of_a_run(merges, gain):
    session = started(outer="normalised")
    for step in range(1, 5):
        session.commit(step)
    marks = (OuterMark(fragment=0, merges=2, gain=1.5), OuterMark(fragment=1, merges=merges, gain=gain))
    with pytest.raises(CoordinatorError, match=rf"outer_marks\[1\]: {merges} merges .* after 2 commits"):
        session.feed(resumed(session, 4, outer_marks=marks))
