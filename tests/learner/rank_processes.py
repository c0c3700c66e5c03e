"""Islands as real processes, beside a test."""

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

HERE = Path(__file__).parent
SECONDS_MAX = 200


def free_port():
    """Return a port that will still be free in a moment: the system gives none of these to anybody who asks.

    Ports that it gives go round, and other tests are running.
    """
    while True:
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port := 10_000 + secrets.randbelow(20_000)))
            return port


class Template:
    """Starts processes by way of ``rank_template.py``."""

    def __init__(self, process):
        self._process = process
        self._pending = b""
        self._codes = {}
        self._read_until(lambda said: "ready" in said)

    def load(self, *modules):
        """Have modules imported that what will be started would else import for itself."""
        self._tell(load=modules)
        self._read_until(lambda said: "loaded" in said)

    def start(self, call, *args, output, env=None):
        """Start a function, as ``module:function``; its output is appended to a file. Returns a pid."""
        self._tell(
            call=call,
            args=[str(arg) if isinstance(arg, Path) else arg for arg in args],
            env=env or {},
            output=str(output),
        )
        return self._read_until(lambda said: "started" in said)["started"]

    @contextmanager
    def process(self, call, *args, output):
        """Start a function; give the process, which is gone afterwards."""
        output.touch()
        started = Started(self, self.start(call, *args, output=output), output)
        try:
            yield started
        finally:
            self.kill(started.pid)

    def island(self, size, call, *args, output):
        """Start the ranks of an island, as torchrun would; returns their pids."""
        port = free_port()
        return [
            self.start(
                call,
                *args,
                output=output,
                env={
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            )
            for rank in range(size)
        ]

    def code(self, pid):
        """Wait for a process to end; return its exit code."""
        if pid not in self._codes:
            self._read_until(lambda said: said.get("ended") == pid)
        return self._codes[pid]

    def kill(self, pid):
        """End a process that may have ended."""
        if pid not in self._codes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.code(pid)

    def _tell(self, **job):
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()

    def _read_until(self, wanted):
        while True:
            *lines, self._pending = self._pending.split(b"\n")
            for number, line in enumerate(lines):
                said = json.loads(line)
                if "ended" in said:
                    self._codes[said["ended"]] = said["code"]
                if wanted(said):
                    self._pending = b"\n".join([*lines[number + 1 :], self._pending])
                    return said
            assert select.select([self._process.stdout], [], [], SECONDS_MAX)[0], "nothing happens"
            read = self._process.stdout.read1()
            assert read, "the template has ended"
            self._pending += read


class Started:
    """A process that a template has started, and what it says."""

    def __init__(self, template, pid, output):
        self._template = template
        self._output = output
        self.pid = pid

    @property
    def said(self):
        """What it has said so far, as whole lines."""
        text = self._output.read_text(encoding="utf-8")
        return text[: text.rfind("\n") + 1].splitlines()

    def until(self, wanted):
        """Wait for a line for which ``wanted`` holds; return the first one."""
        deadline = time.monotonic() + SECONDS_MAX
        while (found := next(filter(wanted, self.said), None)) is None:
            assert time.monotonic() < deadline, self.said
            assert psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE, self.said
            time.sleep(0.005)
        return found

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait(self):
        """Wait for its end; return its exit code, or minus the signal that ended it."""
        return self._template.code(self.pid)


@contextmanager
def rank_template():
    """Run a template until the end of the block, and with it all that it has started."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "rank_template.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield Template(process)
    finally:
        process.stdin.close()
        process.wait(SECONDS_MAX)
        process.stdout.close()
