"""One SVD worker as the syncer sees it: a process, two pipes, and a strict exchange over them.

The process is started from the event loop's own thread, because the kernel's notice to a worker that the
syncer died is tied to the thread that started it. It gets a session of its own (a Ctrl-C at the terminal is
the syncer's business), no descriptor but its three, and none of the ``YETO_`` variables, which hold settings
and a secret of this process.

Whatever is not exactly the answer to the request is an error of the worker, with a sentence for people. What
it printed last on stderr belongs to that sentence: there a traceback ends with its cause.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import trio
from numpy.typing import NDArray

from yeto.errors import ProtocolError, SvdPoolError
from yeto.merge.svd_frames import (
    HEADER_BYTES,
    Code,
    Request,
    decode_answer,
    decode_message,
    encode_matrix_header,
    require_magic,
)
from yeto.programs import module_words

log = logging.getLogger("yeto.syncer")

Matrix = NDArray[np.float32]

PIPE_BYTES: Final = 1 << 20
"""What a pipe is asked to hold, so that a matrix does not go through 64 KiB at a time."""

READ_BYTES: Final = 1 << 20
"""Most that is read at a time, so that a large matrix does not hold up the event loop."""

REAP_SECONDS: Final = 10.0
"""How long a killed process may take to be gone; only one that a driver holds in the kernel takes longer."""

LAST_WORDS_SECONDS: Final = 1.0
"""How long the end of a dead worker's stderr is waited for: somebody else may hold that pipe open."""

LAST_WORDS_CHARACTERS: Final = 400
"""How much of a line is kept for the sentence about a worker's end, and in memory of one without an end."""


class SvdChild:
    """A worker process; everything it does wrong is an ``SvdPoolError`` that names it."""

    def __init__(self, index: int, device: str, python: Path, frame_bytes_max: int) -> None:
        """Describe the worker; nothing runs before ``run``."""
        self.device = device
        self.name = f"SVD worker {index} on {device}"
        self.started = trio.Event()
        self.exited = trio.Event()
        self._python = python
        self._frame_bytes_max = frame_bytes_max
        self._process: subprocess.Popen[bytes] | None = None
        self._to: trio.lowlevel.FdStream | None = None
        self._from: trio.lowlevel.FdStream | None = None
        self._words: trio.lowlevel.FdStream | None = None
        self._request: Request | None = None
        self._answered_bytes = 0
        self._said = ""
        self._said_all = trio.Event()

    @property
    def pid(self) -> int:
        """Process id of the direct child."""
        assert self._process is not None
        return self._process.pid

    @property
    def doing(self) -> str:
        """What it is at, for a sentence."""
        return "idle" if self._request is None else describe(self._request)

    async def run(self) -> None:
        """Start the process and keep it until cancelled or dead; it is killed and reaped in any case.

        Raises:
            SvdPoolError: it could not be started, or it ended.
        """
        try:
            self._start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen)
                self.started.set()
                await self._wait()
                with trio.move_on_after(LAST_WORDS_SECONDS):
                    await self._said_all.wait()
                nursery.cancel_scope.cancel()
            raise self.failure(self._end())
        finally:
            self.kill()
            with trio.move_on_after(REAP_SECONDS, shield=True):
                await self._reap()

    async def exchange(self, number: int, matrix: Matrix) -> Matrix:
        """Send a matrix, return its isotropic merge.

        Args:
            number: of the request.
            matrix: 2-D, contiguous, at most as large as a frame may be.

        Raises:
            SvdPoolError: the answer is another one, or none comes.
        """
        assert self._to is not None
        rows, cols = matrix.shape
        request = Request(number=number, rows=rows, cols=cols)
        self._request, self._answered_bytes = request, 0
        try:
            await self._to.send_all(encode_matrix_header(number, rows, cols))
            await self._to.send_all(matrix.data.cast("B"))
            header = bytearray(HEADER_BYTES)
            await self._receive(memoryview(header), check=require_magic)
            answer = decode_answer(header, request)
            if answer.code is not Code.OK:
                message = bytearray(answer.payload_bytes)
                await self._receive(memoryview(message))
                raise self.failure(f"answered {answer.code.words}: {decode_message(message)}")
            result: Matrix = np.empty((rows, cols), dtype="<f4")
            await self._receive(result.data.cast("B"))
            if not await trio.to_thread.run_sync(_is_finite, result):
                raise self.failure("answered with a matrix that is not finite")
        except ProtocolError as error:
            raise self.failure(f"does not keep the protocol: {error}") from error
        except (trio.BrokenResourceError, EOFError):
            # It died, and ``run`` says how; or it closed a pipe and lives.
            with trio.move_on_after(LAST_WORDS_SECONDS):
                await self.exited.wait()
            if self.exited.is_set():
                await trio.sleep_forever()
            raise self.failure(f"closed its pipe{self._progress()}") from None
        self._request, self._answered_bytes = None, 0
        return result

    def failure(self, what: str) -> SvdPoolError:
        """Return an error that names worker, device, request and shape."""
        during = "" if self._request is None else f", {describe(self._request)}"
        return SvdPoolError(f"{self.name}{during}: {what}{self._last_words()}")

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _start(self) -> None:
        """Start the process.

        Raises:
            SvdPoolError: the system refuses.
        """
        with contextlib.ExitStack() as theirs:
            try:
                requests, to = open_pipe()
                theirs.callback(os.close, requests)
                self._to = trio.lowlevel.FdStream(to)
                answers, answering = open_pipe()
                theirs.callback(os.close, answering)
                self._from = trio.lowlevel.FdStream(answers)
                words, saying = open_pipe()
                theirs.callback(os.close, saying)
                self._words = trio.lowlevel.FdStream(words)
                self._process = subprocess.Popen(
                    module_words(
                        "yeto.merge.svd_worker",
                        *("--device", self.device, "--frame-bytes-max", str(self._frame_bytes_max)),
                        python=str(self._python),
                    ),
                    stdin=requests,
                    stdout=answering,
                    stderr=saying,
                    start_new_session=True,
                    env={name: value for name, value in os.environ.items() if not name.startswith("YETO_")},
                )
            except OSError as error:
                raise self.failure(f"cannot be started with {self._python}: {error.strerror}") from error

    async def _listen(self) -> None:
        """Put what the worker says on stderr into the log."""
        assert self._words is not None
        rest = b""
        async for data in self._words:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(line)
            rest = rest[-LAST_WORDS_CHARACTERS:]
        self._hear(rest)
        self._said_all.set()

    def _hear(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").strip()
        if text:
            self._said = text[:LAST_WORDS_CHARACTERS]
            log.warning("%s: %s", self.name, text)

    async def _wait(self) -> None:
        """Wait for the end of the process."""
        assert self._process is not None
        # A cancelled wait leaves its thread behind, until the process has been killed.
        await trio.to_thread.run_sync(
            self._process.wait, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
        )
        self.exited.set()

    async def _reap(self) -> None:
        for stream in (self._to, self._from, self._words):
            if stream is not None:
                await trio.aclose_forcefully(stream)
        if self._process is not None:
            await self._wait()

    async def _receive(self, target: memoryview, check: Callable[[memoryview], None] | None = None) -> None:
        """Fill ``target``; ``check`` sees what is there so far, each time there is more.

        Raises:
            EOFError: the pipe ended.
        """
        assert self._from is not None
        descriptor = self._from.fileno()
        filled = 0
        while filled < len(target):
            await trio.lowlevel.wait_readable(descriptor)
            try:
                count = os.readv(descriptor, [target[filled : filled + READ_BYTES]])
            except BlockingIOError:
                continue
            if count == 0:
                raise EOFError
            filled += count
            self._answered_bytes += count
            if check is not None:
                check(target[:filled])

    def _progress(self) -> str:
        return f" after {self._answered_bytes} bytes of its answer" if self._answered_bytes else ""

    def _end(self) -> str:
        """Return how the process ended, for a sentence."""
        assert self._process is not None
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how}{self._progress()}"

    def _last_words(self) -> str:
        return f" (it said: {self._said})" if self._said else ""


def open_pipe() -> tuple[int, int]:
    """Return both ends of a new pipe, a large one where that can be had."""
    ends = os.pipe()
    with contextlib.suppress(AttributeError, OSError):  # not everywhere, and not beyond a user's limit
        fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return ends


def describe(request: Request) -> str:
    """Return a request for a sentence."""
    return f"request {request.number} ({request.rows} x {request.cols})"


def _is_finite(matrix: Matrix) -> bool:
    return bool(np.isfinite(matrix).all())
