"""``yeto status``: what a run is doing, on a terminal, as text, or as JSON.

It reads the tape, or asks a dashboard; the run itself is not touched, so anybody may look, at any time, as
often as they like. On a terminal the screen is redrawn until the session ends; elsewhere a line is printed
when something has changed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol

from cyclopts import Parameter

from yeto.errors import ConfigError, TapeError
from yeto.view.json import moment_json
from yeto.view.live import plain_line, screen, text
from yeto.view.model import Moment

TAPE = "./events.jsonl"
"""Where a syncer puts its tape."""
LOOK_SECONDS = 1.0
"""Time between two looks: often enough for eyes, and a look at what was added costs next to nothing."""
LINE_SECONDS = 5.0
"""Time between two printed lines where nothing can be redrawn."""


class Source(Protocol):
    """Where moments come from: a tape, or a dashboard."""

    def look(self) -> bool:
        """Bring it up to date."""

    def moment(self) -> Moment | None:
        """Return the present moment; None where there is no run yet."""


def status_command(
    source: Annotated[
        str | None,
        Parameter(
            help="The tape (events.jsonl), the address of a dashboard (http://HOST:PORT), or the name of a "
            "launched run. Default: ./events.jsonl if it is there, else all launched runs."
        ),
    ] = None,
    /,
    *,
    once: Annotated[bool, Parameter(negative=(), help="Show the present moment and end.")] = False,
    as_json: Annotated[
        bool,
        Parameter(
            name="--json",
            negative=(),
            help="Print JSON on stdout, and nothing else: one object a line; with --once one.",
        ),
    ] = False,
    token_file: Annotated[
        Path | None, Parameter(help="File with the token that a dashboard on another machine asks for.")
    ] = None,
    webhook: Annotated[
        str | None, Parameter(help="Address that each alert is posted to as JSON when it begins and ends.")
    ] = None,
) -> int:
    """Show what a run is doing: learners, rounds, what is waited for and for how long.

    Works on a run that goes on, one that ended, one that was cut off, and on a copy of the tape elsewhere. A
    tape that is not there yet is waited for. Ctrl-C ends the looking, never the run.
    """
    if source is None:
        if not Path(TAPE).exists():
            from yeto.cli.runs import print_runs

            return print_runs(as_json=as_json)
        source = TAPE
    is_url = source.startswith(("http://", "https://"))
    if token_file is not None and not is_url:
        raise ConfigError(f"--token-file {token_file} goes with the address of a dashboard, not with a tape")
    if webhook is not None and once:
        raise ConfigError("--webhook needs to keep looking, and --once does not")
    if not is_url and "." not in source and os.sep not in source:
        # Only now: a tape needs nothing of the registry's room.
        from yeto.cli.runs import present, print_rented, run_named

        run = run_named(source)
        if run is not None and not run.launch().is_local:
            return print_rented(run, as_json=as_json)
        if run is not None:
            state = present(run)
            source = str(run.tape)
            if not as_json:
                print(f"{run.name}: {state.phase}: {state.why}")
                if (once or state.over) and not run.tape.exists():
                    return 0
            once = once or state.over
    seen = _remote(source, token_file) if is_url else _tape(Path(source))
    try:
        if once:
            return _once(seen, source, as_json=as_json)
        if webhook is None:
            return _keep_looking(seen, source, as_json=as_json)
        from yeto.view.webhook import Webhook

        with Webhook(webhook) as hook:
            return _keep_looking(seen, source, as_json=as_json, tell=hook.tell)
    except KeyboardInterrupt:
        return 0


def _tape(path: Path) -> Source:
    from yeto.view.follow import Watcher

    return Watcher(path)


def _remote(url: str, token_file: Path | None) -> Source:
    from yeto.view.remote import RemoteWatcher

    return RemoteWatcher(url, token_file)


def _once(seen: Source, source: str, *, as_json: bool) -> int:
    seen.look()
    moment = seen.moment()
    if moment is None:
        raise TapeError(
            f"{source}: there is no run yet; name the tape of one, or wait for it (without --once)"
        )
    if as_json:
        print(json.dumps(moment_json(moment), indent=2))
    elif sys.stdout.isatty():
        _print_screen(moment)
    else:
        print(text(moment))
    return 0


def _print_screen(moment: Moment) -> None:
    from rich.console import Console

    console = Console()
    # Printed once it may be longer than the screen.
    console.print(screen(moment, console.width, sys.maxsize))


def _keep_looking(
    seen: Source,
    source: str,
    *,
    as_json: bool,
    tell: Callable[[Moment], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show one moment after the other until the session has ended."""
    if sys.stdout.isatty() and not as_json:
        return _redraw(seen, source, tell, sleep)
    said, waited = "", False
    while True:
        changed = seen.look()
        moment = seen.moment()
        if moment is None:
            if not waited:
                print(f"yeto: {source}: there is no run yet; waiting for it", file=sys.stderr, flush=True)
            waited = True
            sleep(LOOK_SECONDS)
            continue
        tell(moment)
        if as_json:
            if changed or not said:
                said = json.dumps(moment_json(moment))
                print(said, flush=True)
        else:
            line = plain_line(moment)
            if line != said:
                print(line, flush=True)
            said = line
        if moment.phase == "ended":
            return 0
        sleep(LOOK_SECONDS if as_json else LINE_SECONDS)


def _redraw(seen: Source, source: str, tell: Callable[[Moment], None], sleep: Callable[[float], None]) -> int:
    from rich.live import Live
    from rich.text import Text

    with Live(Text(f"{source}: reading"), auto_refresh=False) as live:
        while True:
            seen.look()
            moment = seen.moment()
            if moment is None:
                live.update(
                    Text(f"{source}: there is no run yet; waiting for it (Ctrl-C ends this)"), refresh=True
                )
            else:
                tell(moment)
                size = shutil.get_terminal_size()
                live.update(screen(moment, size.columns, size.lines), refresh=True)
                if moment.phase == "ended":
                    return 0
            sleep(LOOK_SECONDS)
