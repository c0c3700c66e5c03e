"""A rank that is not the head: loads what the head loads, then does what the head says.

It has no network, prints nothing unless it fails, and writes nothing. Its end is the head's. As with the
head, training has a thread of its own, so that the process can leave whatever that thread is waiting for.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import NoReturn

import torch
import trio

from yeto.errors import EXIT_INTERRUPTED
from yeto.learner.config import LearnerConfig
from yeto.learner.equipment import equip
from yeto.learner.island import Island
from yeto.learner.leaving import SIGNALS, Patience, leave_now
from yeto.learner.stopwatch import Stopwatch
from yeto.learner.task import Task
from yeto.learner.watch import Loss
from yeto.wire.layout import Layout


def follow(
    config: LearnerConfig, make_task: Callable[[], Task], island: Island, on_lost: Callable[[Loss], None]
) -> None:
    """Live on this rank's training thread, as the :class:`~yeto.learner.trainer.Trainer` does on the head's.

    Args:
        config: how to train; the same on every rank.
        make_task: loads model and data.
        island: this rank's.
        on_lost: called from another thread when a rank is lost.

    Raises:
        YetoError: the task cannot be loaded or trained, or another rank is lost.
    """
    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    try:
        island.open(on_lost)
        is_done = island.share(None) is not None
        if not is_done:
            equipment = equip(config, make_task(), island, Stopwatch(), _nothing)
            equipment.crew.follow()
            equipment.loop.close()
    except Exception as error:
        island.blame(error)
        raise


def _nothing(layout: Layout) -> None:
    """Restore nothing: the head has it."""


def run_follower(config: LearnerConfig, make_task: Callable[[], Task], island: Island) -> int:
    """Run a rank that is not the head in the main thread of this process, until the head's run is over.

    Returns:
        The exit code: 0 when the head has ended the run, however it ended.

    Raises:
        YetoError: the task cannot be loaded or trained here.
    """
    losses: list[Loss] = []
    try:
        trio.run(_run, config, make_task, island, losses.append)
    except Exception as error:
        island.close(str(error))
        if losses:
            # The thread noticed as well; what it met comes of that.
            _leave(island, losses[0])
        raise
    if losses:
        _leave(island, losses[0])
    island.close()
    return 0


async def _run(
    config: LearnerConfig, make_task: Callable[[], Task], island: Island, on_lost: Callable[[Loss], None]
) -> None:
    """Follow the head until its run is over, or until a rank is lost."""
    token = trio.lowlevel.current_trio_token()
    scope = trio.CancelScope()

    def lose(loss: Loss) -> None:
        on_lost(loss)
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(scope.cancel)

    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(_leave_signals_to_the_head)
        try:
            with scope:
                await trio.to_thread.run_sync(
                    follow,
                    config,
                    make_task,
                    island,
                    lose,
                    abandon_on_cancel=True,
                    thread_name="yeto-training",
                )
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _leave_signals_to_the_head(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Do nothing at a first signal, for the head has it too; end the process at a second one."""
    with trio.open_signal_receiver(*SIGNALS) as received:
        task_status.started()
        patience = Patience(has_launcher=True)
        async for _ in received:
            if not patience.is_first() and patience.is_over():
                leave_now(EXIT_INTERRUPTED)


def _leave(island: Island, loss: Loss) -> NoReturn:
    """End with the island: with a word about it, if the head has not said it."""
    if not loss.is_told:
        print(f"yeto: {loss.reason}", file=sys.stderr)
    island.close(loss.reason)
    leave_now(1)
