"""The summed squared error of a denoiser's predictions.

The rule: the sum is exact, the mean is somebody else's, as for language models. Batches of other shapes have
other numbers of elements, and only sums can be put together again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yeto.diffusion.asking import NotTaken
from yeto.diffusion.samples import Samples
from yeto.errors import DataError

if TYPE_CHECKING:
    from yeto.diffusion.model import Denoisers


def summed_error(
    denoisers: Denoisers, samples: Samples, level: Tensor, noise: Tensor, *, weighting: str
) -> Tensor:
    """Return the weighted squared error of predictions, summed over all elements.

    Args:
        denoisers: of one pipeline.
        samples: n of them.
        level: number of the noise level of each, int64 of shape (n,).
        noise: float32 of the latents' shape.
        weighting: what an error at a level counts; see :mod:`yeto.diffusion.objective`.

    Returns:
        A scalar, float32, on the denoisers' device.

    Raises:
        DataError: the pipeline does not take samples of this shape.
    """
    schedule = denoisers.schedule
    noisy = schedule.noised(samples.latents, noise, level)
    target = schedule.target(samples.latents, noise, level)
    weights = schedule.weights(level, weighting)
    timesteps = schedule.timesteps[level]
    parts = [denoisers.part_at(float(timestep)) for timestep in timesteps]
    total = torch.zeros((), device=denoisers.device)
    for part, module in denoisers.modules.items():
        rows = [row for row, own in enumerate(parts) if own == part]
        if not rows:
            # Of two denoisers one may have nothing to do: then its gradients are zero, and not missing.
            for parameter in module.parameters():
                if parameter.requires_grad:
                    total = total + (parameter * 0.0).sum()
            continue
        try:
            said = denoisers.predict(
                part, noisy[rows], timesteps[rows], [samples.conditioning[row] for row in rows]
            )
        except NotTaken as error:
            raise DataError(f"{samples.origins[rows[0]]}: {error}") from error
        errors = (said - target[rows].to(said.device)).square().flatten(1).sum(dim=1)
        total = total + (errors * weights[rows].to(said.device)).sum()
    return total
