"""An iso merge matrix by matrix is the iso merge in one call, to the last bit."""

import numpy as np
import pytest
import torch

from yeto.errors import MergeError
from yeto.merge import PushInput, isotropic, merge_fragment
from yeto.merge.blocks import BLOCK
from yeto.merge.matrices import MatrixMerge
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
