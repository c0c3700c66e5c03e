"""The passes over a fragment: kernels, laid over blocks and threads.

Each takes a plan and gives per tensor what the kernel gives per piece. Everything between two passes is a few
numbers a tensor, in f64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, cast

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from yeto.merge import kernels
from yeto.merge.blocks import Plan, plan, run
from yeto.merge.kernels import Doubles, Floats, Halves
from yeto.merge.sources import Source, flatten, of_tensor
from yeto.wire.digest import RunningDigest, digest

_WIDE: Final = 2.0**100
"""A coefficient up to this, and one over it, is a normal f32 with room to be multiplied."""
_STEP: Final = 2.0**64
"""The power that is taken off one beyond: applied in two steps, neither leaves f32."""
_INFINITY: Final = 0x7F800000
"""Bits of an infinite f32; those of a NaN are above."""
_NO_HALVES: Final[Halves] = np.empty(0, dtype=np.uint16)
_NO_FLOATS: Final[Floats] = np.empty(0, dtype=np.float32)


@frozen
class TensorFacts:
    """What one pass over one tensor of a push finds."""

    norm: float
    """L2 norm of the learner delta d."""
    dot: float
    """d . momentum buffer."""
    momentum_norm: float
    """L2 norm of the momentum buffer."""


def examine(
    source: Source,
    momentum: Tensor,
    cut: Plan,
    *,
    chains: Sequence[Callable[[int], object]] = (),
    threads: int | None = None,
) -> tuple[TensorFacts, ...]:
    """Return norms and dot product of each tensor; NaN or infinite exactly if an element is not finite.

    Args:
        source: the delta.
        momentum: 1-D f32, of the same size.
        cut: the tensors.
        chains: what else to do with each block while it is in the cache.
        threads: as for ``run``.
    """
    sums: Doubles = np.empty((len(cut.pieces), 3))
    buffer = _array(momentum)

    def compute(block: int) -> None:
        first, last = cut.blocks[block]
        kernels.examine(source.kind, source.address, cut.pieces[first:last], buffer, sums[first:last])

    run(len(cut.blocks), compute, chains, threads)
    totals = (cut.by_tensor(sums[:, column]) for column in range(3))
    return tuple(
        TensorFacts(math.sqrt(squares), dot, math.sqrt(lengths))
        for squares, dot, lengths in zip(*totals, strict=True)
    )


def accumulate(
    sources: Sequence[Source],
    coefficients: Sequence[Sequence[float]],
    out: Tensor,
    cut: Plan,
    *,
    threads: int | None = None,
) -> list[float]:
    """Write the sum of ``coefficient * source`` to ``out``; return the sum of squares of each tensor.

    The one accumulation pass of the merge: f32, in the order of the sources.

    Args:
        sources: what to add up.
        coefficients: for each tensor, one a source. What has a coefficient of 0 is not looked at.
        out: 1-D f32, overwritten.
        cut: the tensors.
        threads: as for ``run``.
    """
    powers, rests = _split(coefficients, (cut.tensors, len(sources)))
    kinds = np.array([source.kind for source in sources], dtype=np.int64)
    addresses = np.array([source.address for source in sources], dtype=np.int64)
    sums: Doubles = np.zeros(len(cut.pieces))
    target = _array(out)

    def compute(block: int) -> None:
        first, last = cut.blocks[block]
        kernels.accumulate(kinds, addresses, rests, powers, cut.pieces[first:last], target, sums[first:last])

    run(len(cut.blocks), compute, threads=threads)
    return cut.by_tensor(sums)


@frozen(kw_only=True)
class Stepped:
    """What the pass of the outer step found out about what it wrote."""

    finite: bool
    params_digest: str | None
    momentum_digest: str | None


def step(
    gradient: Tensor,
    factors: Sequence[float],
    params: Tensor,
    momentum: Tensor,
    cut: Plan,
    *,
    lr: float,
    mu: float,
    new_params: Tensor,
    new_momentum: Tensor | None,
    halves: Halves | None = None,
    digests: bool = True,
    threads: int | None = None,
) -> Stepped:
    """Make the outer step, the broadcast's encoding and the digests, in one pass over the fragment.

    Args:
        gradient: 1-D f32, as all tensors here; may be ``new_params``.
        factors: what each tensor of the gradient is still to be multiplied by.
        params: untouched.
        momentum: untouched.
        cut: the tensors.
        lr: outer learning rate.
        mu: outer momentum.
        new_params: overwritten.
        new_momentum: overwritten; None when the momentum stays as it is.
        halves: overwritten with the parameters in bf16, unless it is None.
        digests: whether they are wanted.
        threads: as for ``run``.
    """
    powers, rests = _split([[factor] for factor in factors], (cut.tensors, 1))
    largest = np.zeros(len(cut.pieces), dtype=np.uint32)
    given, old, buffer, target = (_array(each) for each in (gradient, params, momentum, new_params))
    new_buffer = _NO_FLOATS if new_momentum is None else _array(new_momentum)
    encoded = _NO_HALVES if halves is None else halves

    def compute(block: int) -> None:
        first, last = cut.blocks[block]
        kernels.step(
            given,
            rests.reshape(-1),
            powers.reshape(-1),
            cut.pieces[first:last],
            old,
            buffer,
            lr,
            mu,
            target,
            new_buffer,
            encoded,
            largest[first:last],
        )

    running = [RunningDigest(), RunningDigest()] if digests else []
    chains = [
        _digesting(into, array, cut)
        for into, array in zip(
            running, (target, buffer if new_momentum is None else new_buffer), strict=False
        )
    ]
    run(len(cut.blocks), compute, chains, threads)
    return Stepped(
        finite=bool((largest < _INFINITY).all()),
        params_digest=running[0].hex() if digests else None,
        momentum_digest=running[1].hex() if digests else None,
    )


def product_sums(left: Tensor, right: Tensor) -> TensorFacts:
    """Return norms and dot product of two f32 tensors of one shape."""
    return examine(of_tensor(left), flatten(right), plan((left.numel(),)))[0]


def norm(tensor: Tensor) -> float:
    """Return the L2 norm of an f32 tensor in f64; NaN or infinity exactly if an element is not finite."""
    return product_sums(tensor, tensor).norm


def is_finite(tensor: Tensor) -> bool:
    """Return whether every element of an f32 tensor is a finite number."""
    flat = flatten(tensor)
    cut, values = plan((flat.numel(),)), _array(flat)
    largest = np.zeros(len(cut.pieces), dtype=np.uint32)

    def compute(block: int) -> None:
        first, last = cut.blocks[block]
        kernels.largest_magnitudes(cut.pieces[first:last], values, largest[first:last])

    run(len(cut.blocks), compute)
    return bool((largest < _INFINITY).all())


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of an f32 tensor: 32 hex digits over its little-endian bytes, in its own order."""
    return digest(_array(flatten(tensor)).astype("<f4", copy=False))


def compile_kernels() -> None:
    """Compile every kernel for this processor, or load what was compiled before.

    It takes seconds the first time and happens anyway on first use; whoever cannot wait then calls this.
    """
    ones, cut = torch.ones(1), plan((1,))
    examine(of_tensor(ones), ones, cut)
    accumulate([of_tensor(ones)], [[1.0]], torch.empty(1), cut)
    step(ones, [1.0], ones, ones, cut, lr=1.0, mu=0.0, new_params=torch.empty(1), new_momentum=torch.empty(1))
    is_finite(ones)


def split_power(coefficient: float) -> tuple[float, float]:
    """Return a power of two and a rest, both within f32's comfort, whose product is ``coefficient``.

    One over the norm of a subnormal tensor does not fit f32; applied in two steps it need not. Multiplying
    by the power is exact unless the element is negligible beside the norm it was divided by.
    """
    if coefficient == 0.0 or 1.0 / _WIDE <= abs(coefficient) <= _WIDE or not math.isfinite(coefficient):
        return 1.0, coefficient
    return (_STEP, coefficient / _STEP) if abs(coefficient) > _WIDE else (1.0 / _STEP, coefficient * _STEP)


def _split(coefficients: Sequence[Sequence[float]], shape: tuple[int, int]) -> tuple[Floats, Floats]:
    """Return powers and rests of a table of coefficients, as f32."""
    table = np.array([[split_power(each) for each in row] for row in coefficients], dtype=np.float64)
    table = table.reshape(*shape, 2).astype(np.float32)
    return np.ascontiguousarray(table[..., 0]), np.ascontiguousarray(table[..., 1])


def _digesting(running: RunningDigest, array: Floats, cut: Plan) -> Callable[[int], None]:
    """Return the chain that digests an array of the fragment's size."""

    def update(block: int) -> None:
        start, stop = cut.elements(block)
        running.update(array[start:stop].astype("<f4", copy=False))

    return update


def _array(tensor: Tensor) -> Floats:
    return cast(Floats, tensor.numpy())
