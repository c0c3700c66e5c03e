"""The files of a pipeline on the hub: which there are, and having them on this machine, all or none.

The library's own download takes what it finds in the cache where the hub does not answer, whole or not. So
the files are fetched as those of language models are (:mod:`yeto.tuning.hub`): by the hub's own list, and
looked for afterwards. Weights come in one form of each part, those in safetensors before others, and variants
of less precision not at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from huggingface_hub import try_to_load_from_cache

from yeto.tuning.hub import BESIDE_WEIGHTS, NO_COPY, HubError, fetch, fetch_files, weight_files

INDEX: Final = "model_index.json"
INDEX_BYTES_MAX: Final = 1 << 20
"""A few hundred bytes in every pipeline there is."""
WEIGHTS: Final = (
    "diffusion_pytorch_model.safetensors",
    "model.safetensors",
    "diffusion_pytorch_model.bin",
    "pytorch_model.bin",
)
"""Whole or, with an index beside them, in parts; of several kinds the first is loaded."""
UNUSED: Final = frozenset({"safety_checker", "feature_extractor", "image_encoder", "image_processor"})
"""Parts that neither training nor encoding needs."""


def fetch_pipeline(name: str, revision: str | None = None) -> Path:
    """Have a pipeline's files on this machine, in the hub's cache; return their folder, named by the commit.

    Raises:
        HubError: a file cannot be had.
    """
    commit = fetch(
        name,
        revision,
        what="pipeline",
        get=lambda: fetch_files(name, revision, BESIDE_WEIGHTS, _weights),
        is_whole=lambda: _is_whole(_folder(name, revision)),
        file=INDEX,
    )
    if commit is None:
        raise HubError(NO_COPY)
    return _folder(name, commit)


def parts_of(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the parts that a pipeline's index names, each with library and class.

    Raises:
        OSError: there is no index.
        ValueError: it is none.
    """
    place = folder / INDEX
    if place.stat().st_size > INDEX_BYTES_MAX:
        raise ValueError(f"it has {place.stat().st_size} bytes")
    index = json.loads(place.read_text(encoding="utf-8"))
    if not isinstance(index, dict):
        raise ValueError("it is no object")
    return {
        name: (value[0], value[1])
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and all(isinstance(word, str) for word in value)
        # A name is a folder here, and not a way to another one.
        if not name.startswith(("_", ".")) and not {"/", "\\"} & set(name)
    }


def _folder(name: str, revision: str | None) -> Path:
    place = try_to_load_from_cache(name, INDEX, revision=revision)
    if not isinstance(place, str):
        raise HubError(f"it has no {INDEX}, so it is no pipeline of diffusers")
    return Path(place).parent


def _weights(folder: Path, files: Sequence[str]) -> list[str]:
    """Return the names of the weights of all parts that are used."""
    if INDEX not in files:
        # Said by name when the folder is looked for.
        return []
    wanted = []
    for part in parts_of(folder):
        inside = [file.removeprefix(f"{part}/") for file in files if file.startswith(f"{part}/")]
        if part not in UNUSED:
            wanted += [f"{part}/{file}" for file in weight_files(folder / part, inside, WEIGHTS)]
    return wanted


def _is_whole(folder: Path) -> bool:
    """Tell whether a cached copy has all weights, as far as this machine knows what they are."""
    for part in parts_of(folder):
        if part in UNUSED or not (folder / part / "config.json").exists():
            continue
        files = weight_files(folder / part, [path.name for path in (folder / part).iterdir()], WEIGHTS)
        if not files or not all((folder / part / file).exists() for file in files):
            return False
    return True
