"""``python -m yeto.merge.svd_worker --device D``: the isotropic merge of one matrix after the other.

A child of the syncer. Requests come on stdin, answers leave on stdout (``yeto.merge.svd_frames``), one at a
time. A request that is whole but wrong, or whose decomposition fails, is answered with the reason, and the
next one is read: whether that ends the run is the syncer's decision. The end of stdin between two requests
is an ordinary end (exit code 0), in the middle of one it is not (2).

stdout belongs to the answers. So before anything else is loaded the pipe is moved to another descriptor, and
whatever a library prints goes to stderr, which the syncer reads into its log. Nothing is read ahead.

The syncer may be killed. The end of stdin shows it, but only to a worker that is reading; so on Linux the
kernel is asked to kill this process with the one that started it, in the middle of a decomposition too.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from io import FileIO
from typing import TYPE_CHECKING, Final

from yeto.merge.svd_frames import (
    FRAME_BYTES_MAX,
    HEADER_BYTES,
    Code,
    Refusal,
    Request,
    decode_request,
    encode_matrix_header,
    encode_refusal,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.float32]

ENDED: Final = 0
TORN: Final = 2
"""Exit code when a request, or the taking of an answer, stopped in the middle."""

PR_SET_PDEATHSIG: Final = 1
"""Option number of prctl(2)."""

SKIPPED_BYTES: Final = 1 << 20
"""Most that is read at a time of a payload that nobody wants."""


class _Torn(Exception):
    """The other end is gone, in the middle of something."""


def main(words: Sequence[str] | None = None) -> int:
    """Serve until stdin ends; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m yeto.merge.svd_worker", description=__doc__)
    parser.add_argument("--device", required=True, help="where to compute: cpu, cuda:0, ...")
    parser.add_argument("--frame-bytes-max", type=int, default=FRAME_BYTES_MAX, help="largest matrix")
    flags = parser.parse_args(words)
    die_with_the_syncer()
    requests, answers = take_pipes()
    return serve(requests, answers, Computer(flags.device), flags.frame_bytes_max)


def die_with_the_syncer() -> None:
    """Ask the kernel to kill this process when the thread that started it ends, where it can be asked.

    A syncer that is dead already has closed stdin, which is noticed at the first read.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def take_pipes() -> tuple[FileIO, FileIO]:
    """Return stdin and stdout as the worker uses them; from now on nobody else reads or writes there."""
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


class Computer:
    """Torch and a device; loading it may take seconds, so it is done before the first request is read."""

    def __init__(self, device: str) -> None:
        """Compute on ``device``; whether there is such a one shows at the first matrix."""
        import numpy as np
        import torch

        from yeto.merge.iso import isotropic

        self._numpy = np
        self._torch = torch
        self._isotropic = isotropic
        self._device = device

    def empty(self, request: Request) -> Matrix:
        """Return memory for the matrix of a request.

        Raises:
            MemoryError: there is none.
        """
        return self._numpy.empty((request.rows, request.cols), dtype="<f4")

    def merged(self, matrix: Matrix) -> Matrix | tuple[Code, str]:
        """Return the isotropic merge, or why there is none."""
        if not self._numpy.isfinite(matrix).all():
            return Code.NOT_FINITE, "the matrix has elements that are not finite"
        try:
            there = self._torch.from_numpy(matrix).to(self._device)
            result = self._isotropic(there).cpu().contiguous().numpy().astype("<f4", copy=False)
        except Exception as error:  # whatever a device or its driver comes up with; the next matrix may do
            return Code.FAILED, f"{type(error).__name__}: {error}"
        if not self._numpy.isfinite(result).all():
            return Code.RESULT_NOT_FINITE, "the result has elements that are not finite"
        return result


def serve(requests: FileIO, answers: FileIO, computer: Computer, frame_bytes_max: int) -> int:
    """Answer requests until there are no more; return the exit code.

    Args:
        requests: unbuffered.
        answers: unbuffered.
        computer: what decomposes.
        frame_bytes_max: largest matrix, in bytes.
    """
    header = bytearray(HEADER_BYTES)
    try:
        while _fill(requests, memoryview(header), may_end=True):
            asked = decode_request(header, frame_bytes_max=frame_bytes_max)
            refusal = asked if isinstance(asked, Refusal) else _answer(requests, answers, computer, asked)
            if refusal is not None:
                _skip(requests, refusal.payload_bytes)
                _send(answers, encode_refusal(refusal.number, refusal.code, refusal.message))
    except _Torn:
        return TORN
    return ENDED


def _answer(requests: FileIO, answers: FileIO, computer: Computer, request: Request) -> Refusal | None:
    """Read the matrix and answer with its merge; return the refusal when it comes to that."""
    try:
        matrix = computer.empty(request)
    except MemoryError:
        return Refusal(
            number=request.number,
            code=Code.FAILED,
            message=f"no memory for {request.rows} x {request.cols}",
            payload_bytes=request.payload_bytes,
        )
    _fill(requests, matrix.data.cast("B"))
    result = computer.merged(matrix)
    if isinstance(result, tuple):
        code, message = result
        return Refusal(number=request.number, code=code, message=message, payload_bytes=0)
    _send(answers, encode_matrix_header(request.number, request.rows, request.cols))
    _send(answers, result.data.cast("B"))
    return None


def _fill(requests: FileIO, target: memoryview, *, may_end: bool = False) -> bool:
    """Read until ``target`` is full; False when the stream ended before the first byte and may.

    Raises:
        _Torn: it ended elsewhere.
    """
    filled = 0
    while filled < len(target):
        count = requests.readinto(target[filled:])
        if not count:
            if may_end and filled == 0:
                return False
            raise _Torn
        filled += count
    return True


def _skip(requests: FileIO, count: int) -> None:
    """Pass over bytes that belong to a request nobody wants.

    Raises:
        _Torn: they are not all there.
    """
    scratch = memoryview(bytearray(min(count, SKIPPED_BYTES)))
    while count:
        part = scratch[: min(count, SKIPPED_BYTES)]
        _fill(requests, part)
        count -= len(part)


def _send(answers: FileIO, data: bytes | memoryview) -> None:
    """Write all of it.

    Raises:
        _Torn: nobody takes it.
    """
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[answers.write(rest) :]
    except BrokenPipeError as error:
        raise _Torn from error


if __name__ == "__main__":
    sys.exit(main())
