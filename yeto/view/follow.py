"""Following a tape while it is written, or reading one that is whole: the same.

One look reads what was added since the last one. A restart that falls back below what was committed takes
commits back; they cannot be subtracted from what they were added to, so the tape is folded once more from its
beginning, with that restart known beforehand. That costs a second read, once for each such restart.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import evolve

from yeto.core.events import SessionResumed
from yeto.errors import TapeError
from yeto.tape import Restart, Skimmer, complete_lines, find_restarts, open_tape
from yeto.view.board import WANTED, Board
from yeto.view.history import History
from yeto.view.logs import LogFolder
from yeto.view.model import LearnerLive, Live, Moment
from yeto.view.present import present
from yeto.view.writers import is_written

Traffic = Callable[[], Sequence[tuple[int, int]]]
"""Returns, for each learner, the bytes received from it and sent to it since this start of the syncer."""

SLICE_LINES = 64
"""Lines between two looks at the clock: a millisecond or less."""

_SILENT = LearnerLive()

_CONTRADICTED = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""How a fold ends that meets a commit of nobody, say: it takes the tape's word, as only replay verifies it.
A dashboard outlives that, and a person gets one line."""


class Watcher:
    """The fold of one tape, brought up to date by :meth:`look`.

    Args:
        path: the tape; it need not be there yet.
        history: whether to keep the columns over the rounds as well.
        running: what to say of the tape's writer; asked anew for every moment. None is not knowing.
        clock: the wall clock, in seconds since 1970.
        traffic: bytes moved, where the tape's writer is this process.
    """

    def __init__(
        self,
        path: Path,
        *,
        history: bool = False,
        running: Callable[[Path], bool | None] = is_written,
        clock: Callable[[], float] = time.time,
        traffic: Traffic | None = None,
    ) -> None:
        self.path = path
        self._with_history = history
        self._running = running
        self._clock = clock
        self._traffic = traffic
        self._logs = LogFolder(path.parent / "logs")
        self._inode: int | None = None
        self.behind = False
        """Whether the last look stopped before the end of the tape."""
        self._begin(())

    def look(self, *, within: float | None = None) -> bool:
        """Fold what was added since the last look; return whether there was anything.

        Args:
            within: seconds after which to stop, with :attr:`behind` set when more is there.

        Raises:
            TapeError: the tape is damaged, or records that were read are gone again.
        """
        if not self.path.exists():
            return False
        before = self._done
        until = math.inf if within is None else time.monotonic() + within
        try:
            while not self._read_on(until):
                pass
        except _CONTRADICTED as error:
            raise TapeError(
                f"{self.path}: line {self._skimmer.line}: contradicts what stands before it "
                f"({type(error).__name__}: {error}); yeto replay says which record was changed"
            ) from error
        return self._done != before

    @property
    def done_bytes(self) -> int:
        """How much of the tape was folded."""
        return self._done

    def moment(self) -> Moment | None:
        """Return the present moment; None while the tape has no header."""
        if self.board.summary.header is None:
            return None
        running = self._running(self.path)
        writer = {True: "running", False: "gone", None: "unknown"}[running]
        config = self.board.shadow.config
        assert config is not None, "it is in the header"
        learners = self._with_traffic(self._logs.look(config.num_learners))
        if not running or self.board.shadow.exit_code is not None:
            return present(self.board, writer=writer, live=Live(learners=learners))
        live = Live(learners=learners, disk_free_bytes=_free_bytes(self.path.parent))
        return present(self.board, now=self._now(), writer=writer, live=live)

    def _with_traffic(self, learners: Mapping[int, LearnerLive]) -> Mapping[int, LearnerLive]:
        if self._traffic is None:
            return learners
        return {
            learner: evolve(learners.get(learner, _SILENT), bytes_in=received, bytes_out=sent)
            for learner, (received, sent) in enumerate(self._traffic())
        }

    def _begin(self, restarts: tuple[Restart, ...]) -> None:
        self.history = History() if self._with_history else None
        self.board = Board(restarts, self.history)
        self._known = frozenset(restart.seq for restart in restarts)
        self._skimmer = Skimmer(str(self.path), WANTED)
        self._done = 0

    def _read_on(self, until: float) -> bool:
        """Fold to the end or until that time; False when it has to begin anew."""
        with open_tape(self.path) as file:
            status = os.fstat(file.fileno())
            if self._inode not in (None, status.st_ino):
                # Another run has taken its place.
                self._begin(())
            self._inode = status.st_ino
            if status.st_size < self._done:
                raise TapeError(f"{self.path}: records that were read are gone again: its writer failed")
            file.seek(self._done)
            take, feed, last, done = self._skimmer.take, self.board.feed, b"", self._done
            self.behind = False
            try:
                for number, line in enumerate(complete_lines(file, str(self.path)), 1):
                    done += len(line)
                    last = line
                    item = take(line)
                    if item is not None:
                        if item.kind == SessionResumed.kind:
                            resumed: Any = item.body
                            if self._takes_back(item.seq, resumed.step):
                                self._begin(find_restarts(self.path))
                                done = 0
                                return False
                        feed(item)
                    if not number % SLICE_LINES and time.monotonic() >= until:
                        self.behind = True
                        break
            finally:
                self._done = done
        if last:
            self.board.pass_over(self._skimmer.line, self._skimmer.time_of(last))
        return True

    def _takes_back(self, seq: int, step: int) -> bool:
        return seq not in self._known and step < self.board.summary.step

    def _now(self) -> float | None:
        """Return the session's time by the wall clock of its last start; None when that cannot be read."""
        if self.board.wall is None:
            return None
        wall_clock, at = self.board.wall
        try:
            begun = datetime.fromisoformat(wall_clock)
        except ValueError:
            return None
        if begun.tzinfo is None:
            return None
        return at + max(0.0, self._clock() - begun.timestamp())


class OwnRun:
    """The present moment of a run whose processes are ours, whatever becomes of its tape.

    Args:
        tape: it need not be there yet.
    """

    def __init__(self, tape: Path) -> None:
        self._tape = tape
        self._begin()

    def moment(self) -> Moment | None:
        """Return it; None while nothing can be shown, which is no reason for the run to end."""
        try:
            self._watcher.look()
        except TapeError:
            # It was cut back to what is durable, or the run itself will say what is wrong with it.
            self._begin()
            return None
        return self._watcher.moment()

    def _begin(self) -> None:
        # The tape has the same writer also while that is started again.
        self._watcher = Watcher(self._tape, running=lambda _: True)


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
