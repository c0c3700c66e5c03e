"""A whole pipeline with its adapters folded in: what needs no adapter to be loaded any more.

The denoisers that were trained are written anew; everything else is copied from the base pipeline, file by
file. So one denoiser is in memory at a time, and text encoders and VAE keep the bytes they had.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from attrs import evolve
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import Tensor, nn

from yeto.diffusion.export_plan import DiffusionPlan
from yeto.diffusion.export_verify import Verified, largest_change, nothing_learned, probe
from yeto.diffusion.model import Denoisers
from yeto.diffusion.pipeline import SCHEDULER, Found, load_parts
from yeto.errors import CheckpointError, ConfigError

DTYPES: Final[dict[str, torch.dtype | None]] = {"auto": None, "f32": torch.float32, "bf16": torch.bfloat16}
_STORED: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BESIDE_PARTS: Final = ("model_index.json", "*.py", "LICENSE*")
"""What else a pipeline's folder has that its users need."""
_HEAD_BYTES_MAX: Final = 100 << 20
"""Of a safetensors file: more than the library itself takes for a head."""


def write_merged(
    folder: Path,
    plan: DiffusionPlan,
    targets: Mapping[str, Sequence[str]],
    tensors: Mapping[str, Mapping[str, Tensor]],
    dtype: str,
) -> None:
    """Write the base pipeline with adapters folded into its denoisers.

    Args:
        folder: empty.
        plan: names the pipeline, rank and alpha.
        targets: denoiser to what PEFT takes for its adapted modules.
        tensors: denoiser to the adapter's tensors, by their names inside it.
        dtype: of the denoisers: ``f32``, ``bf16``, or ``auto`` for that of the base.

    Raises:
        CheckpointError: a weight is not finite with the adapter folded in.
        OSError: the system refuses.
    """
    base = plan.found.folder
    for name in plan.found.parts:
        if name not in targets and (base / name).is_dir():
            shutil.copytree(base / name, folder / name)
    for pattern in _BESIDE_PARTS:
        for path in base.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    for part, names in targets.items():
        kept = DTYPES[dtype] or _stored_dtype(plan.found, part)
        module = getattr(load_parts(plan.found, (part, SCHEDULER), kept), part)
        _merged(module, plan, names, tensors[part], part).save_pretrained(folder / part)


def verify_merged(
    folder: Path, plan: DiffusionPlan, tensors: Mapping[str, Mapping[str, Tensor]], dtype: str
) -> Verified:
    """Load the denoisers of a written pipeline and compare them with those of the base.

    Args:
        folder: what was written.
        plan: names the base pipeline.
        tensors: denoiser to the adapter's tensors; where they are zero, nothing may have moved.
        dtype: as written.

    Raises:
        CheckpointError: it does not load, has other tensors than its base, or an expected change is missing.
    """
    written = evolve(plan.found, folder=folder, name=str(folder))
    moved, empty, count = {}, True, 0
    for part, own in tensors.items():
        kept = DTYPES[dtype] or _stored_dtype(plan.found, part)
        try:
            after, shapes = _said(written, plan, part, kept)
        except ConfigError as error:
            raise CheckpointError(f"{folder}: does not load: {error}") from error
        before, expected = _said(plan.found, plan, part, kept)
        if shapes != expected:
            raise CheckpointError(f"{folder / part}: has other tensors than its base")
        zero, change = nothing_learned(own), largest_change(before, after, folder / part)
        if change == 0.0 and not zero:
            raise CheckpointError(
                f"{folder / part}: the merged denoiser predicts what its base does; if the change is "
                f"too small for {str(kept).removeprefix('torch.')}, --dtype f32 keeps it"
            )
        moved[part], empty, count = change, empty and zero, count + len(shapes)
    return Verified(tensors=count, moved=moved, empty=empty)


def _said(
    found: Found, plan: DiffusionPlan, part: str, dtype: torch.dtype
) -> tuple[Tensor, dict[str, tuple[int, ...]]]:
    """Return a denoiser's prediction and the shapes of its tensors; it is out of memory afterwards."""
    pipeline = load_parts(found, (part, SCHEDULER), dtype)
    shapes = {name: tuple(one.shape) for name, one in getattr(pipeline, part).state_dict().items()}
    return probe(plan, Denoisers(found, pipeline), part, dtype), shapes


def _merged(
    module: nn.Module,
    plan: DiffusionPlan,
    targets: Sequence[str],
    tensors: Mapping[str, Tensor],
    part: str,
) -> Any:
    """Fold an adapter into a denoiser, in place."""
    settings = LoraConfig(
        r=plan.config.lora_r, lora_alpha=plan.config.lora_alpha, target_modules=list(targets)
    )
    adapted = get_peft_model(module, settings)
    found = set_peft_model_state_dict(
        adapted, {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    )
    if found.unexpected_keys:
        raise CheckpointError(
            f"the checkpoint's tensors are not those of --model {plan.config.model}: {part} has no "
            f"{found.unexpected_keys[0]}"
        )
    whole: Any = adapted.merge_and_unload()
    for name, parameter in whole.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise CheckpointError(f"--merged: {part}.{name} is not finite with the adapter folded in")
    return whole


def _stored_dtype(found: Found, part: str) -> torch.dtype:
    """Return the dtype that a part's weights are kept in; float32 where that cannot be told."""
    for path in sorted((found.folder / part).glob("*.safetensors")):
        if path.name.count(".") > 1:
            # A variant, which nobody asked for.
            continue
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            head = json.loads(file.read(min(size, _HEAD_BYTES_MAX)))
        kinds = {one["dtype"] for name, one in head.items() if name != "__metadata__"}
        wide = [_STORED[kind] for kind in ("BF16", "F16", "F32") if kind in kinds]
        if wide:
            # Some layers are kept wider than the rest.
            return wide[0]
    return torch.float32
