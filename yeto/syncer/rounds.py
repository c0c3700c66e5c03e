"""The tensors of open attempts: buffers for uploads, and the orders that have something computed of them.

Each open attempt (``yeto.syncer.attempts``) is here from the coordinator's order to open it until it is
committed or discarded. What an order asks for is a job (``yeto.syncer.jobs``): it runs beside the pump and
ends with a fact that is told to it. A push is examined when it arrives, so that after sealing only the
reduction is left; and a new version gets into the store when the coordinator says that its round is
committed, never before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

import trio

from yeto.core import CoreConfig
from yeto.core.decisions import AttemptOpened, CommitOrdered, MergeOrdered
from yeto.core.values import Member
from yeto.link import new_buffer
from yeto.merge import compile_kernels
from yeto.state import FragmentVersion
from yeto.syncer.attempts import Attempt, Push
from yeto.syncer.jobs import Jobs
from yeto.syncer.receivers import Facts
from yeto.syncer.recorder import Recorder
from yeto.syncer.session import Session
from yeto.syncer.svd_merges import SvdMerges
from yeto.wire.messages import PushHeader
from yeto.wire.striping import Buffer

TINY_BYTES: Final = 64 * 1024
"""Pushes up to this size are examined where they arrive: that takes a tenth of a millisecond, and the way to
a thread and back more than that, at everybody's expense, because threads take turns. Not before the kernels
are compiled, for which everybody would wait."""


class Rounds:
    """Every open attempt."""

    def __init__(
        self,
        *,
        session: Session,
        facts: Facts,
        config: CoreConfig,
        heavy: trio.CapacityLimiter,
        recorder: Recorder | None = None,
        svd: SvdMerges | None = None,
    ):
        """Compute for ``session``; results become events told to ``facts``.

        Args:
            session: layout and committed values.
            facts: the pump.
            config: outer momentum and the like.
            heavy: worker threads that may compute at a time.
            recorder: takes what attempts were sealed with; None when the run is not recorded.
            svd: the pool that decomposes; None when that is done here.
        """
        self._jobs = Jobs(
            session=session, facts=facts, config=config, heavy=heavy, recorder=recorder, svd=svd
        )
        self._heavy = heavy
        self._is_recorded = recorder is not None
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._nursery: trio.Nursery | None = None
        self._kernels_are_ready = False

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Hold the nursery that the jobs run in."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            # The first time on a machine it takes seconds, and would hold up the first pushes.
            await trio.to_thread.run_sync(compile_kernels, limiter=self._heavy, abandon_on_cancel=True)
            self._kernels_are_ready = True
            await trio.sleep_forever()
        raise AssertionError("a nursery that sleeps for ever was left")

    # Orders of the coordinator. None of them waits.

    def open(self, order: AttemptOpened) -> None:
        """Make room for the pushes of a new attempt."""
        attempt = Attempt(step=order.step, fragment=order.fragment, number=order.attempt)
        self._attempts[order.step, order.attempt] = attempt

    def drop_push(self, step: int, number: int, member: Member) -> None:
        """Free the buffer of a push that was refused for what it holds."""
        attempt = self._attempts.get((step, number))
        if attempt is not None:
            attempt.pushes.pop(member, None)

    def forget(self, member: Member) -> None:
        """Free the unfinished uploads of a learner that is gone; what was examined stays."""
        for attempt in self._attempts.values():
            push = attempt.pushes.get(member)
            if push is not None and push.facts is None:
                del attempt.pushes[member]

    def seal(self, step: int, number: int, keep: frozenset[Member]) -> None:
        """Take nothing more: free the uploads of all members but these, which are recorded."""
        attempt = self._attempts[step, number]
        for member in attempt.pushes.keys() - keep:
            del attempt.pushes[member]
        if self._is_recorded:
            attempt.recorded = trio.Event()
            # The merge lets go of them.
            pushes = tuple((member, push.payload) for member, push in attempt.pushes.items())
            self._start(attempt, self._jobs.record, pushes)

    def discard(self, step: int, number: int) -> None:
        """Forget an attempt and all it holds."""
        attempt = self._attempts.pop((step, number), None)
        if attempt is not None:
            attempt.end()

    def merge(self, order: MergeOrdered) -> None:
        """Reduce the pushes of a sealed attempt; ``merge_finished`` or ``merge_failed`` follows."""
        attempt = self._attempts[order.step, order.attempt]
        self._start(attempt, self._jobs.merge, order)

    def commit(self, order: CommitOrdered) -> None:
        """Compute the outer step of a merged attempt; ``outer_step_applied`` follows."""
        attempt = self._attempts[order.step, order.attempt]
        self._start(attempt, self._jobs.commit, order)

    def take_result(self, step: int, number: int) -> tuple[FragmentVersion, memoryview | None]:
        """Return the new version that a commit computed, and forget the attempt.

        Returns:
            The version, and its encoding for the broadcast; None when that is still to be made.
        """
        attempt = self._attempts.pop((step, number))
        result, encoded = attempt.result, attempt.encoded
        assert result is not None, "outer_step_applied is told after its result is here"
        attempt.end()
        return result, encoded

    # Arrivals from the groups. None of them waits for a thread.

    def push_buffer(self, member: Member, head: PushHeader, size: int) -> Buffer | None:
        """Return the buffer of an admitted push; None when its attempt ended while the reader woke up."""
        attempt = self._attempts.get((head.step, head.attempt))
        if attempt is None or attempt.fragment != head.fragment:
            return None
        buffer = new_buffer(size)
        attempt.pushes[member] = Push(buffer)
        return buffer

    async def push_arrived(self, member: Member, head: PushHeader, buffer: Buffer) -> None:
        """Examine a push that is there whole; ``push_received`` follows."""
        attempt = self._attempts.get((head.step, head.attempt))
        push = None if attempt is None else attempt.pushes.get(member)
        if attempt is None or push is None or push.payload is not buffer:
            return  # its attempt ended while it was uploaded, and the tape says so
        if len(buffer) <= TINY_BYTES and self._kernels_are_ready:
            await self._jobs.examine(attempt, push, member, head, here=True)
        else:
            self._start(attempt, self._jobs.examine, push, member, head)

    def _start(self, attempt: Attempt, job: Callable[..., Awaitable[None]], *parts: object) -> None:
        """Have a job done for an attempt, unless that ends before."""
        assert self._nursery is not None
        scope = trio.CancelScope()
        attempt.jobs.add(scope)

        async def guarded() -> None:
            with scope:
                # A cancelled task runs until it first waits, and what the job needs is freed already.
                if not attempt.ended:
                    await job(attempt, *parts)
            attempt.jobs.discard(scope)

        self._nursery.start_soon(guarded)
