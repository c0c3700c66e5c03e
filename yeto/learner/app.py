"""A learner as a process: Trio in the main thread, training in one worker thread, signals in both.

The training thread may be busy for minutes in code that nothing can interrupt (loading a model, one long
step), so it is asked to stop, not made to. A first Ctrl-C or SIGTERM is honoured at the next opportunity:
between micro batches, or at once while the thread waits; while the task is still loading there is nothing to
save, and the process leaves without it. A second one ends the process on the spot.

Of several ranks the head does all this. The others follow it from the same kind of thread, leave signals to
it, and end when it does; a rank that is lost ends all of them, wherever their threads may be.
"""

from __future__ import annotations

import contextlib
import random
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import trio

from yeto.errors import EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError, YetoError
from yeto.learner.bells import Bell
from yeto.learner.client import Client
from yeto.learner.config import LearnerConfig
from yeto.learner.connection import Shared
from yeto.learner.ending import Outcome
from yeto.learner.follower import run_follower
from yeto.learner.identity import Identity
from yeto.learner.island import SOLO, Island
from yeto.learner.leaving import SIGNALS, Patience, leave_now
from yeto.learner.mailbox import Arrivals, Departures, Stop
from yeto.learner.progress import Progress
from yeto.learner.sinks import open_sinks
from yeto.learner.task import Task
from yeto.learner.trainer import Trainer
from yeto.learner.watch import Loss


def run_learner(config: LearnerConfig, make_task: Callable[[], Task], island: Island = SOLO) -> int:
    """Run a learner, or one rank of it, in the main thread of this process until its run is over.

    Args:
        config: how to train and whom to exchange with.
        make_task: loads model and data; called on the training thread, so that signals work meanwhile.
        island: this rank's; not opened yet.

    Returns:
        The exit code: 0 after the final cut (or, without a syncer, after the last step), 1 when the syncer
        refused this learner or never answered or a rank was lost, 4 when the run was stopped before its final
        cut; of a rank that is not the head 0 whenever the head has ended the run.

    Raises:
        ConfigError: the output folder, the log or a sink of curves cannot be written to.
        YetoError: the task cannot be loaded or trained, or the result not saved.
    """
    if not island.is_head:
        return run_follower(config, make_task, island)
    _require_writable(config.output_dir)
    sinks = open_sinks(config)
    with Progress(
        learner_id=config.learner_id,
        unit=config.unit,
        max_local_steps=config.max_local_steps,
        log_path=config.log_jsonl,
        sinks=sinks,
    ) as progress:
        learner = Learner(config, make_task, progress, island=island)
        try:
            outcome = trio.run(learner.run, True)
        except Exception as error:
            island.close(str(error))
            raise
    island.close(outcome.reason if learner.is_abandoned else None)
    if learner.is_abandoned or sinks.is_stuck:
        # A thread sits in a library call; an interpreter that shuts down under it may crash or hang.
        leave_now(outcome.exit_code)
    return outcome.exit_code


class Learner:
    """The Trio side of a learner's process."""

    def __init__(
        self,
        config: LearnerConfig,
        make_task: Callable[[], Task],
        progress: Progress,
        rng: random.Random | None = None,
        island: Island = SOLO,
    ) -> None:
        """Prepare; nothing happens before ``run``.

        Args:
            config: how to train and whom to exchange with.
            make_task: loads model and data, on the training thread.
            progress: told what happens.
            rng: chance of the back-off; seeded from the system by default.
            island: this rank's, which is the head.
        """
        self._rng = rng
        self._config = config
        self._make_task = make_task
        self._progress = progress
        self._island = island
        self._loss: Loss | None = None
        self._arrivals = Arrivals()
        self._client: Client | None = None
        self._identity: Identity | None = None
        self._thread_scope = trio.CancelScope()
        self.is_abandoned = False
        """Whether ``run`` returned while the training thread was still in a call that nothing interrupts."""

    async def run(self, with_signals: bool = False) -> Outcome:
        """Train and exchange until the run is over.

        Args:
            with_signals: stop on Ctrl-C and SIGTERM; needs the main thread.

        Returns:
            How it ended.

        Raises:
            YetoError: the task cannot be loaded or trained.
        """
        pushes_bell, news_bell, ready_bell = Bell(), Bell(), Bell()
        departures = Departures(ring_pushes=pushes_bell.ring, ring_news=news_bell.ring)

        def ready(identity: Identity) -> None:
            self._identity = identity
            ready_bell.ring()

        trainer = Trainer(
            self._config,
            self._make_task,
            arrivals=self._arrivals,
            departures=departures,
            progress=self._progress,
            on_ready=ready,
            island=self._island,
            on_lost=self._lose_from(trio.lowlevel.current_trio_token()),
        )
        outcome = Outcome(exit_code=EXIT_STOPPED, reason="stopped while loading; nothing was trained")
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            if with_signals:
                await nursery.start(self._watch_signals, trainer)
            if self._config.has_syncer:
                nursery.start_soon(self._exchange, departures, pushes_bell, news_bell, ready_bell)
            try:
                with self._thread_scope:
                    outcome = await trio.to_thread.run_sync(
                        trainer.run, abandon_on_cancel=True, thread_name="yeto-training"
                    )
            except Exception as error:
                failure = error
            finally:
                # Whatever ended this side, the other one must not wait for it.
                self._arrivals.stop(Stop(exit_code=EXIT_STOPPED, reason="stopped"))
                self._arrivals.release()
            nursery.cancel_scope.cancel()
        if failure is not None:
            code = failure.exit_code if isinstance(failure, YetoError) else 1
            self._progress.failed(code, str(failure) or type(failure).__name__)
            raise failure
        if self._thread_scope.cancelled_caught:
            self.is_abandoned = True
            if self._loss is not None:
                outcome = Outcome(exit_code=1, reason=self._loss.reason)
            self._progress.failed(outcome.exit_code, outcome.reason)
            self._progress.notice(outcome.reason)
        return outcome

    async def _exchange(
        self, departures: Departures, pushes_bell: Bell, news_bell: Bell, ready_bell: Bell
    ) -> None:
        """Be connected from the moment it is known what to state."""
        while self._identity is None:
            await ready_bell.wait()
        shared = Shared(
            config=self._config,
            identity=self._identity,
            arrivals=self._arrivals,
            departures=departures,
            pushes_bell=pushes_bell,
            news_bell=news_bell,
        )
        self._client = Client(shared, self._progress, self._rng)
        await self._client.run()

    def _lose_from(self, token: trio.lowlevel.TrioToken) -> Callable[[Loss], None]:
        """Return what ends the run, called from another thread, when a rank is lost."""

        def lose(loss: Loss) -> None:
            self._loss = loss
            # The thread may be in a call that waits for the lost rank for ever.
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(self._thread_scope.cancel)

        return lose

    async def _watch_signals(
        self, trainer: Trainer, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.open_signal_receiver(*SIGNALS) as received:
            task_status.started()
            patience = Patience(self._island.size > 1)
            async for number in received:
                if patience.is_first():
                    self._stop(signal.Signals(number).name, trainer)
                elif patience.is_over():
                    self._progress.restore_terminal()
                    leave_now(EXIT_INTERRUPTED)

    def _stop(self, name: str, trainer: Trainer) -> None:
        """Have the run end at the next opportunity."""
        if not trainer.is_loaded:
            self._thread_scope.cancel()
            return
        self._progress.notice(f"{name}: stopping at the next opportunity; once more ends the process at once")
        self._arrivals.stop(Stop(exit_code=EXIT_STOPPED, reason=f"stopped by {name}"))
        if self._client is not None:
            self._client.stop_requested()


def _require_writable(folder: Path) -> None:
    """Look whether the output folder can be made and written: no training may end at a wrong path."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"--output-dir {folder}: cannot be written to: {error.strerror}; name another folder"
        ) from error
