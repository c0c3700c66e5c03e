"""Child processes of ``yeto run --role local``: started, watched, started again, and never left behind.

Each child has its own session (a Ctrl-C at the terminal reaches the parent only, which then stops the
children in order) and its own log file. A child that a signal killed is started again, as a fleet's
supervisor would; one that exits by itself has said what it had to say.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import trio

from yeto.errors import YetoError

RELAUNCHES_MAX = 5
"""Times one child is started again: it is for accidents, not for a child that cannot live."""

RELAUNCH_SECONDS = 1.0
"""Pause before a child is started again, so that a crash loop does not eat the machine."""

LOG_TAIL_BYTES = 4096
"""How much of a log's end is searched for the line that says why a child failed."""


class Child:
    """One child process that runs a yeto command."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        """Describe the child; nothing runs before ``start``.

        Args:
            name: what the user calls it.
            command: words after ``yeto``.
            log: file that its stdout and stderr are appended to.
        """
        self.name = name
        self.log = log
        self.relaunches = 0
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str] | None = None) -> None:
        """Start the process, with another command if one is given.

        Only the main thread may call it: the kernel's notice that the parent died is tied to the thread
        that started the child.
        """
        if command is not None:
            self._command = list(command)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._words(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # The parent has read its own YETO_* and passes on what the child is to know.
                env={name: value for name, value in os.environ.items() if not name.startswith("YETO_")},
            )

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
        if not self.running:
            return
        self.send_signal(signal.SIGTERM)
        with trio.move_on_after(patience_seconds):
            await self.wait()
        if self.running:
            self.send_signal(signal.SIGKILL)
            await self.wait()

    async def relaunch(self, command: Sequence[str] | None = None) -> None:
        """Start the process again after an accident.

        Raises:
            YetoError: it had too many of them.
        """
        if self.relaunches == RELAUNCHES_MAX:
            raise YetoError(
                f"{self.name} was killed {RELAUNCHES_MAX + 1} times; its log is {self.log} "
                "(out of memory is the usual cause: try a smaller --micro-batch-size or --seq-len)"
            )
        self.relaunches += 1
        await trio.sleep(RELAUNCH_SECONDS)
        self.start(command)

    def failure(self, code: int) -> YetoError:
        """Return the error that explains an exit: the child's own last line, where it left one."""
        # An error comes from the command ("yeto: "), the end of an exchange from the learner by its name.
        own = f"{self.name}: "
        said = [line for line in self._log_tail() if line.startswith(("yeto: ", own))]
        why = said[-1].removeprefix("yeto: ").removeprefix(own) if said else f"exit code {code}"
        why += f"; its log is {self.log}"
        error = YetoError(f"{self.name}: {why}")
        error.exit_code = code if code > 0 else 1
        return error

    def _words(self) -> list[str]:
        # The log has room for the traceback that a terminal is spared.
        return [sys.executable, "-m", "yeto.cli.child", str(os.getpid()), *self._command, "--debug"]

    def _log_tail(self) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return log.read().decode("utf-8", "replace").splitlines()
