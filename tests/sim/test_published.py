"""The published goodput figures, and how near the models come to them."""

import random

import pytest

from yeto.sim import published
from yeto.sim.published import CHIPS, ROWS, published_speeds, published_table, rms_error


@pytest.fixture(scope="module")
def cells():
    return published_table(seed=0)


def test_the_elastic_cells_are_met(cells):
    assert len(cells) == 30
    assert sum(cell.row.elastic for cell in cells) == 25
    assert rms_error(cells) <= 1.5
    assert max(abs(cell.error) for cell in cells if cell.row.elastic) <= 4.0


def test_the_row_that_is_not_elastic_is_a_closed_form(cells):
    """Each failure of the whole group costs a repair and a growing, and the clock stops meanwhile."""
    pause = published.REPAIR_SECONDS + published.GROW_SECONDS
    for cell in cells:
        if not cell.row.elastic:
            rate = cell.num_chips / published.FAILURE_SECONDS
            assert cell.goodput == pytest.approx(100 / (1 + rate * pause), abs=0.5)
            assert abs(cell.error) <= 5.0


def test_goodput_falls_with_chips_and_rises_with_learners(cells):
    rows = [[cell.goodput for cell in cells if cell.row is row] for row in ROWS]
    for row in rows:
        assert row == sorted(row, reverse=True)
    for column in zip(*rows, strict=True):
        assert list(column) == sorted(column)


def test_somebody_always_trains_when_there_are_four(cells):
    for cell in cells:
        assert cell.goodput <= cell.uptime + 1e-9 <= 100.0 + 1e-6
        if cell.row.num_learners >= 4:
            assert cell.uptime > 99.0
        if cell.row.num_learners == 1:
            assert cell.uptime == pytest.approx(cell.goodput, abs=0.1)


def test_only_the_seed_decides():
    row = ROWS[-1]
    first, again, other = (published._cell(row, CHIPS[0], row.paper[0], seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_learner_without_pauses_only_misses_its_slices(monkeypatch):
    """With no time to shrink or grow, what is lost is the share of slices that are being repaired."""
    monkeypatch.setattr(published, "SHRINK_SECONDS", 0.0)
    monkeypatch.setattr(published, "GROW_SECONDS", 0.0)
    monkeypatch.setattr(published, "REPAIR_SECONDS", published.FAILURE_SECONDS / published.SLICE_CHIPS / 9)
    seconds = 4e7
    stretches = list(published._learner_stretches(20 * published.SLICE_CHIPS, seconds, random.Random(1)))
    assert sum(one.end - one.begin for one in stretches) == pytest.approx(seconds)
    share = sum((one.end - one.begin) * one.share for one in stretches) / seconds
    assert share == pytest.approx(0.9, abs=0.01)


def test_learners_of_different_speed(subtests):
    waiting, quorum_1 = published_speeds(seed=0)
    for figure, paper in ((waiting, 84), (quorum_1, 100)):
        with subtests.test(figure.name):
            assert figure.paper == paper
            assert abs(figure.error) <= 1.5
