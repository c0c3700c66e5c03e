"""Accepting sockets, also when the process has no descriptors left for them.

Each connection takes a descriptor, and so do the files that the run is kept in: a checkpoint that could not
be opened would end the run. So connections get all descriptors but a reserve. At that limit, and when the
system refuses a descriptor nevertheless, a stranger gives way; if there is none, a newcomer is closed at once
(it dials again later). That is said once, and once more when it is over; nobody who is connected notices.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

import trio

log = logging.getLogger("yeto.syncer")

RESERVED_DESCRIPTORS: Final = 128
"""For tape, checkpoint, recordings, workers and libraries; at most half of a process's descriptors."""

DESCRIPTORS_WANTED: Final = 65_536
"""200 learners with the most streams: the soft limit is raised up to here, as far as the hard one lets us."""

RETRY_SECONDS: Final = 0.1
"""Pause after the system refused a descriptor."""

EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
"""What accept(2) fails with when there is no room for one more socket."""


def raise_descriptor_limit() -> None:
    """Let this process open as many descriptors as may be needed, if the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def sockets_max() -> int:
    """Return how many connections there may be, so that files still find a descriptor."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = DESCRIPTORS_WANTED
    return soft - min(RESERVED_DESCRIPTORS, soft // 2)


class Acceptor:
    """Accepts connections and serves each in a task of its own."""

    def __init__(
        self,
        serve: Callable[[trio.SocketStream], Awaitable[None]],
        *,
        make_room: Callable[[], bool],
        most: int,
    ) -> None:
        """Prepare.

        Args:
            serve: serves one connection to its end; it is closed afterwards.
            make_room: has some connection closed that can be done without; False when there is none.
            most: connections at a time.
        """
        self._serve = serve
        self._make_room = make_room
        self._most = most
        self._connections = 0
        self._is_short = False

    async def run(
        self,
        listeners: list[trio.SocketListener],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept on all listeners until cancelled."""
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(self._accept, listener, nursery)
            task_status.started()

    async def _accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> NoReturn:
        while True:
            try:
                raw = await listener.accept()
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                self._short(f"the system has no descriptor for one more ({os.strerror(error.errno)})")
                self._make_room()
                await trio.sleep(RETRY_SECONDS)
                continue
            if self._connections >= self._most and not self._make_room():
                self._short(f"there are {self._connections}, all that leave descriptors for files")
                await trio.aclose_forcefully(raw)
                continue
            if self._is_short and self._connections < self._most:
                self._is_short = False
                log.warning("connections are accepted again")
            self._connections += 1
            nursery.start_soon(self._run, raw)

    async def _run(self, raw: trio.SocketStream) -> None:
        try:
            await self._serve(raw)
        finally:
            self._connections -= 1
            await trio.aclose_forcefully(raw)

    def _short(self, why: str) -> None:
        """Say once that there are too many."""
        if not self._is_short:
            self._is_short = True
            log.error("no more connections: %s; raise the limit of open files (ulimit -n)", why)
