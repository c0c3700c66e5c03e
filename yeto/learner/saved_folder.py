"""The folder behind ``--state-dir``: the two newest sets, and a thread that writes the next one.

A set is a folder of its own with a running number in its name. The newest one that is whole is where a
learner goes on; the one before stays, in case the newest turns out to be damaged. A kill in the middle of
writing leaves a ``*.tmp`` that nothing looks at and the next start removes.

Training hands a set over and goes on: it has paid for the copy, the disk is the thread's business. One set
is written at a time; if another comes meanwhile it waits, and gives way to a newer one. So a slow disk costs
sets, not steps, and at most two sets are in memory.

A disk on which the sets have no room is refused before training, when that costs nothing. One that is full
later is not a reason to stop what costs so much more than a disk: it is said each time, and training goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from attrs import frozen

from yeto.errors import ConfigError
from yeto.learner.saved import DamagedState, SavedState
from yeto.storage import hold, size_text, sync_folder

PREFIX: Final = "set-"
DONE: Final = "done.json"

SETS_KEPT: Final = 2
"""The newest one, and the one before in case of damage."""


@frozen
class Finished:
    """How the run ended, and where its result was saved."""

    reason: str
    output_dir: Path | None
    """Absolute; None where an older version did not note it."""

    def is_in(self, folder: Path) -> bool:
        """Whether the result lies in ``folder``."""
        return folder.resolve() == self.output_dir and folder.is_dir() and any(folder.iterdir())


class StateFolder:
    """The sets of one learner, of which only one process at a time may be the owner."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        """Make the folder if need be, and become its owner until ``close``.

        Args:
            path: the folder; what is in it must be this learner's.
            say: told what a person should know, from any thread.

        Raises:
            ConfigError: the folder cannot be written to, or another process owns it.
        """
        self.path = path
        self._say = say
        taken = ConfigError(
            f"--state-dir {path}: another process uses it; give every learner a folder of its own"
        )
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = hold(path / "lock", taken)
            for aside in path.glob("*.tmp"):
                shutil.rmtree(aside)
        except OSError as error:
            raise ConfigError(f"--state-dir {path}: cannot be written to: {error.strerror}") from error
        self._next = max(self._numbers(), default=0) + 1
        self._changed = threading.Condition()
        self._waiting: SavedState | None = None
        self._thread: threading.Thread | None = None
        self._is_writing = False
        self._is_closing = False
        self._last_step: int | None = None

    # -- at the start ---------------------------------------------------------------------------------

    @property
    def done(self) -> Finished | None:
        """How the run ended, if it did: there is nothing to go on with."""
        path = self.path / DONE
        if not path.exists():
            return None
        noted = json.loads(path.read_bytes())
        return Finished(noted["reason"], Path(noted["output_dir"]) if "output_dir" in noted else None)

    def newest(self) -> SavedState | None:
        """Return the newest set that is whole, and say so when that is not the newest one; None without any.

        Raises:
            ConfigError: there are sets, and none of them is whole or known to this version.
        """
        numbers = sorted(self._numbers(), reverse=True)
        for number in numbers:
            try:
                state = SavedState.read(self._set(number))
            except DamagedState as error:
                self._say(f"--state-dir: skipping a damaged set: {error}")
            else:
                # Only now; and so that the next saving does not keep it in the place of this one.
                for damaged in numbers[: numbers.index(number)]:
                    shutil.rmtree(self._set(damaged), ignore_errors=True)
                self._last_step = state.loop.steps
                return state
        if numbers:
            raise ConfigError(
                f"--state-dir {self.path}: none of its {len(numbers)} sets is whole; remove the folder to "
                "begin anew, from the syncer's weights and the first row"
            )
        return None

    def require_space(self, set_bytes: int) -> None:
        """Refuse a disk without room for the sets that are kept and the one that is being written.

        Args:
            set_bytes: size of one. Room that sets in the folder take is room: they give way.

        Raises:
            ConfigError: naming the folder, the space needed and the space there is.
        """
        files = (file for number in self._numbers() for file in self._set(number).iterdir())
        held = sum(file.stat().st_size for file in files)
        wanted = (SETS_KEPT + 1) * set_bytes
        needed, free = wanted - min(held, wanted), shutil.disk_usage(self.path).free
        if free < needed:
            raise ConfigError(
                f"--state-dir {self.path}: {SETS_KEPT} sets of state and one being written take "
                f"{size_text(wanted)}, for which {size_text(needed)} must be free and only {size_text(free)} "
                "are; make room, or name a folder on another disk"
            )

    # -- while training -------------------------------------------------------------------------------

    def save(self, state: SavedState) -> None:
        """Have a set written soon; returns at once."""
        with self._changed:
            self._waiting = state
            if self._thread is None:
                # A daemon: a process that ends on the spot must not wait for a disk.
                self._thread = threading.Thread(target=self._write_on, name="yeto-state", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until what was to be saved is on the disk, or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and not self._is_writing)

    def finish(self, reason: str, output_dir: Path) -> None:
        """Mark that the run is over for this learner, durably; a later start says so and ends.

        Args:
            reason: for people.
            output_dir: where the result was saved.

        Raises:
            OSError: the system refuses.
        """
        self.flush()
        aside = self.path / (DONE + ".part")
        with aside.open("w", encoding="utf-8") as file:
            json.dump({"reason": reason, "output_dir": str(output_dir.resolve())}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.path / DONE)
        sync_folder(self.path)

    def close(self) -> None:
        """Wait for the disk, and give the folder up."""
        self.flush()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._lock.release()

    # -- inside ---------------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        names = (path.name.removeprefix(PREFIX) for path in self.path.glob(PREFIX + "*"))
        return [int(name) for name in names if name.isdecimal()]

    def _set(self, number: int) -> Path:
        return self.path / f"{PREFIX}{number:08}"

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting is not None or self._is_closing)
                state, self._waiting = self._waiting, None
                if state is None:
                    return
                self._is_writing = True
            self._write(state)

    def _write(self, state: SavedState) -> None:
        step = state.loop.steps
        try:
            state.write(self._set(self._next))
        except Exception as error:
            # Whatever it is: what could end the training, or have it wait for ever, is worse than no set.
            kept = "nothing is saved yet" if self._last_step is None else f"step {self._last_step} is saved"
            why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            self._say(
                f"--state-dir {self.path}: cannot save local step {step}: {why}; {kept}, training goes on"
            )
            return
        self._last_step = step
        self._next += 1
        for number in sorted(self._numbers())[:-SETS_KEPT]:
            shutil.rmtree(self._set(number), ignore_errors=True)
