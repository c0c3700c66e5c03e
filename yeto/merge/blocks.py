"""How a pass over a fragment is made: by several threads, block by block, in an order that only sizes decide.

A tensor is cut into *pieces* of at most ``BLOCK`` elements, counted from its beginning. Every piece gives its
own partial sums, and they are added up in order. So it leaves no trace which thread took which piece, or how
many threads there were. Neighbouring pieces of small tensors make one *block*, the unit of work of a thread:
large enough that the interpreter does not matter beside it, small enough to stay in the cache until whoever
digests it has read it.

A digest needs the bytes in their order, so it is a *chain*: its steps follow one another, each as soon as its
block is computed, while other threads compute further blocks. Nobody computes more than a few blocks ahead of
the slowest chain, for then its bytes would have left the cache.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final

import numpy as np
from attrs import frozen

from yeto.merge.kernels import Doubles, Pieces

BLOCK: Final = 1 << 17
"""Elements of a block: 512 KiB in f32. A multiple of every codec's block."""

AHEAD: Final = 2
"""Blocks that may be computed before the slowest chain has digested them, for each thread."""

_THREADS: Final = os.cpu_count() or 1
_HELPERS: Final = ThreadPoolExecutor(max(7, _THREADS - 1), thread_name_prefix="merge")
"""They help whoever calls. Each caller works itself, so no call ever waits for one of them to be free."""


@frozen(eq=False)
class Plan:
    """How a fragment is cut."""

    tensors: int
    pieces: Pieces
    blocks: tuple[tuple[int, int], ...]
    """First piece and the one after the last, of each block."""

    def elements(self, block: int) -> tuple[int, int]:
        """Return the range of elements of a block."""
        first, last = self.blocks[block]
        return int(self.pieces[first, 1]), int(self.pieces[last - 1, 2])

    def only(self, tensors: Iterable[int]) -> Plan:
        """Return the plan of a pass over some of the tensors; their pieces are the same."""
        chosen = np.isin(self.pieces[:, 0], list(tensors))
        return _blocked(self.tensors, np.ascontiguousarray(self.pieces[chosen]))

    def one(self, tensor: int) -> Plan:
        """Return the plan of a pass over one tensor as if there were no other; its pieces are the same."""
        first, last = np.searchsorted(self.pieces[:, 0], (tensor, tensor + 1))
        pieces = self.pieces[first:last].copy()
        pieces[:, 0] = 0
        return _blocked(1, pieces)

    def by_tensor(self, partial: Doubles) -> list[float]:
        """Add up partial sums of the pieces, in order, for each tensor."""
        totals = [0.0] * self.tensors
        for tensor, value in zip(self.pieces[:, 0].tolist(), partial.tolist(), strict=True):
            totals[tensor] += value
        return totals


@lru_cache(maxsize=256)
def plan(sizes: tuple[int, ...]) -> Plan:
    """Cut a fragment whose tensors have these sizes, laid end to end."""
    pieces, begin = [], 0
    for tensor, size in enumerate(sizes):
        pieces += [(tensor, begin + at, begin + min(at + BLOCK, size)) for at in range(0, size, BLOCK)]
        begin += size
    return _blocked(len(sizes), np.array(pieces, dtype=np.int64).reshape(-1, 3))


def _blocked(tensors: int, pieces: Pieces) -> Plan:
    """Join pieces that follow one another, as long as a block has room for them."""
    blocks, first = [], 0
    for piece in range(1, len(pieces) + 1):
        if piece < len(pieces):
            joined = pieces[piece, 2] - pieces[first, 1] <= BLOCK
            if joined and pieces[piece, 1] == pieces[piece - 1, 2]:
                continue
        blocks.append((first, piece))
        first = piece
    return Plan(tensors, pieces, tuple(blocks) if len(pieces) else ())


def run(
    count: int,
    compute: Callable[[int], object],
    chains: Sequence[Callable[[int], object]] = (),
    threads: int | None = None,
) -> None:
    """Compute every block; the calling thread takes part.

    Args:
        count: blocks.
        compute: called once for each block, in any order and by any thread.
        chains: each is called once for each block, in ascending order, after the block was computed.
        threads: at most this many work at a time; None for one a core. It changes no result.

    Raises:
        Exception: the first that ``compute`` or a chain raised; no further block is begun after it.
    """
    threads = min(_THREADS if threads is None else threads, count * (1 + len(chains)))
    if threads <= 1:
        for block in range(count):
            compute(block)
            for chain in chains:
                chain(block)
        return
    work = _Work(count, compute, chains, AHEAD * threads)
    helpers = [_HELPERS.submit(work.take_part) for _ in range(threads - 1)]
    try:
        work.take_part()
    finally:
        for helper in helpers:
            if not helper.cancel():
                helper.result()


class _Work:
    """What is left to do of one call of ``run``; its lock is held only to choose."""

    def __init__(
        self,
        count: int,
        compute: Callable[[int], object],
        chains: Sequence[Callable[[int], object]],
        ahead: int,
    ) -> None:
        self._count = count
        self._compute = compute
        self._chains = chains
        self._ahead = ahead
        self._changed = threading.Condition()
        self._begun = 0
        self._computed = bytearray(count)
        self._digested = [0] * len(chains)
        self._busy = [False] * len(chains)
        self._failed = False

    def take_part(self) -> None:
        """Work until nothing is left that this thread could do."""
        while (job := self._next()) is not None:
            chain, block = job
            try:
                (self._compute if chain is None else self._chains[chain])(block)
            except BaseException:
                self._end(chain, block, failed=True)
                raise
            self._end(chain, block)

    def _next(self) -> tuple[int | None, int] | None:
        """Return (chain or None, block), waiting for it if need be; None when nothing is left to begin."""
        with self._changed:
            while not self._failed:
                for chain, block in enumerate(self._digested):
                    if not self._busy[chain] and block < self._count and self._computed[block]:
                        self._busy[chain] = True
                        return chain, block
                behind = min(self._digested, default=self._begun)
                if self._begun < self._count and self._begun - behind < self._ahead:
                    self._begun += 1
                    return None, self._begun - 1
                if self._begun == self._count and all(
                    busy or block == self._count
                    for busy, block in zip(self._busy, self._digested, strict=True)
                ):
                    return None  # who works on a chain goes on with it
                self._changed.wait()
        return None

    def _end(self, chain: int | None, block: int, *, failed: bool = False) -> None:
        with self._changed:
            if chain is None:
                self._computed[block] = True
            else:
                self._digested[chain] += 1
                self._busy[chain] = False
            self._failed |= failed
            self._changed.notify_all()
