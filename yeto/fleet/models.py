"""How large a model is, before any of it is fetched: what a plan has to fit into memory.

The rule: sizes are those of the weights in bf16, as they are held while training, whatever they are stored
in. So elements are counted and not bytes of files, and a file whose elements cannot be counted (packed
integers) is refused rather than believed. A few models have a short name and are known without a network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from yeto.errors import CheckpointError, ConfigError
from yeto.state.digested import read_bounded

BF16_BYTES = 2
CONFIG_BYTES_MAX = 4 << 20
"""Of a config.json or an index of safetensors files; real ones have kilobytes, the largest index one MiB."""
PACKED_SHARE_MAX = 0.01
"""Of a model's elements in integers: counters and buffers. More are packed weights."""
WEIGHTS_GB_MIN = BF16_BYTES / 1e9
"""Of all weights of a model: one parameter."""
WEIGHTS_GB_MAX = 1_000_000
"""Some hundred times the largest."""
HUB_SECONDS = 10.0
"""Longest wait for an answer of the hub."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_USED = ("num_experts_per_tok", "moe_topk", "top_k_experts")
_REMEDY = "say --weights-gb, twice the billions of its parameters"


@frozen(kw_only=True)
class ModelSize:
    """What a plan needs to know of a model."""

    name: str
    """As it was asked for."""
    hf_id: str
    """Hugging Face id or path, for the learners."""
    weights_gb: float
    """All weights in bf16, in GB of 1e9 bytes."""
    active_gb: float
    """Of these, what one token passes through: all of them, but for a mixture of experts."""
    hidden_size: int | None
    """None when nobody said it."""
    source: str
    """Where the figures are from, for people."""


@frozen(kw_only=True)
class Alias:
    """A short name of a model, and its figures."""

    alias: str
    hf_id: str
    weights_gb: float
    hidden_size: int
    active_gb: float | None = None
    """None when all weights are active."""


ALIASES = (
    Alias(alias="gemma4", hf_id="google/gemma-4-12B-it", weights_gb=24, hidden_size=3840),
    Alias(
        alias="deepseek4flash",
        hf_id="deepseek-ai/DeepSeek-V4-Flash",
        weights_gb=568,
        hidden_size=4096,
        active_gb=26,
    ),
    Alias(alias="qwen3-0.6b", hf_id="Qwen/Qwen3-0.6B", weights_gb=1.2, hidden_size=1024),
    Alias(alias="qwen3-8b", hf_id="Qwen/Qwen3-8B", weights_gb=16.4, hidden_size=4096),
    Alias(alias="qwen3-32b", hf_id="Qwen/Qwen3-32B", weights_gb=65.5, hidden_size=5120),
    Alias(alias="llama3-8b", hf_id="meta-llama/Llama-3.1-8B-Instruct", weights_gb=16.1, hidden_size=4096),
    Alias(alias="llama3-70b", hf_id="meta-llama/Llama-3.3-70B-Instruct", weights_gb=141, hidden_size=8192),
)
"""Models with a short name. Any other goes by its Hugging Face id or its folder."""


def find_alias(name: str) -> Alias | None:
    """Return the alias of a short name or of the Hugging Face id behind one, in any case; None if unknown."""
    wanted = name.lower()
    return next((one for one in ALIASES if wanted in (one.alias, one.hf_id.lower())), None)


def resolve_model(name: str) -> str:
    """Return what the learners are to load: the Hugging Face id of an alias, else the name as it is.

    A folder of that name goes before an alias.
    """
    found = find_alias(name)
    return name if found is None or os.path.isdir(name) else found.hf_id


def model_size(name: str, *, weights_gb: float | None = None, hidden_size: int | None = None) -> ModelSize:
    """Return how large a model is: a folder's own files, else the alias table, else the hub or its cache.

    Args:
        name: an alias, a Hugging Face id or a local model folder.
        weights_gb: what the user says of the weights in bf16; then nothing is looked up but the alias table.
        hidden_size: what the user says of the hidden size; it goes before what was found.

    Raises:
        ConfigError: the user's figure is impossible, nobody knows the size, or a folder's files cannot be
            read; the message says what to do.
    """
    if weights_gb is not None and not WEIGHTS_GB_MIN <= weights_gb <= WEIGHTS_GB_MAX:
        raise ConfigError(
            f"--weights-gb {weights_gb}: must be from {WEIGHTS_GB_MIN:g} (one parameter) "
            f"to {WEIGHTS_GB_MAX:,}"
        )
    found = _known(name, weights_gb) or _looked_up(name)
    return found if hidden_size is None else evolve(found, hidden_size=hidden_size)


def _known(name: str, weights_gb: float | None) -> ModelSize | None:
    """Return the size that needs no file and no network."""
    alias = None if os.path.isdir(name) else find_alias(name)
    if weights_gb is not None:
        active = weights_gb if alias is None or alias.active_gb is None else min(alias.active_gb, weights_gb)
        return ModelSize(
            name=name,
            hf_id=resolve_model(name),
            weights_gb=weights_gb,
            active_gb=active,
            hidden_size=None if alias is None else alias.hidden_size,
            source="--weights-gb",
        )
    if alias is None:
        return None
    return ModelSize(
        name=name,
        hf_id=alias.hf_id,
        weights_gb=alias.weights_gb,
        active_gb=alias.weights_gb if alias.active_gb is None else alias.active_gb,
        hidden_size=alias.hidden_size,
        source="the table of known models",
    )


def _looked_up(name: str) -> ModelSize:
    # Unlike a Path, these say no where a name is impossible or its user unknown.
    folder = os.path.expanduser(name)
    if os.path.isdir(folder):
        return _of_folder(name, Path(folder))
    if os.path.exists(folder) or name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"--model {name}: is no folder; give a model's folder or its Hugging Face id")
    return _of_hub(name)


# -- a folder -----------------------------------------------------------------------------------------


def _of_folder(name: str, folder: Path) -> ModelSize:
    config = _read_json(folder / "config.json", name)
    files = _weight_files(folder, name)
    if files:
        return _counted(name, config, _tensors_of(files, name), f"the safetensors files in {folder}")
    return _counted(name, config, _tensors_of_config(folder, name), f"{folder / 'config.json'}")


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        data = read_bounded(path, CONFIG_BYTES_MAX)
        value = json.loads(data)
    except CheckpointError as error:
        raise ConfigError(f"--model {name}: {error}; {_REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--model {name}: {path} is not JSON: {error}; {_REMEDY}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--model {name}: {path} is no JSON object; {_REMEDY}")
    return value


def _weight_files(folder: Path, name: str) -> list[Path]:
    """Return the safetensors files of a model: those of its index, or the one; none if there are none."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        parts = _read_json(index, name).get("weight_map")
        names = set(parts.values()) if isinstance(parts, dict) else set()
        if not names or not all(isinstance(part, str) and Path(part).name == part for part in names):
            raise ConfigError(f"--model {name}: {index}: has no weight_map of files beside it; {_REMEDY}")
        return [folder / part for part in sorted(names)]
    whole = folder / "model.safetensors"
    return [whole] if whole.exists() else []


def _tensors_of(files: Iterable[Path], name: str) -> Iterable[tuple[str, str, int]]:
    """Yield (name, dtype, elements) of every tensor; only headers are read."""
    from math import prod

    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="np") as opened:
                for tensor in opened.keys():  # noqa: SIM118 - it is no dictionary
                    piece = opened.get_slice(tensor)
                    yield tensor, piece.get_dtype(), prod(piece.get_shape())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"--model {name}: {path}: {error}; {_REMEDY}") from error


def _tensors_of_config(folder: Path, name: str) -> Iterable[tuple[str, str, int]]:
    """Return what the parameters of a causal language model would be, without making them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            # Without a word about it, code in the folder would be asked about, and waited for.
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        # Each model's class has a way of its own to fail at figures that cannot be.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"--model {name}: no safetensors files there, and config.json does not do: {reason}; {_REMEDY}"
        ) from error
    return [(tensor, "BF16", value.numel()) for tensor, value in model.named_parameters()]


# -- the hub ------------------------------------------------------------------------------------------


def _of_hub(name: str) -> ModelSize:
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, NotASafetensorsRepoError, RepositoryNotFoundError

    known = ", ".join(one.alias for one in ALIASES)
    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            files = _weight_files(Path(cached).parent, name)
            if files and all(path.exists() for path in files):
                return _of_folder(name, Path(cached).parent)
        api = HfApi()
        # Answers in time or not at all; what follows asks the same server.
        api.model_info(name, timeout=HUB_SECONDS)
        metadata = api.get_safetensors_metadata(name)
        config = _read_json(Path(hf_hub_download(name, "config.json")), name)
    except HFValidationError as error:
        raise ConfigError(
            f"--model {name}: neither a folder, nor one of {known}, nor an id OWNER/NAME"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"--model {name}: the hub knows no such model (or it is private); {_REMEDY}"
        ) from error
    except NotASafetensorsRepoError as error:
        raise ConfigError(f"--model {name}: has no safetensors files on the hub; {_REMEDY}") from error
    except ConfigError:
        raise
    except Exception as error:
        # The library of the connection has had several names, and so have its errors.
        raise ConfigError(
            f"--model {name}: no folder, no alias ({known}), and the hub does not answer "
            f"({type(error).__name__}); {_REMEDY}"
        ) from error
    tensors = [
        (tensor, info.dtype, info.parameter_count)
        for file in metadata.files_metadata.values()
        for tensor, info in file.tensors.items()
    ]
    return _counted(name, config, tensors, "the safetensors headers on the hub")


# -- both ---------------------------------------------------------------------------------------------


def _counted(
    name: str, config: dict[str, Any], tensors: Iterable[tuple[str, str, int]], source: str
) -> ModelSize:
    """Return the size that the tensors make: (name, dtype, elements) each."""
    floats = packed = experts = 0
    packed_types = set()
    for tensor, dtype, elements in tensors:
        if dtype.startswith(("F", "BF")):
            floats += elements
            # Routed ones; shared experts are passed by every token.
            experts += elements if ".experts." in tensor else 0
        else:
            packed += elements
            packed_types.add(dtype)
    if (floats + packed) * BF16_BYTES > WEIGHTS_GB_MAX * 10**9:
        raise ConfigError(f"--model {name}: its files speak of more weights than any model has; {_REMEDY}")
    if packed > PACKED_SHARE_MAX * (floats + packed):
        raise ConfigError(
            f"--model {name}: its weights are packed ({', '.join(sorted(packed_types))}), so their number "
            f"cannot be read from the files; {_REMEDY}"
        )
    if floats <= 0:
        raise ConfigError(f"--model {name}: there are no weights in its files; {_REMEDY}")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    total, used = _first(inner, _EXPERT_COUNTS), _first(inner, _EXPERTS_USED)
    active = floats - experts * (1 - used / total) if total and used and used <= total else floats
    return ModelSize(
        name=name,
        hf_id=name,
        weights_gb=floats * BF16_BYTES / 1e9,
        active_gb=active * BF16_BYTES / 1e9,
        hidden_size=_first(inner, ("hidden_size", "n_embd", "d_model")),
        source=source,
    )


def _first(config: dict[str, Any], names: Iterable[str]) -> int | None:
    """Return the first of these entries that is a sound count."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20:
            return value
    return None
