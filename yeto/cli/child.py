"""``python -m yeto.cli.child PARENT COMMAND...``: a yeto command that never outlives its parent.

A parent that is killed cannot clean up, so on Linux the kernel is asked to send SIGTERM to this process when
the one that started it is gone. Elsewhere there is no such request, and the command runs as usual.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from yeto.cli.main import main

PR_SET_PDEATHSIG = 1
"""Option number of prctl(2)."""


def die_with_parent(parent: int) -> None:
    """Ask for SIGTERM when the parent dies; exit now if it is dead already.

    Args:
        parent: process id of the parent, as the parent itself knew it.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # It may have died between starting us and the line above.
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    main(sys.argv[2:])
