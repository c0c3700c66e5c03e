"""Child processes: each runs one command of Yeto, and none outlives its run.

They are forked from a server that has imported everything (loading torch costs more than a short training),
so only the words of the command line are read anew; from there on a child is the command, with its own
memory, sockets and exit code. What it says goes to a file.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import trio
from attrs import define, field, frozen
from breaking import wait_for_parent
from ports import free_port

from yeto.errors import YetoError
from yeto.text.fork_server import start_fork_server

TOOLS = Path(__file__).parents[1]
WARM = f"{__package__}.warm"
"""What the server imports; a module that it does not find it passes over in silence."""

MODEL = "YETO_COMPARING_MODEL"
"""Tells the server which model's code to load beforehand."""

JOIN_SECONDS = 10.0
"""Far more than a killed process takes to be gone."""

TAIL_BYTES = 4096
"""How much of a log's end is searched for the line that says why a child failed."""


class RunFailed(YetoError):
    """A child of a run could not do its part; the message is its own last line."""


@frozen(kw_only=True)
class Command:
    """A command of Yeto, and where it runs."""

    words: tuple[str, ...]
    environ: Mapping[str, str] = field(factory=dict)
    slow: float = 1.0
    """A learner's steps take so many times as long."""


@define
class Child:
    """One process."""

    name: str
    log: Path
    process: Any
    family: list[Child] = field(factory=list)
    """All children of the run, this one too."""

    async def wait(self) -> int:
        """Return the exit code, once there is one; for one task at a time."""
        await trio.lowlevel.wait_readable(self.process.sentinel)
        self.process.join()
        return int(self.process.exitcode)

    async def succeed(self) -> None:
        """Wait for the end.

        Raises:
            RunFailed: it was not exit code 0.
        """
        code = await self.wait()
        if code != 0:
            raise self.failure(code)

    def failure(self, code: int) -> RunFailed:
        """Return why it failed, as far as anybody says so."""
        if code < 0:
            return RunFailed(f"{self.name}: killed by signal {-code}; its log is {self.log}")
        # Of an island only one rank says what is wrong, and another may be gone first.
        speaker = self if self.lines() else next((child for child in self.family if child.error()), self)
        said = speaker.error() or (speaker.lines() or [f"exit code {code}"])[-1]
        return RunFailed(f"{speaker.name}: {said}; its log is {speaker.log}")

    def error(self) -> str | None:
        """Return the last line of its log that is an error; None without one."""
        errors = [line for line in self.lines() if line.startswith("yeto: ")]
        return errors[-1].removeprefix("yeto: ") if errors else None

    def lines(self) -> list[str]:
        """Return the last lines of its log."""
        if not self.log.exists():  # it has not come that far
            return []
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
        return [line.strip() for line in lines if line.strip()]


class Family:
    """The children of one run."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    async def start(self, name: str, log: Path, target: Callable[..., None], *args: Any) -> Child:
        """Start a process that calls a module-level function, with its output in a file."""
        # Also when the server is to be started, and that takes seconds.
        process = await trio.to_thread.run_sync(_started, log, target, args)
        child = Child(name, log, process, self._children)
        self._children.append(child)
        return child

    def kill(self) -> None:
        """End all of them, and wait until they are gone."""
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.join(JOIN_SECONDS)


@contextlib.asynccontextmanager
async def family() -> AsyncIterator[Family]:
    """Surround a run: none of its children is there afterwards, however it ends."""
    children = Family()
    try:
        yield children
    finally:
        children.kill()


def island(words: tuple[str, ...], ranks: int) -> list[Command]:
    """Return the commands of an island's ranks, each told its place as torchrun would tell it."""
    if ranks == 1:
        return [Command(words=words)]
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [
        Command(words=words, environ={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]


def prepare(model: str, threads: int) -> None:
    """Say what the server is to load and how many threads its children have; before the first is started."""
    os.environ[MODEL] = model
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The server is a Python of its own, and in some versions it is not told where this one finds its modules.
    paths = [str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def obey(command: Command) -> None:
    """Be a command of Yeto; what a child does."""
    from yeto.cli.main import main

    os.environ.update(command.environ)
    if command.slow > 1.0:
        _slow_down(command.slow)
    main(command.words)


def _slow_down(factor: float) -> None:
    """Have every optimizer step of this process take ``factor`` times as long, as on a slower machine."""
    from yeto.learner.loop import InnerLoop

    step = InnerLoop.step

    def slower(loop: InnerLoop, interrupted: Callable[[], bool]) -> Any:
        began = time.monotonic()
        result = step(loop, interrupted)
        time.sleep((factor - 1.0) * (time.monotonic() - began))
        return result

    InnerLoop.step = slower  # type: ignore[method-assign, assignment]


def _started(log: Path, target: Callable[..., None], args: tuple[Any, ...]) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([WARM])
    start_fork_server()
    process = context.Process(target=_live, args=(str(log), target, args))
    process.start()
    return process


def _live(log: str, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    # A terminal's Ctrl-C is for the process that started this one; so is what its end means.
    os.setsid()
    threading.Thread(target=wait_for_parent, daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for name in [name for name in os.environ if name.startswith("YETO_")]:
        del os.environ[name]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        assert WARM in sys.modules, f"the server that forks has not imported {WARM}"
        target(*args)
    except YetoError as error:
        print(f"yeto: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
