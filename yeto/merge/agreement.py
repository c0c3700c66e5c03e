"""Do the learners agree, and is the published model ahead of them? Three figures of every merge.

They show early what a held-out loss shows late (all of it measured on short LoRA runs with DiLoCo's outer
step, arXiv 2311.08105):

- ``delta_cosine``: mean, over all pairs of learners, of the cosine between their deltas. It falls as a run
  leaves its first rounds; far below 0, learners undo what the others did.
- ``norm_ratio``: norm of the merged gradient beside that of the weighted average of the deltas. Deltas at
  right angles give a radial-directional average sqrt(M) of it (arXiv 2604.21428 App. D.2); more than that is
  disagreement made longer.
- ``offset_ratio``: how far the new parameters lie from the mean of the learners', in lengths of the weighted
  average. Nesterov's momentum publishes a point ahead of the learners; one length ahead and more, round after
  round, the published model is worse than any of them.

All three are square roots of quadratic forms in one matrix: the inner products of the deltas, the merged
gradient and the momentum buffer. Cosines and ratios hardly change when a part of the elements is left out,
so the matrix is summed over at most ``SAMPLE`` elements: blocks of ``BLOCK``, evenly spaced from the first
to the last, so that every large tensor has its part. A fragment of no more elements is taken whole.

The sums are f64, by the library's matrix product, whose order of addition differs between machines: these
are facts for people, rounded, and nothing is decided by them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from yeto.merge.fragment import PushInput
from yeto.merge.outer import MergedGradient
from yeto.merge.reduction import shares
from yeto.merge.sources import flatten
from yeto.wire import codecs
from yeto.wire.layout import FragmentLayout

SAMPLE: Final = 1 << 15
"""Elements looked at, at most: enough to know a cosine to 0.006, and few beside those of a merge that takes
its time. (A sample of a million would cost a merge of a million elements more than half of what it takes.)"""
BLOCK: Final = 256
"""Elements that are neighbours in the sample: a block of every codec, so that it can be decoded alone."""
SPAN: Final = 64
"""Blocks multiplied at a time: what they are decoded to stays in the cache."""
DIGITS: Final = 6
"""Decimals kept of each figure."""

Doubles = NDArray[np.float64]


@frozen(kw_only=True, eq=False)
class Agreement:
    """The inner products of one merge, and what follows from them."""

    products: Doubles
    """(M + 2, M + 2): of the outer gradients D in learner order, the merged gradient, the momentum buffer."""
    shares: tuple[float, ...]
    """w / W of each learner."""

    @property
    def delta_cosine(self) -> float | None:
        """Mean cosine over all pairs of deltas that have a direction; None without such a pair."""
        deltas = self.products[: len(self.shares), : len(self.shares)]
        lengths = np.sqrt(np.diagonal(deltas))
        directed = lengths > 0
        count = int(directed.sum())
        if count < 2:
            return None
        cosines = deltas[directed][:, directed] / np.outer(lengths[directed], lengths[directed])
        return _rounded((cosines.sum() - np.trace(cosines)) / (count * (count - 1)))

    @property
    def norm_ratio(self) -> float | None:
        """|merged gradient| / |weighted average|; None if that is 0."""
        return self._lengths([0.0] * len(self.shares), 1.0, 0.0)

    def offset_ratio(self, *, lr: float, mu: float) -> float | None:
        """|new parameters - (parameters + mean delta)| / |weighted average|; None if that is 0.

        The mean is the weighted one, which is what a commit with lr 1 and no momentum publishes of an
        average: its offset is 0.

        Args:
            lr: outer learning rate of the commit.
            mu: its outer momentum; 0 in a closing sweep.
        """
        # The step is lr (D + mu (mu buf + D)), against the gradient; the mean delta is -sum(w / W D).
        return self._lengths(self.shares, -lr * (1.0 + mu), -lr * mu * mu)

    def _lengths(self, of_deltas: Sequence[float], of_merged: float, of_momentum: float) -> float | None:
        """Return the norm of a combination in lengths of the weighted average."""
        average = self._norm([*self.shares, 0.0, 0.0])
        return _rounded(self._norm([*of_deltas, of_merged, of_momentum]) / average) if average else None

    def _norm(self, combination: Sequence[float]) -> float:
        coefficients = np.array(combination)
        return math.sqrt(max(0.0, float(coefficients @ self.products @ coefficients)))


def measure_agreement(
    pushes: Sequence[PushInput], layout: FragmentLayout, momentum: Tensor, merged: MergedGradient
) -> Agreement | None:
    """Measure what was just merged, before a commit uses the gradient up.

    Args:
        pushes: what was merged, in the same order.
        layout: the fragment's tensors.
        momentum: the fragment's Nesterov buffer, 1-D f32.
        merged: what became of them.

    Returns:
        None when the merged gradient is not finite.

    Raises:
        MergeError: ``merged`` is used up.
    """
    elements, factors = merged.peek()
    if not merged.finite:
        return None
    numel = layout.numel
    blocks = _sampled(numel)
    gradient, buffer = flatten(elements).numpy(), flatten(momentum).numpy()
    remaining = _factors(factors, layout, blocks)
    rows: Doubles = np.empty((len(pushes) + 2, SPAN * BLOCK))
    products: Doubles = np.zeros((len(rows), len(rows)))
    for first in range(0, len(blocks), SPAN):
        some = blocks[first : first + SPAN]
        values = rows[:, : _elements(numel, some)]
        for row, push in zip(values, pushes, strict=False):
            np.negative(_decoded(push, numel, some), out=row)
        values[-2] = _taken(gradient, some)
        values[-2] *= remaining[first * BLOCK :][: values.shape[1]]
        values[-1] = _taken(buffer, some)
        products += values @ values.T
    return Agreement(products=products, shares=tuple(shares([push.weight for push in pushes])))


def _sampled(numel: int) -> NDArray[np.int64]:
    """Return the numbers of the blocks that are looked at."""
    blocks = -(-numel // BLOCK)
    count = min(blocks, SAMPLE // BLOCK)
    return np.arange(count, dtype=np.int64) * blocks // max(count, 1)


def _decoded(push: PushInput, numel: int, blocks: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the elements of these blocks of a push: a delta d, not yet a gradient."""
    codec = codecs.by_name(push.dtype)
    count = _elements(numel, blocks)
    encoded = _taken(np.frombuffer(push.payload, dtype=np.uint8), blocks, codec.encoded_size(BLOCK))
    return codec.decode(np.ascontiguousarray(encoded).data, count)


def _elements(numel: int, blocks: NDArray[np.int64]) -> int:
    """Return how many elements these blocks have; the last of the fragment may have fewer than the others."""
    return len(blocks) * BLOCK - max(0, (int(blocks[-1]) + 1) * BLOCK - numel)


def _taken(array: NDArray[Any], blocks: NDArray[np.int64], size: int = BLOCK) -> NDArray[Any]:
    """Return blocks of ``size`` of an array, end to end, the array's last one as long as it is."""
    whole = len(array) // size
    taken = array[: whole * size].reshape(whole, size)[blocks[blocks < whole]].reshape(-1)
    return taken if blocks[-1] < whole else np.concatenate([taken, array[whole * size :]])


def _factors(
    factors: Sequence[float], layout: FragmentLayout, blocks: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return what each element of these blocks of the merged gradient is still to be multiplied by."""
    sizes = [tensor.numel for tensor in layout.tensors]
    of_tensor, ends = np.array(factors), np.cumsum(sizes)
    starts = blocks * BLOCK
    stops = np.minimum(starts + BLOCK, ends[-1])
    first = np.searchsorted(ends, starts, side="right")
    found = np.repeat(of_tensor[first], stops - starts)
    for row in np.flatnonzero(ends[first] < stops):  # blocks in which tensors meet
        places = np.arange(starts[row], stops[row])
        found[row * BLOCK :][: len(places)] = of_tensor[np.searchsorted(ends, places, side="right")]
    return found


def _rounded(value: float) -> float | None:
    return round(float(value), DIGITS) if math.isfinite(value) else None
