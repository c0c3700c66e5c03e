"""The SVD pool: matrices a second with one worker and with all of them, and what the pipes carry.

The matrices are of two sizes, mixed, and given to the pool all at once; a sample ends when the last one is
back. The peer is ``torch.linalg.svd`` of the same matrices in this process, one after the other and in one
thread, as an iso merge without a pool has it. It makes no isotropic matrix of what it finds, so it does less.

The pipes are measured with a worker that gives every matrix back as it is: the same loop and the same checks
of the syncer, but no decomposition. The peer is a child that reads as many bytes from a pipe of the same size
and writes them back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import trio

from benchmarks.figures import Report, figure_of
from benchmarks.timing import rates
from yeto.syncer.svd_child import Matrix, open_pipe
from yeto.syncer.svd_pool import SvdPool, svd_pool
from yeto.syncer.svd_settings import SvdSettings

ECHO = """#!{python}
import sys
import numpy
from yeto.merge import svd_worker
class Echo(svd_worker.Computer):
    def __init__(self, device):
        self._numpy = numpy
    def merged(self, matrix):
        return matrix
svd_worker.Computer = Echo
sys.exit(svd_worker.main(sys.argv[sys.argv.index("yeto.merge.svd_worker") + 1 :]))
"""

BARE_ECHO = """
import os, sys
buffer = memoryview(bytearray(int(sys.argv[1])))
while True:
    filled = 0
    while filled < len(buffer):
        count = os.readv(0, [buffer[filled:]])
        if not count:
            sys.exit(0)
        filled += count
    rest = buffer
    while rest:
        rest = rest[os.write(1, rest):]
"""


def matrices_of(jobs: int, side: int) -> list[Matrix]:
    """Return that many matrices, every fourth of them twice as high as the others."""
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((side * (2 if number % 4 == 3 else 1), side)).astype(np.float32)
        for number in range(jobs)
    ]


async def decompose_all(pool: SvdPool, matrices: list[Matrix]) -> None:
    """Have all of them decomposed, as fast as the pool can."""
    async with trio.open_nursery() as nursery:
        for matrix in matrices:
            nursery.start_soon(pool.isotropic, matrix)


def decompose_here(matrices: list[Matrix]) -> None:
    """Decompose all of them in this process."""
    for matrix in matrices:
        torch.linalg.svd(torch.from_numpy(matrix), full_matrices=False)


class BareEcho:
    """A child that gives back what it is sent; nothing is looked at."""

    def __init__(self, size: int) -> None:
        requests, to = open_pipe()
        answers, answering = open_pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", BARE_ECHO, str(size)], stdin=requests, stdout=answering
        )
        os.close(requests)
        os.close(answering)
        self._to, self._from = to, answers
        self._buffer = memoryview(bytearray(size))

    def exchange(self, data: memoryview) -> None:
        """Send bytes and take them back."""
        rest = data
        while rest:
            rest = rest[os.write(self._to, rest) :]
        filled = 0
        while filled < len(self._buffer):
            filled += os.readv(self._from, [self._buffer[filled:]])

    def close(self) -> None:
        """End the child."""
        os.close(self._to)
        os.close(self._from)
        self._process.wait()


async def take_turns(
    repeats: int, ours: Callable[[], Awaitable[None]], peer: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Time both in turn, by the wall; the first turn is not counted. The peer blocks: nobody else waits."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        began = time.perf_counter()
        await ours()
        middle = time.perf_counter()
        peer()
        seconds[0].append(middle - began)
        seconds[1].append(time.perf_counter() - middle)
    return seconds[0][1:], seconds[1][1:]


async def measure_jobs(
    devices: tuple[str, ...], matrices: list[Matrix], repeats: int
) -> tuple[list[float], list[float]]:
    """Return seconds of the pool and of this process."""
    async with svd_pool(SvdSettings(devices=devices).validated()) as pool:
        return await take_turns(
            repeats, lambda: decompose_all(pool, matrices), lambda: decompose_here(matrices)
        )


async def measure_pipe(echo: Path, size: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return seconds of a worker's pipes and of bare ones, both ways."""
    matrix = np.zeros((size // 4096, 1024), dtype=np.float32)
    bare = BareEcho(matrix.nbytes)
    try:
        async with svd_pool(SvdSettings(devices=("cpu",), python=str(echo)).validated()) as pool:

            async def exchange() -> None:
                await pool.isotropic(matrix)

            return await take_turns(repeats, exchange, lambda: bare.exchange(matrix.data.cast("B")))
    finally:
        bare.close()


def measure(*, repeats: int, devices: tuple[str, ...], jobs: int, side: int, size: int) -> Report:
    """Measure the pool.

    Args:
        repeats: samples of each figure.
        devices: of the workers.
        jobs: matrices a sample.
        side: columns of each.
        size: bytes of the matrix that the pipes carry, a multiple of 4096.
    """
    torch.set_num_threads(1)
    matrices = matrices_of(jobs, side)
    figures = []
    for count in sorted({1, len(devices)}):
        ours, here = trio.run(measure_jobs, devices[:count], matrices, repeats)
        figures.append(
            figure_of(
                f"jobs_per_second_{'all' if count > 1 else 'one'}",
                f"isotropic, {count} worker{'s' if count > 1 else ''}",
                "matrices/s",
                rates(jobs, ours),
                peer="torch.linalg.svd here",
                peer_values=rates(jobs, here),
            )
        )
    with TemporaryDirectory(prefix="bench-") as folder:
        echo = Path(folder, "python")
        echo.write_text(ECHO.format(python=sys.executable))
        echo.chmod(0o755)
        ours, bare = trio.run(measure_pipe, echo, size, repeats)
    figures.append(
        figure_of(
            "pipe_gb_per_second",
            "to a worker and back",
            "GB/s",
            rates(2e-9 * size, ours),
            peer="bare pipes",
            peer_values=rates(2e-9 * size, bare),
        )
    )
    return Report(
        benchmark="svd",
        what=f"matrices of {side} columns on {', '.join(devices)}; wall seconds until the last one is back",
        settings={"jobs": jobs, "side": side, "pipe_bytes": size, "repeats": repeats},
        figures=tuple(figures),
    )
