"""Many simulations, in parallel processes when that pays.

Each simulation is a function of its configuration alone, so results do not depend on how many run at a time.
Workers never hear Ctrl-C: they look at a flag now and then, and whoever started them decides what is kept.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from attrs import frozen

from yeto.sim.config import SimConfig, SimResult

LOOK_SECONDS = 0.25
"""How often the progress of parallel simulations is looked at."""


@frozen(kw_only=True)
class Run:
    """What one simulation measured, and how long that took on this machine."""

    config: SimConfig
    result: SimResult
    wall_seconds: float


class _Stopped(Exception):
    """A worker was told to stop."""


def run_all(
    configs: Sequence[SimConfig],
    *,
    jobs: int = 1,
    tape: Path | None = None,
    tick: Callable[[float], None] = lambda share: None,
) -> Iterator[tuple[int, Run]]:
    """Yield the index of each configuration with its run, in the order in which they finish.

    Args:
        configs: what to simulate.
        jobs: processes at a time; one simulation, or one job, runs in this process.
        tape: where the tape of a single simulation goes.
        tick: hears now and then which share of the work is done, from 0 to 1.
    """
    if jobs == 1 or len(configs) == 1:
        for index, config in enumerate(configs):
            yield index, _run(config, tape, partial(_tick_part, tick, index, len(configs)))
    else:
        yield from _run_parallel(configs, jobs, tick)


def _tick_part(tick: Callable[[float], None], done: int, total: int, share: float) -> None:
    tick((done + share) / total)


def _run(config: SimConfig, tape: Path | None, tick: Callable[[float], None]) -> Run:
    # On first use: the engine brings the coordinator and the tape.
    from yeto.sim import simulate

    begin = time.perf_counter()
    result = simulate(config, tape=tape, progress=tick)
    return Run(config=config, result=result, wall_seconds=time.perf_counter() - begin)


def _run_parallel(
    configs: Sequence[SimConfig], jobs: int, tick: Callable[[float], None]
) -> Iterator[tuple[int, Run]]:
    # Fresh processes: a fork would copy the threads' locks, but not the threads, of whoever called.
    context = get_context("spawn")
    stop = context.Event()
    shares: Any = context.Array("d", len(configs))
    with ProcessPoolExecutor(
        min(jobs, len(configs)), context, initializer=_begin, initargs=(stop, shares)
    ) as pool:
        # A blocked signal is inherited: Ctrl-C is for this process alone.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            pending = {pool.submit(_work, index, config): index for index, config in enumerate(configs)}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            yield from _collect(pending, lambda: tick(sum(shares) / len(configs)))
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _collect(pending: dict[Future[Run], int], look: Callable[[], None]) -> Iterator[tuple[int, Run]]:
    while pending:
        done, _ = wait(pending, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
        look()
        for future in done:
            yield pending.pop(future), future.result()


_stop: Any
_shares: Any


def _begin(stop: Any, shares: Any) -> None:
    """Keep what a worker shares with whoever started it."""
    global _stop, _shares
    _stop, _shares = stop, shares
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when whoever started it is killed: nothing would ever tell it to stop."""
    parent = parent_process()
    assert parent is not None, "only workers of a pool begin"
    parent.join()
    os._exit(1)


def _work(index: int, config: SimConfig) -> Run:
    def tick(share: float) -> None:
        _shares[index] = share
        if _stop.is_set():
            raise _Stopped

    run = _run(config, None, tick)
    tick(1.0)
    return run
