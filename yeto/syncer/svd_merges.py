"""Iso merges through the SVD pool, and what the coordinator is told of the pool.

A round's matrices are averaged one after the other, and each goes to the pool as soon as it is there: while
workers decompose the first ones, further ones are averaged, and other rounds do the same. Results come back
in any order; the merge is complete when all are there.

The coordinator hears of the pool twice at most. That it failed, before the merges that fail with it are told,
so that the one cause stands before its consequences. And that it is drained, which a session that ends asks
for before its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
import trio
from torch import Tensor

from yeto.core.events import SvdPoolDrained, SvdPoolPoisoned
from yeto.errors import SvdPoolError
from yeto.merge import MergedGradient, PushInput
from yeto.merge.matrices import MatrixMerge
from yeto.syncer.pump import UNSTAMPED
from yeto.syncer.receivers import Facts
from yeto.syncer.svd_pool import SvdPool
from yeto.wire.layout import FragmentLayout

_T = TypeVar("_T")


class SvdMerges:
    """The pool as the rounds use it."""

    def __init__(self, *, pool: SvdPool, facts: Facts, heavy: trio.CapacityLimiter) -> None:
        """Decompose in ``pool``, compute the rest in the threads of ``heavy``, tell ``facts``."""
        self._pool = pool
        self._facts = facts
        self._heavy = heavy
        self._ending = trio.Event()
        self._failure_told = trio.Event()

    async def run(self) -> None:
        """Tell the coordinator when the pool has failed, and, once that is asked for, when it is drained."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_failure)
            await self._ending.wait()
            try:
                await self._pool.drain()
            except SvdPoolError:
                return  # which is told as what it is
            await self._facts.tell(SvdPoolDrained(at=UNSTAMPED))

    def drain(self) -> None:
        """Admit no further matrix; ``svd_pool_drained`` follows when none is left."""
        self._ending.set()

    async def merge(
        self,
        pushes: Sequence[PushInput],
        layout: FragmentLayout,
        momentum: Tensor,
        *,
        mu: float,
        momentum_scale: float | None = None,
    ) -> MergedGradient:
        """Return the iso merge of a sealed attempt; arguments as for ``yeto.merge.merge_fragment``.

        Raises:
            MergeError: a size or weight does not fit.
            SvdPoolError: the pool failed, and the coordinator has been told.
        """
        merge = await self._compute(
            partial(MatrixMerge, pushes, layout, momentum, mu=mu, momentum_scale=momentum_scale)
        )
        failures: list[SvdPoolError] = []

        async def decompose(place: int, matrix: Tensor) -> None:
            try:
                result = await self._pool.isotropic(matrix.numpy())
            except SvdPoolError as error:
                failures.append(error)
            else:
                await self._compute(partial(merge.put, place, torch.from_numpy(result)))

        async with trio.open_nursery() as nursery:
            for place in merge.matrices:
                nursery.start_soon(decompose, place, await self._compute(partial(merge.average, place)))
        if failures:
            if self._pool.failure is not None:
                await self._failure_told.wait()
            raise failures[0]
        return await self._compute(merge.finish)

    async def _tell_failure(self) -> None:
        await self._pool.poisoned.wait()
        assert self._pool.failure is not None
        await self._facts.tell(SvdPoolPoisoned(at=UNSTAMPED, message=self._pool.failure))
        self._failure_told.set()

    async def _compute(self, function: Callable[[], _T]) -> _T:
        return await trio.to_thread.run_sync(function, limiter=self._heavy, abandon_on_cancel=True)
