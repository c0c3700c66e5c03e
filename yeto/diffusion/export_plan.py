"""What a checkpoint of the diffusion task is of: which pipeline, which adapters, which tensor is where.

What flags may say beside a checkpoint that states it all is in :mod:`yeto.tuning.export_manifest`. A manifest
comes from other machines: what becomes a name of a folder, or a size, is checked before it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import field, frozen

from yeto.diffusion.adapter_files import part_of
from yeto.diffusion.config import DiffusionConfig
from yeto.diffusion.pipeline import DENOISERS, Found, find_pipeline
from yeto.errors import CheckpointError
from yeto.state import Checkpoint
from yeto.tuning.export_manifest import (
    ExportFlags,
    base_model,
    manifest_of,
    require_agreement,
    require_lora_settings,
    shapes_of,
)
from yeto.tuning.identity import ModelIdentity
from yeto.wire import Layout

SETTINGS: Final = ("lora_r", "lora_alpha", "lora_targets")


@frozen(kw_only=True)
class Stated:
    """What a training manifest says of the adapters."""

    targets: Mapping[str, tuple[str, ...]]
    """Denoiser to the modules that have an adapter, as PEFT takes them."""
    layout: Layout = field(repr=False)


@frozen(kw_only=True)
class DiffusionPlan:
    """A checkpoint with everything that its tensors need to become adapters again."""

    config: DiffusionConfig
    """Model, pinned revision, adapter settings."""
    found: Found
    """The base pipeline."""
    stated: Stated | None
    """None where the pipeline must say what the tensors are called."""


def plan_export(checkpoint: Checkpoint, flags: ExportFlags, say: Callable[[str], None]) -> DiffusionPlan:
    """Bring what a checkpoint says, its values apart, and the caller's flags together.

    Raises:
        ConfigError: a flag is missing, or contradicts what the checkpoint states.
        CheckpointError: the manifest inside the checkpoint is not of this checkpoint.
    """
    manifest = manifest_of(checkpoint, "diffusion")
    given = {name: getattr(flags, name) for name in SETTINGS}
    settings, stated = dict(given), None
    if manifest is not None:
        settings, targets = _stated(manifest.binding)
        # Targets can be compared only on the pipeline itself.
        require_agreement(settings, {name: given[name] for name in ("lora_r", "lora_alpha")})
        stated = Stated(targets=targets, layout=manifest.layout)
        _require_prefixes(stated)
        settings["lora_targets"] = given["lora_targets"] or "auto"
    require_lora_settings(settings, SETTINGS)
    pipelines: list[Found] = []

    def identify(model: str, revision: str | None = None) -> ModelIdentity:
        pipelines.append(find_pipeline(model, revision, trust_remote_code=flags.trust_remote_code))
        return pipelines[-1].identity

    model, identity = base_model(manifest, flags.model, flags.model_revision, identify, say)
    config = DiffusionConfig(
        model=model,
        model_revision=identity.commit,
        trust_remote_code=flags.trust_remote_code,
        **settings,
    )
    found = pipelines[-1]
    if stated is not None and not set(stated.targets) <= set(found.denoisers):
        raise CheckpointError(
            f"the checkpoint has adapters of {', '.join(stated.targets)}; --model {model} has "
            f"{', '.join(found.denoisers)}"
        )
    return DiffusionPlan(config=config, found=found, stated=stated)


def _stated(binding: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Return rank and alpha, and the targets of each denoiser."""
    lora = binding.get("lora")
    parts = lora.get("targets") if isinstance(lora, Mapping) else None
    settings = (
        {} if not isinstance(lora, Mapping) else {"lora_r": lora.get("r"), "lora_alpha": lora.get("alpha")}
    )
    sound = (
        binding.get("tuning") == "lora"
        and all(isinstance(value, int) and value >= 1 for value in settings.values())
        and isinstance(parts, Mapping)
        and len(parts) > 0
        and all(
            part in DENOISERS and isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)
            for part, names in parts.items()
        )
    )
    if not sound:
        raise CheckpointError(
            "the checkpoint's training manifest does not say what its adapters are (lora with r, alpha and "
            f"targets of {', '.join(DENOISERS)}); it was not written by this version's learners"
        )
    assert isinstance(parts, Mapping), "looked at above"
    return settings, {part: tuple(names) for part, names in parts.items()}


def _require_prefixes(stated: Stated) -> None:
    for name in shapes_of(stated.layout):
        if part_of(name) not in stated.targets:
            raise CheckpointError(
                f"the checkpoint's training manifest has a tensor {name}, but adapters of "
                f"{', '.join(stated.targets)} only"
            )
