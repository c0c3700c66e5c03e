"""The registry of runs: one folder for each run that was launched from this machine.

The rule: what is needed to watch a run, to go on with it and to tear it down is on disk before anything is
started, so that a launch that dies at any point leaves nothing that only it knew of. Files are written aside
and renamed, read strictly, and bounded. The folder is its owner's alone; the run's key is in a file of its
own in it, and in no other.

A name belongs to one run: the folder is made by the one who launches, and made only once.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
from attrs import frozen

from yeto.errors import EXIT_STOPPED, ConfigError, YetoError
from yeto.fleet.commands import KEY, TAPE
from yeto.fleet.launch import Launch, check_name, island_name
from yeto.fleet.processes import Process
from yeto.state.strict import NotStrict, parse_json, structure
from yeto.storage import sync_folder

T = TypeVar("T")

RUNS_VARIABLE: Final = "YETO_RUNS_DIR"
"""Environment variable that names the registry's folder."""

RECORD_BYTES_MAX: Final = 4 << 20
"""Of one file: 256 islands take a fiftieth of it."""

FORMAT: Final = 1

LAUNCHING: Final = "launching"
RUNNING: Final = "running"
STOPPING: Final = "stopping"
STOPPED: Final = "stopped"
DONE: Final = "done"
FAILED: Final = "failed"
PHASES: Final = (LAUNCHING, RUNNING, STOPPING, STOPPED, DONE, FAILED)
OVER: Final = (STOPPED, DONE, FAILED)
"""Phases in which nothing runs any more."""


@frozen(kw_only=True)
class Rented:
    """What SkyPilot was asked for."""

    name: str
    """``head``, ``island-0``, ..."""
    cluster: str | None = None
    """Of the head: its cluster."""
    job: str | None = None
    """Of an island: its managed job's name."""
    address: str | None = None
    """Of the head, once known: ``HOST:PORT``. Of an island: the one it was told."""


@frozen(kw_only=True)
class RunState:
    """How far a run is."""

    phase: str
    why: str
    """One sentence for people: what is going on, or how it ended."""
    changed: str
    """When that was written, UTC."""
    exit_code: int | None = None
    controller: Process | None = None
    """The process that keeps a run of this machine alive."""
    children: tuple[Process, ...] = ()
    """The processes it started: head and islands."""
    rented: tuple[Rented, ...] = ()

    @property
    def over(self) -> bool:
        """Whether the run has come to an end of any kind."""
        return self.phase in OVER


@frozen(kw_only=True)
class _LaunchFile:
    format: int
    launch: Launch


@frozen(kw_only=True)
class _StateFile:
    format: int
    state: RunState


@frozen(kw_only=True)
class Run:
    """The folder of one run."""

    folder: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.folder.name

    @property
    def key(self) -> Path:
        """The run's key, mode 0600."""
        return self.folder / KEY

    @property
    def head(self) -> Path:
        """Folder that the head of a run on this machine works in."""
        return self.folder / "head"

    @property
    def tape(self) -> Path:
        """Tape of a run on this machine."""
        return self.head / TAPE

    @property
    def tasks(self) -> Path:
        """Folder of the tasks that SkyPilot is given."""
        return self.folder / "tasks"

    @property
    def controller_log(self) -> Path:
        """What the controller of a run on this machine says."""
        return self.folder / "logs" / "controller.log"

    @property
    def controller_lock(self) -> Path:
        """Held by the controller as long as it lives."""
        return self.folder / "controller.lock"

    def island(self, number: int) -> Path:
        """Return the folder that an island of this machine works in."""
        return self.folder / island_name(number)

    def log(self, part: str) -> Path:
        """Return what ``head`` or ``island-N`` of a run on this machine printed."""
        return self.folder / "logs" / f"{part}.log"

    def launch(self) -> Launch:
        """Return what was launched.

        Raises:
            YetoError: the file is missing, damaged or of another version.
        """
        launch = _read(self.folder / "launch.json", _LaunchFile).launch
        if launch.name != self.name:
            raise YetoError(f"{self.folder}: holds the run {launch.name!r}; the folder was renamed or copied")
        launch.parsed()
        return launch

    def state(self) -> RunState:
        """Return how far it is.

        Raises:
            YetoError: the file is missing, damaged or of another version.
        """
        path = self.folder / "state.json"
        state = _read(path, _StateFile).state
        if state.phase not in PHASES:
            raise YetoError(f"{path}: no such phase: {state.phase!r}")
        return state

    def write_state(self, state: RunState) -> None:
        """Replace the state, in one piece."""
        write_json(self.folder / "state.json", {"format": FORMAT, "state": attrs.asdict(state)})

    def change(self, **changes: Any) -> RunState:
        """Replace some of the state; return the new one. Only the one who holds the run may."""
        state = attrs.evolve(self.state(), **changes, changed=now())
        self.write_state(state)
        return state

    def torn_down(self) -> None:
        """Write down that nothing of the run is there any more, which ends one that was going on."""
        # A controller that was killed could not say so itself.
        gone: dict[str, Any] = {"controller": None, "children": (), "rented": ()}
        if not self.state().over:
            why = f"torn down; yeto launch --resume {self.name} goes on"
            gone |= {"phase": STOPPED, "why": why, "exit_code": EXIT_STOPPED}
        self.change(**gone)


def runs_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of all runs; it need not be there."""
    return Path(os.path.expanduser(environ.get(RUNS_VARIABLE) or "~/.yeto/runs")).absolute()


def create_run(folder: Path, launch: Launch, key: str) -> Run:
    """Take a name: make the run's folder with the launch, its state and its key.

    Args:
        folder: of all runs.
        launch: what is launched.
        key: the run's key as text.

    Raises:
        ConfigError: a run of that name is there, or the folder cannot be written.
    """
    run = Run(folder=folder / launch.name)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        run.folder.mkdir(mode=0o700)
    except FileExistsError:
        raise ConfigError(
            f"--name {launch.name}: there is a run of that name; yeto status {launch.name} shows it, "
            f"yeto launch --resume {launch.name} goes on with it, yeto down {launch.name} --forget removes it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{RUNS_VARIABLE}: cannot write in {folder}: {error.strerror}") from error
    (run.folder / "logs").mkdir()
    write_secret(run.key, key)
    write_json(run.folder / "launch.json", {"format": FORMAT, "launch": attrs.asdict(launch)})
    run.write_state(RunState(phase=LAUNCHING, why="the launch has begun", changed=now()))
    return run


def find_run(folder: Path, name: str) -> Run:
    """Return a run by its name.

    Raises:
        ConfigError: there is none.
    """
    check_name(name)
    run = Run(folder=folder / name)
    if not run.folder.is_dir():
        raise ConfigError(f"{name}: no run of that name in {folder}; yeto status lists the runs there")
    return run


def all_runs(folder: Path) -> list[Run]:
    """Return every run, the one launched last first."""
    if not folder.is_dir():
        return []
    runs = [Run(folder=path) for path in folder.iterdir() if (path / "launch.json").is_file()]
    return sorted(runs, key=lambda run: (-(run.folder / "launch.json").stat().st_mtime, run.name))


def forget(run: Run) -> None:
    """Remove the folder of a run that is over, with all that is in it."""
    shutil.rmtree(run.folder)


def now() -> str:
    """Return the present moment as the registry writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner may read, whole before it has its name."""
    aside = path.with_name(path.name + ".new")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
    aside.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one piece, durably."""
    aside = path.with_name(path.name + ".new")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def _read(path: Path, kind: type[T]) -> T:
    try:
        with path.open("rb") as file:
            data = file.read(RECORD_BYTES_MAX + 1)
    except OSError as error:
        raise YetoError(
            f"{path}: {error.strerror}; the launch died before it was written: remove "
            f"{path.parent} when nothing of it runs"
        ) from error
    if len(data) > RECORD_BYTES_MAX:
        raise YetoError(f"{path}: larger than {RECORD_BYTES_MAX} bytes; this was not written by Yeto")
    try:
        value = parse_json(data)
        if isinstance(value, dict) and value.get("format") not in (None, FORMAT):
            raise YetoError(f"{path}: format {value['format']!r}; this Yeto reads {FORMAT}")
        return structure(value, kind)
    except NotStrict as error:
        raise YetoError(f"{path}: {error}; it was changed after it was written") from error
