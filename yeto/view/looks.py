"""One fold for everybody who looks, refreshed at most once a second, in a worker thread.

A source folds in slices, so that neither the end of a program nor a busy syncer waits for a long tape.
Whoever asks gets the last look if it is fresh, else waits for the next; how many ask makes no difference.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import trio
from attrs import frozen

from yeto.errors import YetoError

REFRESH_SECONDS = 1.0
"""How old a look may be: people see no difference, and a fold costs the same for each."""
HISTORY_SECONDS = 4.0
"""How old the history may be: a page asks for it every five seconds."""
PATIENCE_SECONDS = 3.0
"""How long a request waits for a tape that is being read the first time, before it is told to come again."""

_T = TypeVar("_T")


class Source(Protocol):
    """Where a run is looked at. All methods are called in a worker thread, one at a time."""

    name: str
    """What is shown: a path or an address."""

    def advance(self, seconds: float) -> bool:
        """Read on for about so long; return whether everything that is there has been read.

        Raises:
            YetoError: it cannot be read.
        """

    def status(self) -> dict[str, Any] | None:
        """Return the moment as JSON values; None where there is no run yet."""

    def history(self) -> dict[str, Any] | None:
        """Return the history as JSON values; None where there is no run yet."""

    def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""

    def story(self, step: int, stopped: Callable[[], bool]) -> list[dict[str, Any]]:
        """Return the records of a round; empty when there are none.

        Args:
            step: the round.
            stopped: whether nobody waits for it any more; asked now and then.

        Raises:
            YetoError: they cannot be read.
        """


@frozen(kw_only=True)
class Look:
    """What was seen at one time."""

    number: int
    """Looks with the same number are the same."""
    status: bytes | None
    """JSON of the moment; None where there is none."""
    moment: dict[str, Any] | None
    problem: str
    """Why there is none, or why it is no longer up to date; empty when all is well."""
    reading: bool = False
    """Whether that is only because the source is being read the first time."""


class Looks:
    """The looks at one source; :meth:`run` takes them, as a task, when somebody asks.

    Args:
        source: what is looked at.
        slice_seconds: longest time that is read without a pause.
        rest: how much longer the pauses are than the reading; 0 reads as fast as it can.
        history_seconds: how old a history may be: to make one takes a hundred times what a moment takes.
    """

    def __init__(
        self,
        source: Source,
        *,
        slice_seconds: float = 0.25,
        rest: float = 0.0,
        history_seconds: float = HISTORY_SECONDS,
    ) -> None:
        self.source = source
        self._slice_seconds = slice_seconds
        self._rest = rest
        self._history_seconds = history_seconds
        self._turn = trio.Lock()
        self._thread = trio.CapacityLimiter(1)
        self._stories = trio.CapacityLimiter(1)
        self._look = Look(
            number=0, status=None, moment=None, problem=f"{source.name}: is being read", reading=True
        )
        self._looked_at = -REFRESH_SECONDS
        self._wanted = trio.Event()
        self._taken = trio.Event()
        self._history: tuple[int, float, bytes, bytes] | None = None
        self._metrics: tuple[float, bytes] | None = None

    async def run(self) -> None:
        """Take a look whenever one is wanted."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            async with self._turn:
                await self._refresh()
            self._taken.set()
            self._taken = trio.Event()

    async def look(self) -> Look:
        """Return a look that is not older than a second, or, when that takes long, the last one."""
        if trio.current_time() - self._looked_at >= REFRESH_SECONDS:
            self._wanted.set()
            with trio.move_on_after(PATIENCE_SECONDS):
                await self._taken.wait()
        return self._look

    async def history(self, *, packed: bool) -> bytes | None:
        """Return the history as JSON of the last look, gzipped if asked for; None where there is none."""
        look = await self.look()
        if look.status is None:
            return None
        async with self._turn:
            now, old = trio.current_time(), self._history
            if old is None or (old[0] != look.number and now - old[1] >= self._history_seconds):
                plain, small = await self._in_thread(partial(_pack, self.source))
                self._history = old = look.number, now, plain, small
            return old[3] if packed else old[2]

    async def metrics(self) -> bytes:
        """Return the metrics, rendered at most once a second."""
        async with self._turn:
            if self._metrics is None or trio.current_time() - self._metrics[0] >= REFRESH_SECONDS:
                self._metrics = trio.current_time(), await self._in_thread(self.source.metrics)
            return self._metrics[1]

    async def story(self, step: int) -> list[dict[str, Any]]:
        """Return the records of a round."""
        # In a thread of its own: it reads a tape from its beginning, and the others need not wait for that.
        gone = threading.Event()
        try:
            work = partial(self.source.story, step, gone.is_set)
            return await trio.to_thread.run_sync(work, limiter=self._stories, abandon_on_cancel=True)
        finally:
            gone.set()

    async def _refresh(self) -> None:
        problem = ""
        try:
            while not await self._in_thread(partial(self.source.advance, self._slice_seconds)):
                if self._rest:
                    await trio.sleep(self._rest * self._slice_seconds)
            moment = await self._in_thread(self.source.status)
            if moment is None:
                problem = f"{self.source.name}: there is nothing yet"
        except YetoError as error:
            moment, problem = self._look.moment, str(error)
        status = None if moment is None else _json(moment)
        if status != self._look.status or problem != self._look.problem:
            self._look = Look(number=self._look.number + 1, status=status, moment=moment, problem=problem)
        self._looked_at = trio.current_time()

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await trio.to_thread.run_sync(work, limiter=self._thread)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _pack(source: Source) -> tuple[bytes, bytes]:
    plain = _json(source.history())
    return plain, gzip.compress(plain, compresslevel=4, mtime=0)
