"""An adapter as a folder that ``pipeline.load_lora_weights`` takes: one for each denoiser.

The keys are PEFT's own behind a prefix for the part of the pipeline, and the head of the file has rank, alpha
and targets: without them the library would take the scale to be one, whatever alpha is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save_file
from torch import Tensor

from yeto.errors import ConfigError
from yeto.tuning.hub import cause_of

WEIGHTS: Final = "pytorch_lora_weights.safetensors"
SETTINGS_KEY: Final = "lora_adapter_metadata"
"""What diffusers calls the settings in the head of the file."""


def file_prefix(component: str) -> str:
    """Return what keys of a denoiser's file begin with, for diffusers to take it.

    The file of a second transformer has the first one's prefix, and a flag of ``load_lora_weights`` says
    which of the two it is for.
    """
    return "unet" if component == "unet" else "transformer"


def load_options(component: str) -> dict[str, Any]:
    """Return what ``load_lora_weights`` has to be told for a denoiser's folder."""
    return {"load_into_transformer_2": True} if component == "transformer_2" else {}


def component_of(name: str) -> str:
    """Return the denoiser that a trained tensor belongs to: the first piece of its canonical name."""
    return name.partition(".")[0]


def tensors_of(tensors: Mapping[str, Tensor], component: str) -> dict[str, Tensor]:
    """Return the tensors of one denoiser, by their names inside it."""
    return {
        name.removeprefix(f"{component}."): tensor
        for name, tensor in tensors.items()
        if component_of(name) == component
    }


def write_adapter(
    folder: Path,
    component: str,
    tensors: Mapping[str, Tensor],
    *,
    r: int,
    alpha: int,
    targets: Sequence[str],
) -> None:
    """Write one denoiser's adapter.

    Args:
        folder: is made.
        component: the denoiser.
        tensors: by canonical name; others than this denoiser's are left out.
        r: rank.
        alpha: scale times rank.
        targets: what PEFT takes for the adapted modules.

    Raises:
        OSError: the system refuses.
    """
    prefix = file_prefix(component)
    settings: dict[str, Any] = {"r": r, "lora_alpha": alpha, "target_modules": list(targets)}
    words = json.dumps({f"{prefix}.{name}": value for name, value in settings.items()}, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            f"{prefix}.{name}": tensor.detach().to("cpu").contiguous()
            for name, tensor in tensors_of(tensors, component).items()
        },
        folder / WEIGHTS,
        metadata={"format": "pt", SETTINGS_KEY: words},
    )


def load_adapters(pipeline: Any, folder: Path, components: Sequence[str]) -> None:
    """Put exported adapters on a pipeline, as its users do.

    Args:
        pipeline: with these denoisers.
        folder: has a folder for each denoiser that was trained.
        components: the denoisers there are.

    Raises:
        ConfigError: there is no adapter, or the library does not load it.
    """
    found = [component for component in components if (folder / component / WEIGHTS).is_file()]
    if not found:
        raise ConfigError(
            f"{folder}: no adapter of {' or '.join(components)} is here; name a folder that "
            "yeto-diffusion-export or a learner wrote"
        )
    for component in found:
        try:
            pipeline.load_lora_weights(
                str(folder / component), adapter_name=component, **load_options(component)
            )
        except Exception as error:
            raise ConfigError(f"{folder / component}: does not load: {cause_of(error)}") from error
