"""What a checkpoint of the text task is of: which model, which tuning, which tensor is where.

What flags may say beside a checkpoint that states it all is in :mod:`yeto.tuning.export_manifest`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen

from yeto.errors import CheckpointError, ConfigError
from yeto.state import Checkpoint
from yeto.text.config import TextConfig
from yeto.tuning.export_manifest import (
    ExportFlags,
    base_model,
    manifest_of,
    require_agreement,
    require_lora_settings,
)
from yeto.tuning.identity import ModelIdentity, identify
from yeto.wire import Layout

SETTINGS = ("tuning", "lora_r", "lora_alpha", "lora_targets")


@frozen(kw_only=True)
class ExportPlan:
    """A checkpoint with everything that its tensors need to become a model again."""

    config: TextConfig
    """Model, pinned revision, tuning, adapter settings."""
    identity: ModelIdentity
    layout: Layout | None = field(repr=False)
    """Names, shapes and order of the tensors; None until the model says them (no manifest)."""
    chat_template: str | None = field(repr=False)
    """The template that rows were written by, where it was not the model's."""
    given_targets: str | None
    """``--lora-targets`` as given; can be compared with the stated ones only on the model itself."""


def plan_export(checkpoint: Checkpoint, flags: ExportFlags, say: Callable[[str], None]) -> ExportPlan:
    """Bring what a checkpoint says, its values apart, and the caller's flags together.

    Raises:
        ConfigError: a flag is missing, or contradicts what the checkpoint states.
        CheckpointError: the manifest inside the checkpoint is not of this checkpoint.
    """
    manifest = manifest_of(checkpoint, "text")
    stated = {} if manifest is None else _stated(manifest.binding)
    # Targets can be compared only on the model itself.
    require_agreement(stated, {name: getattr(flags, name) for name in SETTINGS if name != "lora_targets"})
    settings = {name: getattr(flags, name) for name in SETTINGS if getattr(flags, name) is not None} | stated
    if "tuning" not in settings:
        raise ConfigError(
            "the checkpoint does not state how it was trained; say --tuning lora or --tuning full"
        )
    if settings["tuning"] == "lora":
        require_lora_settings(settings, SETTINGS)
    model, identity = base_model(manifest, flags.model, flags.model_revision, identify, say)
    config = TextConfig(
        model=model,
        model_revision=identity.commit,
        trust_remote_code=flags.trust_remote_code,
        **settings,
    )
    return ExportPlan(
        config=config,
        identity=identity,
        layout=None if manifest is None else manifest.layout,
        chat_template=None if manifest is None else _template(manifest.binding),
        given_targets=flags.lora_targets,
    )


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


def _template(binding: Mapping[str, Any]) -> str | None:
    template = binding.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    raise CheckpointError("the checkpoint's training manifest is damaged: its chat template is no text")
