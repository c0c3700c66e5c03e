"""What one launch is: which islands train what, and where the result goes.

The rule: everything that the run's commands are made of is in one value, written down once before anything
starts. So a head or an island that is started again, on this machine or another, gets the very same words.
No secret is in it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from attrs import frozen

from yeto.errors import ConfigError
from yeto.fleet.grammar import Island, parse_islands

NAME_MAX = 30
"""Longest name of a run: clouds allow their machines' names little more than that and ``-island-255``."""

_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")


@frozen(kw_only=True)
class Launch:
    """One launch, as the registry keeps it."""

    name: str
    """What the run is called: its folder in the registry, and how the names of clusters and jobs begin."""
    islands: str
    """As ``--gpu`` has them; island i is learner i."""
    model: str
    """Hugging Face id, or the absolute path of a folder of this machine."""
    data: str
    """Rows to train on: an id, a URL, or an absolute path of this machine."""
    output: str
    """Where the result goes: an absolute path of this machine, or a URI."""
    task: str = "text"
    """What kind of model it is: text, or diffusion."""
    eval_data: str | None = None
    """Held-out rows, as ``data``."""
    chat_template: str | None = None
    """Absolute path of a template of this machine."""
    quorum: int
    """Islands without which no round is merged."""
    syncer_words: tuple[str, ...] = ()
    """Flags of the syncer beyond its place."""
    learner_words: tuple[str, ...] = ()
    """Flags of every learner beyond its place and inputs."""
    export_words: tuple[str, ...] = ()
    """Flags of the export beyond checkpoint, model and folder."""
    on_demand: tuple[int, ...] = ()
    """Numbers of the islands that are rented on demand; the others are spot machines."""
    mirror: str | None = None
    """Where checkpoint and tape are copied to while the run goes on."""
    head_infra: str | None = None
    """Where the head is rented (``cloud[/region]``); None leaves the choice to SkyPilot."""
    head_memory_gb: int = 16
    """Memory that the head's machine has at least."""
    disk_gb: int = 256
    """Disk of every rented machine."""
    torch_threads: int | None = None
    """Threads of each learner process of this machine; None is for machines of their own."""

    def parsed(self) -> tuple[Island, ...]:
        """Return the islands.

        Raises:
            ConfigError: the text names none.
        """
        return parse_islands(self.islands)

    @property
    def is_local(self) -> bool:
        """Whether everything runs on this machine."""
        return self.parsed()[0].is_local


def island_name(number: int) -> str:
    """Return what the island of a learner is called in logs, folders and jobs."""
    return f"island-{number}"


def check_name(name: str) -> str:
    """Return a name that every cloud takes and that no path can hide in.

    Raises:
        ConfigError: it is none.
    """
    if len(name) > NAME_MAX or _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} cannot be the name of a run: it has lower-case letters, digits and single hyphens, a "
            f"letter first, {NAME_MAX} at most"
        )
    return name


def require_one_kind(islands: tuple[Island, ...]) -> None:
    """Refuse a fleet that is half on this machine: rented islands could not reach a head here.

    Raises:
        ConfigError: it is.
    """
    if len({island.is_local for island in islands}) > 1:
        raise ConfigError(
            "--gpu: local: islands run beside a head on this machine, which rented ones cannot reach; "
            "name islands of one kind"
        )


def is_remote(place: str) -> bool:
    """Return whether a place is a URI, such as ``s3://bucket/folder``, and no path of this machine."""
    return "://" in place and not place.startswith(("file://", "local://"))


def local_path(text: str) -> Path | None:
    """Return the absolute path of what a flag names on this machine; None if it names nothing there."""
    # Unlike Path.expanduser, it leaves alone the name of a user whom nobody knows.
    path = Path(os.path.expanduser(text))
    return None if is_remote(text) or not path.exists() else path.absolute()
