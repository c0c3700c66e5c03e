"""What tools that start many processes share: broken rules, Ctrl-C, and the end of a child."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from multiprocessing.connection import wait
from multiprocessing.process import parent_process

import trio


class Broken(Exception):
    """A rule does not hold; the message says which and how."""


def only_broken(error: BaseException) -> Broken | None:
    """Return the rule that broke, if that is all that happened."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, Broken) else None


async def until_interrupted(
    run: Callable[[], Awaitable[None]], stopping: Callable[[], None] = lambda: None
) -> bool:
    """Run; return whether somebody stopped it before its end, which ``stopping`` is told at once."""
    interrupted = False

    async def watch(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        nonlocal interrupted
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                if not interrupted:
                    interrupted = True
                    stopping()
                    nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        await nursery.start(watch)
        await run()
        nursery.cancel_scope.cancel()
    return interrupted


def wait_for_parent() -> None:
    """End this process when the one that started it has ended; for a thread that is nobody's concern."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
