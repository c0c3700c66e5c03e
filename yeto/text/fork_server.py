"""The process that forks workers: one of this process, started before the first worker is."""

from __future__ import annotations

import signal
import sys
import threading
from multiprocessing import forkserver, resource_tracker
from typing import Final

_STARTING: Final = threading.Lock()

_UNSAID: Final = "ignore:resource_tracker:UserWarning"
"""Of a killed process: that its semaphores are to be removed. To do it is what the tracker is for."""


def start_fork_server() -> None:
    """Start the fork server deaf to Ctrl-C and SIGTERM, and with it every worker it will fork.

    A terminal sends Ctrl-C to all of them, and a supervisor SIGTERM to the whole process group. When to stop
    is for the process that started them to say: it has a state to save first, and a fork server or a worker
    that dies before looks to it like a failure.
    """
    with _STARTING:
        # Starting the tracker unblocks the signals again, so it goes first.
        sys.warnoptions.append(_UNSAID)
        try:
            resource_tracker.ensure_running()
        finally:
            sys.warnoptions.remove(_UNSAID)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
