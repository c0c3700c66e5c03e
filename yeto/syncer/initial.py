"""The first values of a session, and the manifest that says what they are.

Both come from learners, before there is a round. The initial values are learner 0's: a set belongs to the
connection whose HELLO opened the session, each fragment is taken once, and what is left of a set whose
connection ended is thrown away with the session it opened.

A value is decoded and examined in a worker thread and then *staged*: it gets into the store only when the
coordinator has taken the event that reports it.
"""

from __future__ import annotations

from typing import NoReturn

import torch
import trio

from yeto.core.events import FragmentInitialised
from yeto.core.values import Member
from yeto.link import new_buffer
from yeto.merge import is_finite, tensor_digest
from yeto.state import FragmentVersion
from yeto.syncer.pump import UNSTAMPED
from yeto.syncer.receivers import Facts
from yeto.syncer.session import Session
from yeto.wire import codecs
from yeto.wire.contract import TrainingManifest
from yeto.wire.messages import InitHeader
from yeto.wire.striping import Buffer


class Initial:
    """Takes initial values and training manifests from the groups."""

    def __init__(self, *, session: Session, facts: Facts, heavy: trio.CapacityLimiter) -> None:
        """Bring values into ``session`` and tell the pump of each."""
        self._session = session
        self._facts = facts
        self._heavy = heavy
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Hold the nursery that the decoding runs in."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()
        raise AssertionError("a nursery that sleeps for ever was left")

    def init_buffer(self, member: Member, head: InitHeader, size: int) -> Buffer | None:
        """Return a buffer for an initial value, or None when it is not wanted."""
        return new_buffer(size) if self._session.expect(member, head.fragment) else None

    def init_arrived(self, member: Member, head: InitHeader, buffer: Buffer) -> None:
        """Decode an initial value; ``fragment_initialised`` follows."""
        assert self._nursery is not None
        self._nursery.start_soon(self._decode, member, head.fragment, buffer)

    def waits_for(self, member: Member) -> bool:
        """Whether initial values are wanted of this member, and nothing of them has come."""
        return self._session.waits_for(member)

    def manifest_arrived(self, manifest: TrainingManifest) -> None:
        """Keep it if it is the session's."""
        self._session.offer_manifest(manifest)

    async def _decode(self, member: Member, fragment: int, buffer: Buffer) -> None:
        if self._session.opener != member:
            return  # its session was released while it was uploaded
        terms = self._session.require_terms()
        dtype, numel = codecs.bulk_dtype(terms.stated.dtype), terms.layout.fragments[fragment].numel
        version, finite = await trio.to_thread.run_sync(
            _initial_version, fragment, buffer, dtype, numel, limiter=self._heavy, abandon_on_cancel=True
        )
        self._session.stage(member, version)
        await self._facts.tell(
            FragmentInitialised(
                at=UNSTAMPED,
                learner=member.learner,
                generation=member.generation,
                fragment=fragment,
                digest=version.params_digest,
                finite=finite,
            )
        )


def _initial_version(fragment: int, data: Buffer, dtype: str, numel: int) -> tuple[FragmentVersion, bool]:
    """Return version 0 of a fragment with an empty momentum, and whether it is finite."""
    params = torch.from_numpy(codecs.by_name(dtype).decode(data, numel))
    momentum = torch.zeros(numel, dtype=torch.float32)
    version = FragmentVersion(
        fragment=fragment,
        version=0,
        params=params,
        momentum=momentum,
        params_digest=tensor_digest(params),
        momentum_digest=tensor_digest(momentum),
        lookahead=0.0,
    )
    return version, is_finite(params)
