"""The outer step: Nesterov momentum on the merged outer gradient (DiLoCo, arXiv 2311.08105).

buf = mu buf + D; theta = theta - lr (D + mu buf), with buf = 0 at first. It is ``torch.optim.SGD`` with
``nesterov=True``, in the same operations and so in the same bits; mu = 0 is plain SGD.

Neither parameters nor momentum are changed in place: the store hands fragment versions out by reference, to
broadcasts and checkpoints that may still be running. The merged gradient is nobody else's: the new parameters
take its memory, so that a commit touches no more of it than it must.
"""

from __future__ import annotations

from attrs import define, field, frozen
from torch import Tensor

from yeto.errors import MergeError
from yeto.merge.blocks import Plan, plan
from yeto.merge.checks import require_f32
from yeto.merge.memory import empty_floats, empty_halves
from yeto.merge.passes import accumulate, step
from yeto.merge.sources import flatten, of_tensor


@define(kw_only=True, eq=False)
class MergedGradient:
    """The merged outer gradient of one fragment."""

    finite: bool
    norm: float | None
    """L2 norm over the whole fragment; None when not finite."""
    corrected: tuple[int, ...]
    """Indexes of the pushes in which the correction changed at least one tensor."""
    _cut: Plan = field(alias="cut")
    _factors: tuple[float, ...] = field(alias="factors")
    """What the elements of each tensor are still to be multiplied by."""
    _elements: Tensor | None = field(alias="elements")
    """1-D f32 in layout order; None once a commit took it."""

    @property
    def gradient(self) -> Tensor:
        """The gradient, 1-D f32 in layout order: a copy, which a commit does not need.

        Raises:
            MergeError: a commit has used it up.
        """
        elements = self._available()
        copy = empty_floats(elements.numel())
        accumulate([of_tensor(elements)], [[factor] for factor in self._factors], copy, self._cut)
        return copy

    def peek(self) -> tuple[Tensor, tuple[float, ...]]:
        """Return the elements and what those of each tensor are still to be multiplied by; to read only.

        Raises:
            MergeError: a commit has used them up.
        """
        return self._available(), self._factors

    def take(self) -> tuple[Tensor, tuple[float, ...], Plan]:
        """Hand over the memory, for good: the elements, each tensor's factor, and where tensors begin."""
        elements = self._available()
        self._elements = None
        return elements, self._factors, self._cut

    def _available(self) -> Tensor:
        if self._elements is None:
            raise MergeError("this merged gradient was used up by a commit; merge again")
        return self._elements


@frozen(kw_only=True, eq=False)
class OuterResult:
    """What a commit makes of a fragment."""

    params: Tensor
    """f32, 1-D, new."""
    momentum: Tensor
    """f32, 1-D; the very tensor that was given in a closing sweep, else new."""
    finite: bool
    """Whether both are finite; if not, nothing may be committed."""
    params_digest: str
    momentum_digest: str
    encoded: memoryview | None = None
    """The parameters in bf16, when they were asked for."""


def outer_step(
    params: Tensor, momentum: Tensor, gradient: Tensor, *, lr: float, mu: float
) -> tuple[Tensor, Tensor]:
    """Return new parameters and momentum after one Nesterov step.

    Args:
        params: f32, any shape.
        momentum: f32, same shape; zeros before the first step.
        gradient: merged outer gradient, f32, same shape.
        lr: outer learning rate.
        mu: outer momentum in [0, 1).

    Raises:
        MergeError: a dtype or shape does not fit.
    """
    _require(params, momentum, gradient)
    new_params, new_momentum = empty_floats(params.numel()), empty_floats(params.numel())
    step(
        flatten(gradient),
        [1.0],
        flatten(params),
        flatten(momentum),
        plan((params.numel(),)),
        lr=lr,
        mu=mu,
        new_params=new_params,
        new_momentum=new_momentum,
        digests=False,
    )
    return new_params.view(params.shape), new_momentum.view(params.shape)


def apply_outer_step(
    params: Tensor, momentum: Tensor, gradient: Tensor, *, lr: float, mu: float, sweep: bool = False
) -> OuterResult:
    """Compute the next version of a fragment, with its digests.

    Args:
        params: f32, 1-D, the committed version; untouched.
        momentum: f32, 1-D, same size; untouched.
        gradient: merged outer gradient, same size; untouched.
        lr: outer learning rate.
        mu: outer momentum; ignored in a sweep.
        sweep: closing sweep: plain SGD with ``lr``, and the momentum stays as it is.

    Raises:
        MergeError: a dtype or size does not fit.
    """
    _require(params, momentum, gradient)
    cut = plan((params.numel(),))
    new_params = empty_floats(params.numel())
    return _next_version(
        params, momentum, flatten(gradient), (1.0,), cut, new_params, lr=lr, mu=mu, sweep=sweep
    )


def commit_fragment(
    params: Tensor,
    momentum: Tensor,
    merged: MergedGradient,
    *,
    lr: float,
    mu: float,
    sweep: bool = False,
    encode: bool = False,
    threads: int | None = None,
) -> OuterResult:
    """Make a merged gradient the next version of its fragment, and encode what is broadcast.

    The same bits as ``apply_outer_step`` of ``merged.gradient`` and ``yeto.wire.bf16.encode``, in one pass.

    Args:
        params: f32, 1-D, the committed version; untouched.
        momentum: f32, 1-D, same size; untouched.
        merged: what ``merge_fragment`` returned; used up, its memory becomes the new parameters'.
        lr: outer learning rate.
        mu: outer momentum; ignored in a sweep.
        sweep: closing sweep: plain SGD with ``lr``, and the momentum stays as it is.
        encode: whether to encode the new parameters in bf16.
        threads: at most this many work at a time; None for one a core. It changes no bit.

    Raises:
        MergeError: a dtype or size does not fit, or ``merged`` is used up.
    """
    elements, factors, cut = merged.take()
    _require(params, momentum, elements)
    return _next_version(
        params,
        momentum,
        elements,
        factors,
        cut,
        elements,
        lr=lr,
        mu=mu,
        sweep=sweep,
        encode=encode,
        threads=threads,
    )


def _next_version(
    params: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    factors: tuple[float, ...],
    cut: Plan,
    new_params: Tensor,
    *,
    lr: float,
    mu: float,
    sweep: bool,
    encode: bool = False,
    threads: int | None = None,
) -> OuterResult:
    new_momentum = None if sweep else empty_floats(params.numel())
    halves = empty_halves(params.numel()) if encode else None
    stepped = step(
        gradient,
        factors,
        params.detach(),
        momentum.detach(),
        cut,
        lr=lr,
        mu=0.0 if sweep else mu,
        new_params=new_params,
        new_momentum=new_momentum,
        halves=halves,
        threads=threads,
    )
    assert stepped.params_digest is not None
    assert stepped.momentum_digest is not None
    return OuterResult(
        params=new_params,
        momentum=momentum if new_momentum is None else new_momentum,
        finite=stepped.finite,
        params_digest=stepped.params_digest,
        momentum_digest=stepped.momentum_digest,
        encoded=None if halves is None else halves.astype("<u2", copy=False).data.cast("B"),
    )


def _require(params: Tensor, momentum: Tensor, gradient: Tensor) -> None:
    require_f32("params", params)
    require_f32("momentum", momentum, params)
    require_f32("gradient", gradient, params)
