"""Waking a Trio task from another thread, without ever making that thread wait."""

from __future__ import annotations

import contextlib

import trio


class Bell:
    """Rung from any thread, heard by one Trio task. Rings that nobody waited for are remembered as one."""

    def __init__(self) -> None:
        """Make a bell that belongs to the running Trio loop."""
        self._token = trio.lowlevel.current_trio_token()
        self._rung = trio.Event()

    def ring(self) -> None:
        """Wake the listener; returns at once, and does nothing once the loop is over."""
        # A run that was abandoned while the other thread was busy leaves nobody to tell.
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._wake, idempotent=True)

    async def wait(self) -> None:
        """Wait for a ring since the last call."""
        await self._rung.wait()
        self._rung = trio.Event()

    def _wake(self) -> None:
        self._rung.set()
