"""How far a local run is, while it goes on: redrawn on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import trio

from yeto.errors import TapeError
from yeto.view.follow import Watcher
from yeto.view.live import plain_line, screen
from yeto.view.model import Moment

LINE_SECONDS = 5.0
"""Time between two printed lines where nothing can be redrawn."""

SCREEN_SECONDS = 0.5
"""Time between two looks where the screen is redrawn."""

STARTING = "the syncer is starting"


async def show_run(tape: Path) -> None:
    """Show how far the run of a tape is, until cancelled."""
    look = _Look(tape)
    if not sys.stdout.isatty():
        said = ""
        while True:
            await trio.sleep(LINE_SECONDS)
            moment = look.moment()
            line = STARTING if moment is None else plain_line(moment)
            if line != said:
                print(line, flush=True)
            said = line
    from rich.live import Live

    with Live(STARTING, auto_refresh=False) as live:
        while True:
            moment = look.moment()
            if moment is not None:
                size = shutil.get_terminal_size()
                live.update(screen(moment, size.columns, size.lines), refresh=True)
            await trio.sleep(SCREEN_SECONDS)


class _Look:
    """The newest moment of a run that is ours."""

    def __init__(self, tape: Path) -> None:
        self._tape = tape
        self._begin()

    def moment(self) -> Moment | None:
        try:
            self._watcher.look()
        except TapeError:
            # It was cut back to what is durable; a run does not end because it cannot be shown.
            self._begin()
            return None
        return self._watcher.moment()

    def _begin(self) -> None:
        # The tape has the same writer also while that is started again.
        self._watcher = Watcher(self._tape, running=lambda _: True)
