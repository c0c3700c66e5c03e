"""The process that is hit: a syncer as its command starts it, behind ``calls``.

It is forked from a server that has imported everything, so one more costs little: only the words of the
command line are not read anew. What it says goes to a file; it ends with whoever started it.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from breaking import wait_for_parent

# What a syncer needs, read once by the server and not by every process.
import yeto.syncer.app  # noqa: F401
from crashing.calls import Calls, Fault
from yeto.cli.common import fail, unforeseen
from yeto.cli.run_syncer import SyncerFlags, run_syncer_command
from yeto.errors import YetoError

KILLED = -9
"""Exit code of a process that was killed, as its parent sees it."""


def live(flags: SyncerFlags, root: Path, calls: Path, said: Path, fault: Fault | None) -> None:
    """Run a syncer and end with its exit code.

    Args:
        flags: of its command line.
        root: calls that write below this folder are counted.
        calls: where they are written down.
        said: where its output goes.
        fault: what happens to it.
    """
    end_with_parent()
    speak_to(said)
    Calls(root, calls, fault).install()
    try:
        code = run_syncer_command(flags)
    except YetoError as error:
        code = fail(error)
    except Exception as error:
        code = fail(unforeseen(error))
    sys.exit(code)


def speak_to(said: Path) -> None:
    """Send stdout and stderr of this process to a file."""
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def end_with_parent() -> None:
    """Have this process end with the one that started it, however that ends."""
    threading.Thread(target=wait_for_parent, daemon=True).start()
