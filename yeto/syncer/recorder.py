"""Recording beside the loop: one task, one thread, and a merge that does not outrun what is written of it.

What an attempt was sealed with is handed over when it is sealed, and written while it is merged. Its commit
is not told to the coordinator before it is on the disk; so whatever the tape says was committed can be
executed again. A slow disk makes merges slow, and nothing else: pushes are taken in, examined and answered
meanwhile, and the pump never waits.

Memory: at most ``ATTEMPTS_QUEUED_MAX`` attempts wait for the writer and one is being written. Their pushes
are those the merges hold anyway, unless the attempt was discarded meanwhile; then these bytes, at most, stay
until they are written.

A recording that cannot be written ends the run, like a tape or a checkpoint that cannot be written: an audit
with a hole in it is none. The tape and the checkpoint are as intact as after any crash.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn

import numpy as np
import trio
from attrs import field, frozen

from yeto.core.values import Member
from yeto.merge import MergedGradient
from yeto.state import Checkpoint
from yeto.storage import size_text
from yeto.syncer.payloads import RecordingFolder
from yeto.wire import codecs
from yeto.wire.striping import Buffer

log = logging.getLogger("yeto.syncer")

ATTEMPTS_QUEUED_MAX: Final = 2
"""As many as rounds are open by default: a disk that keeps up on average is never waited for."""


@frozen(eq=False)
class _Job:
    write: Callable[[], None]
    done: trio.Event = field(factory=trio.Event)


class Recorder:
    """Writes what a run is made of into its recording."""

    def __init__(self, folder: RecordingFolder, *, begun: bool) -> None:
        """Write to ``folder``; with ``begun`` it has the fragments that this start begins with."""
        self._folder = folder
        self._begun = begun
        self._jobs, self._queue = trio.open_memory_channel[_Job](ATTEMPTS_QUEUED_MAX)
        self._thread = trio.CapacityLimiter(1)

    def begin(self, checkpoint: Checkpoint) -> None:
        """Have the first checkpoint of a fresh start written; later ones are not needed."""
        if self._begun:
            return
        self._begun = True
        sizes = [version.numel for version in checkpoint.fragments]
        assert checkpoint.dtype is not None, "a session has a dtype"
        push = max(map(codecs.by_name(checkpoint.dtype).encoded_size, sizes))
        log.info(
            "recording every merged push in %s: at most %s a learner and round",
            self._folder.path,
            size_text(push),
        )
        # There is room: no attempt is sealed before this checkpoint is durable.
        self._jobs.send_nowait(_Job(partial(self._folder.write_checkpoint, checkpoint)))

    async def pushes(
        self, step: int, attempt: int, dtype: str, pushes: Sequence[tuple[Member, Buffer]]
    ) -> None:
        """Wait until the pushes of a sealed attempt are on the disk."""
        views = [(member, memoryview(data)) for member, data in pushes]
        await self._written(partial(self._folder.write_pushes, step, attempt, dtype, views))

    async def gradient(self, step: int, attempt: int, merged: MergedGradient) -> None:
        """Wait until the merged gradient of an iso merge is on the disk; it must not be used up before."""

        def write() -> None:
            # Its copy is made here, in the thread.
            data = merged.gradient.numpy().astype("<f4", copy=False).view(np.uint8).data
            self._folder.write_gradient(step, attempt, data)

        await self._written(write)

    async def run(self) -> NoReturn:
        """Write what is handed over, in order.

        Raises:
            RecordingError: the disk refuses; nothing that waited for it has been committed.
        """
        while True:
            job = await self._queue.receive()
            await trio.to_thread.run_sync(job.write, limiter=self._thread)
            job.done.set()

    async def _written(self, write: Callable[[], None]) -> None:
        job = _Job(write)
        await self._jobs.send(job)
        await job.done.wait()
