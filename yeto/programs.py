"""How a program of ours starts another one."""

from __future__ import annotations

import os
import sys


def module_words(module: str, *words: str, python: str | None = None) -> list[str]:
    """Return the command line that runs a module, with modules from nowhere that this program has none from.

    ``python -m`` looks into the working folder first, ``yeto`` does not. A user's ``queue.py`` there must not
    become a library's.

    Args:
        module: dotted name.
        words: its arguments.
        python: the interpreter, of 3.11 or newer; None takes the one that runs this program.
    """
    looks_here = bool({"", os.getcwd()} & set(sys.path))
    return [python or sys.executable, *([] if looks_here else ["-P"]), "-m", module, *words]
