"""What a denoiser learns: which noise its input gets, what it should say, and what an error weighs.

Two kinds of pipelines are known, by their schedulers. With **flow matching**, the input is ``(1 - sigma) *
latents + sigma * noise`` and the target ``noise - latents``. With a schedule of the **DDPM** kind the input
is ``a * latents + b * noise``, where ``a * a`` is the scheduler's cumulated product of alphas and ``b * b``
the rest, and the target is what the scheduler's prediction type says: the noise, the velocity ``a * noise - b
* latents``, or the latents themselves (the sample). What stands at inference between scheduler and denoiser
(a solver of higher order, say) makes no difference: the noise levels are those of training.

The rule of the time: noise levels are drawn uniformly from the steps that the scheduler was made for. A shift
that a flow-matching scheduler has by its settings is in its steps already.

The rule of the weights: all of them say what an error at a noise level counts. With the signal-to-noise ratio
``snr = a * a / (b * b)`` (``a = 1 - sigma``, ``b = sigma`` for flow matching):

* ``none``: one;
* ``sigma``: ``b * b``, so that the error of a flow counts as that of the latents which follow from it;
* ``snr``: as much as the same error of the noise which follows from what was said; one where noise is
  predicted;
* ``min-snr``: that, times ``min(snr, 5) / snr``: nearly clean inputs count less (arXiv:2303.09556).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from attrs import field, frozen
from torch import Tensor

from yeto.errors import ConfigError

MIN_SNR_GAMMA: Final = 5.0
"""Gamma of the min-SNR weighting, as its paper has it (arXiv 2303.09556)."""
FLOW: Final = "flow"
PREDICTIONS: Final = ("epsilon", "v_prediction", "sample")
_FLOW_PREDICTION: Final = "flow_prediction"


@frozen(kw_only=True, eq=False)
class Schedule:
    """Noise levels of a pipeline, and what its denoiser predicts; tensors are float32 of shape (steps,)."""

    prediction: str
    """``flow``, ``epsilon``, ``v_prediction`` or ``sample``."""
    timesteps: Tensor = field(repr=False)
    """How the scheduler counts each level."""
    signal: Tensor = field(repr=False)
    """Factor of the latents in the input."""
    noise: Tensor = field(repr=False)
    """Factor of the noise in the input."""
    scheduler: Any = field(repr=False)
    """One of diffusers for the same levels, to be used up by whoever wants to ask it."""
    train_steps: int
    """How many levels the scheduler was made for."""

    def noised(self, latents: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Return the denoiser's input.

        Args:
            latents: float32 of shape (n, channels, height, width).
            noise: of the same shape.
            level: numbers of noise levels, int64 of shape (n,).
        """
        signal, share = self._at(level, latents)
        return signal * latents + share * noise

    def target(self, latents: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """Return what the denoiser should say of it, of the latents' shape; arguments as of ``noised``."""
        if self.prediction == FLOW:
            return noise - latents
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "sample":
            return latents
        signal, share = self._at(level, latents)
        return signal * noise - share * latents

    def weights(self, level: Tensor, weighting: str) -> Tensor:
        """Return what a squared error at each level counts, float32 of shape (n,)."""
        signal, share = self.signal[level].double() ** 2, self.noise[level].double() ** 2
        if weighting == "none":
            weights = torch.ones_like(signal)
        elif weighting == "sigma":
            weights = share
        else:
            if self.prediction == "epsilon":
                weights = torch.ones_like(signal)
            elif self.prediction == "sample":
                weights = signal / share
            else:
                weights = signal
            if weighting == "min-snr":
                # As min(snr, gamma) / snr, but for inputs without any signal too.
                weights = weights * torch.clamp(MIN_SNR_GAMMA * share / signal, max=1.0)
        return weights.float()

    def _at(self, level: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        place = (-1, *(1,) * (like.ndim - 1))
        return (
            self.signal[level].to(like.device).reshape(place),
            self.noise[level].to(like.device).reshape(place),
        )


def schedule_of(scheduler: Any, model: str) -> Schedule:
    """Return the noise levels that a pipeline's scheduler was made for.

    Args:
        scheduler: of the pipeline; is left as it is.
        model: names the pipeline in errors.

    Raises:
        ConfigError: it is of neither kind that is known.
    """
    from diffusers import DDPMScheduler

    settings = scheduler.config
    name = type(scheduler).__name__
    prediction = settings.get("prediction_type")
    steps = settings.get("num_train_timesteps")
    if isinstance(steps, int) and steps > 1:
        if name.startswith("FlowMatch") and not settings.get("invert_sigmas"):
            own = type(scheduler).from_config(settings)
            return _flow(own, own.sigmas[:steps].double(), steps)
        if prediction == _FLOW_PREDICTION and settings.get("use_flow_sigmas"):
            sigmas = torch.arange(steps, 0, -1, dtype=torch.float64) / steps
            shift = float(settings.get("flow_shift") or 1.0)
            sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
            return _flow(type(scheduler).from_config(settings), sigmas, steps)
        if prediction in PREDICTIONS and (settings.get("beta_schedule") or settings.get("trained_betas")):
            own = DDPMScheduler.from_config(settings)
            kept = own.alphas_cumprod.double()
            return Schedule(
                prediction=str(prediction),
                timesteps=torch.arange(steps, dtype=torch.float32),
                signal=kept.sqrt().float(),
                noise=(1 - kept).sqrt().float(),
                scheduler=own,
                train_steps=steps,
            )
    raise ConfigError(
        f"--model {model}: its scheduler {name} is neither for flow matching nor of the DDPM kind with a "
        f"prediction type of {', '.join(PREDICTIONS)}, so it is not known what to learn; "
        "use a pipeline with such a scheduler"
    )


def _flow(scheduler: Any, sigmas: Tensor, steps: int) -> Schedule:
    return Schedule(
        prediction=FLOW,
        timesteps=(sigmas * steps).float(),
        signal=(1 - sigmas).float(),
        noise=sigmas.float(),
        scheduler=scheduler,
        train_steps=steps,
    )
