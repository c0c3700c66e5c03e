"""Processes that another process of ours started: whether they are still the same ones, and their end.

The rule: nothing is sent to a number alone. A process id is given to somebody else once its process is gone,
so it is written down together with when its process began, and both must fit. What belongs to a run is also
known by a word in its environment, which its children inherit: so ones that nobody wrote down are found too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from attrs import frozen

PROC = Path("/proc")

RUN_VARIABLE = "OF_YETO_RUN"
"""Environment variable that holds the folder of the run that a process belongs to. It does not begin as
flags in the environment do: it is none."""

ENVIRON_BYTES_MAX = 8 << 20
"""Larger environments are not ours."""

NAME_CHARS = 80
"""Of a command line that stands for a name, as much as a line of a message has room for."""


@frozen(kw_only=True)
class Process:
    """A process as it was written down."""

    name: str
    pid: int
    mark: str
    """When it began, in its system's own words."""

    @property
    def alive(self) -> bool:
        """Whether this very process is still there."""
        return start_mark(self.pid) == self.mark


def start_mark(pid: int) -> str | None:
    """Return words that tell a process from an earlier one of the same number; None when there is none.

    A process that has ended and was not waited for yet counts as gone.
    """
    if pid < 1:
        return None
    if PROC.joinpath("self", "stat").exists():
        try:
            # The name in parentheses may hold anything; the fields after it are numbers.
            fields = PROC.joinpath(str(pid), "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        return None if fields[0] in (b"Z", b"X") else fields[19].decode("ascii")
    asked = subprocess.run(
        ["ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    state, _, began = asked.stdout.strip().partition(" ")
    return None if asked.returncode or state.startswith("Z") else began.strip() or None


def _short(command: str) -> str:
    """A command line as one line of a message holds it."""
    line = " ".join(command.split())
    return line if len(line) <= NAME_CHARS else f"{line[:NAME_CHARS]}…"


def written_down(name: str, pid: int) -> Process | None:
    """Return a running process to be written down; None when it is gone already."""
    mark = start_mark(pid)
    return None if mark is None else Process(name=name, pid=pid, mark=mark)


def processes_of(folder: Path) -> list[Process]:
    """Return every process of this user that belongs to the run in a folder, where the system tells."""
    wanted = f"{RUN_VARIABLE}={folder}".encode()
    found = []
    for entry in PROC.iterdir() if PROC.joinpath("self", "environ").exists() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            with entry.joinpath("environ").open("rb") as file:
                variables = file.read(ENVIRON_BYTES_MAX).split(b"\0")
            command = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").strip()
        except OSError:
            # Another user's, or gone.
            continue
        if wanted in variables:
            process = written_down(_short(command.decode("utf-8", "replace")), int(entry.name))
            found += [] if process is None else [process]
    return found


def send(process: Process, number: signal.Signals) -> bool:
    """Send a signal to a process if it is the one that was written down; return whether it was."""
    if not process.alive:
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def wait_gone(processes: list[Process], seconds: float) -> list[Process]:
    """Wait until processes are gone, at most so long; return those that are not."""
    until = time.monotonic() + seconds
    while left := [process for process in processes if process.alive]:
        if time.monotonic() >= until:
            return left
        time.sleep(0.05)
    return []
