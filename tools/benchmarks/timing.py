"""Time and memory: whose seconds are counted, and how measure and peer take turns.

Work of one thread that waits for nothing is timed in CPU seconds of this process: on a quiet machine they are
what a clock on the wall shows, on a shared one the turns of others are left out. What waits for a disk, a
network or another process is timed by the wall.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from attrs import frozen

P = ParamSpec("P")
R = TypeVar("R")

Clock = Callable[[], float]

cpu_clock: Clock = time.process_time
wall_clock: Clock = time.perf_counter


@frozen
class Spent:
    """What one piece of work took, in seconds of either sort."""

    cpu: float
    wall: float


def timed(work: Callable[[], R]) -> tuple[R, Spent]:
    """Run a function; return its result and what it took."""
    cpu, wall = cpu_clock(), wall_clock()
    result = work()
    return result, Spent(cpu_clock() - cpu, wall_clock() - wall)


def take_turns(
    repeats: int, *works: Callable[[], object], clock: Clock, warm_up: bool = True
) -> tuple[list[float], ...]:
    """Time several functions in turn, so that each sample has its neighbours in time.

    Every other turn goes backwards, lest one of them always profit from what another left in a cache.

    Args:
        repeats: samples of each.
        works: what to time.
        clock: ``cpu_clock`` or ``wall_clock``.
        warm_up: run each once before, uncounted.

    Returns:
        Seconds of each function, in the order given.
    """
    if warm_up:
        for work in works:
            work()
    settle_memory()
    seconds: tuple[list[float], ...] = tuple([] for _ in works)
    for turn in range(repeats):
        order = range(len(works)) if turn % 2 == 0 else reversed(range(len(works)))
        for index in order:
            began = clock()
            works[index]()
            seconds[index].append(clock() - began)
    return seconds


def rates(amount: float, seconds: Sequence[float]) -> list[float]:
    """Return ``amount`` per second for each sample."""
    return [amount / value for value in seconds]


def settle_memory() -> None:
    """Collect garbage, and keep the collector away from what the benchmark itself holds.

    Otherwise a list of a hundred thousand prepared events is walked again and again, at the expense of
    whatever is being measured.
    """
    gc.collect()
    gc.freeze()


def in_child(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a module-level function in a fresh interpreter; return what it returns."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args, **kwargs).result()


def reset_peak() -> int:
    """Begin a new high-water mark of this process's memory; return the bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the high-water mark of resident bytes since ``reset_peak``."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    raise OSError(f"/proc/self/status does not say {field}")
