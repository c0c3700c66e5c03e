"""A whole training on one machine: a syncer and its learners as child processes, watched until they are done.

The rule: whatever happens, no child is left behind and nothing that was committed is lost. A child that a
signal killed is started again (the syncer from its checkpoint); one that says it cannot go on ends the run
with its own words; Ctrl-C stops the syncer first, so that it checkpoints, and then the learners.
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import trio
from attrs import field, frozen

from yeto.core.decisions import SessionOpened
from yeto.errors import EXIT_STOPPED, ConfigError, TapeError, YetoError, first_of
from yeto.fleet.children import Child, clear_finished, stop_all
from yeto.fleet.commands import CHECKPOINT, TAPE, YETO_RUN
from yeto.fleet.keeper import FAREWELL_SECONDS, STOP_SECONDS, Keeper
from yeto.state.guards import lock_file
from yeto.storage import Held, hold
from yeto.tape import read

READY_SECONDS = 60.0
"""Longest time from starting the syncer to its first connection; it loads a checkpoint in between."""

LOCK = "run.lock"
"""Held by the command of a run, in its folder, as long as it lives."""

BEFORE_A_RUN = {"data", "logs", LOCK}
"""What a command that failed before its run began may have left in the folder; in no later one's way."""


def hold_folder(folder: Path, *, resume: bool) -> Held:
    """Make the folder of a run and hold it, or refuse one that the run could not be in.

    Two commands in one folder would each take the other's syncer for its own, and who fails clears it.

    Raises:
        ConfigError: it cannot be written, has no run to resume, or has something else in it; another command
            is running in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = {path.name for path in folder.iterdir()}
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--run-dir {folder}: {error.strerror}; name a folder that can be written"
        ) from error
    if resume:
        if TAPE not in present:
            raise ConfigError(
                f"--resume: there is no run in --run-dir {folder}; to begin one, leave out --resume"
            )
    elif present - BEFORE_A_RUN:
        raise ConfigError(
            f"--run-dir {folder} is not empty; go on with its run (--resume), name another folder, "
            "or remove this one"
        )
    taken = ConfigError(f"--run-dir {folder}: another command is running in it; wait for it, or stop it")
    return hold(folder / LOCK, taken)


@frozen(kw_only=True)
class LocalRun:
    """Where a local run lives and how its children are started."""

    folder: Path
    num_learners: int
    resume: bool
    syncer_words: Sequence[str]
    """Flags of the syncer beyond place and start mode."""
    learner_words: Callable[[int], Sequence[str]]
    """Flags of learner i beyond the syncer's address and the log."""
    show: Callable[[Path], Awaitable[None]]
    """Shows how far the run of a tape is, until it is cancelled."""
    ready_seconds: float = READY_SECONDS
    say: Callable[[str], None] = field(default=partial(print, flush=True))

    @property
    def tape(self) -> Path:
        """The tape of the run."""
        return self.folder / TAPE

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the run."""
        return self.folder / CHECKPOINT

    @property
    def logs(self) -> Path:
        """Folder of what the children print."""
        return self.folder / "logs"

    def learner(self, number: int) -> Path:
        """Return the folder of one learner: its output, and its state."""
        return self.folder / "learners" / str(number)

    def began(self) -> bool:
        """Tell whether there is anything to go on with: a checkpoint, or a session on the tape."""
        if self.checkpoint.exists():
            return True
        try:
            return any(isinstance(record.body, SessionOpened) for record in read(self.tape))
        except TapeError:
            # None is there, or it ends before its header; one with anything else in it is kept.
            return self.tape.exists() and self.tape.stat().st_size > 0

    def train(self) -> int:
        """Run until the final cut; return 0, or 4 when a signal stopped it before.

        A run that fails before it began leaves nothing in the way of the corrected command.

        Raises:
            YetoError: a child cannot go on; the message is its own.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        for learner in range(self.num_learners):
            # Whether a run that was over goes on is for its syncer to say.
            clear_finished(self.learner(learner) / "state")
        try:
            return trio.run(_Fleet(self).run)
        except* YetoError as group:
            if not self.resume and not self.began():
                self._clear()
            raise first_of(group) from None

    def _clear(self) -> None:
        shutil.rmtree(self.folder / "learners", ignore_errors=True)
        # With the locks beside them, which stay when a syncer is killed.
        for place in (self.tape, self.checkpoint):
            for file in self.folder.glob(f"{place.name}*"):
                file.unlink()


class _Fleet:
    """The children of one run, and what is known of them."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self._ready_file = run.logs / "syncer-ready.json"
        self._port = 0
        self._syncer = Child("syncer", (), run.logs / "syncer.log")
        self._learners = [
            Child(f"learner {learner}", (), run.logs / f"learner-{learner}.log")
            for learner in range(run.num_learners)
        ]
        self._keeper = Keeper(say=run.say, stop=self._stop, kill=self._kill)

    async def run(self) -> int:
        for learner in range(self._run.num_learners):
            self._json_log(learner).unlink(missing_ok=True)
        try:
            return await self._keeper.run(self._shown)
        finally:
            # Also when Python itself fails here: no child may outlive the run.
            with trio.CancelScope(shield=True):
                await self._syncer.stop(STOP_SECONDS)
                await stop_all(self._learners, STOP_SECONDS)

    async def _shown(self) -> int:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run.show, self._run.tape)
            code = await self._live()
            nursery.cancel_scope.cancel()
        return code

    async def _live(self) -> int:
        run = self._run
        states = [run.learner(learner) / "state" / "lock" for learner in range(run.num_learners)]
        await self._keeper.until_free(lock_file(run.checkpoint), *states)
        if self._keeper.stopping.is_set() or not await self._start_syncer():
            return EXIT_STOPPED
        async with trio.open_nursery() as nursery:
            for learner, child in enumerate(self._learners):
                child.start(self._learner_command(learner))
                nursery.start_soon(self._keep_learner, child)
            code = await self._keep_syncer()
            if code != 0:
                # They would train on and wait for a syncer that does not come back.
                self._keeper.stopping.set()
                for child in self._learners:
                    child.send_signal(signal.SIGTERM)
            with trio.move_on_after(FAREWELL_SECONDS):
                for child in self._learners:
                    await child.wait()
            nursery.cancel_scope.cancel()
        return code

    async def _keep_syncer(self) -> int:
        code = await self._keeper.keep(
            self._syncer,
            "the syncer",
            origin=" from its checkpoint",
            again=lambda: self._syncer_command(resume=True),
        )
        if code < 0:
            return EXIT_STOPPED
        if code in (0, EXIT_STOPPED):
            return code
        raise self._syncer.failure(code)

    async def _keep_learner(self, child: Child) -> None:
        code = await self._keeper.keep(child, child.name)
        if code > 0 and not self._keeper.stopping.is_set():
            raise child.failure(code)

    async def _start_syncer(self) -> bool:
        """Start the syncer and learn its port; False when a signal ended it before."""
        self._ready_file.unlink(missing_ok=True)
        self._syncer.start(self._syncer_command(resume=self._run.resume))
        with trio.move_on_after(self._run.ready_seconds):
            while not self._ready_file.exists():
                if not self._syncer.running:
                    code = await self._syncer.wait()
                    if self._keeper.stopping.is_set():
                        return False
                    raise self._syncer.failure(code)
                await trio.sleep(0.05)
            # A syncer that is started again takes the same port, so that its learners find it.
            self._port = json.loads(self._ready_file.read_text(encoding="utf-8"))["port"]
            return True
        raise YetoError(
            f"the syncer is not ready after {self._run.ready_seconds:.0f} s; its log is {self._syncer.log}"
        )

    def _syncer_command(self, *, resume: bool) -> list[str]:
        words = [*YETO_RUN, "--role=syncer", f"--port={self._port}", f"--ready-file={self._ready_file}"]
        words += [f"--checkpoint-path={self._run.checkpoint}", f"--event-tape={self._run.tape}"]
        words += ["--resume-or-start"] if resume else []
        return [*words, *self._run.syncer_words]

    def _learner_command(self, learner: int) -> list[str]:
        words = [*YETO_RUN, "--role=learner", f"--syncer=127.0.0.1:{self._port}"]
        words += [f"--learner-id={learner}", f"--num-learners={self._run.num_learners}"]
        words += [f"--log-jsonl={self._json_log(learner)}", *self._run.learner_words(learner)]
        return words

    def _json_log(self, learner: int) -> Path:
        return self._run.logs / f"learner-{learner}.jsonl"

    def _stop(self) -> None:
        self._run.say("stopping: the syncer writes a checkpoint first (again to kill at once)")
        self._syncer.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        self._run.say("killing everything; the last checkpoint is intact")
        for child in (self._syncer, *self._learners):
            child.send_signal(signal.SIGKILL)
