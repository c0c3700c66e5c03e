"""The syncer's process: ``yeto`` with the words after it, and an end when whoever started it is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading

from yeto.cli.main import main


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing is ever written: this returns at the other end's end
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main(sys.argv[1:])
