"""Which Python runs the SVD workers, and why it may not be one inside a container of its own.

A worker is ended by killing the process that was started. A container client (``docker run``) is not that
process: its death does not prove that the daemon stopped what holds the GPU. A pool that cannot say that its
workers are gone cannot promise anything about them. So an interpreter that starts a container is refused,
even behind links, behind ``sudo`` and the like, in a script, or in a script that a script starts. What is
looked at is text: a compiled program, or a name put together at run time, is not seen through.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from yeto.errors import ConfigError

CLIENTS: Final = frozenset(
    {"docker", "podman", "nerdctl", "docker-compose", "podman-compose", "podman-remote"}
)
"""Programs that have a daemon, or its like, start what they are asked to run."""

PREFIXES: Final = frozenset(
    "env exec sudo doas command builtin nohup nice ionice time timeout setsid stdbuf chrt taskset numactl "
    "chronic unshare xargs eval if then else elif while until do ! {".split()
)
"""Words in front of the program that is meant."""

SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh", "busybox", "fish"})

SCRIPT_BYTES_MAX: Final = 1 << 20
"""As much of a script is looked at; a wrapper has a few lines."""

_ASSIGNMENT: Final = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE: Final = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?[-=]([^}]*))?\})")
_SEPARATORS: Final = re.compile(r"\n|;|&&|\|\||\||&|\$\(|[()`]")
_COMMENTS: Final = re.compile(r"""("[^"]*"|'[^']*')|(?:(?<=\s)|^)#[^\n]*""", re.MULTILINE)
_QUOTED: Final = re.compile(r"""["']([^"']*)["']""")
_STARTING: Final = re.compile(
    r"(?:\S*/)?([\w-]+)(?:\s+(?:-|run|exec|start|compose|container)\b.*)?", re.DOTALL
)
"""A program's name, alone or with what a container client is asked to do."""


def find_interpreter(python: str) -> Path:
    """Return the interpreter of the workers, as a path; links are kept, for a virtual environment is one.

    Args:
        python: a path, or a name to be looked for in PATH.

    Raises:
        ConfigError: there is no such program, it is more than one word, or it starts a container.
    """
    if not python.strip():
        raise ConfigError("--iso-worker-python: is empty; name a Python that has Yeto and torch")
    found = shutil.which(python)
    client = _client_of(_words(python), {}, set()) if found is None else _client_behind(found, set())
    if client is not None:
        raise ConfigError(
            f"--iso-worker-python {python}: starts a container ({client} run), and killing the {client} "
            "client does not prove that the daemon stopped the process that holds the GPU; run the syncer "
            "inside the container, with ISO_WORKER_PYTHON=python3"
        )
    if found is None:
        if len(_words(python)) > 1:
            raise ConfigError(
                f"--iso-worker-python {python}: name one program, without arguments; a script may hold them"
            )
        raise ConfigError(f"--iso-worker-python {python}: there is no such program that can be executed")
    return Path(os.path.abspath(found))


def _client_behind(program: str, seen: set[Path]) -> str | None:
    """Return the container client that a program is, leads to, or starts.

    Args:
        program: path or name.
        seen: scripts that were looked at; each is looked at once, so those that start one another come to
            an end.
    """
    if os.path.basename(program) in CLIENTS:
        return os.path.basename(program)
    found = shutil.which(program)
    if found is None:
        return None
    path = Path(found)
    while path.is_symlink():  # one step at a time: it is by its name that a client knows what to do
        path = path.parent / path.readlink()
        if path.name in CLIENTS:
            return path.name
    path = path.resolve()
    if path in seen:
        return None
    seen.add(path)
    return _client_in_script(path, seen)


def _client_in_script(path: Path, seen: set[Path]) -> str | None:
    """Return the container client that a script starts; None also for what is no script."""
    try:
        with path.open("rb") as file:
            if file.read(2) != b"#!":
                return None
            text = file.read(SCRIPT_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return None  # it cannot be read; whether it can be run shows when it is
    first, _, body = text.partition("\n")
    interpreter = _words(first)
    client = _client_of(interpreter, {}, seen)
    if client is not None:
        return client
    named = {os.path.basename(word) for word in interpreter}
    if named & SHELLS:
        return _client_in_shell(body, seen)
    # Another language starts a program by its name in quotes.
    for quoted in _QUOTED.findall(body):
        starting = _STARTING.fullmatch(quoted.strip())
        if starting is not None and starting[1] in CLIENTS:
            return starting[1]
    return None


def _client_in_shell(body: str, seen: set[Path]) -> str | None:
    """Return the container client that the commands of a shell script start."""
    variables: dict[str, str] = {}
    for command in _commands(body):
        client = _client_of(_words(command), variables, seen)
        if client is not None:
            return client
    return None


def _commands(body: str) -> Iterator[str]:
    """Split a shell script where a command may begin; comments are left out."""
    text = re.sub(r"\\\n", " ", body)
    yield from _SEPARATORS.split(_COMMENTS.sub(lambda found: found[1] or "", text))


def _client_of(words: list[str], variables: dict[str, str], seen: set[Path]) -> str | None:
    """Return the container client that a command starts, by the first word that is a program.

    Args:
        words: of the command.
        variables: values of the script's variables as far as they are plain; assignments are added.
        seen: scripts that were looked at.
    """
    behind_prefix = False
    for place, word in enumerate(words):
        if word in ("export", "readonly", "local", "declare", "typeset"):
            continue
        if word == "command" and words[place + 1 : place + 2] in (["-v"], ["-V"]):
            return None  # asks whether there is such a program
        assigned = _ASSIGNMENT.fullmatch(word)
        if assigned is not None:
            variables[assigned[1]] = _expanded(assigned[2], variables)
            continue
        for part in _expanded(word, variables).split():
            if os.path.basename(part) in PREFIXES:
                behind_prefix = True
            elif not part.startswith("-"):
                client = _client_behind(part, seen)
                if client is not None:
                    return client
                if os.path.basename(part) in SHELLS:
                    return _client_in_shell(" ".join(words[place + 1 :]), seen)
                if not behind_prefix:
                    return None
                # Behind a prefix it may be a value of its options (``timeout 5``, ``sudo -u name``).
    return None


def _expanded(word: str, variables: dict[str, str]) -> str:
    """Replace the variables whose value is known, and take the default of those whose value is not."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name, match[3] or match[0])

    return _VARIABLE.sub(value, word)


def _words(command: str) -> list[str]:
    """Split a command into words; quotes that do not fit are taken for what stands in them."""
    try:
        return shlex.split(command)
    except ValueError:
        return command.replace('"', " ").replace("'", " ").split()
