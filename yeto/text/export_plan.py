"""What a checkpoint is of: which model, which tuning, which tensor is where.

The rule: a checkpoint that carries the learners' training manifest needs no flags, and a flag that says
something else is refused, never obeyed; with the wrong alpha an adapter loads and is wrong. A checkpoint
without a manifest needs the flags, and then its layout fingerprint decides whether they are right: it covers
every name, shape and position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from attrs import field, frozen

from yeto.errors import CheckpointError, ConfigError, ProtocolError
from yeto.layout import build_layout
from yeto.state import Checkpoint, StoredCheckpoint
from yeto.text.config import TextConfig
from yeto.tuning.identity import ModelIdentity, identify
from yeto.wire import Layout, MergeMode, TrainingManifest, layout_fingerprint

SETTINGS = ("tuning", "lora_r", "lora_alpha", "lora_targets")


@frozen(kw_only=True)
class ExportFlags:
    """What the caller said; None where the checkpoint is to say it."""

    model: str | None = None
    model_revision: str | None = None
    trust_remote_code: bool = False
    tuning: str | None = None
    lora_r: int | None = None
    lora_alpha: int | None = None
    lora_targets: str | None = None


@frozen(kw_only=True)
class ExportPlan:
    """A checkpoint with everything that its tensors need to become a model again."""

    config: TextConfig
    """Model, pinned revision, tuning, adapter settings."""
    identity: ModelIdentity
    layout: Layout | None = field(repr=False)
    """Names, shapes and order of the tensors; None until the model says them (no manifest)."""
    given_targets: str | None
    """``--lora-targets`` as given; can be compared with the stated ones only on the model itself."""


def plan_export(checkpoint: Checkpoint, flags: ExportFlags, say: Callable[[str], None]) -> ExportPlan:
    """Bring what a checkpoint says, its values apart, and the caller's flags together.

    Raises:
        ConfigError: a flag is missing, or contradicts what the checkpoint states.
        CheckpointError: the manifest inside the checkpoint is not of this checkpoint.
    """
    manifest = _manifest(checkpoint)
    stated = {} if manifest is None else _stated(manifest.binding)
    for name, value in stated.items():
        given = None if name == "lora_targets" else getattr(flags, name)
        if given is not None and str(given) != str(value):
            raise ConfigError(
                f"--{name.replace('_', '-')} {given} contradicts the checkpoint, which states {value}; "
                "leave the flag out"
            )
    settings = {name: getattr(flags, name) for name in SETTINGS if getattr(flags, name) is not None} | stated
    if "tuning" not in settings:
        raise ConfigError(
            "the checkpoint does not state how it was trained; say --tuning lora or --tuning full"
        )
    if settings["tuning"] == "lora":
        missing = [name for name in SETTINGS if name not in settings]
        if missing:
            wanted = ", ".join("--" + name.replace("_", "-") for name in missing)
            raise ConfigError(f"the checkpoint does not state its LoRA settings; give {wanted}")
    model, revision, identity = _model(manifest, flags, say)
    config = TextConfig(
        model=model,
        model_revision=revision,
        trust_remote_code=flags.trust_remote_code,
        **settings,
    )
    return ExportPlan(
        config=config,
        identity=identity,
        layout=None if manifest is None else manifest.layout,
        given_targets=flags.lora_targets,
    )


def named_layout(
    checkpoint: StoredCheckpoint, plan: ExportPlan, shapes: Mapping[str, tuple[int, ...]]
) -> Layout:
    """Return the layout with names, checked against the tensors that the model has.

    Args:
        checkpoint: what is exported.
        plan: with a layout if the checkpoint carries a manifest.
        shapes: canonical name to shape of the model's trained tensors.

    Raises:
        CheckpointError: the checkpoint's tensors are not this model's.
    """
    if plan.layout is not None:
        stated = {tensor.name: tensor.shape for part in plan.layout.fragments for tensor in part.tensors}
        _require_equal(stated, dict(shapes), plan.config.model)
        return plan.layout
    for layout in _candidates(checkpoint, shapes):
        if checkpoint.facts.fingerprint is None:
            sizes = [part.numel for part in checkpoint.fragments]
            if [part.numel for part in layout.fragments] == sizes:
                return layout
        elif layout_fingerprint(layout).hex() == checkpoint.facts.fingerprint:
            return layout
    raise CheckpointError(
        f"the checkpoint's tensors are not those of --model {plan.config.model} with these settings (no "
        "layout of its names and shapes has the checkpoint's fingerprint); check --model, --tuning and the "
        "--lora flags"
    )


def _manifest(checkpoint: Checkpoint) -> TrainingManifest | None:
    if checkpoint.training_manifest is None:
        return None
    try:
        manifest = TrainingManifest.from_dict(checkpoint.training_manifest)
    except ProtocolError as error:
        raise CheckpointError(f"the checkpoint's training manifest is damaged: {error}") from error
    if layout_fingerprint(manifest.layout).hex() != checkpoint.fingerprint:
        raise CheckpointError("the checkpoint's training manifest describes other tensors than it has")
    return manifest


def _stated(binding: Mapping[str, Any]) -> dict[str, Any]:
    try:
        stated: dict[str, Any] = {"tuning": binding["tuning"]}
        if stated["tuning"] == "lora":
            lora = binding["lora"]
            targets = ",".join(lora["targets"])
            stated |= {"lora_r": lora["r"], "lora_alpha": lora["alpha"], "lora_targets": targets}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint's training manifest is not of the text task (no {error}); was this another task?"
        ) from error
    return stated


def _model(
    manifest: TrainingManifest | None, flags: ExportFlags, say: Callable[[str], None]
) -> tuple[str, str | None, ModelIdentity]:
    """Return name, revision and identity of the base model."""
    stated: Mapping[str, str] = {} if manifest is None else manifest.binding.get("model", {})
    model = flags.model or stated.get("hub_id")
    if model is None:
        raise ConfigError(
            "--model is missing: the checkpoint was trained from a local folder, or does not say from what; "
            "name the folder or the Hugging Face id of the base model"
        )
    revision = flags.model_revision
    if revision is None and model == stated.get("hub_id"):
        revision = stated.get("commit")
    identity = identify(model, revision)
    found = identity.binding()
    if stated and found.keys() == dict(stated).keys() and found != dict(stated):
        raise ConfigError(
            f"--model {model} is not the model that was trained: it is {_words(found)}, the checkpoint "
            f"states {_words(stated)}"
        )
    if stated and found.keys() != dict(stated).keys():
        say(
            f"note: whether {model} is the model that was trained cannot be told: it is {_words(found)}, the "
            f"checkpoint states {_words(stated)}"
        )
    return model, identity.commit, identity


def _words(binding: Mapping[str, str]) -> str:
    return " ".join(f"{name} {value}" for name, value in sorted(binding.items(), reverse=True))


def _require_equal(
    stated: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], model: str
) -> None:
    for name in sorted(stated.keys() | found.keys()):
        if stated.get(name) != found.get(name):
            raise CheckpointError(
                f"the checkpoint's tensors are not those of --model {model}: {name} has shape "
                f"{stated.get(name, 'none')} in the checkpoint and {found.get(name, 'none')} in the model"
            )


def _candidates(checkpoint: StoredCheckpoint, shapes: Mapping[str, tuple[int, ...]]) -> list[Layout]:
    """Return the layouts with the checkpoint's number of fragments that some learner flags give."""
    count = len(checkpoint.fragments)
    merges = ["rda", "iso"]
    if checkpoint.facts.modes:
        merges = ["iso" if MergeMode.ISO in checkpoint.facts.modes else "rda"]
    layouts = [
        build_layout(shapes, fragments=wish, pattern=pattern, matrix_merge=merge)
        for merge, pattern, wish in product(merges, ("binpack", "strided"), {count, max(1, count - 1)})
    ]
    return [layout for layout in layouts if len(layout.fragments) == count]
