"""Whether learners agree: the figures against their definitions in f64, on whole fragments and on samples."""

from itertools import combinations
from math import sqrt

import merge_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yeto.errors import MergeError
from yeto.merge import PushInput, commit_fragment, measure_agreement, merge_fragment
from yeto.merge.agreement import BLOCK, SAMPLE
from yeto.wire.codecs import by_name
from yeto.wire.layout import FragmentLayout, MergeMode, TensorSpec

SHAPES = [(1,), (255,), (16, 16), (257,), (40, 30), (3, 5)]


def fragment(mode=MergeMode.RDA, shapes=SHAPES):
    return FragmentLayout(
        mode=mode, tensors=tuple(TensorSpec(name=f"t{i}", shape=shape) for i, shape in enumerate(shapes))
    )


def random(size, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def push(values, weight=1.0, dtype="f32", correct=False):
    payload = by_name(dtype).encode(np.asarray(values, dtype=np.float32))
    return PushInput(payload=payload, dtype=dtype, weight=weight, correct=correct)


def measured(pushes, layout, momentum=None, *, mu=0.9, plain_average=False):
    momentum = torch.zeros(layout.numel) if momentum is None else momentum
    merged = merge_fragment(pushes, layout, momentum, mu=mu, plain_average=plain_average)
    return measure_agreement(pushes, layout, momentum, merged)


def cosine(left, right):
    return float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q4"])
@pytest.mark.parametrize("mode", list(MergeMode))
@pytest.mark.parametrize("shapes", [SHAPES, [(7,)], [(BLOCK,), (2, BLOCK)]], ids=["ragged", "tiny", "even"])
def test_every_figure_is_what_its_definition_says(shapes, mode, dtype):
    layout = fragment(mode, shapes)
    size, weights, lr, mu = layout.numel, [3.0, 1.0, 2.0], 0.7, 0.9
    params, momentum = random(size, 8), random(size, 9)
    deltas = [random(size, seed) + 0.3 * random(size, 7) for seed in range(3)]
    pushes = [
        push(delta, weight, dtype, correct=index == 1)
        for index, (delta, weight) in enumerate(zip(deltas, weights, strict=True))
    ]
    sent = [by_name(dtype).decode(one.payload, size).astype(np.float64) for one in pushes]
    merged = merge_fragment(pushes, layout, momentum, mu=mu)
    gradient = merged.gradient.numpy().astype(np.float64)
    found = measure_agreement(pushes, layout, momentum, merged)
    mean = oracle.average(sent, weights)
    pairs = [cosine(left, right) for left, right in combinations(sent, 2)]
    assert found.delta_cosine == pytest.approx(np.mean(pairs), abs=1e-5)
    assert found.norm_ratio == pytest.approx(np.linalg.norm(gradient) / np.linalg.norm(mean), abs=1e-5)
    for sweep in (False, True):
        merged = merge_fragment(pushes, layout, momentum, mu=mu)
        after = commit_fragment(params, momentum, merged, lr=lr, mu=mu, sweep=sweep).params
        offset = after.numpy().astype(np.float64) - (params.numpy().astype(np.float64) + mean)
        assert found.offset_ratio(lr=lr, mu=0.0 if sweep else mu) == pytest.approx(
            np.linalg.norm(offset) / np.linalg.norm(mean), abs=1e-5
        )


def test_deltas_at_right_angles_have_cosine_0_and_a_radial_average_of_sqrt_m():
    layout = fragment(shapes=[(4, 4)])
    pushes = [push(row) for row in np.eye(4, 16)]
    found = measured(pushes, layout)
    assert found.delta_cosine == 0.0
    assert found.norm_ratio == pytest.approx(sqrt(4), abs=1e-6)
    assert measured(pushes, layout, plain_average=True).norm_ratio == 1.0


def test_equal_deltas_agree_and_nothing_is_ahead_of_them_without_momentum():
    delta = random(300, 1)
    found = measured([push(delta), push(2 * delta)], fragment(shapes=[(300,)]))
    assert (found.delta_cosine, found.norm_ratio) == (1.0, 1.0)
    assert found.offset_ratio(lr=1.0, mu=0.0) == pytest.approx(0.0, abs=1e-6)
    # From a buffer of 0, Nesterov's first step is lr (1 + mu) times the gradient.
    assert found.offset_ratio(lr=0.7, mu=0.9) == pytest.approx(0.7 * 1.9 - 1, abs=1e-6)


def test_learners_that_undo_each_other_are_told():
    delta = random(64, 1)
    assert measured([push(delta), push(-0.5 * delta)], fragment(shapes=[(64,)])).delta_cosine == -1.0


def test_the_weighted_average_published_as_it_is_is_not_ahead_of_the_learners():
    layout = fragment()
    pushes = [push(random(layout.numel, seed), weight=1.0 + 9 * seed) for seed in range(3)]
    found = measured(pushes, layout, random(layout.numel, 9), plain_average=True)
    assert found.offset_ratio(lr=1.0, mu=0.0) == pytest.approx(0.0, abs=1e-6)


def test_what_has_no_direction_makes_no_pair():
    layout, zero, delta = fragment(shapes=[(64,)]), torch.zeros(64), random(64, 1)
    assert measured([push(delta)], layout).delta_cosine is None
    assert measured([push(delta), push(zero)], layout).delta_cosine is None
    assert measured([push(delta), push(zero), push(delta)], layout).delta_cosine == 1.0
    nothing = measured([push(zero), push(zero)], layout)
    assert (nothing.delta_cosine, nothing.norm_ratio, nothing.offset_ratio(lr=1.0, mu=0.9)) == (None,) * 3


@settings(max_examples=25, derandomize=True, database=None, deadline=None)
@given(st.floats(1e-18, 1e14), st.integers(2, 5), st.integers(1, 700))
def test_no_figure_depends_on_the_size_of_the_steps(scale, learners, size):
    layout, momentum = fragment(shapes=[(size,)]), random(size, 99)
    deltas = [random(size, seed) for seed in range(learners)]
    one = measured([push(delta) for delta in deltas], layout, momentum)
    other = measured([push(delta * scale) for delta in deltas], layout, momentum * scale)
    assert other.delta_cosine == pytest.approx(one.delta_cosine, abs=1e-5)
    assert other.norm_ratio == pytest.approx(one.norm_ratio, abs=1e-4, rel=1e-4)
    assert other.offset_ratio(lr=0.7, mu=0.9) == pytest.approx(
        one.offset_ratio(lr=0.7, mu=0.9), abs=1e-4, rel=1e-4
    )


@pytest.mark.parametrize("dtype", ["bf16", "q4"])
def test_a_large_fragment_is_judged_by_a_sample_from_its_first_to_its_last_tensor(dtype):
    # Learners agree on the first tensor and undo each other on the last; neither may decide alone.
    half = 2 * SAMPLE + 77
    layout = fragment(shapes=[(half,), (half,)])
    shared, other = random(half, 1), random(half, 2)
    pushes = [push(torch.cat([shared, sign * other]), dtype=dtype) for sign in (1, -1)]
    found = measured(pushes, layout)
    assert found.delta_cosine == pytest.approx(0.0, abs=0.02)
    # One tensor keeps its norm; where directions cancel the average is taken, which is 0.
    assert found.norm_ratio == pytest.approx(1.0, abs=0.02)


def test_what_a_tensor_is_still_to_be_multiplied_by_is_its_own_in_a_sample_too():
    sizes = [3 * BLOCK, SAMPLE // 2 + 5, 1, 91, 2 * SAMPLE]
    layout = fragment(shapes=[(size,) for size in sizes])
    scales = torch.cat([torch.full((size,), 10.0**index) for index, size in enumerate(sizes)])
    pushes = [push(scales * random(layout.numel, seed)) for seed in range(2)]
    merged = merge_fragment(pushes, layout, torch.zeros(layout.numel), mu=0.9)
    found = measure_agreement(pushes, layout, torch.zeros(layout.numel), merged)
    mean = (torch.from_numpy(np.frombuffer(pushes[0].payload, np.float32).copy())
            + torch.from_numpy(np.frombuffer(pushes[1].payload, np.float32).copy())) / 2  # fmt: skip
    exact = float(merged.gradient.double().norm() / mean.double().norm())
    assert found.norm_ratio == pytest.approx(exact, rel=0.02)


def test_a_gradient_that_is_not_finite_has_no_figures_and_a_used_one_is_refused():
    layout, momentum = fragment(shapes=[(8,)]), torch.zeros(8)
    pushes = [push(torch.full((8,), torch.nan)), push(torch.ones(8))]
    merged = merge_fragment(pushes, layout, momentum, mu=0.9)
    assert measure_agreement(pushes, layout, momentum, merged) is None
    commit_fragment(momentum, momentum, merged, lr=1.0, mu=0.0)
    with pytest.raises(MergeError, match="used up"):
        measure_agreement(pushes, layout, momentum, merged)
