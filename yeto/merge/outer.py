"""The outer step: Nesterov momentum on the merged outer gradient (DiLoCo, arXiv 2311.08105).

buf = mu buf + D; theta = theta - lr (D + mu buf), with buf = 0 at first. It is ``torch.optim.SGD`` with
``nesterov=True``, in the same operations and so in the same bits; mu = 0 is plain SGD.

Nothing is changed in place: the store hands fragment versions out by reference, to broadcasts and
checkpoints that may still be running.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from yeto.merge.chunks import CHUNK, chunk_bounds, is_finite, require_f32, tensor_digest


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
    require_f32("params", params)
    require_f32("momentum", momentum, params)
    require_f32("gradient", gradient, params)
    new_params = torch.empty(params.shape, dtype=torch.float32)
    new_momentum = torch.empty(params.shape, dtype=torch.float32)
    flat = [tensor.detach().reshape(-1) for tensor in (params, momentum, gradient)]
    out_params, out_momentum = new_params.view(-1), new_momentum.view(-1)
    scratch = torch.empty(CHUNK, dtype=torch.float32)
    for start, stop in chunk_bounds(params.numel()):
        theta, buffer, delta = (tensor[start:stop] for tensor in flat)
        step = scratch[: stop - start]
        new_buffer = torch.mul(buffer, mu, out=out_momentum[start:stop]).add_(delta)
        torch.add(delta, new_buffer, alpha=mu, out=step)
        torch.add(theta, step, alpha=-lr, out=out_params[start:stop])
    return new_params, new_momentum


def apply_outer_step(
    params: Tensor, momentum: Tensor, gradient: Tensor, *, lr: float, mu: float, sweep: bool = False
) -> OuterResult:
    """Compute the next version of a fragment, with its digests.

    Args:
        params: f32, 1-D, the committed version; untouched.
        momentum: f32, 1-D, same size; untouched.
        gradient: merged outer gradient, same size.
        lr: outer learning rate.
        mu: outer momentum; ignored in a sweep.
        sweep: closing sweep: plain SGD with ``lr``, and the momentum stays as it is.

    Raises:
        MergeError: a dtype or size does not fit.
    """
    new_params, new_momentum = outer_step(params, momentum, gradient, lr=lr, mu=0.0 if sweep else mu)
    if sweep:
        new_momentum = momentum
    return OuterResult(
        params=new_params,
        momentum=new_momentum,
        finite=is_finite(new_params) and is_finite(new_momentum),
        params_digest=tensor_digest(new_params),
        momentum_digest=tensor_digest(new_momentum),
    )
