"""The Hugging Face hub: what it gives is complete or refused, and nobody waits for it without an end.

The rule: a model is what its files say, all of them. The libraries below look for optional files (a chat
template, say) one by one, and where the hub does not answer for one of them they go on as if it had none. So
the files are fetched here first, by the list that the hub gives of them, and the libraries are then told to
look at this machine only.

What may pass (too many requests, an error of the server, a line that breaks) is tried again, with a longer
wait each time and what has arrived kept; the client below bounds each read. What does not pass by waiting (no
such name, no permission, a full disk) is said at once. A name that is no local path may also be a path with a
typing error; where the hub cannot be reached at all, one look beforehand answers at once.
"""

from __future__ import annotations

import glob
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

logger = logging.getLogger(__name__)

REACH_SECONDS = 10.0
"""Longest look for the hub: slow lines answer a connect in less."""
TRIES = 4
"""How often the hub is asked for the same; the client below has tried several times in each of them."""
FIRST_WAIT_SECONDS = 2.0
"""Wait before the second try; it doubles for each further one."""
BESIDE_WEIGHTS: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""Files of a model that are small: settings, tokenizer, templates, code."""
INDISPENSABLE: Final = ("config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja")
"""Those of them without which the same text would become other tokens; each only if the model has it."""
WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")
"""Whole or, with an index beside them, in parts; of several kinds the first is loaded."""

NO_COPY: Final = "HF_HUB_OFFLINE is set, and there is no copy of it on this machine; unset that to fetch it"

T = TypeVar("T")


class HubError(Exception):
    """The hub cannot give what was asked for; the text says why and what to do."""


def unreachable_hub(
    name: str, *, revision: str | None = None, repo_type: str = "model", file: str = "config.json"
) -> str | None:
    """Return why the hub cannot give ``name``, or None when it is worth asking it (or its cache).

    Args:
        name: of a repository on the hub.
        revision: branch, tag or commit.
        repo_type: ``model`` or ``dataset``.
        file: what a model of its kind cannot be without.
    """
    if constants.HF_HUB_OFFLINE or (repo_type == "model" and cached_commit(name, revision, file)):
        return None
    return _no_way_to_it()


def cached_commit(name: str, revision: str | None = None, file: str = "config.json") -> str | None:
    """Return the commit of a model that the hub's cache on this machine has for a revision."""
    path = try_to_load_from_cache(name, file, revision=revision)
    return Path(path).parent.name if isinstance(path, str) else None


_fetched_by_now: dict[tuple[str, str | None, str], str] = {}
"""Commits of models that this process has fetched: one run sees one commit, and asks once."""


def fetch_model(name: str, revision: str | None = None, *, weights: bool = False) -> str | None:
    """Have all files of a model on this machine, in the hub's cache; return their commit.

    Args:
        name: a repository of the hub.
        revision: branch, tag or commit.
        weights: the weights, too.

    Returns:
        The commit, which from now on can be loaded without the hub; None if only the libraries can tell.

    Raises:
        HubError: a file cannot be had.
    """
    return fetch(
        name,
        revision,
        what="model with weights" if weights else "model",
        get=lambda: _fetched(name, revision, weights),
        is_whole=lambda: _is_whole(name, revision, weights and not constants.HF_HUB_OFFLINE),
    )


def fetch(
    name: str,
    revision: str | None,
    *,
    what: str,
    get: Callable[[], str],
    is_whole: Callable[[], bool],
    file: str = "config.json",
) -> str | None:
    """Have something of a repository on this machine, or take the copy of it that is here if that is whole.

    Args:
        name: a repository of the hub.
        revision: branch, tag or commit.
        what: is asked for; the same is asked for once in a process.
        get: asks for it, and returns the commit that came.
        is_whole: whether the copy on this machine has all that it must have.
        file: what it cannot be without.

    Returns:
        The commit; None if the hub is switched off and there is no copy.

    Raises:
        HubError: it cannot be had.
    """
    key = (name, revision, what)
    if key in _fetched_by_now:
        return _fetched_by_now[key]
    cached = cached_commit(name, revision, file)
    try:
        if constants.HF_HUB_OFFLINE:
            raise HubError("HF_HUB_OFFLINE is set")
        if cached is not None and (away := _no_way_to_it()) is not None:
            raise HubError(away)
        _fetched_by_now[key] = patiently(get)
        return _fetched_by_now[key]
    except HubError as error:
        if isinstance(error.__cause__, RepositoryNotFoundError | RevisionNotFoundError):
            raise
        if cached is None:
            if constants.HF_HUB_OFFLINE:
                return None
            raise
        if not is_whole():
            raise HubError(f"{error}, and the copy of it on this machine is not complete") from error
        if not constants.HF_HUB_OFFLINE:
            logger.warning("%s: %s; going on with the copy of it on this machine", name, error)
        return cached


def fetch_card(name: str, revision: str | None = None) -> str | None:
    """Have the description of a data set on this machine, which says what its files are; return its commit.

    To be called through :func:`patiently`: with the description missing, other files may be taken for rows.
    """
    if constants.HF_HUB_OFFLINE:
        return revision
    info = HfApi().dataset_info(name, revision=revision)
    if any(file.rfilename == "README.md" for file in info.siblings or ()):
        hf_hub_download(name, "README.md", repo_type="dataset", revision=info.sha)
    return info.sha


def patiently(ask: Callable[[], T]) -> T:
    """Return what ``ask`` returns, which may fail a few times if that can pass.

    Raises:
        HubError: it cannot pass, or did not.
    """
    for tried in range(1, TRIES + 1):
        try:
            return ask()
        except Exception as error:
            if not may_pass(error):
                raise HubError(_explained(error)) from error
            if tried == TRIES:
                raise HubError(
                    f"{_explained(error)} ({TRIES} tries); the same command goes on with what has arrived"
                ) from error
            wait = FIRST_WAIT_SECONDS * 2 ** (tried - 1)
            logger.warning("%s; asking again in %.0f s", _explained(error), wait)
        time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def may_pass(error: BaseException) -> bool:
    """Tell whether the same request may go well a little later."""
    if constants.HF_HUB_OFFLINE:
        return False
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return status in (408, 429) or status >= 500
        # The library of the connection has had several names; its own word for all troubles of a line is one.
        if isinstance(cause, ConnectionError | TimeoutError) or any(
            kind.__name__ in ("TransportError", "XetDownloadError") for kind in type(cause).__mro__
        ):
            return True
        if isinstance(cause, _Incomplete) or (type(cause) is OSError and cause.errno is None):
            # A file that came shorter than it is, as the client says.
            return True
    return False


def cause_of(error: BaseException) -> str:
    """Return an exception of a library in one line; its class too, where it is not a plain sentence."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError | ValueError | ImportError | HubError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Incomplete(Exception):
    """Files are missing after a download that said it was done."""


def fetch_files(
    name: str, revision: str | None, small: Sequence[str], weights: Callable[[Path, list[str]], list[str]]
) -> str:
    """Fetch files of a model; return the commit that came. To be called through :func:`patiently`.

    Args:
        name: a repository of the hub.
        revision: branch, tag or commit.
        small: patterns of files that are fetched first, all that there are.
        weights: from the folder that has these, and the names of all files, to the names of further ones.
    """
    info = HfApi().model_info(name, revision=revision)
    files = [file.rfilename for file in info.siblings or ()]
    folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(small)))
    wanted = weights(folder, files)
    if wanted:
        snapshot_download(name, revision=revision, allow_patterns=[glob.escape(file) for file in wanted])
    # The client takes a copy that it has for an answer when it gets none, whether it is whole or not.
    wanted = wanted + [file for file in files if any(fnmatch(file, pattern) for pattern in small)]
    missing = [file for file in wanted if not (folder / file).exists()]
    if folder.name != info.sha or missing:
        raise _Incomplete(f"{name} came without {', '.join(missing[:3]) or 'its newest commit'}")
    return folder.name


def weight_files(folder: Path, files: Sequence[str], names: Sequence[str] = WEIGHTS) -> list[str]:
    """Return the files with the weights; none where they are kept in a way that only the library knows.

    Args:
        folder: has the index of those in parts.
        files: names of all there are.
        names: what weights are called, those first that are loaded first.
    """
    for whole in names:
        if whole in files:
            return [whole]
        index = folder / f"{whole}.index.json"
        if index.exists():
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return []


def _fetched(name: str, revision: str | None, weights: bool) -> str:
    return fetch_files(name, revision, BESIDE_WEIGHTS, weight_files if weights else lambda folder, files: [])


def _is_whole(name: str, revision: str | None, weights: bool) -> bool:
    """Tell whether a cached copy has what it must have, as far as this machine knows what that is."""
    try:
        folder = Path(
            snapshot_download(
                name, revision=revision, allow_patterns=list(INDISPENSABLE), local_files_only=True
            )
        )
    except EntryNotFoundError:
        return False
    wanted = weight_files(folder, [path.name for path in folder.iterdir()]) if weights else []
    return all((folder / file).exists() for file in wanted) and bool(wanted or not weights)


def _no_way_to_it() -> str | None:
    """Return why no connection to the hub can be made; None if one can, or if only trying will tell."""
    if getproxies():
        return None
    place = urlsplit(constants.ENDPOINT)
    try:
        port = place.port or (80 if place.scheme == "http" else 443)
        socket.create_connection((place.hostname or "", port), timeout=REACH_SECONDS).close()
    except OSError as error:
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, what it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _explained(error: BaseException) -> str:
    """Return an error of the hub with its remedy, if there is one."""
    for cause in _causes(error):
        if constants.HF_HUB_OFFLINE and isinstance(cause, ConnectionError):
            return NO_COPY
        if isinstance(cause, GatedRepoError):
            return "it needs a permission: ask for it on its page of the hub, then log in (hf auth login)"
        if isinstance(cause, RepositoryNotFoundError):
            return (
                "the hub has none of this name that you may see; correct it, or log in if it is private "
                "(hf auth login, or HF_TOKEN)"
            )
        if isinstance(cause, RevisionNotFoundError):
            return "the hub has it, but not at this revision; name a branch, tag or commit that it has"
        if isinstance(cause, EntryNotFoundError) and not isinstance(cause, LocalEntryNotFoundError):
            return cause_of(cause)
        if getattr(cause, "response", None) is not None:
            # Its first line has the status; what follows is advice to programmers.
            return str(cause).strip().splitlines()[0]
    # The first to fail knows best.
    *_, first = _causes(error)
    return cause_of(first)
