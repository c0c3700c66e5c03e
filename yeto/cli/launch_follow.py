"""Watching a run on this machine: its controller's words as they come, and its progress by the tape."""

from __future__ import annotations

import time
from pathlib import Path

from yeto.fleet.detached import present_state
from yeto.fleet.registry import FAILED, Run
from yeto.view.follow import OwnRun
from yeto.view.live import plain_line

LOOK_SECONDS = 0.5
"""Between two looks at the registry and the controller's log."""
LINE_SECONDS = 5.0
"""Between two lines of progress."""
READ_BYTES_MAX = 1 << 20
"""Of a log at a time."""


def follow(run: Run, *, since: int = 0) -> int:
    """Print what a run does until it is over; return its exit code, or 0 when Ctrl-C ended the watching.

    Args:
        run: of this machine.
        since: bytes of its controller's log that are from an earlier start.
    """
    said_by_controller = AddedLines(run.controller_log, since=since)
    progress = OwnRun(run.tape)
    said, last, next_line = "", "", time.monotonic() + LINE_SECONDS
    try:
        while True:
            state = present_state(run)
            for last in said_by_controller.new():
                print(last, flush=True)
            if state.over:
                break
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + LINE_SECONDS
                moment = progress.moment()
                line = state.why if moment is None else plain_line(moment)
                if line != said:
                    print(line, flush=True)
                said = line
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        from yeto.cli.launch import come_back

        print(f"\ndetached; the run goes on.   {come_back(run.name)}")
        return 0
    verdict = f"{state.phase}: {state.why}"
    if last != verdict:
        # A controller that was killed could not say so.
        print(verdict, flush=True)
    if state.phase == FAILED:
        print(_what_to_do(run), flush=True)
    return 1 if state.exit_code is None else state.exit_code


def _what_to_do(run: Run) -> str:
    return (
        f"yeto logs {run.name} shows what was said, yeto launch --resume {run.name} goes on from the "
        f"checkpoint, yeto down {run.name} --forget removes the run"
    )


class AddedLines:
    """The lines of a file, and those that are added to it."""

    def __init__(self, path: Path, *, since: int = 0) -> None:
        """Begin at the first line, or after so many bytes; the file need not be there yet."""
        self._path = path
        self._done = since
        self.behind = False
        """Whether the last look stopped before the end of the file."""

    def new(self) -> list[str]:
        """Return the whole lines since the last look, or some of them."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._done)
                data = file.read(READ_BYTES_MAX)
        except FileNotFoundError:
            return []
        self.behind = len(data) == READ_BYTES_MAX
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and self.behind:
            # A line that is longer than anything we read at a time.
            whole = data
        self._done += len(whole)
        return whole.decode("utf-8", "replace").splitlines()
