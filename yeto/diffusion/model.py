"""The denoisers of a learner: loaded, frozen, adapted, placed, and ready to be asked.

The rules of dtypes and seeds are those of language models (:mod:`yeto.text.model`): what is trained is
float32, what is frozen may be bfloat16; adapters are drawn on the CPU from the root seed alone, everything
random about training from root + learner + M * rank afterwards.

The rule of the names: a trained tensor is called by its denoiser's part of the pipeline and by the key that
PEFT gives it, ``transformer.….to_q.lora_A.weight``, which is what files of adapters call it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import field, frozen
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from yeto.diffusion.asking import Asking
from yeto.diffusion.calls import Denoising, Manner
from yeto.diffusion.config import DiffusionConfig
from yeto.diffusion.encode import PipelineEncoders
from yeto.diffusion.needs import needs_of
from yeto.diffusion.objective import Schedule, schedule_of
from yeto.diffusion.pipeline import SCHEDULER, VAE, Found, find_pipeline, load_parts
from yeto.diffusion.targets import Targets, find_targets
from yeto.diffusion.values import Conditioning, Encoders, RowNeeds
from yeto.errors import ConfigError
from yeto.tuning.devices import choose_device
from yeto.tuning.lora import ADAPTER, canonical_name


class Denoisers:
    """The denoisers of a loaded pipeline, and what they ask of rows."""

    def __init__(self, found: Found, pipeline: Any) -> None:
        """Look at a pipeline, and try how it calls its denoisers.

        Args:
            found: where it was loaded from.
            pipeline: with some of its denoisers and its scheduler, and perhaps its VAE; stays as it is.

        Raises:
            ConfigError: it cannot be trained.
        """
        loaded = {part: getattr(pipeline, part, None) for part in found.denoisers}
        self.modules: dict[str, nn.Module] = {part: one for part, one in loaded.items() if one is not None}
        """Part name to module."""
        first: Any = next(iter(self.modules.values()))
        # Its own word for the dtype: some layers stay in float32, whatever the others are.
        device, dtype = next(first.parameters()).device, first.dtype
        self.device: torch.device = device
        self.schedule: Schedule = schedule_of(pipeline.scheduler, found.name)
        asking = Asking(
            pipeline,
            self.modules,
            self.schedule.scheduler,
            name=found.name,
            device=device,
            dtype=dtype,
        )
        self._denoising = Denoising(
            asking,
            self.modules,
            self.schedule,
            name=found.name,
            device=device,
            dtype=dtype,
        )
        self.needs: RowNeeds = needs_of(found, pipeline)
        self.manner: Manner | None = None
        """How they are called; None where that shows only with the first row."""
        if self.needs.prompt_width is not None and self.needs.latent_channels is not None:
            self.manner = self._denoising.rehearse(
                self.needs.latent_channels, self.needs.prompt_width, self.needs.pooled_width
            )

    def part_at(self, timestep: float) -> str:
        """Return the name of the denoiser for a time, as the scheduler counts it."""
        return self._denoising.part_at(timestep)

    def predict(
        self, part: str, latents: Tensor, timesteps: Tensor, conditioning: Sequence[Conditioning]
    ) -> Tensor:
        """Return what a denoiser says; see :meth:`yeto.diffusion.calls.Denoising.predict`."""
        return self._denoising.predict(part, latents, timesteps, conditioning)


@frozen(kw_only=True)
class LoadedPipeline:
    """A pipeline whose denoisers are ready to train."""

    found: Found
    denoisers: Denoisers = field(repr=False)
    encoders: Encoders = field(repr=False)
    targets: Targets
    device: torch.device
    compute_dtype: torch.dtype
    """What matrix products run in: bfloat16 (by autocast) or float32."""

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by canonical name, in the model's order; all float32."""
        return trainable_parameters(self.denoisers.modules)

    def describe(self) -> dict[str, Any]:
        """Return facts for people."""
        trained = sum(parameter.numel() for parameter in self.trainable_parameters().values())
        total = sum(one.numel() for module in self.denoisers.modules.values() for one in module.parameters())
        return {
            "pipeline": self.found.kind,
            "denoisers": list(self.denoisers.modules),
            "prediction": self.denoisers.schedule.prediction,
            "parameters": total,
            "trainable_parameters": trained,
            "trainable_percent": round(100.0 * trained / total, 4),
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            "device": str(self.device),
        }


def load_encoders(config: DiffusionConfig) -> tuple[Encoders, RowNeeds]:
    """Return a pipeline's frozen parts, without its denoisers, and what its rows must be.

    Raises:
        ConfigError: there is no such pipeline.
    """
    found = _found(config)
    device = choose_device(config.device)
    pipeline = load_parts(found, (VAE, SCHEDULER), torch.float32)
    vae = getattr(pipeline, VAE, None)
    encoders = PipelineEncoders(found, device=device, dtype=_dtype(config, device), vae=vae)
    return encoders, needs_of(found, pipeline)


def load_pipeline(config: DiffusionConfig) -> LoadedPipeline:
    """Build what a configuration describes, ready to train.

    Seeds the global random state: the root seed before building, the training seed afterwards.

    Raises:
        ConfigError: the pipeline does not load, or a setting does not fit it.
    """
    device = choose_device(config.device)
    dtype = _dtype(config, device)
    found = _found(config)
    pipeline = load_parts(found, (*found.denoisers, VAE, SCHEDULER), dtype)
    modules = _trained_denoisers(found, pipeline)
    torch.manual_seed(config.seed)
    targets = adapt(modules, config)
    for module in modules.values():
        _set_checkpointing(module, config.gradient_checkpointing, device)
        module.to(device)
        # Nothing is drawn and nothing measured before: the mode decides about dropout only.
        module.eval()
    denoisers = Denoisers(found, pipeline)
    for module in denoisers.modules.values():
        module.train()
    vae = getattr(pipeline, VAE, None)
    encoders = PipelineEncoders(found, device=device, dtype=dtype, vae=vae)
    torch.manual_seed(config.seed + config.learner_id + config.num_learners * config.rank)
    return LoadedPipeline(
        found=found,
        denoisers=denoisers,
        encoders=encoders,
        targets=targets,
        device=device,
        compute_dtype=dtype,
    )


def load_frozen(config: DiffusionConfig) -> tuple[Found, Any, PipelineEncoders]:
    """Load a pipeline to look at: its denoisers frozen, without adapters, on their device, and its encoders.

    Raises:
        ConfigError: the pipeline does not load.
    """
    device = choose_device(config.device)
    dtype = _dtype(config, device)
    found = _found(config)
    pipeline = load_parts(found, (*found.denoisers, VAE, SCHEDULER), dtype)
    for module in _trained_denoisers(found, pipeline).values():
        module.requires_grad_(False)
        module.to(device)
    vae = getattr(pipeline, VAE, None)
    return found, pipeline, PipelineEncoders(found, device=device, dtype=dtype, vae=vae)


def adapt(denoisers: Mapping[str, nn.Module], config: DiffusionConfig) -> Targets:
    """Freeze denoisers and give them float32 adapters; draws their A matrices from the global random state.

    Raises:
        ConfigError: the targets are not there, or PEFT cannot put an adapter on one of them.
    """
    targets = find_targets(denoisers, config.lora_targets)
    for part, module in denoisers.items():
        module.requires_grad_(False)
        if part not in targets:
            continue
        settings = LoraConfig(
            r=config.lora_r,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            target_modules=list(targets[part]),
        )
        try:
            inject_adapter_in_model(settings, module, adapter_name=ADAPTER)
        except ValueError as error:
            raise ConfigError(f"--lora-targets: {' '.join(str(error).split())}") from error
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return targets


def adapted_shapes(config: DiffusionConfig, found: Found) -> tuple[Targets, dict[str, tuple[int, ...]]]:
    """Return the targets and the trained tensors that a configuration leads to, without training anything.

    Raises:
        ConfigError: the pipeline does not load, or the targets are not there.
    """
    # bfloat16 is enough to look at shapes.
    pipeline = load_parts(found, (*found.denoisers, SCHEDULER), torch.bfloat16)
    modules = _trained_denoisers(found, pipeline)
    targets = adapt(modules, config)
    return targets, {name: tuple(one.shape) for name, one in trainable_parameters(modules).items()}


def trainable_parameters(denoisers: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return the trained parameters of denoisers by canonical name."""
    named = {
        f"{part}.{canonical_name(name)}": parameter
        for part, module in denoisers.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    assert all(parameter.dtype == torch.float32 for parameter in named.values())
    return named


def _trained_denoisers(found: Found, pipeline: Any) -> dict[str, nn.Module]:
    """Return the denoisers that the pipeline calls.

    Raises:
        ConfigError: a second one is there, and the pipeline does not say from when on.
    """
    if len(found.denoisers) > 1 and pipeline.config.get("boundary_ratio") is None:
        raise ConfigError(
            f"--model {found.name}: it has {' and '.join(found.denoisers)}, and no boundary_ratio that says "
            "which of them denoises when; set it in its model_index.json"
        )
    return {part: getattr(pipeline, part) for part in found.denoisers}


def _found(config: DiffusionConfig) -> Found:
    return find_pipeline(config.model, config.model_revision, trust_remote_code=config.trust_remote_code)


def _dtype(config: DiffusionConfig, device: torch.device) -> torch.dtype:
    wants_bf16 = config.base_dtype == "bf16" or (config.base_dtype == "auto" and device.type != "cpu")
    return torch.bfloat16 if wants_bf16 else torch.float32


def _set_checkpointing(module: Any, wanted: str, device: torch.device) -> None:
    if wanted == "off" or (wanted == "auto" and device.type == "cpu"):
        return
    if not getattr(module, "_supports_gradient_checkpointing", False):
        if wanted == "on":
            raise ConfigError(
                f"--gradient-checkpointing on: {type(module).__name__} does not support it; say off"
            )
        return
    module.enable_gradient_checkpointing()
