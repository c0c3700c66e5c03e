"""From a checkpoint to a folder that transformers and PEFT load.

The rule: all or nothing. The folder is written under another name, loaded back and compared, and only then
renamed; whoever finds it under its own name has a model that works. Nothing but the checkpoint and the base
model is needed: every learner may be gone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen
from safetensors import SafetensorError
from torch import nn

import yeto
from yeto.errors import CheckpointError, ConfigError
from yeto.layout import tensor_slices
from yeto.state import Checkpoint, read_checkpoint
from yeto.text.export_plan import ExportFlags, ExportPlan, named_layout, plan_export
from yeto.text.export_verify import Verified, begins_at_zero, verify_adapter, verify_model
from yeto.text.lora import add_adapter, canonical_name, find_targets, quiet, save_adapter
from yeto.text.model import load_base
from yeto.text.tokenizer import load_tokenizer
from yeto.wire import Layout

FACTS_FILE = "yeto-export.json"
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
        say: takes progress lines.

    Raises:
        ConfigError: a flag is missing, wrong, or contradicts the checkpoint.
        CheckpointError: the checkpoint cannot be read, is not of this model, or the result is not what it
            should be. Nothing is left behind then.
    """
    output_dir = Path(os.path.abspath(output_dir))
    if output_dir.exists() and not (overwrite and output_dir.is_dir()):
        raise ConfigError(
            f"--output-dir {output_dir} exists; name another one, or replace it with --overwrite"
        )
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    say(f"reading {checkpoint}")
    state = read_checkpoint(checkpoint)
    for notice in state.notices:
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
    plan = plan_export(state, flags, say)
    if merged and plan.config.tuning != "lora":
        raise ConfigError("--merged: this checkpoint is of full tuning, whose export is a whole model anyway")
    kind = "model" if plan.config.tuning == "full" else "merged" if merged else "adapter"
    say(f"step {state.step}, {len(state.fragments)} fragments; building {kind} on {plan.config.model}")
    module = _filled(state, plan, dtype if kind != "adapter" else "auto")
    aside = output_dir.with_name(f".{output_dir.name}.partial-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        say(f"writing {output_dir}")
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        _write(module, kind, plan, aside)
        del module
        verified = None
        if verify:
            say("verifying: loading the result back")
            verified = _verify(kind, plan, aside, expect_change=_has_learned(state, plan))
        warnings = _warnings(state, verified)
        _write_facts(state, plan, kind, verified, aside)
        _put_in_place(aside, output_dir)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"--output-dir {output_dir}: cannot write: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
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
        verified=verified,
        warnings=warnings,
    )


def _filled(state: Checkpoint, plan: ExportPlan, dtype: str) -> Any:
    """Return the base model, with its adapter if there is one, holding the checkpoint's tensors."""
    config = plan.config
    module = load_base(config, DTYPES[dtype])
    if config.tuning == "lora":
        targets = find_targets(module, config.lora_targets)
        if plan.given_targets is not None and find_targets(module, plan.given_targets) != targets:
            raise ConfigError(
                f"--lora-targets {plan.given_targets} contradicts the checkpoint, which states "
                f"{config.lora_targets}; leave the flag out"
            )
        module = add_adapter(module, targets.names, r=config.lora_r, alpha=config.lora_alpha)
        # Who loads the adapter gets the base model it was trained on, not what its branch points to then.
        module.peft_config["default"].revision = config.model_revision
    else:
        module.requires_grad_(True)
    trained = {
        canonical_name(name): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    layout = named_layout(state, plan, {name: tuple(p.shape) for name, p in trained.items()})
    _fill(trained, layout, state)
    return module


def _fill(trained: dict[str, nn.Parameter], layout: Layout, state: Checkpoint) -> None:
    with torch.no_grad():
        for part, version in zip(layout.fragments, state.fragments, strict=True):
            for piece in tensor_slices(part):
                values = version.params[piece.start : piece.stop].reshape(piece.tensor.shape)
                trained[piece.tensor.name].copy_(values)


def _write(module: Any, kind: str, plan: ExportPlan, folder: Path) -> None:
    folder.mkdir()
    if kind == "adapter":
        save_adapter(module, str(folder))
    else:
        with quiet():
            whole = module.merge_and_unload(safe_merge=True) if kind == "merged" else module
            whole.save_pretrained(folder)
    load_tokenizer(plan.config).save_pretrained(folder)


def _verify(kind: str, plan: ExportPlan, folder: Path, *, expect_change: bool) -> Verified:
    if kind == "adapter":
        return verify_adapter(folder, plan.config)
    return verify_model(folder, plan.config, expect_change=expect_change)


def _has_learned(state: Checkpoint, plan: ExportPlan) -> bool:
    """Tell whether a whole model must differ from its base: rounds were committed and B is not zero."""
    if plan.config.tuning == "full" or plan.layout is None:
        return state.step > 0
    return any(
        bool(version.params[piece.start : piece.stop].any())
        for part, version in zip(plan.layout.fragments, state.fragments, strict=True)
        for piece in tensor_slices(part)
        if begins_at_zero(piece.tensor.name)
    )


def _warnings(state: Checkpoint, verified: Verified | None) -> tuple[str, ...]:
    if state.step == 0:
        return ("no round was committed yet: this is the model as training began",)
    if verified is not None and verified.empty:
        return (f"after {state.step} committed rounds every B matrix is zero: nothing was learned",)
    return ()


def _write_facts(
    state: Checkpoint, plan: ExportPlan, kind: str, verified: Verified | None, folder: Path
) -> None:
    config = plan.config
    lora = {"r": config.lora_r, "alpha": config.lora_alpha, "targets": config.lora_targets}
    facts = {
        "format_version": 1,
        "software_version": yeto.__version__,
        "kind": kind,
        "base_model": plan.identity.binding(),
        "tuning": config.tuning,
        "lora": lora if config.tuning == "lora" else None,
        "checkpoint": {
            "digest": state.digest,
            "format": state.format,
            "step": state.step,
            "versions": [version.version for version in state.fragments],
            "params_digests": [version.params_digest for version in state.fragments],
            "layout_fingerprint": state.fingerprint,
            "session_contract": state.contract,
        },
        "ledger": [attrs.asdict(entry) for entry in state.ledger],
        "settings": state.settings,
        "verified": None if verified is None else attrs.asdict(verified),
    }
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    (folder / FACTS_FILE).write_text(text, encoding="utf-8")


def _put_in_place(aside: Path, output_dir: Path) -> None:
    if not output_dir.exists():
        aside.rename(output_dir)
        return
    old = output_dir.with_name(f".{output_dir.name}.old-{os.getpid()}")
    output_dir.rename(old)
    try:
        aside.rename(output_dir)
    except OSError:
        old.rename(output_dir)
        raise
    shutil.rmtree(old)
