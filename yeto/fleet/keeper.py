"""What every parent does alike: it keeps its children alive, and ends them in order when it is told to.

The rule: a child that a signal killed had an accident and is started again; one that ended by itself meant
it. The first SIGINT or SIGTERM stops in order, each later one kills. What that means for which children is
for the parent to say.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Sequence

import trio

from yeto.fleet.children import Child


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

    async def run(self, live: Callable[[], Awaitable[int]]) -> int:
        """Heed signals while ``live`` goes on; return what it returns."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._heed_signals)
            code = await live()
            nursery.cancel_scope.cancel()
        return code

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
