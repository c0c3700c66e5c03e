"""What a denoiser learns: inputs, targets and weights against formulas in float64, by scheduler."""

import math

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)

from yeto.diffusion.objective import schedule_of
from yeto.errors import ConfigError

LEVELS = torch.tensor([0, 1, 250, 500, 998, 999])


def drawn():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 4, 2, 2, generator=generator), torch.randn(6, 4, 2, 2, generator=generator)


def cumulated(scheduler):
    """The product of alphas up to each step, by hand in float64."""
    settings = scheduler.config
    if settings.beta_schedule == "linear":
        betas = torch.linspace(settings.beta_start, settings.beta_end, 1000, dtype=torch.float64)
    else:
        betas = (
            torch.linspace(settings.beta_start**0.5, settings.beta_end**0.5, 1000, dtype=torch.float64) ** 2
        )
    return torch.cumprod(1 - betas, 0)


@pytest.mark.parametrize(
    "scheduler",
    [
        DDPMScheduler(),
        DDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012),
        PNDMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, skip_prk_steps=True),
        EulerDiscreteScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012),
    ],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_ddpm_kinds_learn_what_the_prediction_type_says(scheduler, prediction):
    scheduler = type(scheduler).from_config(scheduler.config, prediction_type=prediction)
    schedule = schedule_of(scheduler, "m")
    latents, noise = drawn()
    kept = cumulated(scheduler)[LEVELS].reshape(-1, 1, 1, 1)
    a, b = kept.sqrt(), (1 - kept).sqrt()
    wanted = {
        "epsilon": noise.double(),
        "v_prediction": a * noise - b * latents,
        "sample": latents.double(),
    }[prediction]
    assert schedule.prediction == prediction
    assert torch.equal(schedule.timesteps[LEVELS], LEVELS.float())
    noisy = schedule.noised(latents, noise, LEVELS)
    assert torch.allclose(noisy.double(), a * latents + b * noise, atol=2e-5)
    assert torch.allclose(schedule.target(latents, noise, LEVELS).double(), wanted, atol=2e-5)
    # What diffusers itself would add to train with.
    theirs = DDPMScheduler.from_config(scheduler.config).add_noise(latents, noise, LEVELS)
    assert torch.allclose(noisy, theirs, atol=1e-6)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("kind", [FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler])
def test_flow_matching_learns_noise_minus_latents(kind, shift):
    schedule = schedule_of(kind(shift=shift), "m")
    latents, noise = drawn()
    plain = (1000 - LEVELS.double()) / 1000
    sigma = (shift * plain / (1 + (shift - 1) * plain)).reshape(-1, 1, 1, 1)
    assert schedule.prediction == "flow"
    noisy = schedule.noised(latents, noise, LEVELS)
    assert torch.allclose(noisy.double(), (1 - sigma) * latents + sigma * noise, atol=1e-5)
    assert torch.equal(schedule.target(latents, noise, LEVELS), noise - latents)
    assert torch.allclose(schedule.timesteps[LEVELS].double(), 1000 * sigma.flatten(), atol=1e-3)


def test_a_solver_of_flows_has_the_same_levels():
    solver = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )
    same = schedule_of(FlowMatchEulerDiscreteScheduler(shift=3.0), "m")
    schedule = schedule_of(solver, "m")
    assert schedule.prediction == "flow"
    assert torch.allclose(schedule.noise, same.noise, atol=1e-6)
    assert torch.allclose(schedule.timesteps, same.timesteps, atol=1e-3)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample", "flow"])
def test_weights_are_the_formulas(prediction):
    if prediction == "flow":
        schedule = schedule_of(FlowMatchEulerDiscreteScheduler(), "m")
        sigma = (1000 - LEVELS.double()) / 1000
        signal, share = (1 - sigma) ** 2, sigma**2
    else:
        scheduler = DDPMScheduler(prediction_type=prediction)
        schedule = schedule_of(scheduler, "m")
        signal = cumulated(scheduler)[LEVELS]
        share = 1 - signal
    for place, (a2, b2) in enumerate(zip(signal.tolist(), share.tolist(), strict=True)):
        snr = a2 / b2
        if prediction == "epsilon":
            as_noise, published = 1.0, min(snr, 5.0) / snr if snr else 1.0
        elif prediction == "sample":
            as_noise, published = snr, min(snr, 5.0)
        else:
            as_noise = a2
            published = min(snr, 5.0) / (snr + 1) if prediction == "v_prediction" else min(snr, 5.0) * b2
        wanted = {"none": 1.0, "sigma": b2, "snr": as_noise, "min-snr": published}
        for weighting, value in wanted.items():
            given = float(schedule.weights(LEVELS, weighting)[place])
            assert math.isfinite(given)
            assert given == pytest.approx(value, rel=2e-3, abs=1e-9), (weighting, place)


def test_an_input_without_any_signal_has_a_finite_weight():
    schedule = schedule_of(DDPMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction"), "m")
    assert float(schedule.signal[-1]) == 0.0
    for weighting in ("none", "sigma", "snr", "min-snr"):
        assert torch.isfinite(schedule.weights(torch.tensor([999]), weighting)).all()


def test_the_pipelines_own_scheduler_is_left_alone():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    before = scheduler.timesteps.clone()
    schedule_of(scheduler, "m").scheduler.set_timesteps(2)
    assert torch.equal(scheduler.timesteps, before)


@pytest.mark.parametrize(
    "scheduler",
    [
        EDMEulerScheduler(),
        FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        DDPMScheduler(prediction_type="something"),
    ],
    ids=["edm", "inverted", "unknown prediction"],
)
def test_other_schedulers_are_refused_by_name(scheduler):
    with pytest.raises(ConfigError, match=rf"--model m: its scheduler {type(scheduler).__name__} is neither"):
        schedule_of(scheduler, "m")
