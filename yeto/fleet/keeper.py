"""What every parent does alike: it keeps its children alive, and ends them in order when it is told to.

The rule: a child that a signal killed had an accident and is started again; one that ended by itself meant
it. The first SIGINT or SIGTERM stops in order, each later one kills. What that means for which children is
for the parent to say.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import trio

from yeto.fleet.children import Child
from yeto.storage import is_held

T = TypeVar("T")

EARLIER_SECONDS: Final = 120.0
"""Longest wait for the children of an earlier parent: more than a syncer takes to stop and to save."""

FAREWELL_SECONDS: Final = 90.0
"""How long learners may take to save and leave once their syncer is done: more than their own wait for it."""

STOP_SECONDS: Final = 15.0
"""Time that a child has to end after SIGTERM, before it is killed, when the run is over anyway."""

LOOK_SECONDS: Final = 0.1
"""Time between two looks at what they hold."""


class Keeper:
    """Keeps the children of one parent, until a signal says that it is to stop."""

    def __init__(
        self, *, say: Callable[[str], None], stop: Callable[[], None], kill: Callable[[], None]
    ) -> None:
        """Describe the parent.

        Args:
            say: takes lines for people.
            stop: called at the first signal, with ``stopping`` set.
            kill: called at each later one.
        """
        self.stopping = trio.Event()
        """Set when nothing is started again any more."""
        self._say = say
        self._stop = stop
        self._kill = kill

    async def run(self, live: Callable[[], Awaitable[T]]) -> T:
        """Heed signals while ``live`` goes on; return what it returns."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._heed_signals)
            result = await live()
            nursery.cancel_scope.cancel()
        return result

    async def until_free(self, *locks: Path) -> None:
        """Wait for the children of an earlier parent, which was killed: they were told to stop, and save.

        Whoever holds a file for longer is somebody else. Then the child that needs it says so.

        Args:
            locks: files that a child holds as long as it lives.
        """
        waiting = False
        with trio.move_on_after(EARLIER_SECONDS):
            while not self.stopping.is_set() and any(map(is_held, locks)):
                if not waiting:
                    self._say("what an earlier start has left running is still saving; waiting for it to end")
                waiting = True
                await trio.sleep(LOOK_SECONDS)

    async def keep(
        self,
        child: Child,
        called: str,
        *,
        origin: str = "",
        again: Callable[[], Sequence[str]] | None = None,
        started: Callable[[], None] = lambda: None,
    ) -> int:
        """Start a child again whenever a signal killed it; return its exit code once it ended otherwise.

        Args:
            child: is running.
            called: what people call it.
            origin: what it goes on from, as the end of a sentence about it.
            again: gives the command to start it with; None is the one it had.
            started: called whenever it was started again.

        Returns:
            What the child chose, or the negative number of the signal that killed it when it was to stop.

        Raises:
            YetoError: it had too many accidents.
        """
        while (code := await child.wait()) < 0:
            if not self.stopping.is_set():
                self._say(f"{called} was killed by signal {-code}; starting it again{origin}")
                await child.pause()
            # Also when that was said during the pause.
            if self.stopping.is_set():
                break
            child.start(None if again is None else again())
            started()
        return code

    async def _heed_signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                if self.stopping.is_set():
                    self._kill()
                else:
                    self.stopping.set()
                    self._stop()
