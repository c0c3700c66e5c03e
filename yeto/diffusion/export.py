"""From a checkpoint to adapters that diffusers loads, one folder for each denoiser, or to a whole pipeline.

The rule: all or nothing. The folder is written under another name, loaded back and compared, and only then
renamed; whoever finds it under its own name has adapters that work. Nothing but the checkpoint and the base
pipeline is needed: every learner may be gone.

A checkpoint with the learners' training manifest names its tensors itself, and they are written as they are:
the pipeline is loaded to verify, not to export. Without a manifest the pipeline says what the names are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from attrs import frozen
from safetensors import SafetensorError
from torch import Tensor

from yeto.diffusion.adapter_files import how_to_load, tensors_of, write_adapter
from yeto.diffusion.export_merged import DTYPES, verify_merged, write_merged
from yeto.diffusion.export_plan import DiffusionPlan, plan_export
from yeto.diffusion.export_verify import Verified, verify_adapters
from yeto.diffusion.model import adapted_shapes
from yeto.errors import CheckpointError, ConfigError
from yeto.state import StoredCheckpoint, open_checkpoint
from yeto.tuning.export_facts import write_facts
from yeto.tuning.export_fill import fill, warnings_of
from yeto.tuning.export_lookahead import CHOICES, Fate, fate_of
from yeto.tuning.export_manifest import ExportFlags, named_layout, require_sizes, shapes_of
from yeto.tuning.export_place import free_place
from yeto.tuning.placing import made_aside, put_in_place
from yeto.tuning.settings import require_choice
from yeto.wire import Layout

ADAPTERS: Final = "diffusion-adapters"
MERGED: Final = "diffusion-pipeline"


@frozen(kw_only=True)
class DiffusionExportReport:
    """What was written."""

    output_dir: Path
    kind: str
    """``diffusion-adapters``, or ``diffusion-pipeline`` for a whole one with them folded in."""
    step: int
    """Global step of the checkpoint."""
    base_model: str
    folders: tuple[str, ...]
    """Inside ``output_dir``, one for each denoiser that was trained, and named after it."""
    lookahead: str
    """What became of Nesterov's look-ahead: ``removed``, ``kept``, ``none`` (there was none) or ``unknown``
    (the checkpoint does not say, and the parameters are as stored)."""
    verified: Verified | None
    warnings: tuple[str, ...]


def export(
    checkpoint: Path,
    model: str | None,
    output_dir: Path,
    *,
    model_revision: str | None = None,
    trust_remote_code: bool = False,
    tuning: str | None = None,
    lora_r: int | None = None,
    lora_alpha: int | None = None,
    lora_targets: str | None = None,
    merged: bool = False,
    verify: bool = True,
    overwrite: bool = False,
    dtype: str = "auto",
    lookahead: str = "remove",
    say: Callable[[str], None] = lambda line: None,
) -> DiffusionExportReport:
    """Write the adapters that a checkpoint holds, or the pipeline with them folded in.

    Args:
        checkpoint: folder, manifest or single file.
        model: folder or Hugging Face id of the base pipeline; None takes the id that the checkpoint states.
        output_dir: made by this call; an existing one is refused unless ``overwrite``.
        model_revision: of a Hugging Face id; None takes the commit that the checkpoint states.
        trust_remote_code: run code that comes with the pipeline.
        tuning: only ``lora``.
        lora_r: rank; this and the next two may be None if the checkpoint states them.
        lora_alpha: scale times rank.
        lora_targets: as given to the learners.
        merged: fold the adapters into their denoisers and write the whole pipeline.
        verify: load the result back, compare it with the checkpoint, and with the base pipeline.
        overwrite: replace ``output_dir``, once everything else is done.
        dtype: of merged denoisers: ``f32``, ``bf16``, or ``auto`` for the base's.
        lookahead: ``remove`` takes Nesterov's look-ahead off the fragments that were stored with it; ``keep``
            writes what is stored.
        say: takes progress lines.

    Raises:
        ConfigError: a flag is missing, wrong, or contradicts the checkpoint.
        CheckpointError: the checkpoint cannot be read, is not of this pipeline, or the result is not what it
            should be. Nothing is left behind then.
    """
    output_dir = free_place(output_dir, checkpoint, model, overwrite=overwrite)
    require_choice("--lookahead", lookahead, CHOICES)
    require_choice("--dtype", dtype, tuple(DTYPES))
    require_choice("--tuning", tuning or "lora", ("lora",))
    say(f"reading {checkpoint}")
    stored = open_checkpoint(checkpoint)
    for notice in stored.notices:
        say(f"note: {notice}")
    flags = ExportFlags(
        model=model,
        model_revision=model_revision,
        trust_remote_code=trust_remote_code,
        lora_r=lora_r,
        lora_alpha=lora_alpha,
        lora_targets=lora_targets,
    )
    plan = plan_export(stored.facts, flags, say)
    say(f"step {stored.facts.step}, {len(stored.fragments)} fragments; adapters of {plan.config.model}")
    targets, layout = _named(stored, plan, lora_targets)
    tensors = {name: torch.empty(shape) for name, shape in shapes_of(layout).items()}
    stored, learned = fill(checkpoint, stored, tensors, layout, lookahead, say)
    fate, step = fate_of(stored.lookaheads, lookahead), stored.facts.step
    say(f"look-ahead: {fate.sentence}")
    kind, verified = MERGED if merged else ADAPTERS, None
    own = {part: tensors_of(tensors, part) for part in targets}
    try:
        say(f"writing {output_dir}")
        with made_aside(output_dir) as aside:
            if merged:
                write_merged(aside, plan, targets, own, dtype)
            else:
                _write_adapters(aside, plan, targets, tensors)
            if verify:
                say("verifying: loading the result back")
                verified = (
                    verify_merged(aside, plan, own, dtype) if merged else verify_adapters(aside, plan, own)
                )
            _write_facts(stored, plan, kind, targets, fate, verified, aside)
            put_in_place(aside, output_dir, replace=overwrite)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"--output-dir {output_dir}: cannot write: {error}") from error
    warnings = warnings_of(step, learned)
    for warning in warnings:
        say(f"warning: {warning}")
    if verified is not None:
        moved = ", ".join(f"{part} by up to {change:.3g}" for part, change in verified.moved.items())
        say(f"verified: {verified.tensors} tensors; predictions moved: {moved}")
    say(f"done: {output_dir}; in Python:")
    for line in _loading(plan, kind, targets, output_dir):
        say(f"  {line}")
    return DiffusionExportReport(
        output_dir=output_dir,
        kind=kind,
        step=step,
        base_model=plan.config.model,
        folders=tuple(targets),
        lookahead=fate.word,
        verified=verified,
        warnings=warnings,
    )


def _write_adapters(
    folder: Path, plan: DiffusionPlan, targets: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor]
) -> None:
    for part, names in targets.items():
        write_adapter(
            folder / part,
            part,
            tensors,
            kind=plan.found.kind,
            r=plan.config.lora_r,
            alpha=plan.config.lora_alpha,
            targets=names,
        )


def _write_facts(
    stored: StoredCheckpoint,
    plan: DiffusionPlan,
    kind: str,
    targets: Mapping[str, Sequence[str]],
    fate: Fate,
    verified: Verified | None,
    folder: Path,
) -> None:
    config = plan.config
    write_facts(
        folder,
        stored,
        kind=kind,
        identity=plan.found.identity,
        tuning=config.tuning,
        lora={"r": config.lora_r, "alpha": config.lora_alpha, "targets": targets},
        fate=fate,
        verified=verified,
        more={"pipeline": plan.found.kind, "folders": list(targets)},
    )


def _loading(plan: DiffusionPlan, kind: str, parts: Iterable[str], folder: Path) -> list[str]:
    """Return the lines of Python that load what was written."""
    if kind == MERGED:
        return [f'pipeline = DiffusionPipeline.from_pretrained("{folder}")']
    return [how_to_load(plan.found.kind, folder / part, part) for part in parts]


def _named(
    stored: StoredCheckpoint, plan: DiffusionPlan, given: str | None
) -> tuple[dict[str, list[str]], Layout]:
    """Return the targets of each denoiser, and the layout with names."""
    said = plan.stated
    if said is not None and given is None:
        require_sizes(stored, said.layout)
        return {part: list(names) for part, names in said.targets.items()}, said.layout
    targets, shapes = adapted_shapes(plan.config, plan.found)
    if said is not None and {part: tuple(names) for part, names in targets.items()} != dict(said.targets):
        words = "; ".join(f"{part}: {', '.join(names)}" for part, names in said.targets.items())
        raise ConfigError(
            f"--lora-targets {given} contradicts the checkpoint, which states {words}; leave the flag out"
        )
    layout = named_layout(stored, None if said is None else said.layout, shapes, plan.config.model)
    return {part: list(names) for part, names in targets.items()}, layout
