"""What is computed for an attempt: the examination of a push, the merge, the outer step.

All arithmetic runs in worker threads, a bounded number at a time, and every job ends with the one fact that
the coordinator waits for, unless its attempt has ended meanwhile. The outer step makes a *new* fragment
version and leaves it with its attempt.

A run that is recorded hands the pushes of a sealed attempt to the recorder, which writes them while they are
merged; the merge is told when both are done.
"""

from __future__ import annotations

from functools import partial

import trio
from attrs import evolve
from torch import Tensor

from yeto.core import CoreConfig
from yeto.core.decisions import CommitOrdered, MergeOrdered
from yeto.core.events import MergeFailed, MergeFinished, OuterStepApplied, PushReceived
from yeto.core.outer import is_normalised, lookahead, stock_momentum
from yeto.core.values import Member
from yeto.errors import MergeError, SvdPoolError
from yeto.merge import (
    MergedGradient,
    PushInput,
    commit_fragment,
    examine_push,
    measure_agreement,
    merge_fragment,
)
from yeto.merge.fragment import decomposes
from yeto.state import FragmentVersion
from yeto.syncer.attempts import Attempt, Push
from yeto.syncer.pump import UNSTAMPED
from yeto.syncer.receivers import Facts
from yeto.syncer.recorder import Recorder
from yeto.syncer.session import Session
from yeto.syncer.svd_merges import SvdMerges
from yeto.wire import codecs
from yeto.wire.layout import FragmentLayout
from yeto.wire.messages import PushHeader
from yeto.wire.striping import Buffer


class Jobs:
    """Computes for the attempts of one session; results become events told to ``facts``."""

    def __init__(
        self,
        *,
        session: Session,
        facts: Facts,
        config: CoreConfig,
        heavy: trio.CapacityLimiter,
        recorder: Recorder | None,
        svd: SvdMerges | None,
    ) -> None:
        """Take what ``Rounds`` was given."""
        self._session = session
        self._facts = facts
        self._config = config
        self._heavy = heavy
        self._recorder = recorder
        self._svd = svd

    async def examine(
        self, attempt: Attempt, push: Push, member: Member, head: PushHeader, *, here: bool = False
    ) -> None:
        """Look through a push that is there whole; ``push_received`` follows.

        Args:
            attempt: that it answers.
            push: its bytes; gets what was found in them.
            member: who sent it.
            head: what it stated.
            here: do it in this thread, where everybody waits for it.
        """
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

    async def record(self, attempt: Attempt, pushes: tuple[tuple[Member, Buffer], ...]) -> None:
        """Have what an attempt was sealed with written to the recording."""
        assert self._recorder is not None
        assert attempt.recorded is not None
        dtype = self._session.require_terms().stated.dtype
        await self._recorder.pushes(attempt.step, attempt.number, dtype, pushes)
        attempt.recorded.set()

    async def merge(self, attempt: Attempt, order: MergeOrdered) -> None:
        """Reduce the pushes of a sealed attempt; ``merge_finished`` or ``merge_failed`` follows."""
        began = trio.current_time()
        attempt.normalised = is_normalised(order)
        inputs = self._inputs(attempt, order)
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

    def _inputs(self, attempt: Attempt, order: MergeOrdered) -> list[PushInput]:
        """Return the pushes of the ordered responders, in their order, as the merge takes them."""
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
        return inputs

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

    async def commit(self, attempt: Attempt, order: CommitOrdered) -> None:
        """Compute the next version of the fragment; ``outer_step_applied`` follows."""
        began = trio.current_time()
        base = self._session.store.current(order.fragment)
        offset_ratio = None
        if order.no_op:
            if attempt.recorded is not None:
                await attempt.recorded.wait()
            attempt.result = evolve(base, version=order.step)
        else:
            attempt.result, attempt.encoded = await self._next_version(attempt, order, base)
        version = attempt.result
        if version is not None and attempt.agreement is not None:
            offset_ratio = attempt.agreement.offset_ratio(lr=order.lr, mu=order.momentum)
        await self._facts.tell(
            OuterStepApplied(
                at=UNSTAMPED,
                step=order.step,
                attempt=order.attempt,
                finite=version is not None,
                params_digest=None if version is None else version.params_digest,
                momentum_digest=None if version is None else version.momentum_digest,
                seconds=round(trio.current_time() - began, 6),
                offset_ratio=offset_ratio,
            )
        )

    async def _next_version(
        self, attempt: Attempt, order: CommitOrdered, base: FragmentVersion
    ) -> tuple[FragmentVersion | None, memoryview | None]:
        """Return what the outer step makes of a fragment, with its encoding for the broadcast if it made one.

        Returns:
            Twice None when it would not be finite.
        """
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
        if not result.finite:
            return None, None
        version = FragmentVersion(
            fragment=order.fragment,
            version=order.step,
            params=result.params,
            momentum=result.momentum,
            params_digest=result.params_digest,
            momentum_digest=result.momentum_digest,
            lookahead=lookahead(order, normalised=attempt.normalised),
        )
        return version, result.encoded
