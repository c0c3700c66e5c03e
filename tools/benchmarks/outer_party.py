"""Processes that do one outer round whenever they are told to: what all parties of ``peers`` have in common.

Every party stays alive for the whole benchmark and waits between its turns, so that a sample is a round and
nothing else, and each has its neighbours in time.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

START_SECONDS: Final = 300.0
"""Longest time for processes to import what they need and to find each other."""
ROUND_SECONDS: Final = 300.0


class Party(Protocol):
    """A way to make the weights of several learners one."""

    def round(self) -> int | None:
        """Do one outer round; return the TCP bytes of learner 0 in it, None where they are not known."""


def context() -> Any:
    """Return what forks processes from a server that has imported everything already."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(
        ["torch.distributed", "yeto.syncer.app", "yeto.cli.run_syncer", "fake_learner"]
    )
    return made


class Told:
    """Processes, each at the other end of a pipe; a context manager, which ends them."""

    def __init__(self, serve: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        """Start one process for each tuple of arguments; ``serve`` gets its pipe before them."""
        self._stack = ExitStack()
        self._pipes: list[Connection] = []
        forks = context()
        for own in arguments:
            ours, theirs = forks.Pipe()
            process = forks.Process(target=serve, args=(theirs, *own), daemon=True)
            process.start()
            theirs.close()
            # Some wait for others that are gone by then, so none is asked to end by itself.
            self._stack.callback(process.join)
            self._stack.callback(process.kill)
            self._pipes.append(ours)

    def __enter__(self) -> Told:
        self.answers(START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for pipe in self._pipes:
            pipe.close()

    def tell(self, order: object) -> list[Any]:
        """Give all of them an order, at once; return what they answer."""
        for pipe in self._pipes:
            pipe.send(order)
        return self.answers(ROUND_SECONDS)

    def answers(self, seconds: float) -> list[Any]:
        """Wait for one answer of each.

        Raises:
            TimeoutError: one has not come.
            EOFError: a process has ended.
        """
        found = []
        for pipe in self._pipes:
            if not pipe.poll(seconds):
                raise TimeoutError(f"a process of the benchmark has said nothing for {seconds:g} s")
            found.append(pipe.recv())
        return found


def difference(before: int | None, after: int | None) -> int | None:
    """Return what was counted between two counts, either of which may be missing."""
    return None if before is None or after is None else after - before
