"""An iso merge matrix by matrix is the iso merge in one call, to the last bit."""

import numpy as np
import pytest
import torch

from yeto.errors import MergeError
from yeto.merge import PushInput, commit_fragment, isotropic, matrices, merge_fragment
from yeto.merge.blocks import BLOCK
from yeto.merge.matrices import MatrixMerge
from yeto.merge.reduction import reduce_into
from yeto.wire.codecs import by_name
from yeto.wire.layout import FragmentLayout, MergeMode, TensorSpec

SHAPES = [(5,), (16, 24), (3, BLOCK + 11), (40, 7), (0, 4), ()]
LAYOUT = FragmentLayout(
    mode=MergeMode.ISO,
    tensors=tuple(TensorSpec(name=f"t{place}", shape=shape) for place, shape in enumerate(SHAPES)),
)


def random(seed):
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed))


def pushes(dtype="bf16"):
    """Three pushes, of which the correction is asked to look at two and turns one."""
    momentum = random(9)
    deltas = [0.1 * random(1) + momentum, 0.1 * random(2) - momentum, random(3)]
    return momentum, [
        PushInput(
            payload=by_name(dtype).encode(delta.numpy()),
            dtype=dtype,
            weight=float(place + 1),
            correct=place < 2,
        )
        for place, delta in enumerate(deltas)
    ]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_the_same_bits_in_any_order(order):
    momentum, given = pushes()
    expected = merge_fragment(given, LAYOUT, momentum, mu=0.9)
    merge = MatrixMerge(given, LAYOUT, momentum, mu=0.9)
    assert merge.matrices == (1, 2, 3)
    averages = {place: merge.average(place) for place in merge.matrices}
    for place in order:
        merge.put(place, isotropic(averages[place]))
    merged = merge.finish()
    assert torch.equal(merged.gradient, expected.gradient)
    assert (merged.norm, merged.finite, merged.corrected) == (expected.norm, True, expected.corrected)
    assert merged.corrected == (0,)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_digests_of_a_matrix_merge_are_those_of_one_call(dtype):
    momentum, given = pushes(dtype)
    base = random(4)
    merge = MatrixMerge(given, LAYOUT, momentum, mu=0.9, threads=2)
    for place in reversed(merge.matrices):
        merge.put(place, isotropic(merge.average(place)))
    there, here = (
        commit_fragment(base.clone(), momentum, merged, lr=0.7, mu=0.9, sweep=False)
        for merged in (merge_fragment(given, LAYOUT, momentum, mu=0.9), merge.finish())
    )
    assert (here.params_digest, here.momentum_digest) == (there.params_digest, there.momentum_digest)


def test_a_matrix_costs_what_it_costs_however_many_others_there_are(monkeypatch):
    momentum, given = pushes()
    handed = []

    def reducing(out, sources, momentum, tensors, cut, **how):
        handed.append((len(tensors), cut.tensors))
        return reduce_into(out, sources, momentum, tensors, cut, **how)

    monkeypatch.setattr(matrices, "reduce_into", reducing)
    merge = MatrixMerge(given, LAYOUT, momentum, mu=0.9)
    for place in merge.matrices:
        merge.put(place, merge.average(place))
    merge.finish()
    assert handed == [(1, 1)] * len(SHAPES)


def test_what_is_not_there_or_does_not_fit_is_named():
    momentum, given = pushes("f32")
    merge = MatrixMerge(given, LAYOUT, momentum, mu=0.9)
    with pytest.raises(MergeError, match="matrix 1 of the fragment is not decomposed yet"):
        merge.finish()
    with pytest.raises(MergeError, match=r"decomposed matrix 3 has shape \(7, 40\), expected \(40, 7\)"):
        merge.put(3, torch.zeros(7, 40))
    with pytest.raises(MergeError, match="3 weights sum to 0"):
        MatrixMerge(
            [PushInput(payload=push.payload, dtype="f32", weight=0.0, correct=False) for push in given],
            LAYOUT,
            momentum,
            mu=0.9,
        )


def test_a_result_that_is_not_finite_is_seen():
    momentum, given = pushes("f32")
    merge = MatrixMerge(given, LAYOUT, momentum, mu=0.9)
    for place in merge.matrices:
        matrix = merge.average(place)
        merge.put(place, matrix if place != 3 else torch.full(matrix.shape, np.inf))
    assert (merge.finish().finite, merge.finish().norm) == (False, None)
