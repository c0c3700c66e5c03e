"""``python -m yeto.fleet.child PARENT SIGNAL MODULE WORDS...``: a program that never outlives its parent.

A parent that is killed cannot clean up, so on Linux the kernel is asked to send a signal to this process when
the one that started it is gone: SIGTERM where it can still do something in order, SIGKILL where another one
is about to take its place. Elsewhere there is no such request, and the program runs as usual.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Option number of prctl(2)."""


def die_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Ask for a signal when the parent dies; exit now if it is dead already.

    Args:
        parent: process id of the parent, as the parent itself knew it.
        number: the signal.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    # It may have died between starting us and the line above.
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    _, parent_id, signal_number, *sys.argv = sys.argv
    die_with_parent(int(parent_id), int(signal_number))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
