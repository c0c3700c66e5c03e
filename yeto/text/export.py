"""From a checkpoint to a folder that transformers and PEFT load.

The rule: all or nothing. The folder is written under another name, loaded back and compared, and only then
renamed; whoever finds it under its own name has a model that works. Nothing but the checkpoint and the base
model is needed: every learner may be gone.

The rule of memory: one model and one fragment (:mod:`yeto.tuning.export_fill`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import SafetensorError

from yeto.errors import CheckpointError, ConfigError
from yeto.state import StoredCheckpoint, open_checkpoint
from yeto.text.export_plan import ExportPlan, plan_export
from yeto.text.export_verify import Verified, verify_adapter, verify_model
from yeto.text.lora import add_adapter, find_targets, quiet, save_adapter
from yeto.text.model import load_base
from yeto.text.tokenizer import load_tokenizer
from yeto.tuning.export_facts import write_facts
from yeto.tuning.export_fill import fill, warnings_of
from yeto.tuning.export_lookahead import CHOICES, Fate, fate_of
from yeto.tuning.export_manifest import ExportFlags, named_layout
from yeto.tuning.export_place import free_place
from yeto.tuning.lora import canonical_name
from yeto.tuning.placing import made_aside, put_in_place
from yeto.tuning.settings import require_choice

DTYPES: dict[str, torch.dtype | str] = {"auto": "auto", "f32": torch.float32, "bf16": torch.bfloat16}


@frozen(kw_only=True)
class ExportReport:
    """What was written."""

    output_dir: Path
    kind: str
    """``adapter``, ``merged`` or ``model``."""
    step: int
    """Global step of the checkpoint."""
    base_model: str
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
) -> ExportReport:
    """Write the model that a checkpoint holds.

    Args:
        checkpoint: folder, manifest or single file.
        model: folder or Hugging Face id of the base model; None takes the id that the checkpoint states.
        output_dir: made by this call; an existing one is refused unless ``overwrite``.
        model_revision: of a Hugging Face id; None takes the commit that the checkpoint states.
        trust_remote_code: run code that comes with the model.
        tuning: ``lora`` or ``full``; this and the next three may be None if the checkpoint states them.
        lora_r: rank.
        lora_alpha: scale times rank.
        lora_targets: as given to the learners.
        merged: fold a LoRA adapter into its base model and write the whole model.
        verify: load the result back and compare it with the base model.
        overwrite: replace ``output_dir``, once everything else is done.
        dtype: of a model folder's weights: ``f32``, ``bf16``, or ``auto`` for the base model's.
        lookahead: ``remove`` takes Nesterov's look-ahead off the fragments that were stored with it, as those
            of a run with outer momentum are before its closing sweep; ``keep`` writes what is stored.
        say: takes progress lines.

    Raises:
        ConfigError: a flag is missing, wrong, or contradicts the checkpoint.
        CheckpointError: the checkpoint cannot be read, is not of this model, or the result is not what it
            should be. Nothing is left behind then.
    """
    output_dir = free_place(output_dir, checkpoint, model, overwrite=overwrite)
    require_choice("--dtype", dtype, tuple(DTYPES))
    require_choice("--lookahead", lookahead, CHOICES)
    say(f"reading {checkpoint}")
    stored = open_checkpoint(checkpoint)
    for notice in stored.notices:
        say(f"note: {notice}")
    flags = ExportFlags(
        model=model,
        model_revision=model_revision,
        trust_remote_code=trust_remote_code,
        tuning=tuning,
        lora_r=lora_r,
        lora_alpha=lora_alpha,
        lora_targets=lora_targets,
    )
    plan = plan_export(stored.facts, flags, say)
    if merged and plan.config.tuning != "lora":
        raise ConfigError("--merged: this checkpoint is of full tuning, whose export is a whole model anyway")
    kind = "model" if plan.config.tuning == "full" else "merged" if merged else "adapter"
    say(
        f"step {stored.facts.step}, {len(stored.fragments)} fragments; building {kind} on {plan.config.model}"
    )
    module = _built(plan, dtype if kind != "adapter" else "auto")
    trained = {canonical_name(name): part for name, part in module.named_parameters() if part.requires_grad}
    shapes = {name: tuple(part.shape) for name, part in trained.items()}
    layout = named_layout(stored, plan.layout, shapes, plan.config.model)
    stored, learned = fill(checkpoint, stored, trained, layout, lookahead, say)
    state, fate = stored.facts, fate_of(stored.lookaheads, lookahead)
    say(f"look-ahead: {fate.sentence}")
    try:
        say(f"writing {output_dir}")
        with made_aside(output_dir) as aside:
            _write(module, kind, plan, aside)
            del module, trained
            verified = None
            if verify:
                say("verifying: loading the result back")
                verified = _verify(kind, plan, aside, expect_change=state.step > 0 and learned)
            warnings = warnings_of(state.step, learned)
            _write_facts(stored, plan, kind, fate, verified, aside)
            put_in_place(aside, output_dir, replace=overwrite)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"--output-dir {output_dir}: cannot write: {error}") from error
    for warning in warnings:
        say(f"warning: {warning}")
    if verified is not None:
        say(f"verified: {verified.tensors} tensors, logits moved by up to {verified.logits_moved:.3g}")
    say(f"done: {output_dir}")
    return ExportReport(
        output_dir=output_dir,
        kind=kind,
        step=state.step,
        base_model=plan.config.model,
        lookahead=fate.word,
        verified=verified,
        warnings=warnings,
    )


def _built(plan: ExportPlan, dtype: str) -> Any:
    """Return the base model, with a new adapter if there is one."""
    config = plan.config
    module = load_base(config, DTYPES[dtype])
    if config.tuning != "lora":
        module.requires_grad_(True)
        return module
    targets = find_targets(module, config.lora_targets)
    if plan.given_targets is not None and find_targets(module, plan.given_targets) != targets:
        raise ConfigError(
            f"--lora-targets {plan.given_targets} contradicts the checkpoint, which states "
            f"{config.lora_targets}; leave the flag out"
        )
    return add_adapter(
        module, targets.names, r=config.lora_r, alpha=config.lora_alpha, commit=config.model_revision
    )


def _write(module: Any, kind: str, plan: ExportPlan, folder: Path) -> None:
    if kind == "adapter":
        save_adapter(module, str(folder))
    else:
        with quiet():
            whole = _merged(module) if kind == "merged" else module
            whole.save_pretrained(folder)
    tokenizer = load_tokenizer(plan.config)
    if plan.chat_template is not None:
        tokenizer.chat_template = plan.chat_template
    tokenizer.save_pretrained(folder)


def _merged(module: Any) -> Any:
    """Fold an adapter into its base model, in place: PEFT's own check for NaN copies each weight first.

    Raises:
        CheckpointError: a weight is not finite then.
    """
    whole = module.merge_and_unload()
    for name, parameter in whole.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise CheckpointError(f"--merged: {name} is not finite with the adapter folded in")
    return whole


def _verify(kind: str, plan: ExportPlan, folder: Path, *, expect_change: bool) -> Verified:
    if kind == "adapter":
        return verify_adapter(folder, plan.config)
    return verify_model(folder, plan.config, expect_change=expect_change)


def _write_facts(
    stored: StoredCheckpoint, plan: ExportPlan, kind: str, fate: Fate, verified: Verified | None, folder: Path
) -> None:
    config = plan.config
    lora = {"r": config.lora_r, "alpha": config.lora_alpha, "targets": config.lora_targets}
    write_facts(
        folder,
        stored,
        kind=kind,
        identity=plan.identity,
        tuning=config.tuning,
        lora=lora if config.tuning == "lora" else None,
        fate=fate,
        verified=verified,
    )
