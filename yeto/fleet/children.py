"""Child processes: started, watched, started again, and never left behind.

Each child has its own session (a Ctrl-C at the terminal reaches the parent only, which then stops the
children in order) and its own log file. When to start one again is for its parent to say; here is how, and
how often: a child that lives for a while has earned its next accidents.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path

import trio

from yeto.errors import YetoError
from yeto.programs import module_words

RELAUNCHES_MAX = 5
"""Times one child is started again: it is for accidents, not for a child that cannot live."""

LIVED_SECONDS = 600.0
"""A child that ran for so long could live: accidents before that are not counted any more."""

RELAUNCH_SECONDS = 1.0
"""Pause before a child is started again, doubled each time, so that a crash loop does not eat the machine."""

LOG_TAIL_BYTES = 4096
"""How much of a log's end is searched for the line that says why a child failed."""


class Child:
    """One child process that runs a module's program."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path | None,
        *,
        folder: Path | None = None,
        speaks_as: str | None = None,
        death_signal: signal.Signals = signal.SIGTERM,
        keep_variables: Collection[str] = (),
    ) -> None:
        """Describe the child; nothing runs before ``start``.

        Args:
            name: what the user calls it.
            command: words after ``python -m``.
            log: file that its stdout and stderr are appended to; None is where its parent's go.
            folder: where it runs; None is where its parent runs.
            speaks_as: what its own lines begin with, if not with its name.
            death_signal: what it gets when its parent dies (on Linux).
            keep_variables: variables of the environment that begin with YETO_ and that it gets all the same.
        """
        self.name = name
        self.log = log
        self.relaunches = 0
        self._command = list(command)
        self._folder = folder
        self._speaks_as = speaks_as or name
        self._death_signal = death_signal
        self._keep_variables = frozenset(keep_variables)
        self._started_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str] | None = None) -> None:
        """Start the process, with another command if one is given.

        Only the main thread may call it: the kernel's notice that the parent died is tied to the thread
        that started the child.
        """
        if command is not None:
            self._command = list(command)
        self._started_at = time.monotonic()
        with nullcontext() if self.log is None else self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._words(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
                # The parent has read its own YETO_* and passes on what the child is to know.
                env={
                    name: value
                    for name, value in os.environ.items()
                    if not name.startswith("YETO_") or name in self._keep_variables
                },
            )

    @property
    def pid(self) -> int:
        """Process id of the last start."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    async def wait(self) -> int:
        """Wait for the end of the process; return its exit code (negative: the signal that killed it)."""
        assert self._process is not None
        # A cancelled wait leaves its thread behind, until ``stop`` has ended the process.
        return await trio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process is still there."""
        if self._process is not None:
            self._process.send_signal(number)

    async def stop(self, patience_seconds: float) -> None:
        """End the process: SIGTERM, and SIGKILL when it takes longer than ``patience_seconds``."""
        await stop_all([self], patience_seconds)

    async def relaunch(self) -> None:
        """Start the process again after an accident.

        Raises:
            YetoError: it had too many of them.
        """
        await self.pause()
        self.start()

    async def pause(self) -> None:
        """Count an accident, and wait before the process is started again.

        Raises:
            YetoError: it had too many of them.
        """
        if time.monotonic() - self._started_at > LIVED_SECONDS:
            self.relaunches = 0
        if self.relaunches == RELAUNCHES_MAX:
            raise YetoError(
                f"{self.name} died {RELAUNCHES_MAX + 1} times{self._where()} "
                "(out of memory is the usual cause: it needs more, or, if it trains, a smaller "
                "--micro-batch-size or --seq-len)"
            )
        self.relaunches += 1
        # Twice as long each time: what keeps it from living may pass.
        await trio.sleep(RELAUNCH_SECONDS * 2 ** (self.relaunches - 1))

    def failure(self, code: int) -> YetoError:
        """Return the error that explains an exit: the child's own last line, where it left one."""
        # An error comes from the command ("yeto: "), the end of an exchange from the learner by its name.
        own = f"{self._speaks_as}: "
        said = [line for line in self._log_tail() if line.startswith(("yeto: ", own))]
        why = said[-1].removeprefix("yeto: ").removeprefix(own) if said else f"exit code {code}"
        error = YetoError(f"{self.name}: {why}{self._where()}")
        error.exit_code = code if code > 0 else 1
        return error

    def _words(self) -> list[str]:
        parent = [str(os.getpid()), str(int(self._death_signal))]
        return module_words("yeto.fleet.child", *parent, *self._command)

    def _where(self) -> str:
        return "" if self.log is None else f"; its log is {self.log}"

    def _log_tail(self) -> list[str]:
        if self.log is None:
            return []
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return log.read().decode("utf-8", "replace").splitlines()


def clear_finished(state: Path) -> None:
    """Remove what a learner keeps of a session that was over, so that a resumed run can use it again."""
    if (state / "done.json").exists():
        shutil.rmtree(state)


async def stop_all(children: Sequence[Child], patience_seconds: float) -> None:
    """End processes beside each other: SIGTERM, and SIGKILL to those that take longer than the patience.

    Each is told once: to some a second SIGTERM means to leave what they are saving.
    """
    running = [child for child in children if child.running]
    for child in running:
        child.send_signal(signal.SIGTERM)
    with trio.move_on_after(patience_seconds):
        for child in running:
            await child.wait()
    for child in running:
        if child.running:
            child.send_signal(signal.SIGKILL)
            await child.wait()
