"""The functions of one fragment: from wire bytes to the next version."""

import math
import os
import subprocess
import sys
from pathlib import Path

import merge_oracle as oracle
import numpy as np
import pytest
import torch
from attrs import evolve

from yeto.errors import MergeError
from yeto.merge import (
    PushInput,
    apply_outer_step,
    average,
    commit_fragment,
    correct_delta,
    examine_push,
    isotropic,
    merge_fragment,
    outer_step,
    radial_directional_average,
    tensor_digest,
)
from yeto.merge import fragment as fragment_module
from yeto.merge.blocks import BLOCK
from yeto.merge.fragment import decomposes
from yeto.wire import bf16
from yeto.wire.codecs import by_name
from yeto.wire.digest import digest
from yeto.wire.layout import FragmentLayout, MergeMode, TensorSpec

SHAPES = [(), (1,), (255,), (16, 16), (257,), (40, 30), (BLOCK,), (3, BLOCK + 11)]
DTYPES = ["f32", "bf16", "q4"]


def fragment(mode=MergeMode.RDA, shapes=SHAPES):
    return FragmentLayout(
        mode=mode, tensors=tuple(TensorSpec(name=f"t{i}", shape=shape) for i, shape in enumerate(shapes))
    )


def random(size, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def encode(values, dtype):
    return by_name(dtype).encode(np.asarray(values, dtype=np.float32))


def decode(payload, dtype, numel):
    return torch.from_numpy(by_name(dtype).decode(payload, numel))


def push(values, dtype="f32", weight=1.0, correct=False):
    return PushInput(payload=encode(values, dtype), dtype=dtype, weight=weight, correct=correct)


def spans(layout):
    start = 0
    for spec in layout.tensors:
        yield spec, slice(start, start + spec.numel)
        start += spec.numel


def near(actual, expected, tolerance=5e-6):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert (actual.double() - expected).norm() <= tolerance * expected.norm()


class TestExamine:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_facts(self, dtype):
        layout = fragment()
        payload = encode(random(layout.numel, 1), dtype)
        delta, momentum = decode(payload, dtype, layout.numel).double(), random(layout.numel, 2)
        facts = examine_push(payload, dtype, layout.numel, momentum, layout)
        cosine = -(delta @ momentum.double()) / (delta.norm() * momentum.double().norm())
        assert facts.finite
        assert facts.digest == digest(payload)
        assert facts.norm == pytest.approx(float(delta.norm()), rel=1e-12)
        assert facts.cosine_to_momentum == pytest.approx(float(cosine), abs=1e-12)
        for found, (_, span) in zip(facts.tensors, spans(layout), strict=True):
            assert found.norm == pytest.approx(float(delta[span].norm()), rel=1e-12)
            assert found.dot == pytest.approx(float(delta[span] @ momentum[span].double()), abs=1e-9)

    def test_without_a_layout_the_fragment_is_one_tensor(self):
        facts = examine_push(encode([3.0, 4.0], "f32"), "f32", 2, torch.tensor([-1.0, 0.0]))
        assert (facts.norm, facts.tensors) == (5.0, ())
        assert facts.cosine_to_momentum == pytest.approx(0.6)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_non_finite_values_are_found(self, dtype, value):
        delta = random(BLOCK + 300, 1).numpy()
        delta[BLOCK + 299] = value
        with np.errstate(invalid="ignore"):
            payload = encode(delta, dtype)
        facts = examine_push(payload, dtype, delta.size, torch.zeros(delta.size))
        assert (facts.finite, facts.norm, facts.cosine_to_momentum) == (False, None, None)
        assert facts.digest == digest(payload)

    @pytest.mark.parametrize(("value", "finite"), [(9.9e14, True), (1.1e15, False), (3e38, False)])
    def test_a_monstrous_norm_counts_as_not_finite(self, value, finite):
        assert examine_push(encode([0.0, value], "f32"), "f32", 2, torch.zeros(2)).finite is finite

    @pytest.mark.parametrize(("delta", "momentum"), [(0.0, 1.0), (1.0, 0.0), (1e-42, 1.0)])
    def test_a_vector_of_nearly_zero_has_no_cosine(self, delta, momentum):
        facts = examine_push(encode([delta] * 3, "f32"), "f32", 3, torch.full((3,), momentum))
        assert facts.finite
        assert facts.norm == pytest.approx(math.sqrt(3) * float(np.float32(delta)), rel=1e-6)
        assert facts.cosine_to_momentum is None

    def test_sizes_must_fit(self):
        with pytest.raises(MergeError, match="7 bytes instead of 8"):
            examine_push(bytes(7), "f32", 2, torch.zeros(2))
        with pytest.raises(MergeError, match="momentum has 3 elements"):
            examine_push(bytes(8), "f32", 2, torch.zeros(3))
        with pytest.raises(MergeError, match="layout has 5 elements"):
            examine_push(bytes(8), "f32", 2, torch.zeros(2), fragment(shapes=[(5,)]))


class TestMerge:
    @pytest.mark.parametrize("plain_average", [False, True])
    @pytest.mark.parametrize("mode", list(MergeMode))
    def test_who_decomposes_is_who_is_said_to(self, mode, plain_average, monkeypatch):
        decomposed = []
        monkeypatch.setattr(fragment_module, "isotropic", lambda matrix: decomposed.append(1) or matrix)
        layout = fragment(mode, [(3, 4)])
        given = [push(random(layout.numel, 1), "f32", 1.0, False)]
        merge_fragment(given, layout, torch.zeros(layout.numel), mu=0.9, plain_average=plain_average)
        assert bool(decomposed) is decomposes(layout, plain_average=plain_average)
        assert bool(decomposed) is (mode is MergeMode.ISO and not plain_average)

    @pytest.mark.parametrize("mode", list(MergeMode))
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_matches_the_oracle(self, mode, dtype):
        layout = fragment(mode, SHAPES[:-1])
        momentum = random(layout.numel, 9)
        # Opposing, sideways and agreeing to the momentum, once each.
        raw = [random(layout.numel, seed) + mix * momentum for seed, mix in enumerate((2.0, -0.05, -1.0))]
        flags = [True, True, False]
        pushes = [
            push(values, dtype, weight, flag)
            for values, weight, flag in zip(raw, (1.0, 2.0, 5.0), flags, strict=True)
        ]
        merged = merge_fragment(pushes, layout, momentum, mu=0.9)
        deltas = [decode(given.payload, dtype, layout.numel) for given in pushes]
        expected = oracle.merge(deltas, [1.0, 2.0, 5.0], flags, layout, momentum, 0.9)
        tolerance = 5e-5 if mode is MergeMode.ISO else 5e-6
        for _, span in spans(layout):
            near(merged.gradient[span], expected[span], tolerance)
        assert merged.finite
        assert merged.norm == pytest.approx(float(merged.gradient.double().norm()), rel=1e-7)
        assert merged.corrected == (0, 1)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_uncorrected_tensors_are_the_public_functions_bit_for_bit(self, dtype):
        momentum = torch.zeros(fragment().numel)
        payloads = [encode(random(momentum.numel(), seed), dtype) for seed in range(2)]
        outer = [-decode(payload, dtype, momentum.numel()) for payload in payloads]
        expected = {
            MergeMode.AVG: lambda deltas: average(deltas, [1.0, 3.0]),
            MergeMode.RDA: lambda deltas: radial_directional_average(deltas, [1.0, 3.0]),
            MergeMode.ISO: lambda deltas: isotropic(average(deltas, [1.0, 3.0])),
        }
        pushes = [
            PushInput(payload=payload, dtype=dtype, weight=weight, correct=True)
            for payload, weight in zip(payloads, (1.0, 3.0), strict=True)
        ]
        for mode in MergeMode:
            layout = fragment(mode)
            merged = merge_fragment(pushes, layout, momentum, mu=0.9)
            assert merged.corrected == ()
            for spec, span in spans(layout):
                rule = mode if mode is not MergeMode.ISO or len(spec.shape) == 2 else MergeMode.AVG
                deltas = [delta[span].view(spec.shape) for delta in outer]
                assert torch.equal(merged.gradient[span].view(spec.shape), expected[rule](deltas))

    def test_correction_is_per_tensor_and_damped(self):
        layout = fragment(MergeMode.AVG, [(2,), (2,)])
        momentum = torch.tensor([10.0, 0.0, 10.0, 0.0])
        merged = merge_fragment([push([2.0, -0.5, -1.0, -0.1], correct=True)], layout, momentum, mu=0.9)
        first = correct_delta(torch.tensor([-2.0, 0.5]), torch.tensor([1.0, 0.0]))
        torch.testing.assert_close(merged.gradient[:2], first, rtol=1e-6, atol=0)
        assert merged.gradient[2:].tolist() == [1.0, pytest.approx(0.1)]
        assert merged.corrected == (0,)

    def test_only_real_corrections_are_counted(self):
        layout = fragment(MergeMode.AVG, [(2,)])
        momentum = torch.tensor([1.0, 0.0])
        opposing, agreeing = [1.0, 0.0], [-1.0, 0.0]
        pushes = [push(opposing, correct=False), push(agreeing, correct=True), push(opposing, correct=True)]
        assert merge_fragment(pushes, layout, momentum, mu=0.9).corrected == (2,)

    def test_plain_average_overrides_mode_and_correction(self):
        layout = fragment(MergeMode.RDA, [(2,)])
        pushes = [push([2.0, 0.0], correct=True), push([0.0, 2.0], correct=True)]
        merged = merge_fragment(pushes, layout, torch.tensor([5.0, 5.0]), mu=0.9, plain_average=True)
        assert merged.gradient.tolist() == [-1.0, -1.0]
        assert merged.corrected == ()

    @pytest.mark.parametrize("mode", list(MergeMode))
    def test_one_learner_moves_as_its_delta_says(self, mode):
        layout = fragment(mode, [(5,), (300,)])
        delta = random(305, 1)
        merged = merge_fragment([push(delta, weight=0.3)], layout, torch.zeros(305), mu=0.9)
        assert torch.equal(merged.gradient, -delta)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("plain", [False, True])
    def test_facts_from_the_arrival_change_no_bit(self, dtype, plain):
        layout, momentum = fragment(), random(fragment().numel, 5)
        payloads = [encode(random(layout.numel, s) + momentum * (s - 1), dtype) for s in range(3)]
        results = []
        for known in (False, True):
            pushes = [
                PushInput(
                    payload=payload,
                    dtype=dtype,
                    weight=1.0 + index,
                    correct=index > 0,
                    facts=examine_push(payload, dtype, layout.numel, momentum, layout) if known else None,
                )
                for index, payload in enumerate(payloads)
            ]
            results.append(merge_fragment(pushes, layout, momentum, mu=0.9, plain_average=plain))
        assert torch.equal(results[0].gradient, results[1].gradient)
        assert results[0].corrected == results[1].corrected
        assert results[0].norm == results[1].norm

    def test_learner_order_by_id_makes_the_bits_independent_of_arrival(self):
        layout, momentum = fragment(), random(fragment().numel, 5)
        by_learner = {
            learner: push(random(layout.numel, learner), "bf16", 1.0 + learner, correct=True)
            for learner in range(5)
        }
        digests = set()
        for seed in range(4):
            arrival = torch.randperm(5, generator=torch.Generator().manual_seed(seed)).tolist()
            accepted = {learner: by_learner[learner] for learner in arrival}
            pushes = [accepted[learner] for learner in sorted(accepted)]
            digests.add(tensor_digest(merge_fragment(pushes, layout, momentum, mu=0.9).gradient))
        assert len(digests) == 1

    def test_payload_may_be_any_buffer(self):
        layout, payload = fragment(MergeMode.AVG, [(3,)]), encode([1.0, 2.0, 3.0], "f32")
        for kind in (bytes, bytearray, memoryview, lambda data: np.frombuffer(data, dtype=np.uint8)):
            given = PushInput(payload=kind(payload), dtype="f32", weight=1.0, correct=False)
            merged = merge_fragment([given], layout, torch.zeros(3), mu=0.9)
            assert merged.gradient.tolist() == [-1.0, -2.0, -3.0]

    def test_zero_and_subnormal_pushes(self):
        layout = fragment(MergeMode.RDA, [(4,)])
        pushes = [push([0.0] * 4), push([1e-42] * 4), push([-0.0] * 4)]
        merged = merge_fragment(pushes, layout, torch.ones(4), mu=0.9)
        assert merged.finite
        near(merged.gradient, [-1e-42 / 3] * 4, tolerance=2e-3)

    def test_overflow_is_reported_not_hidden(self):
        layout = fragment(MergeMode.AVG, [(2,)])
        merged = merge_fragment([push([math.inf, 0.0])], layout, torch.zeros(2), mu=0.9)
        assert (merged.finite, merged.norm) == (False, None)

    def test_refusals(self):
        layout = fragment(MergeMode.AVG, [(2,)])
        with pytest.raises(MergeError, match="sum to 0"):
            merge_fragment([push([1.0, 2.0], weight=0.0)], layout, torch.zeros(2), mu=0.9)
        with pytest.raises(MergeError, match="nothing to merge"):
            merge_fragment([], layout, torch.zeros(2), mu=0.9)
        with pytest.raises(MergeError, match="12 bytes instead of 8"):
            merge_fragment([push([1.0, 2.0, 3.0])], layout, torch.zeros(2), mu=0.9)
        with pytest.raises(MergeError, match="momentum has 3 elements"):
            merge_fragment([push([1.0, 2.0])], layout, torch.zeros(3), mu=0.9)


class TestApply:
    def test_is_the_outer_step_with_digests(self):
        params, momentum, gradient = (random(BLOCK + 9, seed) for seed in range(3))
        result = apply_outer_step(params, momentum, gradient, lr=0.7, mu=0.9)
        expected = outer_step(params, momentum, gradient, lr=0.7, mu=0.9)
        assert torch.equal(result.params, expected[0])
        assert torch.equal(result.momentum, expected[1])
        assert result.finite
        assert result.params_digest == digest(result.params.numpy().astype("<f4"))
        assert result.momentum_digest == digest(result.momentum.numpy().tobytes())

    def test_sweep_leaves_the_momentum_alone(self):
        params, momentum, gradient = (random(40, seed) for seed in range(3))
        result = apply_outer_step(params, momentum, gradient, lr=1.0, mu=0.9, sweep=True)
        assert torch.equal(result.params, params - gradient)
        assert result.momentum is momentum

    @pytest.mark.parametrize("where", ["params", "momentum"])
    def test_overflow_is_not_finite(self, where):
        big = torch.tensor([3e38, 0.0])
        params, momentum = (big, torch.zeros(2)) if where == "params" else (torch.zeros(2), big)
        gradient = -big if where == "params" else big
        assert not apply_outer_step(params, momentum, gradient, lr=0.7, mu=0.9).finite


class TestCommit:
    def merged(self, layout, momentum, mode=MergeMode.RDA):
        pushes = [push(random(layout.numel, seed), "bf16", 1.0 + seed, correct=True) for seed in range(3)]
        return merge_fragment(pushes, layout, momentum, mu=0.9)

    @pytest.mark.parametrize("mode", list(MergeMode))
    @pytest.mark.parametrize("sweep", [False, True])
    def test_is_the_outer_step_and_the_codec_bit_for_bit(self, mode, sweep):
        layout = fragment(mode, SHAPES[:-1])
        params, momentum = random(layout.numel, 8), random(layout.numel, 9)
        merged = self.merged(layout, momentum)
        settings = {"lr": 1.0 if sweep else 0.7, "mu": 0.9, "sweep": sweep}
        expected = apply_outer_step(params, momentum, merged.gradient, **settings)
        result = commit_fragment(params, momentum, merged, **settings, encode=True)
        assert torch.equal(result.params, expected.params)
        assert torch.equal(result.momentum, expected.momentum)
        assert (result.params_digest, result.momentum_digest) == (
            expected.params_digest,
            expected.momentum_digest,
        )
        assert result.params_digest == tensor_digest(result.params)
        assert result.momentum_digest == tensor_digest(result.momentum)
        assert (result.momentum is momentum) == sweep
        assert bytes(result.encoded) == bf16.encode(result.params.numpy())
        assert (result.finite, expected.encoded) == (True, None)

    def test_what_it_is_given_stays_but_for_the_gradient(self):
        layout = fragment(shapes=[(300,)])
        params, momentum = random(300, 8), random(300, 9)
        before = params.clone(), momentum.clone()
        merged = self.merged(layout, momentum)
        first = merged.gradient
        assert torch.equal(first, merged.gradient)
        assert first.data_ptr() != merged.gradient.data_ptr()
        result = commit_fragment(params, momentum, merged, lr=0.7, mu=0.9)
        assert (torch.equal(params, before[0]), torch.equal(momentum, before[1])) == (True, True)
        assert result.encoded is None
        with pytest.raises(MergeError, match="used up by a commit"):
            _ = merged.gradient
        with pytest.raises(MergeError, match="used up by a commit"):
            commit_fragment(params, momentum, merged, lr=0.7, mu=0.9)

    def test_what_is_not_finite_is_said(self):
        layout = fragment(MergeMode.AVG, [(2,)])
        merged = merge_fragment([push([math.inf, 0.0])], layout, torch.zeros(2), mu=0.9)
        assert not commit_fragment(torch.zeros(2), torch.zeros(2), merged, lr=0.7, mu=0.9).finite

    def test_sizes_must_fit(self):
        layout = fragment(MergeMode.AVG, [(2,)])
        merged = merge_fragment([push([1.0, 0.0])], layout, torch.zeros(2), mu=0.9)
        with pytest.raises(MergeError, match="momentum has shape"):
            commit_fragment(torch.zeros(2), torch.zeros(3), merged, lr=0.7, mu=0.9)


class TestProperties:
    """What must hold of whole fragments, whatever is in them."""

    LAYOUT = fragment(MergeMode.RDA, [(), (255,), (16, 17), (BLOCK + 9,)])

    def merge(self, deltas, weights, momentum, layout=LAYOUT, dtype="f32"):
        pushes = [push(d, dtype, w, correct=True) for d, w in zip(deltas, weights, strict=True)]
        return merge_fragment(pushes, layout, momentum, mu=0.9)

    @pytest.mark.parametrize("factor", [2.0**-30, 0.5, 2.0**40])
    def test_weights_count_by_their_ratios(self, factor):
        deltas, momentum = (
            [random(self.LAYOUT.numel, seed) for seed in range(3)],
            random(self.LAYOUT.numel, 9),
        )
        weights = [1.0, 3.0, 5.0]
        once = self.merge(deltas, weights, momentum)
        again = self.merge(deltas, [factor * weight for weight in weights], momentum)
        assert torch.equal(once.gradient, again.gradient)
        assert once.norm == again.norm

    @pytest.mark.parametrize("exponent", [-60, -3, 30])
    def test_everything_scaled_scales_the_merge(self, exponent):
        factor = 2.0**exponent
        deltas, momentum = (
            [random(self.LAYOUT.numel, seed) for seed in range(3)],
            random(self.LAYOUT.numel, 9),
        )
        once = self.merge(deltas, [1.0, 2.0, 3.0], torch.zeros_like(momentum))
        scaled = self.merge([factor * d for d in deltas], [1.0, 2.0, 3.0], torch.zeros_like(momentum))
        assert torch.equal(scaled.gradient, factor * once.gradient)
        assert scaled.norm == pytest.approx(factor * once.norm, rel=1e-14)

    def test_the_mean_length_survives_the_merge(self):
        # What the radial-directional average is for: nearly orthogonal deltas, each as long as the other.
        layout = fragment(MergeMode.RDA, [(5000,)])
        deltas = [random(5000, seed) for seed in range(8)]
        mean = sum(float(delta.norm()) for delta in deltas) / 8
        merged = self.merge(deltas, [1.0] * 8, torch.zeros(5000), layout)
        assert float(merged.gradient.norm()) == pytest.approx(mean, rel=1e-6)
        assert merged.norm == pytest.approx(mean, rel=1e-7)
        averaged = self.merge(deltas, [1.0] * 8, torch.zeros(5000), fragment(MergeMode.AVG, [(5000,)]))
        assert averaged.norm < mean / 2

    def test_a_momentum_of_zero_corrects_nothing(self):
        deltas = [random(self.LAYOUT.numel, seed) for seed in range(2)]
        assert self.merge(deltas, [1.0, 1.0], torch.zeros(self.LAYOUT.numel)).corrected == ()

    @pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-30, 1e10])
    def test_far_magnitudes(self, scale):
        layout = fragment(MergeMode.RDA, [(700,)])
        deltas = [random(700, seed) * scale for seed in range(3)]
        merged = self.merge(deltas, [1.0, 2.0, 3.0], torch.zeros(700), layout)
        expected = oracle.merge(deltas, [1.0, 2.0, 3.0], [False] * 3, layout, torch.zeros(700), 0.9)
        assert merged.finite
        near(merged.gradient, expected, tolerance=5e-6 if scale > 1e-38 else 0.05)

    def test_directions_that_cancel_in_one_tensor_leave_the_others_alone(self):
        layout = fragment(MergeMode.RDA, [(3,), (BLOCK + 1,), (3,)])
        first, second = random(layout.numel, 1), random(layout.numel, 2)
        second[3:-3] = -2 * first[3:-3]
        merged = self.merge([first, second], [1.0, 1.0], torch.zeros(layout.numel), layout)
        near(merged.gradient[3:-3], first[3:-3].double() / 2)
        for span in (slice(0, 3), slice(-3, None)):
            near(merged.gradient[span], oracle.radial([-first[span], -second[span]], [1.0, 1.0]))
        assert merged.norm == pytest.approx(float(merged.gradient.double().norm()), rel=1e-7)


@pytest.mark.parametrize("mode", list(MergeMode))
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads_or_on_the_run(mode, dtype):
    # Matrices large enough that torch's own SVD, sums and products differ between thread counts.
    layout = fragment(mode, [(7,), (257, 400), (3, BLOCK + 1)])
    momentum, params = random(layout.numel, 7), random(layout.numel, 8)
    pushes = [
        push(random(layout.numel, seed) + (seed - 1) * momentum, dtype, 1.0 + seed, correct=True)
        for seed in range(3)
    ]
    before, seen = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3, 5, 8, 8):
            torch.set_num_threads(min(threads, 4))
            facts = [
                examine_push(each.payload, dtype, layout.numel, momentum, layout, threads=threads)
                for each in pushes
            ]
            known = [evolve(each, facts=found) for each, found in zip(pushes, facts, strict=True)]
            merged = merge_fragment(known, layout, momentum, mu=0.9, threads=threads)
            norm = merged.norm
            result = commit_fragment(params, momentum, merged, lr=0.7, mu=0.9, encode=True, threads=threads)
            assert torch.get_num_threads() == min(threads, 4)
            seen.add((*facts, norm, result.params_digest, result.momentum_digest, digest(result.encoded)))
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1


def everything():
    """Return one digest over what comes of merges in every dtype, of sums that round."""
    found = []
    layout = fragment(MergeMode.RDA, [(), (257,), (60, 50)])
    momentum, params = random(layout.numel, 7), random(layout.numel, 8)
    for dtype in DTYPES:
        pushes = [
            push(random(layout.numel, seed) + (seed - 1) * momentum, dtype, 1.0 + seed, correct=True)
            for seed in range(3)
        ]
        facts = [examine_push(each.payload, dtype, layout.numel, momentum, layout) for each in pushes]
        merged = merge_fragment(pushes, layout, momentum, mu=0.9)
        found.append(repr((facts, merged.norm, merged.corrected)))
        result = commit_fragment(params, momentum, merged, lr=0.7, mu=0.9, encode=True)
        found += [result.params_digest, result.momentum_digest, digest(result.encoded)]
    return digest("\n".join(found).encode())


def test_a_processor_of_twenty_years_ago_gives_the_same_bits():
    # "generic" has no fused multiply-add, and vectors of 128 bits. Another process compiles the loops for it.
    done = subprocess.run(
        [sys.executable, "-c", "import test_merge_fragment as t; print(t.everything())"],
        cwd=Path(__file__).parent,
        env=os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout.split() == [everything()]


def test_bits_are_the_same_on_every_machine():
    layout = fragment(MergeMode.RDA, [(300,), (70, 11)])
    pattern = np.arange(layout.numel, dtype=np.float64)
    deltas = [((pattern * step) % 101 - 50) / 64 for step in (7, 13, 29)]
    momentum = torch.tensor((pattern * 3) % 17 - 8, dtype=torch.float32)
    pushes = [push(delta, "bf16", 1.0 + i, correct=True) for i, delta in enumerate(deltas)]
    merged = merge_fragment(pushes, layout, momentum, mu=0.9)
    result = apply_outer_step(momentum * 0.125, momentum, merged.gradient, lr=0.7, mu=0.9)
    assert merged.corrected == (0, 1, 2)
    assert result.params_digest == "1bf7bb54aa0c841f555455800990fdbd"
    assert result.momentum_digest == "03a19dd812f37c79d7a2a8177590cb4f"
