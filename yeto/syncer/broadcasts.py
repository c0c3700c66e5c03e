"""Sending what is committed: each fragment version is encoded once, whoever is to have it.

As a rule the outer step encodes what it makes, in the same pass; the encoding waits here until the version is
published. What no outer step made (initial values, a checkpoint's) is encoded when somebody first wants it.

The coordinator orders versions, not bytes. An order is resolved at once to the immutable version it names,
which is the store's current one or the one broadcast before it (a commit may wait for its checkpoint while
a learner joins). It is carried out when its record is durable: one task encodes in a worker thread and puts
the shared bytes into the outbox of every learner that wants exactly that version.

What is still to be encoded is kept per learner and fragment, newest wins. So it is bounded by the learners
that are there times the fragments, however often they reconnect and however slow encoding is.
"""

from __future__ import annotations

from typing import NoReturn

import trio

from yeto.core.decisions import FinalCutOrdered
from yeto.core.values import FragmentVersionRef, Member
from yeto.state import FragmentVersion
from yeto.syncer.pump import Act
from yeto.syncer.registry import Registry
from yeto.syncer.session import Session
from yeto.wire import codecs

ENCODINGS_PER_FRAGMENT = 2
"""Encodings kept: the newest two, besides the one that is published and may be asked for once more."""


class Broadcasts:
    """Encodes fragment versions and hands them to the groups."""

    def __init__(self, *, session: Session, registry: Registry, heavy: trio.CapacityLimiter) -> None:
        """Send values of ``session`` to the groups in ``registry``."""
        self._session = session
        self._registry = registry
        self._heavy = heavy
        self._published: dict[int, FragmentVersion] = {}
        self._encoded: dict[int, dict[int, memoryview]] = {}
        self._wanted: dict[Member, dict[int, FragmentVersion]] = {}
        self._work = trio.Event()

    def publish(self, refs: tuple[FragmentVersionRef, ...], to: tuple[Member, ...]) -> Act:
        """Resolve an order to send fragments; return what carries it out."""
        versions = tuple(self._resolve(ref) for ref in refs)
        for version in versions:
            self._published[version.fragment] = version

        async def act() -> None:
            for member in to:
                wanted = self._wanted.setdefault(member, {})
                for version in versions:
                    wanted[version.fragment] = version
            self._work.set()

        return act

    def keep(self, version: FragmentVersion, encoded: memoryview) -> None:
        """Take the encoding of a version that was just committed."""
        kept = self._encoded.setdefault(version.fragment, {})
        kept[version.version] = encoded
        published = self._published.get(version.fragment)
        for old in sorted(kept)[:-ENCODINGS_PER_FRAGMENT]:
            if published is None or old != published.version:  # that one may be asked for once more
                del kept[old]

    def repeat(self, member: Member, fragment: int, step: int, attempt: int) -> None:
        """Send a fragment once more, then the same pull: the learner missed a broadcast.

        Its newest published version is encoded already, or is about to be sent to this learner anyway.
        """
        group = self._registry.find(member)
        if group is None:
            return
        version = self._published[fragment]
        tensor = self._encoded.get(fragment, {}).get(version.version)
        if tensor is not None:
            group.broadcast(fragment, version.version, tensor, again=True)
        group.pull(fragment, step, attempt)

    def final_cut(self, order: FinalCutOrdered) -> Act:
        """Resolve the final cut; return what sends it."""
        versions = tuple(self._session.store.current(p) for p in range(len(order.versions)))
        assert tuple(version.version for version in versions) == order.versions

        async def act() -> None:
            cut = tuple((version.version, _f32_bytes(version)) for version in versions)
            for member in order.to:
                group = self._registry.find(member)
                if group is not None:
                    group.final_cut(order.step, cut)

        return act

    async def run(self) -> NoReturn:
        """Encode and hand over what is wanted, in the order in which it was ordered."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while self._wanted:
                await self._serve_next()

    async def _serve_next(self) -> None:
        """Encode the version that has been wanted longest, and give it to everybody who wants it."""
        first = next(iter(self._wanted.values()))
        version = next(iter(first.values()))
        tensor = await self._encode(version)
        for member in list(self._wanted):
            wanted = self._wanted[member]
            group = self._registry.find(member)
            if group is None:
                wanted.clear()
            elif wanted.get(version.fragment) is version:
                del wanted[version.fragment]
                group.broadcast(version.fragment, version.version, tensor)
            if not wanted:
                del self._wanted[member]

    async def _encode(self, version: FragmentVersion) -> memoryview:
        kept = self._encoded.setdefault(version.fragment, {})
        tensor = kept.get(version.version)
        if tensor is None:
            dtype = codecs.bulk_dtype(self._session.require_terms().stated.dtype)
            if dtype == "f32":
                tensor = _f32_bytes(version)
            else:
                codec = codecs.by_name(dtype)
                data = await trio.to_thread.run_sync(
                    lambda: codec.encode(version.params.numpy()), limiter=self._heavy, abandon_on_cancel=True
                )
                tensor = memoryview(data)
            self.keep(version, tensor)
        else:
            await trio.lowlevel.checkpoint()
        return tensor

    def _resolve(self, ref: FragmentVersionRef) -> FragmentVersion:
        current = self._session.store.current(ref.fragment)
        version = current if current.version == ref.version else self._published[ref.fragment]
        assert version.version == ref.version, f"fragment {ref.fragment} version {ref.version} is gone"
        return version


def _f32_bytes(version: FragmentVersion) -> memoryview:
    """Return the parameters as little-endian f32, without copying them."""
    return version.params.numpy().data.cast("B")
