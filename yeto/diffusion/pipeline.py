"""Where a pipeline is, what is in it, and loading the parts of it that are wanted.

A pipeline of diffusers is a folder with a ``model_index.json`` that names its parts, each in a folder of its
own. The rule: a part is loaded by whoever needs it. The denoiser of a large pipeline is beside training what
its text encoder is beside caching, and neither should wait, or pay in memory, for the other.

Which parts are trained is decided by their names, which all pipelines share: the denoisers are called
``transformer``, ``transformer_2`` and ``unet``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from yeto.diffusion.extra import require_diffusers
from yeto.diffusion.pipeline_files import INDEX, fetch_pipeline, parts_of
from yeto.errors import ConfigError
from yeto.tuning.hub import HubError, cause_of, unreachable_hub
from yeto.tuning.identity import ModelIdentity, files_digest, require_hub_id

DENOISERS: Final = ("transformer", "transformer_2", "unet")
VAE: Final = "vae"
SCHEDULER: Final = "scheduler"
_HASHED: Final = (
    "config.json",
    "scheduler_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
)
"""What decides what a part does; how words become tokens is in the text encoder's hands."""


@frozen(kw_only=True)
class Found:
    """A pipeline on this machine."""

    name: str
    """As ``--model`` has it."""
    folder: Path
    kind: str
    """Name of the pipeline's class."""
    parts: tuple[str, ...]
    """Names of the parts that are there."""
    identity: ModelIdentity
    trust_remote_code: bool = field(default=False)

    @property
    def denoisers(self) -> tuple[str, ...]:
        """The parts that can be trained."""
        return tuple(name for name in DENOISERS if name in self.parts)

    def others_than(self, wanted: Collection[str]) -> dict[str, None]:
        """Return what tells diffusers to leave out all parts but those wanted."""
        return {name: None for name in self.parts if name not in wanted}


def find_pipeline(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Found:
    """Have the files of a pipeline on this machine, and look what they are.

    Args:
        model: a folder, or a Hugging Face id.
        revision: branch, tag or commit of a Hugging Face id.
        trust_remote_code: allow a pipeline that brings its own code.

    Raises:
        ConfigError: there is no such pipeline, or nothing in it can be trained.
    """
    require_diffusers()
    if os.path.isdir(model):
        folder, commit = Path(model), None
    else:
        require_hub_id(model)
        try:
            cause = unreachable_hub(model, revision=revision, file=INDEX)
            if cause is not None:
                raise HubError(cause)
            folder = fetch_pipeline(model, revision)
        except HubError as error:
            raise ConfigError(
                f"--model {model}: no such folder, and as a Hugging Face id: {error}"
            ) from error
        commit = folder.name
    kind, parts = _index(model, folder)
    trained = [name for name in DENOISERS if name in parts]
    if not trained:
        raise ConfigError(
            f"--model {model}: {kind} has nothing to train: its parts are "
            f"{', '.join(parts) or 'none'}, none is one of {', '.join(DENOISERS)}; name another pipeline"
        )
    if commit is None:
        identity = ModelIdentity(digest=_digest(model, folder, parts))
    else:
        identity = ModelIdentity(hub_id=model, commit=commit)
    return Found(
        name=model,
        folder=folder,
        kind=kind,
        parts=parts,
        identity=identity,
        trust_remote_code=trust_remote_code,
    )


def load_parts(found: Found, wanted: Collection[str], dtype: Any) -> Any:
    """Load a pipeline with some of its parts only, on the CPU.

    Args:
        found: the pipeline.
        wanted: names of its parts; the others are None in the result.
        dtype: of the weights; those of the VAE are float32.

    Raises:
        ConfigError: it does not load.
    """
    import diffusers
    import torch
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        # Bars are for people; in a log file they are noise.
        diffusers_logging.disable_progress_bar()
        transformers_logging.disable_progress_bar()
    # They would tell, at each part that is left out, that it is missing.
    before = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(
            str(found.folder),
            dtype={"default": dtype, VAE: torch.float32} if VAE in wanted else dtype,
            local_files_only=True,
            trust_remote_code=found.trust_remote_code,
            **found.others_than(wanted),
        )
    except Exception as error:
        raise ConfigError(
            f"--model {found.name}: does not load as a diffusers pipeline: {cause_of(error)}"
        ) from error
    finally:
        diffusers_logging.set_verbosity(before)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _index(model: str, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Return the class and the parts that ``model_index.json`` names."""
    place = folder / INDEX
    if not place.is_file():
        remedy = (
            "a model of transformers is for --task text"
            if (folder / "config.json").is_file()
            else f"it needs a {INDEX} and a folder for each part"
        )
        raise ConfigError(f"--model {model}: not a folder of a diffusers pipeline; {remedy}")
    try:
        parts = parts_of(folder)
        kind = json.loads(place.read_text(encoding="utf-8")).get("_class_name")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model {model}: its {INDEX} cannot be read: {error}") from error
    if isinstance(kind, list) and kind:
        # Beside the name of a file of code.
        kind = kind[-1]
    if not isinstance(kind, str):
        raise ConfigError(f"--model {model}: its {INDEX} does not say what pipeline it is (no _class_name)")
    return kind, tuple(parts)


def _digest(model: str, folder: Path, parts: tuple[str, ...]) -> str:
    """Return the digest of a folder's parts: settings and weights."""
    files = {folder / INDEX}
    for part in parts:
        files.update(path for pattern in _HASHED for path in (folder / part).glob(pattern) if path.is_file())
    weighty = {path.parent.name for path in files if path.suffix in (".safetensors", ".bin")}
    for name in (*DENOISERS, VAE):
        if name in parts and name not in weighty:
            raise ConfigError(f"--model {model}: its part {name} has no weights (looked in {folder / name})")
    return files_digest(folder, sorted(files))
