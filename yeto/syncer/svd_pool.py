"""The SVD worker pool: whole matrices, one persistent child process for each device, and no second chances.

A job is one complete f32 matrix on exactly one device. Jobs wait in one bounded channel, in the order in
which they were admitted, and any free worker takes the next; so matrices of very different sizes keep all
devices busy.

*Permits* bound the matrices that are admitted, queued and running together. A permit is given back when the
result reaches whoever asked for it, not when it is committed: the merges of later rounds must not starve
those of earlier ones, nor the other way round. Whoever gives a job up (its attempt was discarded) frees the
permit at once while the job is queued; a job that runs cannot be called off, and keeps its permit until the
worker has answered. A matrix whose owner still waits for admission is its owner's, and not counted.

*Poison*: a result is trusted because every worker has always kept to the protocol. The first time one does
not (it dies, says that it failed, says nothing in time, or says anything else), the pool is of no use any
more, for good. Queued jobs are dropped, all workers are killed, and that first failure is what everybody
hears who waits, or asks later. Nothing is restarted: half of a device's faults come back, and a run that goes
on from its checkpoint starts with workers that were probed.

*Drain*: nothing more is admitted, and when the last admitted matrix is done the workers are ended.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Final

import numpy as np
import trio
from attrs import define, field

from yeto.errors import ConfigError, SvdPoolError
from yeto.merge.svd_frames import too_large
from yeto.syncer.svd_child import Matrix, SvdChild
from yeto.syncer.svd_interpreter import find_interpreter
from yeto.syncer.svd_settings import SvdSettings

log = logging.getLogger("yeto.syncer")

PROBE: Final = np.array([[1.5]], dtype=np.float32)
"""Must come back bit for bit, by whatever algorithm: norm, square root and quotient of it are exact."""


@define(eq=False)
class _Job:
    """One admitted matrix."""

    number: int
    matrix: Matrix | None
    """None once it is not needed any more, like the result."""
    deadline: float
    begun: bool = False
    result: Matrix | None = None
    done: trio.Event = field(factory=trio.Event)
    given_up: bool = False


class SvdPool:
    """Workers that have answered their probe; made by ``svd_pool``."""

    def __init__(self, settings: SvdSettings) -> None:
        """Describe a pool; ``run`` starts it."""
        self.failure: str | None = None
        """What poisoned it."""
        self.poisoned = trio.Event()
        self.admitted = 0
        """Matrices that hold a permit."""
        self._settings = settings
        python = find_interpreter(settings.python)
        self.workers = tuple(
            SvdChild(index, device, python, settings.frame_bytes_max)
            for index, device in enumerate(settings.devices)
        )
        self._permits = trio.Semaphore(settings.queue_capacity, max_value=settings.queue_capacity)
        self._jobs, self._queue = trio.open_memory_channel[_Job](settings.queue_capacity)
        self._numbers = count(1)
        self._emptied = trio.lowlevel.ParkingLot()
        self._closed: str | None = None
        """Why nothing more is admitted."""
        self._ready = False
        self._waiting: set[trio.CancelScope] = set()
        self._scope = trio.CancelScope()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start and probe the workers, say so, and keep them until the pool is drained, stopped or poisoned.

        Raises:
            ConfigError: a worker is of no use from the start.
        """
        with self._scope:
            async with trio.open_nursery() as nursery:
                for worker in self.workers:
                    nursery.start_soon(self._keep, worker)
                async with trio.open_nursery() as probes:
                    for worker in self.workers:
                        probes.start_soon(self._probe, worker)
                await trio.lowlevel.checkpoint()  # the last one to be probed may have poisoned the pool
                self._ready = True
                task_status.started()
                for worker in self.workers:
                    nursery.start_soon(self._serve, worker)
        if self.failure is not None and not self._ready:
            raise ConfigError(f"{self.failure}; check --iso-worker-devices and --iso-worker-python")

    async def isotropic(self, matrix: Matrix) -> Matrix:
        """Return the isotropic merge of a matrix, from whichever worker is free first.

        Args:
            matrix: 2-D, not empty, contiguous. It is sent from where it is: not to be changed before this
                returns, nor after it was cancelled.

        Raises:
            SvdPoolError: the pool is poisoned, or takes no more.
        """
        rows, cols = matrix.shape
        if matrix.nbytes > self._settings.frame_bytes_max:
            self.poison(f"the SVD pool: {too_large(rows, cols, self._settings.frame_bytes_max)}")
        with self._heeding():
            self._require_open()
            await self._permits.acquire()
            self.admitted += 1
            job = _Job(
                number=next(self._numbers),
                matrix=matrix,
                deadline=trio.current_time() + self._settings.request_seconds,
            )
            try:
                self._require_open()
                await self._jobs.send(job)
                await job.done.wait()
                assert job.result is not None
                return job.result
            finally:
                self._leave(job)

    async def drain(self) -> None:
        """Admit nothing more, wait until no matrix is queued or running, and end the workers.

        Raises:
            SvdPoolError: the pool is poisoned, or was not empty in time, which poisons it.
        """
        self._closed = self._closed or "the SVD pool is drained and takes no more matrices"
        seconds = self._settings.drain_seconds
        with self._heeding():
            with trio.move_on_after(seconds):
                while self.admitted:
                    await self._emptied.park()
            if self.admitted:
                self.poison(
                    f"the SVD pool still holds {self.admitted} matrices after {seconds:g} s of draining "
                    f"(--iso-worker-drain-timeout-s): {self._doings()}"
                )
                await trio.lowlevel.checkpoint()
        self.stop()

    def poison(self, message: str) -> None:
        """The pool is of no use any more, for good, and this is why; the first reason is kept."""
        if self.failure is not None or self._scope.cancel_called:
            return
        log.error("%s", message)
        self.failure = self._closed = message
        self.poisoned.set()
        self._end()

    def stop(self) -> None:
        """Kill the workers; what is queued or running is given up."""
        self._closed = self._closed or "the SVD pool was stopped"
        self._end()

    def _end(self) -> None:
        for worker in self.workers:
            worker.kill()
        for scope in self._waiting:
            scope.cancel()
        self._scope.cancel()

    # Whoever waits.

    @contextmanager
    def _heeding(self) -> Iterator[None]:
        """Stop waiting when the pool ends.

        Raises:
            SvdPoolError: it has ended, or did so meanwhile.
        """
        if self._scope.cancel_called:
            raise SvdPoolError(self._closed)
        with trio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                yield
            finally:
                self._waiting.discard(scope)
        if scope.cancelled_caught:
            raise SvdPoolError(self._closed)

    def _require_open(self) -> None:
        if self._closed is not None:
            raise SvdPoolError(self._closed)

    def _leave(self, job: _Job) -> None:
        """The one who asked for a job is gone, with its result or without."""
        job.given_up = True
        if job.done.is_set() or not job.begun:
            self._release(job)

    def _release(self, job: _Job) -> None:
        job.matrix = job.result = None  # the queue, or an idle worker, may have the job for long
        self.admitted -= 1
        self._permits.release()
        if not self.admitted:
            self._emptied.unpark_all()

    def _doings(self) -> str:
        return ", ".join(f"{worker.name} is at {worker.doing}" for worker in self.workers)

    # The workers.

    async def _keep(self, worker: SvdChild) -> None:
        try:
            await worker.run()
        except SvdPoolError as error:
            self.poison(str(error))

    async def _probe(self, worker: SvdChild) -> None:
        """Have one element computed, within the time of a start."""
        began, seconds = trio.current_time(), self._settings.startup_seconds
        with trio.move_on_after(seconds) as patience:
            await worker.started.wait()
            result = await self._exchange(worker, 0, PROBE)
            if result.tobytes() != PROBE.tobytes():
                self.poison(f"{worker.name}: cannot compute, it makes {result[0, 0]} of {PROBE[0, 0]}")
                await trio.sleep_forever()
            log.info("%s is ready after %.1f s", worker.name, trio.current_time() - began)
        if patience.cancelled_caught:
            late = worker.failure(f"was not ready within {seconds:g} s (--iso-worker-startup-timeout-s)")
            self.poison(str(late))

    async def _serve(self, worker: SvdChild) -> None:
        seconds = self._settings.request_seconds
        async for job in self._queue:
            if job.matrix is None:
                continue  # given up while it was queued
            job.begun = True
            with trio.move_on_at(job.deadline) as patience:
                job.result = await self._exchange(worker, job.number, job.matrix)
            if patience.cancelled_caught:
                # Those that run were admitted first: no job is late in the queue before one of them is.
                late = worker.failure(
                    f"no answer within {seconds:g} s of its admission (--iso-worker-request-timeout-s)"
                )
                self.poison(str(late))
                return
            job.done.set()
            if job.given_up:
                self._release(job)

    async def _exchange(self, worker: SvdChild, number: int, matrix: Matrix) -> Matrix:
        try:
            return await worker.exchange(number, matrix)
        except SvdPoolError as error:
            self.poison(str(error))
            await trio.sleep_forever()


@asynccontextmanager
async def svd_pool(settings: SvdSettings) -> AsyncIterator[SvdPool]:
    """Run a pool for as long as the block lasts; its workers have been probed when it begins.

    Raises:
        ConfigError: in a group: a worker is of no use from the start.
    """
    pool = SvdPool(settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        try:
            yield pool
        finally:
            pool.stop()
