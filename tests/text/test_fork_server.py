"""The fork server of the workers, and the process that removes what a killed one leaves behind."""

import subprocess
import sys
from pathlib import Path

KILLED = """
import multiprocessing, os, signal
from yeto.text.fork_server import start_fork_server

start_fork_server()
held = multiprocessing.get_context("forkserver").Semaphore()
print(held._semlock.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_leaves_no_semaphore_and_no_word_about_it():
    # What it starts holds its stderr, too, so this waits for all of them.
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=200)
    assert done.returncode == -9
    assert done.stdout.startswith("/mp-")
    assert not Path("/dev/shm", "sem." + done.stdout.strip().removeprefix("/")).exists()
    assert done.stderr == ""
