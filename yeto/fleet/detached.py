"""A run on this machine from outside: its controller is started, asked after, and ended.

Whoever launches, looks or tears down is another process than the controller, and may come days later. All
they share is the registry. Nothing is believed of a process but what the system says of it now.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

from yeto.errors import ConfigError, YetoError
from yeto.fleet.processes import RUN_VARIABLE, Process, processes_of, send, wait_gone
from yeto.fleet.registry import FAILED, LAUNCHING, OVER, Run, RunState
from yeto.programs import module_words

END_SECONDS = 180.0
"""How long a controller may take to end its run in order: more than it gives head and islands."""
KILL_SECONDS = 10.0
"""How long a killed process may take to be gone."""
BEHIND_SECONDS = 2.0
"""How long what ended processes had started, such as a forkserver of theirs, may be behind them."""
LOOK_SECONDS = 0.05
"""Between two looks whether a controller is there."""


def start_controller(run: Run) -> None:
    """Start the controller of a run, in a session of its own: it outlives this process and its terminal.

    Raises:
        ConfigError: another one runs it.
        YetoError: it died at once; the message is its own.
    """
    if controller_of(run) is not None:
        raise ConfigError(
            f"{run.name} is running; yeto status {run.name} shows it, yeto down {run.name} ends it"
        )
    run.change(phase=LAUNCHING, why="the controller is starting", controller=None, exit_code=None)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("YETO_")}
    with run.controller_log.open("ab") as log:
        process = subprocess.Popen(
            module_words("yeto.fleet.controller", str(run.folder)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=run.folder,
            start_new_session=True,
            env=environ | {RUN_VARIABLE: str(run.folder)},
        )
    # From here on the state is the controller's to write.
    while run.state().controller is None and not run.state().over:
        if process.poll() is not None:
            said = run.controller_log.read_text(encoding="utf-8", errors="replace").splitlines()
            why = said[-1].removeprefix("yeto: ") if said else f"exit code {process.returncode}"
            raise YetoError(f"the controller of {run.name} died: {why}; its log is {run.controller_log}")
        time.sleep(LOOK_SECONDS)


def controller_of(run: Run) -> Process | None:
    """Return the controller of a run if it is alive."""
    controller = run.state().controller
    return controller if controller is not None and controller.alive else None


def present_state(run: Run) -> RunState:
    """Return how far a run on this machine is, also when its controller died without a word."""
    state = run.state()
    if state.phase in OVER or state.controller is None or state.controller.alive:
        return state
    why = f"its controller is gone; yeto launch --resume {run.name} goes on with it"
    return run.change(phase=FAILED, why=why, exit_code=1)


def end(run: Run, say: Callable[[str], None]) -> list[Process]:
    """End everything of a run on this machine, in order where that is possible; return what is left.

    Also for a run whose controller failed or died: whatever it started is looked for, and ended.
    """
    controller = controller_of(run)
    if controller is not None:
        # One whose run is over has written its last word and is about to be gone.
        if not run.state().over:
            say("stopping: the head writes a checkpoint, then the islands end")
            send(controller, signal.SIGTERM)
        wait_gone([controller], END_SECONDS)
        wait_gone(_left(run), BEHIND_SECONDS)
    for number, seconds in ((signal.SIGTERM, KILL_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        left = _left(run)
        for process in left:
            say(f"ending {process.name} (process {process.pid}), which was left over")
            send(process, number)
        wait_gone(left, seconds)
    left = _left(run)
    if not left:
        run.torn_down()
    return left


def _left(run: Run) -> list[Process]:
    """Return every process of a run that is there, as written down or found."""
    state = run.state()
    known = {process.pid: process for process in processes_of(run.folder)}
    for process in (*state.children, *(() if state.controller is None else (state.controller,))):
        if process.alive:
            known[process.pid] = process
    known.pop(os.getpid(), None)
    return list(known.values())
