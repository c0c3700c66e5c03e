"""Proof that exported adapters are what they claim to be, by loading them the way their users will.

The rule: writing without an error proves nothing. An adapter whose keys are named wrongly loads with a
warning at most and does nothing, and one whose scale is lost acts too little. So each folder is loaded with
``pipeline.load_lora_weights`` (or what its users have instead), every tensor must be there with its values
and no other, rank and alpha must be those of the checkpoint, and what the denoiser predicts must differ from
what it predicted before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from attrs import frozen
from peft import get_peft_model_state_dict
from torch import Tensor

from yeto.diffusion.adapter_files import load_adapter
from yeto.diffusion.encode import PipelineEncoders
from yeto.diffusion.export_plan import DiffusionPlan
from yeto.diffusion.model import Denoisers
from yeto.diffusion.pipeline import SCHEDULER, load_parts
from yeto.diffusion.values import Conditioning
from yeto.errors import CheckpointError, ConfigError
from yeto.tuning.export_fill import begins_at_zero
from yeto.tuning.hub import cause_of

PROBED: Final = "probed"
"""Name of the adapter while it is looked at."""
_EXAMPLES: Final = 3
_SIDE: Final = 16
"""Height and width of the latents that are probed."""
_TOKENS: Final = 8
"""Of the prompt that is probed."""


@frozen(kw_only=True)
class Verified:
    """What loading the export back showed."""

    tensors: int
    """Tensors of all folders, all of them expected, loaded and equal to the checkpoint's."""
    moved: dict[str, float]
    """Denoiser to the largest change of its prediction against the base pipeline, on a fixed probe."""
    empty: bool
    """The trained tensors say that nothing was learned: every B matrix is zero."""


def verify_adapters(
    folder: Path, plan: DiffusionPlan, expected: Mapping[str, Mapping[str, Tensor]]
) -> Verified:
    """Load every denoiser's folder onto its base and compare, one denoiser in memory at a time.

    Args:
        folder: of the export.
        plan: names the pipeline, rank and alpha.
        expected: denoiser to its tensors, by their names inside it.

    Raises:
        CheckpointError: a key is missing, unexpected or not loaded as it was written, the scale is another
            one, or an adapter that is not zero changes nothing.
    """
    moved, empty = {}, True
    for part, tensors in expected.items():
        zero = nothing_learned(tensors)
        change = 0.0
        # In a coarse dtype a young adapter can drown in rounding; float32 has the last word.
        for dtype in (torch.bfloat16, torch.float32):
            change = _change(folder / part, part, plan, tensors, dtype)
            if change > 0.0 or zero:
                break
        if change == 0.0 and not zero:
            raise CheckpointError(f"{folder / part}: the adapter loads but changes no prediction")
        moved[part], empty = change, empty and zero
    return Verified(tensors=sum(map(len, expected.values())), moved=moved, empty=empty)


def _change(
    folder: Path, part: str, plan: DiffusionPlan, expected: Mapping[str, Tensor], dtype: torch.dtype
) -> float:
    """Load one folder and check it; return how much it changes a prediction."""
    pipeline = load_parts(plan.found, (part, SCHEDULER), dtype)
    denoisers = Denoisers(plan.found, pipeline)
    before = probe(plan, denoisers, part, dtype)
    try:
        load_adapter(pipeline, folder, part, PROBED)
    except Exception as error:
        raise CheckpointError(f"{folder}: does not load: {cause_of(error)}") from error
    module = getattr(pipeline, part)
    if PROBED not in getattr(module, "peft_config", {}):
        raise CheckpointError(f"{folder}: {plan.found.kind} does not take it for its {part}")
    loaded = {
        name: tensor
        for name, tensor in get_peft_model_state_dict(module, adapter_name=PROBED).items()
        # Made for a key that the file does not have, and never filled.
        if not tensor.is_meta
    }
    missing, unexpected = sorted(expected.keys() - loaded.keys()), sorted(loaded.keys() - expected.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"{folder}: keys differ from those that were loaded: missing "
            f"{', '.join(missing[:_EXAMPLES]) or 'none'}, unexpected "
            f"{', '.join(unexpected[:_EXAMPLES]) or 'none'}"
        )
    for name, tensor in expected.items():
        if not torch.equal(loaded[name], tensor.to(loaded[name].dtype)):
            raise CheckpointError(f"{folder}: {name} was not loaded as the checkpoint has it")
    settings = module.peft_config[PROBED]
    if (settings.r, settings.lora_alpha) != (plan.config.lora_r, plan.config.lora_alpha):
        raise CheckpointError(
            f"{folder}: loaded with r {settings.r} and alpha {settings.lora_alpha} instead of "
            f"{plan.config.lora_r} and {plan.config.lora_alpha}"
        )
    return largest_change(before, probe(plan, denoisers, part, dtype), folder)


def nothing_learned(tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether an adapter's tensors are those of the beginning."""
    return not any(bool(tensor.any()) for name, tensor in tensors.items() if begins_at_zero(name))


def largest_change(before: Tensor, after: Tensor, folder: Path) -> float:
    """Return the largest difference between two predictions.

    Raises:
        CheckpointError: it is not finite.
    """
    change = float((after - before).abs().max())
    if not change < float("inf"):
        raise CheckpointError(f"{folder}: with the adapter the predictions are not finite")
    return change


def probe(plan: DiffusionPlan, denoisers: Denoisers, part: str, dtype: torch.dtype) -> Tensor:
    """Return what a denoiser says of fixed noise with a fixed prompt, float32."""
    needs = denoisers.needs
    if needs.latent_channels is None:
        raise ConfigError(
            f"--model {plan.config.model}: does not say how many channels its latents have, so adapters for "
            "it cannot be compared with it; --no-verify leaves that out"
        )
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, needs.latent_channels, _SIDE, _SIDE, generator=generator)
    if needs.prompt_width is None:
        # Its settings do not say how wide a prompt is; its text encoders do.
        (prompt,) = PipelineEncoders(plan.found, device=torch.device("cpu"), dtype=dtype).conditioning([""])
    else:
        prompt = Conditioning(
            prompt_embeds=torch.randn(_TOKENS, needs.prompt_width, generator=generator),
            mask=torch.ones(_TOKENS, dtype=torch.bool) if needs.needs_mask else None,
            pooled=None
            if needs.pooled_width is None
            else torch.randn(needs.pooled_width, generator=generator),
        )
    times = denoisers.schedule.timesteps
    with torch.no_grad():
        return denoisers.predict(part, latents, times[len(times) // 2].reshape(1), [prompt]).float()
