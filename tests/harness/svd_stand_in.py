"""Programs that pass for the Python of an SVD worker: real processes that misbehave on purpose, in 50 ms.

A stand-in ignores what it is asked to run and runs a few lines instead, with these names: ``requests()``
yields (number, rows, cols, data), the probe first, until stdin ends; ``answer`` and ``refuse`` reply;
``note`` adds a line to the file ``notes`` beside it; ``hold(name)`` waits until there is such a file.
"""

import contextlib
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from yeto.syncer.svd_settings import SvdSettings

PRELUDE = """#!{python} -IS
import os, signal, struct, sys, time
HERE = {here!r}
DEVICE = sys.argv[sys.argv.index("--device") + 1]
def take(count):
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            sys.exit(2 if data else 0)
        data += part
    return data
def give(data):
    while data:
        data = data[os.write(1, data):]
def frame(number, rows, cols, size, code=0):
    return struct.pack("<8sIIQQQQ", b"YETOISO1", 1, code, number, rows, cols, size)
def requests():
    while True:
        number, rows, cols, size = struct.unpack("<8sIIQQQQ", take(48))[3:]
        data = take(size)
        note(f"{{DEVICE}} began {{number}}: {{rows}} x {{cols}}")
        yield number, rows, cols, data
def answer(number, rows, cols, data):
    note(f"{{DEVICE}} done {{number}}")
    give(frame(number, rows, cols, len(data)) + data)
def refuse(number, code, text):
    give(frame(number, 0, 0, len(text), code) + text.encode())
def note(line):
    with open(HERE + "/notes", "a") as notes:
        notes.write(line + "\\n")
def hold(name):
    while not os.path.exists(HERE + "/" + name):
        time.sleep(0.005)
        if os.getppid() == 1:
            sys.exit(1)
"""

SERVE = """
for number, rows, cols, data in requests():
    answer(number, rows, cols, data)
"""

BAD_ROWS = 13
"""Rows of the matrix that a stand-in of ``bad`` treats badly."""


def stand_in(folder, body=SERVE, name="python"):
    """Write a stand-in; return its path."""
    path = folder / name
    path.write_text(PRELUDE.format(python=sys.executable, here=str(folder)) + body)
    path.chmod(0o755)
    return path


def bad(folder, deed, **settings):
    """Return settings of a pool whose workers do as they should, but for matrices of ``BAD_ROWS`` rows."""
    lines = "\n        ".join(deed.splitlines())
    body = f"""
for number, rows, cols, data in requests():
    if rows == {BAD_ROWS}:
        {lines}
    else:
        answer(number, rows, cols, data)
"""
    return settings_of(folder, body, **settings)


def settings_of(folder, body=SERVE, **settings):
    """Return validated settings of a pool of stand-ins."""
    settings = {"devices": ("cpu",), "python": str(stand_in(folder, body))} | settings
    return SvdSettings(**settings).validated()


def matrix(rows, cols=5, seed=0):
    """Return some matrix; a stand-in gives it back as it is."""
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def notes(folder):
    """Return what the stand-ins noted so far."""
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []


def let_go(folder, name="gate"):
    """Let whoever holds for a file go on."""
    Path(folder / name).touch()


def workers():
    """Return the SVD workers below this process, also those that wait to be reaped."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE or "yeto.merge.svd_worker" in child.cmdline():
                found.append(child)
    return found


def gone(pids):
    """Whether processes are gone; one that has ended and was not reaped is still there."""
    return not any(psutil.pid_exists(pid) for pid in pids)


def wait_until_dead(pid, seconds=200.0):
    """Wait for the end of a process that is none of ours; whether it is reaped is not our business."""
    with contextlib.suppress(psutil.NoSuchProcess):
        until = time.monotonic() + seconds
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, f"process {pid} lives"
            time.sleep(0.01)
