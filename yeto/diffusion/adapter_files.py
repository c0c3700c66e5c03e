"""An adapter as a folder that its users load, one for each denoiser.

Where the pipeline has ``load_lora_weights``, as nearly all have, it is a file of diffusers: PEFT's keys
behind a prefix for the part of the pipeline, and in the head rank, alpha and targets; without them the
library would take the scale to be one, whatever alpha is. Where it has not (PixArt, say), it is a folder of
PEFT, which ``PeftModel.from_pretrained`` puts on the denoiser itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from diffusers.utils import logging as diffusers_logging
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import Tensor

from yeto.errors import ConfigError
from yeto.tuning.hub import cause_of

WEIGHTS: Final = "pytorch_lora_weights.safetensors"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"
_PEFT_PREFIX: Final = "base_model.model"
SETTINGS_KEY: Final = "lora_adapter_metadata"
"""What diffusers calls the settings in the head of the file."""


def file_prefix(part: str) -> str:
    """Return what keys of a denoiser's file begin with, for diffusers to take it.

    The file of a second transformer has the first one's prefix, and a flag of ``load_lora_weights`` says
    which of the two it is for.
    """
    return "unet" if part == "unet" else "transformer"


def load_options(part: str) -> dict[str, Any]:
    """Return what ``load_lora_weights`` has to be told for a denoiser's folder."""
    return {"load_into_transformer_2": True} if part == "transformer_2" else {}


def takes_adapters(kind: str) -> bool:
    """Tell whether pipelines of a class have ``load_lora_weights``; one that diffusers does not know may."""
    import diffusers

    pipeline = getattr(diffusers, kind, None)
    return pipeline is None or hasattr(pipeline, "load_lora_weights")


def how_to_load(kind: str, folder: Path, part: str) -> str:
    """Return the line of Python by which a pipeline gets a denoiser's adapter."""
    if not takes_adapters(kind):
        return f'pipeline.{part} = PeftModel.from_pretrained(pipeline.{part}, "{folder}")'
    options = "".join(f", {name}={value}" for name, value in load_options(part).items())
    return f'pipeline.load_lora_weights("{folder}"{options})'


def part_of(name: str) -> str:
    """Return the denoiser that a trained tensor belongs to: the first piece of its canonical name."""
    return name.partition(".")[0]


def tensors_of(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return the tensors of one denoiser, by their names inside it."""
    return {
        name.removeprefix(f"{part}."): tensor for name, tensor in tensors.items() if part_of(name) == part
    }


def write_adapter(
    folder: Path,
    part: str,
    tensors: Mapping[str, Tensor],
    *,
    kind: str,
    r: int,
    alpha: int,
    targets: Sequence[str],
) -> None:
    """Write one denoiser's adapter.

    Args:
        folder: is made.
        part: the denoiser.
        kind: class of the pipeline, which decides what loads there.
        tensors: by canonical name; others than this denoiser's are left out.
        r: rank.
        alpha: scale times rank.
        targets: what PEFT takes for the adapted modules.

    Raises:
        OSError: the system refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"r": r, "lora_alpha": alpha, "target_modules": list(targets)}
    metadata = {"format": "pt"}
    if takes_adapters(kind):
        prefix, file_name = file_prefix(part), WEIGHTS
        words = {f"{prefix}.{name}": value for name, value in settings.items()}
        metadata[SETTINGS_KEY] = json.dumps(words, sort_keys=True)
    else:
        prefix, file_name = _PEFT_PREFIX, PEFT_WEIGHTS
        LoraConfig(**settings, inference_mode=True).save_pretrained(folder)
    own = tensors_of(tensors, part)
    save_file(
        {f"{prefix}.{name}": tensor.detach().to("cpu").contiguous() for name, tensor in own.items()},
        folder / file_name,
        metadata=metadata,
    )


def load_adapter(pipeline: Any, folder: Path, part: str, name: str) -> None:
    """Put one exported adapter on a pipeline's denoiser, as its users do.

    Args:
        pipeline: with the denoiser, whose layers are replaced in place.
        folder: of the denoiser.
        part: the denoiser.
        name: of the adapter, from now on.

    Raises:
        Exception: whatever the libraries raise.
    """
    if (folder / PEFT_WEIGHTS).is_file():
        PeftModel.from_pretrained(getattr(pipeline, part), str(folder), adapter_name=name)
        return
    # The library would also tell of text encoders, for which there is no adapter and need not be.
    before = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        pipeline.load_lora_weights(str(folder), adapter_name=name, **load_options(part))
    finally:
        diffusers_logging.set_verbosity(before)


def load_adapters(pipeline: Any, folder: Path, parts: Sequence[str]) -> None:
    """Put exported adapters on a pipeline, as its users do.

    Args:
        pipeline: with these denoisers.
        folder: has a folder for each denoiser that was trained.
        parts: the denoisers there are.

    Raises:
        ConfigError: there is no adapter, or the library does not load it.
    """
    found = [
        part for part in parts if any((folder / part / name).is_file() for name in (WEIGHTS, PEFT_WEIGHTS))
    ]
    if not found:
        raise ConfigError(
            f"{folder}: no adapter of {' or '.join(parts)} is here; name a folder that "
            "yeto-diffusion-export or a learner wrote"
        )
    for part in found:
        try:
            load_adapter(pipeline, folder / part, part, part)
        except Exception as error:
            raise ConfigError(f"{folder / part}: does not load: {cause_of(error)}") from error
