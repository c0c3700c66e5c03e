"""The tensors of open attempts: buffers for uploads, the merge, the outer step.

An attempt owns the buffers its pushes are received into, and dies as one: when the coordinator discards it,
the buffers are let go, jobs that have not begun are cancelled, and what a thread that was already running
still brings back is dropped. A cancel scope cannot stop a thread, so every result is held against the
attempt it was computed for before anything is done with it.

A run that is recorded hands the pushes of a sealed attempt to the recorder, which writes them while they are
merged; the merge is told when both are done.

All arithmetic runs in worker threads, a bounded number at a time. A push is examined when it arrives, so
that after sealing only the reduction is left. The outer step makes a *new* fragment version; the pump puts
it into the store when the coordinator says that the round is committed, never before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, NoReturn

import trio
from attrs import define, field
from torch import Tensor

from yeto.core import CoreConfig
from yeto.core.decisions import AttemptOpened, CommitOrdered, MergeOrdered
from yeto.core.events import MergeFailed, MergeFinished, OuterStepApplied, PushReceived
from yeto.core.outer import is_normalised, lookahead, stock_momentum
from yeto.core.values import Member
from yeto.errors import MergeError, SvdPoolError
from yeto.link import new_buffer
from yeto.merge import (
    Agreement,
    MergedGradient,
    PushFacts,
    PushInput,
    commit_fragment,
    compile_kernels,
    examine_push,
    measure_agreement,
    merge_fragment,
)
from yeto.merge.fragment import decomposes
from yeto.state import FragmentVersion
from yeto.syncer.pump import UNSTAMPED
from yeto.syncer.receivers import Facts
from yeto.syncer.recorder import Recorder
from yeto.syncer.session import Session
from yeto.syncer.svd_merges import SvdMerges
from yeto.wire import codecs
from yeto.wire.layout import FragmentLayout
from yeto.wire.messages import PushHeader
from yeto.wire.striping import Buffer

TINY_BYTES: Final = 64 * 1024
"""Pushes up to this size are examined where they arrive: that takes a tenth of a millisecond, and the way to
a thread and back more than that, at everybody's expense, because threads take turns. Not before the kernels
are compiled, for which everybody would wait."""


@define(eq=False)
class _Push:
    """One member's upload: its wire bytes, and what was found in them."""

    payload: Buffer
    facts: PushFacts | None = None


@define(eq=False)
class _Attempt:
    """One open attempt of one round, with everything that is freed when it ends."""

    step: int
    fragment: int
    number: int
    pushes: dict[Member, _Push] = field(factory=dict)
    gradient: MergedGradient | None = None
    agreement: Agreement | None = None
    """What the merge told of its learners; the commit adds how far it went ahead of them."""
    normalised: bool = False
    """Whether its step is divided by what the momentum buffer has gathered, and so leaves no look-ahead."""
    result: FragmentVersion | None = None
    encoded: memoryview | None = None
    """The result as it is broadcast, if the outer step made that on its way."""
    jobs: set[trio.CancelScope] = field(factory=set)
    recorded: trio.Event | None = None
    """Set when its pushes are on the disk; None when they are not recorded."""
    ended: bool = False

    def end(self) -> None:
        """Free the buffers and give up what has not begun."""
        self.ended = True
        self.pushes.clear()
        self.gradient = self.result = self.encoded = None
        for scope in self.jobs:
            scope.cancel()


class Rounds:
    """Every open attempt, and the worker threads that compute for them."""

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
        self._session = session
        self._facts = facts
        self._config = config
        self._heavy = heavy
        self._recorder = recorder
        self._svd = svd
        self._attempts: dict[tuple[int, int], _Attempt] = {}
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
        attempt = _Attempt(step=order.step, fragment=order.fragment, number=order.attempt)
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
        if self._recorder is not None:
            attempt.recorded = trio.Event()
            # The merge lets go of them.
            pushes = tuple((member, push.payload) for member, push in attempt.pushes.items())
            self._start(attempt, lambda: self._record(attempt, pushes))

    def discard(self, step: int, number: int) -> None:
        """Forget an attempt and all it holds."""
        attempt = self._attempts.pop((step, number), None)
        if attempt is not None:
            attempt.end()

    def merge(self, order: MergeOrdered) -> None:
        """Reduce the pushes of a sealed attempt; ``merge_finished`` or ``merge_failed`` follows."""
        attempt = self._attempts[order.step, order.attempt]
        self._start(attempt, lambda: self._merge(attempt, order))

    def commit(self, order: CommitOrdered) -> None:
        """Compute the outer step of a merged attempt; ``outer_step_applied`` follows."""
        attempt = self._attempts[order.step, order.attempt]
        self._start(attempt, lambda: self._commit(attempt, order))

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
        attempt.pushes[member] = _Push(buffer)
        return buffer

    async def push_arrived(self, member: Member, head: PushHeader, buffer: Buffer) -> None:
        """Examine a push that is there whole; ``push_received`` follows."""
        attempt = self._attempts.get((head.step, head.attempt))
        push = None if attempt is None else attempt.pushes.get(member)
        if attempt is None or push is None or push.payload is not buffer:
            return  # its attempt ended while it was uploaded, and the tape says so
        if len(buffer) <= TINY_BYTES and self._kernels_are_ready:
            await self._examine(attempt, push, member, head, here=True)
        else:
            self._start(attempt, lambda: self._examine(attempt, push, member, head, here=False))

    # Jobs.

    def _start(self, attempt: _Attempt, job: Callable[[], Awaitable[None]]) -> None:
        assert self._nursery is not None
        scope = trio.CancelScope()
        attempt.jobs.add(scope)

        async def guarded() -> None:
            with scope:
                # A cancelled task runs until it first waits, and what the job needs is freed already.
                if not attempt.ended:
                    await job()
            attempt.jobs.discard(scope)

        self._nursery.start_soon(guarded)

    async def _examine(
        self, attempt: _Attempt, push: _Push, member: Member, head: PushHeader, *, here: bool
    ) -> None:
        layout = self._session.fragment_layout(head.fragment)
        momentum = self._session.store.current(head.fragment).momentum
        dtype = self._session.require_terms().stated.dtype
        if here:
            facts = examine_push(push.payload, dtype, layout.numel, momentum, layout, threads=1)
        else:
            facts = await trio.to_thread.run_sync(
                examine_push,
                push.payload,
                dtype,
                layout.numel,
                momentum,
                layout,
                limiter=self._heavy,
                abandon_on_cancel=True,
            )
        if attempt.ended:
            return
        push.facts = facts
        await self._facts.tell(
            PushReceived(
                at=UNSTAMPED,
                learner=member.learner,
                generation=member.generation,
                fragment=head.fragment,
                step=head.step,
                attempt=head.attempt,
                payload_bytes=len(push.payload),
                digest=facts.digest,
                finite=facts.finite,
                norm=facts.norm,
                cosine_to_momentum=facts.cosine_to_momentum,
            )
        )

    async def _record(self, attempt: _Attempt, pushes: tuple[tuple[Member, Buffer], ...]) -> None:
        assert self._recorder is not None
        assert attempt.recorded is not None
        dtype = self._session.require_terms().stated.dtype
        await self._recorder.pushes(attempt.step, attempt.number, dtype, pushes)
        attempt.recorded.set()

    async def _merge(self, attempt: _Attempt, order: MergeOrdered) -> None:
        began = trio.current_time()
        attempt.normalised = is_normalised(order)
        dtype = self._session.require_terms().stated.dtype
        inputs = []
        for part in order.responders:
            push = attempt.pushes[Member(learner=part.learner, generation=part.generation)]
            inputs.append(
                PushInput(
                    payload=push.payload,
                    dtype=dtype,
                    weight=part.weight,
                    correct=part.correct,
                    facts=push.facts,
                )
            )
        layout = self._session.fragment_layout(order.fragment)
        momentum = self._session.store.current(order.fragment).momentum
        try:
            merged = await self._reduce(inputs, layout, momentum, order)
            agreement = await trio.to_thread.run_sync(
                measure_agreement,
                inputs,
                layout,
                momentum,
                merged,
                limiter=self._heavy,
                abandon_on_cancel=True,
            )
        except (MergeError, SvdPoolError) as error:
            await self._facts.tell(
                MergeFailed(at=UNSTAMPED, step=order.step, attempt=order.attempt, message=str(error))
            )
            return
        if attempt.ended:
            return
        attempt.gradient, attempt.agreement = merged, agreement
        attempt.pushes.clear()
        if attempt.recorded is not None:
            assert self._recorder is not None
            if decomposes(layout, plain_average=order.plain_average):
                await self._recorder.gradient(order.step, order.attempt, merged)
            await attempt.recorded.wait()
        await self._facts.tell(
            MergeFinished(
                at=UNSTAMPED,
                step=order.step,
                attempt=order.attempt,
                finite=merged.finite,
                gradient_norm=merged.norm,
                corrected=tuple(order.responders[index].learner for index in merged.corrected),
                seconds=round(trio.current_time() - began, 6),
                delta_cosine=None if agreement is None else agreement.delta_cosine,
                norm_ratio=None if agreement is None else agreement.norm_ratio,
            )
        )

    async def _reduce(
        self, pushes: list[PushInput], layout: FragmentLayout, momentum: Tensor, order: MergeOrdered
    ) -> MergedGradient:
        mu, scale = stock_momentum(self._config), order.momentum_scale
        if self._svd is not None and decomposes(layout, plain_average=order.plain_average):
            return await self._svd.merge(pushes, layout, momentum, mu=mu, momentum_scale=scale)
        return await trio.to_thread.run_sync(
            partial(
                merge_fragment,
                pushes,
                layout,
                momentum,
                mu=mu,
                momentum_scale=scale,
                plain_average=order.plain_average,
            ),
            limiter=self._heavy,
            abandon_on_cancel=True,
        )

    async def _commit(self, attempt: _Attempt, order: CommitOrdered) -> None:
        began = trio.current_time()
        base = self._session.store.current(order.fragment)
        encoded = offset_ratio = None
        if order.no_op:
            if attempt.recorded is not None:
                await attempt.recorded.wait()
            finite = True
            version = FragmentVersion(
                fragment=order.fragment,
                version=order.step,
                params=base.params,
                momentum=base.momentum,
                params_digest=base.params_digest,
                momentum_digest=base.momentum_digest,
                lookahead=base.lookahead,
            )
        else:
            merged = attempt.gradient
            assert merged is not None, "a commit is ordered after its merge"
            bulk = codecs.bulk_dtype(self._session.require_terms().stated.dtype)
            result = await trio.to_thread.run_sync(
                lambda: commit_fragment(
                    base.params,
                    base.momentum,
                    merged,
                    lr=order.lr,
                    mu=order.momentum,
                    sweep=order.sweep,
                    encode=bulk == "bf16",
                ),
                limiter=self._heavy,
            )
            finite, encoded = result.finite, result.encoded
            if attempt.agreement is not None:
                offset_ratio = attempt.agreement.offset_ratio(lr=order.lr, mu=order.momentum)
            version = FragmentVersion(
                fragment=order.fragment,
                version=order.step,
                params=result.params,
                momentum=result.momentum,
                params_digest=result.params_digest,
                momentum_digest=result.momentum_digest,
                lookahead=lookahead(order, normalised=attempt.normalised),
            )
        if finite:
            attempt.result, attempt.encoded = version, encoded
        await self._facts.tell(
            OuterStepApplied(
                at=UNSTAMPED,
                step=order.step,
                attempt=order.attempt,
                finite=finite,
                params_digest=version.params_digest if finite else None,
                momentum_digest=version.momentum_digest if finite else None,
                seconds=round(trio.current_time() - began, 6),
                offset_ratio=offset_ratio if finite else None,
            )
        )
