"""From a checkpoint to a folder that transformers and PEFT load.

The rule: all or nothing. The folder is written under another name, loaded back and compared, and only then
renamed; whoever finds it under its own name has a model that works. Nothing but the checkpoint and the base
model is needed: every learner may be gone.

The rule of memory: one model and one fragment. A checkpoint holds eight bytes a parameter, so its fragments
are read one at a time, straight into the model. A syncer may go on writing to the folder: when a file has
gone, the newest checkpoint is filled in instead, from its first fragment.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen
from safetensors import SafetensorError
from torch import Tensor, nn

import yeto
from yeto.errors import CheckpointError, ConfigError
from yeto.layout import tensor_slices
from yeto.state import StoredCheckpoint, open_checkpoint
from yeto.state.digested import IncompleteCheckpoint
from yeto.state.manifest import FRESH_LOOKS_MAX
from yeto.text.export_plan import ExportFlags, ExportPlan, named_layout, plan_export
from yeto.text.export_verify import Verified, begins_at_zero, verify_adapter, verify_model
from yeto.text.lora import add_adapter, find_targets, quiet, save_adapter
from yeto.text.model import load_base
from yeto.text.tokenizer import load_tokenizer
from yeto.tuning.export_lookahead import Fate, fate_of, removed, require_choice
from yeto.tuning.export_place import free_place
from yeto.tuning.lora import canonical_name
from yeto.tuning.placing import made_aside, put_in_place
from yeto.wire import FragmentLayout, Layout

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
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    require_choice(lookahead)
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
    module, stored, learned = _filled(
        checkpoint, stored, plan, dtype if kind != "adapter" else "auto", lookahead, say
    )
    state, fate = stored.facts, fate_of(stored.lookaheads, lookahead)
    say(f"look-ahead: {fate.sentence}")
    try:
        say(f"writing {output_dir}")
        with made_aside(output_dir) as aside:
            _write(module, kind, plan, aside)
            del module
            verified = None
            if verify:
                say("verifying: loading the result back")
                verified = _verify(kind, plan, aside, expect_change=state.step > 0 and learned)
            warnings = _warnings(state.step, learned)
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


def _filled(
    checkpoint: Path,
    stored: StoredCheckpoint,
    plan: ExportPlan,
    dtype: str,
    lookahead: str,
    say: Callable[[str], None],
) -> tuple[Any, StoredCheckpoint, bool]:
    """Return the base model, with its adapter if there is one, holding the checkpoint's tensors.

    Returns:
        The model, the checkpoint that it holds in the end, and whether anything was learned.
    """
    module = _built(plan, dtype)
    trained = {
        canonical_name(name): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    layout = named_layout(stored, plan, {name: tuple(p.shape) for name, p in trained.items()})
    for _ in range(FRESH_LOOKS_MAX):
        try:
            return module, stored, _fill(trained, layout, stored, lookahead)
        except IncompleteCheckpoint:
            newer = open_checkpoint(checkpoint)
            if newer.facts.step == stored.facts.step or newer.facts.fingerprint != stored.facts.fingerprint:
                raise
            say(f"note: step {stored.facts.step} was replaced while it was read; taking {newer.facts.step}")
            stored = newer
    raise CheckpointError(
        f"{checkpoint}: was replaced {FRESH_LOOKS_MAX} times while it was read; keep some checkpoints with "
        "--keep-every and name one of their manifests"
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
    module = add_adapter(module, targets.names, r=config.lora_r, alpha=config.lora_alpha)
    # Who loads the adapter gets the base model it was trained on, not what its branch points to then.
    module.peft_config["default"].revision = config.model_revision
    return module


def _fill(trained: dict[str, nn.Parameter], layout: Layout, stored: StoredCheckpoint, lookahead: str) -> bool:
    """Copy every fragment into the parameters; return whether a tensor that began at zero is not zero now.

    Where there is none (full tuning) that cannot be told, and the model is taken to have learned.
    """
    learned = not any(begins_at_zero(name) for name in trained)
    with torch.no_grad():
        for fragment, part in enumerate(layout.fragments):
            ahead = removed(stored.lookaheads[fragment], lookahead)
            # Its values have no name here, so that they are gone before the next are read.
            learned |= _fill_one(trained, part, torch.from_numpy(stored.read_params(fragment, ahead)))
    return learned


def _fill_one(trained: dict[str, nn.Parameter], part: FragmentLayout, values: Tensor) -> bool:
    learned = False
    for piece in tensor_slices(part):
        name, value = piece.tensor.name, values[piece.start : piece.stop]
        trained[name].copy_(value.reshape(piece.tensor.shape))
        learned |= begins_at_zero(name) and bool(value.any())
    return learned


def _write(module: Any, kind: str, plan: ExportPlan, folder: Path) -> None:
    if kind == "adapter":
        save_adapter(module, str(folder))
    else:
        with quiet():
            whole = _merged(module) if kind == "merged" else module
            whole.save_pretrained(folder)
    load_tokenizer(plan.config).save_pretrained(folder)


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


def _warnings(step: int, learned: bool) -> tuple[str, ...]:
    if step == 0:
        return ("no round was committed yet: this is the model as training began",)
    if not learned:
        return (f"after {step} committed rounds every B matrix is zero: nothing was learned",)
    return ()


def _write_facts(
    stored: StoredCheckpoint, plan: ExportPlan, kind: str, fate: Fate, verified: Verified | None, folder: Path
) -> None:
    config, state = plan.config, stored.facts
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
            "versions": [part.version for part in stored.fragments],
            "params_digests": [part.params_digest for part in stored.fragments],
            "layout_fingerprint": state.fingerprint,
            "session_contract": state.contract,
        },
        "lookahead": {
            "outcome": fate.word,
            "momentum_times": list(stored.lookaheads),
        },
        "ledger": [attrs.asdict(entry) for entry in state.ledger],
        "settings": state.settings,
        "verified": None if verified is None else attrs.asdict(verified),
    }
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    (folder / FACTS_FILE).write_text(text, encoding="utf-8")
