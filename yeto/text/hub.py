"""The libraries below: whether the hub can be reached at all, and what went wrong, in one line.

A name that is no local path may be meant for the Hugging Face hub, or be a path with a typing error. Where
the hub cannot be reached its client tries for a minute, aloud, before it says so; one look beforehand
answers at once. They also raise whatever their own dependencies raise, so a damaged file can end in any
class of exception: callers catch them all at the one call and pass on the cause.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, try_to_load_from_cache

REACH_SECONDS = 10.0
"""Longest look for the hub: slow lines answer a connect in less."""


def unreachable_hub(name: str, *, revision: str | None = None, repo_type: str = "model") -> str | None:
    """Return why the hub cannot give ``name``, or None when it is worth asking it (or its cache).

    Args:
        name: of a repository on the hub.
        revision: branch, tag or commit.
        repo_type: ``model`` or ``dataset``.
    """
    if constants.HF_HUB_OFFLINE or getproxies():
        # Offline the client fails at once by itself; behind a proxy a direct look says nothing.
        return None
    if repo_type == "model" and isinstance(
        try_to_load_from_cache(name, "config.json", revision=revision, repo_type=repo_type), str
    ):
        return None
    place = urlsplit(constants.ENDPOINT)
    try:
        port = place.port or (80 if place.scheme == "http" else 443)
        socket.create_connection((place.hostname or "", port), timeout=REACH_SECONDS).close()
    except OSError as error:
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


def cause_of(error: Exception) -> str:
    """Return an exception of a library in one line; its class too, where it is not a plain sentence."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError | ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
