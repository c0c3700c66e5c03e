"""What a checkpoint says about how it was trained, and how that goes with what the caller of an export says.

The rule: a checkpoint that carries the learners' training manifest needs no flags, and a flag that says
something else is refused, never obeyed; with the wrong alpha an adapter loads and is wrong. A checkpoint
without a manifest needs the flags, and then its layout fingerprint decides whether they are right: it covers
every name, shape and position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, Final, Protocol

from attrs import frozen

from yeto.errors import CheckpointError, ConfigError, ProtocolError
from yeto.layout import build_layout
from yeto.state import Checkpoint, StoredCheckpoint
from yeto.tuning.identity import ModelIdentity
from yeto.wire import Layout, MergeMode, TrainingManifest, layout_fingerprint

COMMANDS: Final = {"text": "yeto-export", "diffusion": "yeto-diffusion-export"}
"""Which command exports the checkpoints of which task."""


@frozen(kw_only=True)
class ExportFlags:
    """What the caller of an export said; None where the checkpoint is to say it."""

    model: str | None = None
    model_revision: str | None = None
    trust_remote_code: bool = False
    tuning: str | None = None
    lora_r: int | None = None
    lora_alpha: int | None = None
    lora_targets: str | None = None


class Identify(Protocol):
    """Finds out which model a name means."""

    def __call__(self, model: str, revision: str | None = None) -> ModelIdentity:
        """Return what ``--model`` is; a ConfigError if it is none."""
        ...


def manifest_of(checkpoint: Checkpoint, task: str) -> TrainingManifest | None:
    """Return the training manifest inside a checkpoint; None if it has none.

    Args:
        checkpoint: its values need not be there.
        task: that it must be of, ``text`` or ``diffusion``.

    Raises:
        CheckpointError: the manifest is damaged, or is not of this checkpoint.
        ConfigError: it is of another task; the message names the command for it.
    """
    if checkpoint.training_manifest is None:
        return None
    try:
        manifest = TrainingManifest.from_dict(checkpoint.training_manifest)
    except ProtocolError as error:
        raise CheckpointError(f"the checkpoint's training manifest is damaged: {error}") from error
    if layout_fingerprint(manifest.layout).hex() != checkpoint.fingerprint:
        raise CheckpointError("the checkpoint's training manifest describes other tensors than it has")
    # Text was the first task, and does not say which it is.
    stated = manifest.binding.get("task", "text")
    if stated != task:
        command = COMMANDS.get(stated) if isinstance(stated, str) else None
        remedy = "no command here exports it" if command is None else f"export it with {command}"
        raise ConfigError(f"--checkpoint is of the {stated} task, not of the {task} task: {remedy}")
    return manifest


def require_agreement(stated: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse flags that contradict what a checkpoint states.

    Args:
        stated: setting to value.
        given: the same of the flags; None where the caller said nothing.

    Raises:
        ConfigError: naming the flag.
    """
    for name, value in stated.items():
        said = given.get(name)
        if said is not None and str(said) != str(value):
            raise ConfigError(
                f"--{name.replace('_', '-')} {said} contradicts the checkpoint, which states {value}; "
                "leave the flag out"
            )


def require_lora_settings(settings: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Refuse to go on where neither the checkpoint nor the caller says what the adapter is.

    Raises:
        ConfigError: naming the flags that are missing.
    """
    missing = [name for name in names if settings.get(name) is None]
    if missing:
        wanted = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(f"the checkpoint does not state its LoRA settings; give {wanted}")


def base_model(
    manifest: TrainingManifest | None,
    model: str | None,
    revision: str | None,
    identify: Identify,
    say: Callable[[str], None],
) -> tuple[str, ModelIdentity]:
    """Return name and identity of the base model, which must be the one that was trained.

    Args:
        manifest: of the checkpoint.
        model: as given; None takes the id that the checkpoint states.
        revision: as given; None takes the commit that the checkpoint states.
        identify: finds out which model a name means.
        say: takes a note where that cannot be compared.

    Raises:
        ConfigError: the model is missing, or is another one.
    """
    stated: Mapping[str, str] = {} if manifest is None else manifest.binding.get("model", {})
    if model is None:
        model = stated.get("hub_id")
    if model is None:
        raise ConfigError(
            "--model is missing: the checkpoint was trained from a local folder, or does not say from what; "
            "name the folder or the Hugging Face id of the base model"
        )
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
    return model, identity


def named_layout(
    checkpoint: StoredCheckpoint, stated: Layout | None, shapes: Mapping[str, tuple[int, ...]], model: str
) -> Layout:
    """Return the layout with names, checked against the tensors that the model has.

    Args:
        checkpoint: what is exported.
        stated: the layout of its manifest; None if it carries none.
        shapes: canonical name to shape of the model's trained tensors.
        model: ``--model``, for messages.

    Raises:
        CheckpointError: the checkpoint's tensors are not this model's.
    """
    if stated is not None:
        _require_equal(shapes_of(stated), shapes, model)
        return stated
    for layout in _candidates(checkpoint, shapes):
        if checkpoint.facts.fingerprint is None:
            sizes = [part.numel for part in checkpoint.fragments]
            if [part.numel for part in layout.fragments] == sizes:
                return layout
        elif layout_fingerprint(layout).hex() == checkpoint.facts.fingerprint:
            return layout
    raise CheckpointError(
        f"the checkpoint's tensors are not those of --model {model} with these settings (no "
        "layout of its names and shapes has the checkpoint's fingerprint); check --model, --tuning and the "
        "--lora flags"
    )


def shapes_of(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return name to shape of every tensor of a layout."""
    return {tensor.name: tensor.shape for part in layout.fragments for tensor in part.tensors}


def require_sizes(checkpoint: StoredCheckpoint, layout: Layout) -> None:
    """Refuse a manifest whose tensors are not as large as the checkpoint's fragments, before making them.

    Raises:
        CheckpointError: so it is.
    """
    stated = [part.numel for part in layout.fragments]
    found = [part.numel for part in checkpoint.fragments]
    if stated != found:
        raise CheckpointError(
            f"the checkpoint's training manifest describes fragments of {stated[:3]}… elements, the "
            f"checkpoint has {found[:3]}…"
        )


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
    # A layout with embeddings has two fragments where one was asked for.
    layouts = [
        build_layout(dict(shapes), fragments=wish, pattern=pattern, matrix_merge=merge)
        for merge, pattern, wish in product(merges, ("binpack", "strided"), {count, max(1, count - 1)})
    ]
    return [layout for layout in layouts if len(layout.fragments) == count]
