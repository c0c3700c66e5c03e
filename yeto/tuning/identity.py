"""Which base model this is, in words that mean the same on every machine.

Averaging is only sound between learners that started from the same weights, so the model's identity is part
of what they must agree on. A path says nothing to another machine and a branch name moves: a model of the
Hugging Face hub is its id and commit, a local folder is the hash of its configuration and weights.

Hashing a large folder takes minutes, so the result is kept beside the user's other caches, under a key made
of every file's size and modification time.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen
from blake3 import blake3
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, loaded lazily
from transformers.utils import cached_file

from yeto.errors import ConfigError
from yeto.tuning.hub import NO_COPY, HubError, cause_of, fetch_model, unreachable_hub

logger = logging.getLogger(__name__)

_HASHED = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
"""What decides a model's function; tokenizers are not averaged."""
_TOKENIZER = ("tokenizer*", "*.model", "vocab*", "*.tiktoken", "tekken.json", "tokenization*.py")
"""Under one of these names every tokenizer has something."""


@frozen(kw_only=True)
class ModelIdentity:
    """A base model: an id at a commit, or the digest of a folder."""

    hub_id: str | None = None
    commit: str | None = None
    digest: str | None = None
    """BLAKE3 over names and contents of a folder's configuration and weight files, hex."""

    def binding(self) -> dict[str, str]:
        """Return the JSON that all learners of a run must share."""
        if self.hub_id is not None and self.commit is not None:
            return {"hub_id": self.hub_id, "commit": self.commit}
        assert self.digest is not None, "a model is of the hub or a folder"
        return {"digest": self.digest}


def identify(model: str, revision: str | None = None, *, cache_folder: Path | None = None) -> ModelIdentity:
    """Return what ``--model`` is.

    Args:
        model: a folder, or a Hugging Face id (its configuration file is fetched or taken from the cache).
        revision: branch, tag or commit of a Hugging Face id.
        cache_folder: where digests of folders are kept; None takes the user's cache folder.

    Raises:
        ConfigError: there is no such model, or its commit cannot be found out.
    """
    if os.path.isdir(model):
        require_model(model)
        return ModelIdentity(digest=_folder_digest(Path(model), cache_folder))
    # The hub's cache keeps a file under .../snapshots/<commit>/<file>.
    commit = fetched_commit(model, revision) or _settings_of_hub(model, revision).parent.name
    if len(commit) != 40:
        raise ConfigError(f"--model {model}: its commit is unknown; give it with --model-revision")
    return ModelIdentity(hub_id=model, commit=commit)


def fetched_commit(model: str, revision: str | None = None, *, weights: bool = False) -> str | None:
    """Refuse what can be no model; have the files of one of the hub on this machine and return their commit.

    Args:
        model: a folder, or a Hugging Face id.
        revision: branch, tag or commit of a Hugging Face id.
        weights: the weights, too.

    Returns:
        None for a folder, and where only the libraries can tell what there is.

    Raises:
        ConfigError: there is no such model, or the hub does not give it.
    """
    require_model(model, revision)
    if os.path.isdir(model):
        return None
    try:
        return fetch_model(model, revision, weights=weights)
    except HubError as error:
        raise ConfigError(f"--model {model}: no such folder, and as a Hugging Face id: {error}") from error


def require_model(model: str, revision: str | None = None) -> None:
    """Refuse, at once, a name that is neither a folder nor anything the hub could be asked for.

    Raises:
        ConfigError: there can be no such model.
    """
    if os.path.isdir(model):
        if not os.path.isfile(os.path.join(model, "config.json")):
            raise _no_model_folder(Path(model))
        return
    require_hub_id(model)
    cause = unreachable_hub(model, revision=revision)
    if cause is not None:
        raise ConfigError(f"--model {model}: no such folder, and as a Hugging Face id: {cause}")


def require_hub_id(model: str) -> None:
    """Refuse a name that the hub could not be asked for.

    Raises:
        ConfigError: it is a path, or no name of the hub.
    """
    # An id of the hub is NAME or OWNER/NAME.
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or os.path.exists(model):
        raise ConfigError(f"--model {model}: no such folder")
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        # A path with a typing error, such as one with a slash at its end.
        raise ConfigError(f"--model {model}: no such folder, and no Hugging Face id") from error


def check_model(model: str, revision: str | None = None) -> Path:
    """Refuse a model that cannot load, as far as that shows without loading it or anything that could.

    Args:
        model: a folder, or a Hugging Face id, of which everything but the weights is fetched.
        revision: branch, tag or commit of a Hugging Face id.

    Returns:
        The folder that its settings and its tokenizer are in.

    Raises:
        ConfigError: there is no such model, or it lacks settings, a tokenizer or, as a folder, weights.
    """
    commit = fetched_commit(model, revision)
    folder = Path(model)
    if not folder.is_dir():
        folder = _settings_of_hub(model, commit or revision).parent
    elif not any(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)):
        raise _no_model_folder(Path(model))
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {model}: its config.json cannot be read: {error}") from error
    if not isinstance(settings, dict) or not {"model_type", "auto_map"} & settings.keys():
        raise ConfigError(f"--model {model}: its config.json does not say what model it is (no model_type)")
    if not any(path for pattern in _TOKENIZER for path in folder.glob(pattern)):
        raise ConfigError(
            f"--model {model}: it has no tokenizer; put the tokenizer's files beside its config.json"
        )
    return folder


def _settings_of_hub(model: str, revision: str | None) -> Path:
    """Return where this machine has the configuration of a model of the hub."""
    try:
        path = cached_file(model, "config.json", revision=revision)
        if path is not None:
            return Path(path)
        cause = "it has no config.json"
    except Exception as error:
        cause = cause_of(error)
        if constants.HF_HUB_OFFLINE:
            # The library takes that for a broken line, and advises to mend it.
            cause = NO_COPY
    raise ConfigError(f"--model {model}: no such folder, and as a Hugging Face id: {cause}")


def files_digest(folder: Path, files: Sequence[Path], cache_folder: Path | None = None) -> str:
    """Return the BLAKE3 over names and contents of files below a folder, hex.

    Args:
        folder: named by the model.
        files: in a fixed order; a file in the folder itself goes by its name, others by the way to them.
        cache_folder: where digests are kept; None takes the user's cache folder.
    """
    cache_folder = cache_folder or _user_cache()
    key = blake3(str(folder.resolve()).encode())
    for path in files:
        status = path.stat()
        key.update(f"\0{path.relative_to(folder)}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    kept = cache_folder / key.hexdigest()
    try:
        return kept.read_text(encoding="ascii")
    except OSError:
        pass  # not hashed yet, or not readable: then it is hashed now
    digest = blake3()
    for path in files:
        contents = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + contents)
    result = digest.hexdigest()
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        aside = kept.with_suffix(f".{os.getpid()}")
        aside.write_text(result, encoding="ascii")
        aside.replace(kept)
    except OSError as error:
        # Only time is lost: the next start hashes again.
        logger.info("model digest not kept in %s: %s", cache_folder, error)
    return result


def _no_model_folder(folder: Path) -> ConfigError:
    remedy = (
        "a pipeline of diffusers is for --task diffusion"
        if (folder / "model_index.json").is_file()
        else "it needs config.json and weight files"
    )
    return ConfigError(f"--model {folder}: not a model folder; {remedy}")


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "yeto" / "models"


def _folder_digest(folder: Path, cache_folder: Path | None) -> str:
    files = sorted({path for pattern in _HASHED for path in folder.glob(pattern)})
    if folder / "config.json" not in files or len(files) < 2:
        raise _no_model_folder(folder)
    return files_digest(folder, files, cache_folder)
