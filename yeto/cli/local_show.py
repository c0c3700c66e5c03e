"""How far a local run is, while it goes on: redrawn on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import trio

from yeto.view.follow import OwnRun
from yeto.view.live import plain_line, screen

LINE_SECONDS = 5.0
"""Time between two printed lines where nothing can be redrawn."""

SCREEN_SECONDS = 0.5
"""Time between two looks where the screen is redrawn."""

STARTING = "the syncer is starting"


async def show_run(tape: Path) -> None:
    """Show how far the run of a tape is, until cancelled."""
    run = OwnRun(tape)
    if not sys.stdout.isatty():
        said = ""
        while True:
            await trio.sleep(LINE_SECONDS)
            moment = run.moment()
            line = STARTING if moment is None else plain_line(moment)
            if line != said:
                print(line, flush=True)
            said = line
    from rich.live import Live

    with Live(STARTING, auto_refresh=False) as live:
        while True:
            moment = run.moment()
            if moment is not None:
                size = shutil.get_terminal_size()
                live.update(screen(moment, size.columns, size.lines), refresh=True)
            await trio.sleep(SCREEN_SECONDS)
