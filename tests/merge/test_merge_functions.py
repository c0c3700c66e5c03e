"""The functions of one tensor: exact cases, the slow oracle, properties, refusals."""

import math

import merge_oracle as oracle
import pytest
import torch

from yeto.errors import MergeError
from yeto.merge import (
    average,
    correct_delta,
    isotropic,
    learner_weight,
    outer_step,
    radial_directional_average,
)
from yeto.merge.blocks import BLOCK

SIZES = [1, 2, 255, 256, 257, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float32)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(actual, expected, rtol=2e-6, atol=1e-12):
    torch.testing.assert_close(
        actual.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=rtol, atol=atol
    )


def near(actual, expected, tolerance=2e-6):
    """Compare whole tensors: the error's norm against the norm of what is right."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    error = torch.linalg.vector_norm(actual.double() - expected)
    assert error <= tolerance * torch.linalg.vector_norm(expected), float(error)


class TestWeights:
    def test_quantity_times_quality(self):
        assert learner_weight(100, 10) == 1000.0
        assert learner_weight(100, 0) == 0.0

    @pytest.mark.parametrize("function", [average, radial_directional_average])
    @pytest.mark.parametrize(
        ("weights", "text"),
        [
            ([0.0, 0.0], "sum to 0"),
            ([1.0, -1.0], "weight 1 is -1"),
            ([1.0, math.nan], "weight 1 is nan"),
            ([math.inf, 1.0], "weight 0 is inf"),
            ([1.0], "2 deltas but 1 weights"),
        ],
    )
    def test_unusable_weights_are_refused(self, function, weights, text):
        with pytest.raises(MergeError, match=text):
            function([tensor(1), tensor(2)], weights)

    @pytest.mark.parametrize("function", [average, radial_directional_average])
    def test_nothing_to_merge_is_refused(self, function):
        with pytest.raises(MergeError, match="nothing to merge"):
            function([], [])

    @pytest.mark.parametrize("function", [average, radial_directional_average])
    def test_shapes_and_dtypes_must_fit(self, function):
        with pytest.raises(MergeError, match=r"delta 1 has shape \(3,\)"):
            function([tensor(1, 2), tensor(1, 2, 3)], [1, 1])
        with pytest.raises(MergeError, match=r"delta 0 is torch.float64"):
            function([tensor(1, 2).double(), tensor(1, 2)], [1, 1])


class TestAverage:
    def test_golden(self):
        assert average([tensor(1, 2), tensor(5, 6)], [1, 3]).tolist() == [4.0, 5.0]

    @pytest.mark.parametrize("size", SIZES)
    def test_matches_the_oracle(self, size):
        deltas = [random(size, seed=seed) for seed in range(3)]
        close(average(deltas, [1, 2.5, 7]), oracle.average(deltas, [1, 2.5, 7]), rtol=1e-5, atol=1e-6)

    def test_one_learner_is_itself(self):
        delta = random(1000)
        assert torch.equal(average([delta], [17.3]), delta)

    def test_a_zero_weight_takes_no_part(self):
        a, b, c = (random(300, seed=seed) for seed in range(3))
        assert torch.equal(average([a, b, c], [1, 0, 2]), average([a, c], [1, 2]))

    @pytest.mark.parametrize("shape", [(), (1,), (4, 5), (2, 3, 4), (0,)])
    def test_keeps_the_shape_and_the_inputs(self, shape):
        deltas = [random(*shape, seed=1), random(*shape, seed=2)]
        before = [delta.clone() for delta in deltas]
        for function in (average, radial_directional_average):
            assert function(deltas, [1, 2]).shape == shape
        assert all(torch.equal(a, b) for a, b in zip(deltas, before, strict=True))

    def test_takes_transposed_tensors(self):
        delta = random(4, 6).T
        assert torch.equal(average([delta], [1]), delta)


class TestRadial:
    @pytest.mark.parametrize(
        ("deltas", "expected"),
        [
            ([(2, 0), (0, 2)], (math.sqrt(2), math.sqrt(2))),
            ([(3, 4), (0, 0)], (1.5, 2.0)),
            ([(1, 0), (-1, 0)], (0.0, 0.0)),
            ([(0, 0), (0, 0)], (0.0, 0.0)),
        ],
    )
    def test_golden(self, deltas, expected):
        merged = radial_directional_average([tensor(*delta) for delta in deltas], [1, 1])
        torch.testing.assert_close(merged, tensor(*expected), rtol=0, atol=1e-6)

    def test_one_learner_is_itself(self):
        delta = random(1000)
        assert torch.equal(radial_directional_average([delta], [3.7]), delta)

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("learners", [2, 3, 7])
    def test_matches_the_oracle(self, size, learners):
        deltas = [random(size, seed=seed) * 10.0 ** (seed - 2) for seed in range(learners)]
        weights = [1.0 + 3 * seed for seed in range(learners)]
        near(radial_directional_average(deltas, weights), oracle.radial(deltas, weights))

    @pytest.mark.parametrize("scale", [1e-44, 1e-40, 1e-36, 1e-20, 1e15, 1e30, 1e37])
    def test_far_magnitudes_neither_vanish_nor_overflow(self, scale):
        deltas = [random(300, seed=1) * scale, random(300, seed=2) * scale]
        merged = radial_directional_average(deltas, [1, 2])
        near(merged, oracle.radial(deltas, [1, 2]), tolerance=2e-6 if scale > 1e-38 else 0.05)

    def test_tiny_beside_normal_still_counts_as_a_direction(self):
        deltas = [tensor(1e-42, 0), tensor(0, 1)]
        merged = radial_directional_average(deltas, [1, 1])
        near(merged, oracle.radial(deltas, [1, 1]))

    def test_cancelling_directions_fall_back_to_the_average(self):
        a = random(5000)
        noisy = -a * (1 + 1e-8)
        assert torch.equal(radial_directional_average([a, noisy], [1, 1]), average([a, noisy], [1, 1]))
        pair = [a, -3 * a]
        near(radial_directional_average(pair, [1, 1]), oracle.average(pair, [1, 1]))

    @pytest.mark.parametrize("factor", [0.25, 3.0, 1e-9, 1e12])
    def test_scaling_all_weights_changes_nothing(self, factor):
        deltas = [random(4000, seed=seed) for seed in range(3)]
        weights = [1.0, 2.0, 4.0]
        scaled = [factor * weight for weight in weights]
        for function in (average, radial_directional_average):
            near(function(deltas, scaled), function(deltas, weights).double(), tolerance=2e-7)

    @pytest.mark.parametrize("factor", [2.0**-20, 8.0])
    def test_homogeneous_of_degree_one(self, factor):
        deltas = [random(4000, seed=seed) for seed in range(3)]
        for function in (average, radial_directional_average):
            scaled = function([factor * delta for delta in deltas], [1, 2, 3])
            assert torch.equal(scaled, factor * function(deltas, [1, 2, 3]))

    def test_order_of_learners_changes_no_bit(self):
        deltas = [random(BLOCK + 5, seed=seed) for seed in range(4)]
        deltas.append(deltas[0].flip(0))  # the same norm, up to summation order
        deltas += [torch.eye(5)[i].repeat(BLOCK // 5 + 2)[: BLOCK + 5].clone() for i in range(3)]
        weights = [1.0, 2.0, 2.0, 5.0, 1.0, 1.0, 1.0, 1.0]
        expected = radial_directional_average(deltas, weights)
        for seed in range(6):
            order = torch.randperm(len(deltas), generator=torch.Generator().manual_seed(seed)).tolist()
            merged = radial_directional_average([deltas[i] for i in order], [weights[i] for i in order])
            assert torch.equal(merged, expected)


class TestIsotropic:
    @pytest.mark.parametrize(
        ("matrix", "expected"),
        [
            ([[3, 0], [0, 1]], [[2, 0], [0, 2]]),
            ([[1, 0, 0], [0, 2, 0]], [[1.5, 0, 0], [0, 1.5, 0]]),
            ([[3, 4], [6, 8]], [[1.5, 2], [3, 4]]),
            ([[0, 0], [0, 0]], [[0, 0], [0, 0]]),
        ],
    )
    def test_golden(self, matrix, expected):
        merged = isotropic(torch.tensor(matrix, dtype=torch.float32))
        torch.testing.assert_close(merged, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (8, 8), (64, 17), (17, 64), (96, 96)])
    def test_matches_the_oracle(self, shape):
        matrix = random(*shape)
        near(isotropic(matrix), oracle.isotropic(matrix), tolerance=2e-5)

    def test_rounding_noise_is_not_lifted(self):
        matrix = torch.outer(random(64, seed=1), random(64, seed=2))
        merged = isotropic(matrix)
        assert torch.linalg.matrix_rank(merged.double(), rtol=1e-3) == 1
        near(merged, matrix.double() / 64, tolerance=2e-5)

    @pytest.mark.parametrize("scale", [1e-30, 1e30])
    def test_is_homogeneous(self, scale):
        matrix = random(12, 9)
        near(isotropic(matrix * scale) / scale, isotropic(matrix).double(), tolerance=1e-5)

    def test_leaves_input_and_thread_setting_alone(self):
        matrix = random(6, 4)
        before, threads = matrix.clone(), torch.get_num_threads()
        isotropic(matrix)
        assert torch.equal(matrix, before)
        assert torch.get_num_threads() == threads

    def test_empty_matrix(self):
        assert isotropic(torch.empty(0, 4)).shape == (0, 4)

    @pytest.mark.parametrize(
        ("matrix", "text"),
        [
            (torch.ones(3), "iso merges matrices"),
            (torch.ones(3, 3).double(), "float64"),
            (torch.full((3, 3), math.nan), "SVD of a 3 x 3 matrix failed"),
        ],
    )
    def test_refusals(self, matrix, text):
        with pytest.raises(MergeError, match=text):
            isotropic(matrix)


class TestCorrection:
    @pytest.mark.parametrize(
        ("delta", "expected"),
        [
            ((1, 0.1), (1, 0.1)),
            ((-2, 0.5), (-1.6048644, 0.5)),
            ((0.1, 1), (0.3679057, 0.9352247)),
        ],
    )
    def test_golden(self, delta, expected):
        torch.testing.assert_close(
            correct_delta(tensor(*delta), tensor(1, 0)), tensor(*expected), rtol=0, atol=1e-6
        )

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("mix", [-5.0, -0.3, 0.0, 0.1, 0.3])
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
    def test_matches_the_oracle(self, size, mix, scale):
        momentum = random(size, seed=1)
        delta = scale * (random(size, seed=2) + mix * momentum)
        near(correct_delta(delta, momentum), oracle.correct(delta, momentum), tolerance=5e-6)

    @pytest.mark.parametrize(("delta", "momentum"), [(0.0, 1.0), (1e-9, 1.0), (1.0, 0.0), (1.0, -1e-9)])
    def test_nearly_zero_vectors_are_left_alone(self, delta, momentum):
        before = tensor(delta, delta)
        assert torch.equal(correct_delta(before, tensor(-momentum, momentum)), before)

    def test_an_agreeing_delta_keeps_every_bit(self):
        momentum = random(5000)
        delta = momentum + random(5000, seed=3)
        corrected = correct_delta(delta, momentum)
        assert torch.equal(corrected, delta)
        assert corrected.data_ptr() != delta.data_ptr()

    def test_turning_keeps_the_length(self):
        momentum, delta = random(5000, seed=1), random(5000, seed=2)
        corrected = correct_delta(delta, momentum)
        assert not torch.equal(corrected, delta)
        torch.testing.assert_close(corrected.norm(), delta.norm(), rtol=1e-5, atol=0)

    def test_shape_is_kept_and_checked(self):
        assert correct_delta(-torch.ones(2, 3), torch.ones(2, 3)).shape == (2, 3)
        assert correct_delta(tensor(-1)[0], tensor(1)[0]).shape == ()
        with pytest.raises(MergeError, match="momentum has shape"):
            correct_delta(torch.ones(2, 3), torch.ones(3, 2))


class TestOuterStep:
    def test_golden(self):
        params, momentum = tensor(0), tensor(0)
        for expected in (-1.33, -3.227, -5.6343):
            params, momentum = outer_step(params, momentum, tensor(1), lr=0.7, mu=0.9)
            torch.testing.assert_close(params, tensor(expected), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("size", SIZES)
    def test_equals_torch_sgd_bit_for_bit(self, size):
        ours, momentum = random(size), torch.zeros(size)
        theirs = torch.nn.Parameter(ours.clone())
        optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
        for seed in range(4):
            gradient = random(size, seed=seed + 10)
            theirs.grad = gradient.clone()
            optimizer.step()
            ours, momentum = outer_step(ours, momentum, gradient, lr=0.7, mu=0.9)
        assert torch.equal(ours, theirs.detach())
        assert torch.equal(momentum, optimizer.state[theirs]["momentum_buffer"])

    def test_no_momentum_is_plain_sgd(self):
        params, gradient = random(300), random(300, seed=1)
        new, buffer = outer_step(params, torch.zeros(300), gradient, lr=1.0, mu=0.0)
        assert torch.equal(new, params - gradient)
        assert torch.equal(buffer, gradient)

    @pytest.mark.parametrize("size", SIZES)
    def test_matches_the_oracle(self, size):
        params, momentum, gradient = (random(size, seed=seed) for seed in range(3))
        expected = oracle.nesterov(params, momentum, gradient, 0.7, 0.9)
        actual = outer_step(params, momentum, gradient, lr=0.7, mu=0.9)
        for ours, theirs in zip(actual, expected, strict=True):
            near(ours, theirs, tolerance=5e-7)

    def test_inputs_are_untouched(self):
        inputs = [random(50, seed=seed) for seed in range(3)]
        before = [given.clone() for given in inputs]
        outer_step(*inputs, lr=0.7, mu=0.9)
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))

    def test_shapes_must_fit(self):
        with pytest.raises(MergeError, match="gradient has shape"):
            outer_step(tensor(1, 2), tensor(1, 2), tensor(1), lr=1, mu=0)
