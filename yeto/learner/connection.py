"""One connection generation: what the syncer sends goes to the arrivals, what training leaves goes out.

Nothing of a generation outlives it but the broadcasts it brought: pulls, pushes in preparation, partial
messages and a partial final cut die with the connection, because the next one starts from what the syncer
has then.

Decoding and encoding happen in worker threads, so that neither heartbeats nor training wait for them.
"""

from __future__ import annotations

import contextlib

import trio
from attrs import evolve, field, frozen

from yeto.errors import ProtocolError, YetoError
from yeto.learner.anchors import Broadcast, Pull, Values
from yeto.learner.bells import Bell
from yeto.learner.config import LearnerConfig
from yeto.learner.fragments import is_finite
from yeto.learner.identity import Identity, InitialFragment
from yeto.learner.mailbox import Arrivals, Departures, FinalCut
from yeto.learner.push import encode_push
from yeto.link import FrameStream, Group, LinkClosed, Places, new_buffer
from yeto.wire import codecs, f32
from yeto.wire.auth import REFUSAL
from yeto.wire.digest import digest
from yeto.wire.frames import MessageType
from yeto.wire.legality import TensorSizes
from yeto.wire.messages import (
    BroadcastHeader,
    BudgetDone,
    DataHello,
    ErrorMessage,
    FinalAck,
    FinalFragmentHeader,
    FinalManifest,
    Heartbeat,
    InitHeader,
    PullRequest,
    TensorHead,
)
from yeto.wire.striping import Buffer

WORKERS = 2
"""Threads for decoding and encoding: one each way, and no more taken from training."""

OUTBOX_SPARE_BYTES = 1024 * 1024
"""Room in the outbox for heads, beside every tensor twice."""

REFUSAL_SECONDS = 2.0
"""How long the reason of a failed introduction is looked for."""


class PermanentFailure(YetoError):
    """The syncer said ERROR, or contradicted itself: nothing that a new connection would mend."""


class SessionReleased(YetoError):
    """The syncer said SHUTDOWN: this learner's part is done."""


@frozen(kw_only=True, eq=False)
class Shared:
    """What all connections of a learner have in common."""

    config: LearnerConfig
    identity: Identity
    arrivals: Arrivals
    departures: Departures
    pushes_bell: Bell
    """Rung when a push waits to be encoded."""
    news_bell: Bell
    """Rung when a step, the used-up budget or a saved cut is to be reported."""
    workers: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(WORKERS))


class Connection:
    """A generation's group of streams, from HELLO to its end.

    Attributes:
        generation: drawn for this dial.
        anchored: fragments of which the syncer has sent a broadcast.
        was_heard: whether the syncer sent anything at all.
        acknowledged: set when the ACK of a saved cut was sent.
    """

    def __init__(
        self, shared: Shared, generation: int, streams: tuple[FrameStream, ...], sizes: TensorSizes
    ) -> None:
        """Make the group of dialled streams; ``introduce`` says HELLO on them."""
        config = shared.config
        self._shared = shared
        self._streams = streams
        self._numels = [fragment.numel for fragment in shared.identity.layout.fragments]
        self._bulk_codec = codecs.by_name(codecs.bulk_dtype(config.wire_dtype))
        self._places = Places.learner(sizes)
        self._manifest: FinalManifest | None = None
        self._final: dict[int, tuple[int, str, Values]] = {}
        self._cut: FinalCut | None = None
        self.generation = generation
        self.anchored: set[int] = set()
        self.was_heard = False
        self.acknowledged = trio.Event()
        self._group = Group(
            streams[0],
            config.wan_streams,
            places=self._places,
            outbox_bytes_max=2 * (sum(sizes.bulk) + sum(sizes.delta)) + OUTBOX_SPARE_BYTES,
            on_control=self._on_control,
            admit=self._admit,
            deliver=self._deliver,
            heartbeat=self._heartbeat,
        )
        for index, stream in enumerate(streams[1:], start=1):
            self._group.attach(index, stream)

    @property
    def has_cut(self) -> bool:
        """Whether a complete final cut came over this connection."""
        return self._cut is not None

    async def introduce(self) -> None:
        """Say who this is on every stream; the caller limits the time.

        Raises:
            LinkClosed: the connection ended.
            PermanentFailure: it ended because the syncer refuses this learner.
        """
        shared, config = self._shared, self._shared.config
        control, *data = self._streams
        try:
            await control.send(MessageType.HELLO, shared.identity.hello(config, self.generation))
            if shared.identity.manifest is not None:
                await control.send(MessageType.MANIFEST, shared.identity.manifest)
            for index, stream in enumerate(data, start=1):
                hello = DataHello(learner=config.learner_id, generation=self.generation, stream=index)
                await stream.send(MessageType.DATA_HELLO, hello.encode())
        except LinkClosed:
            # A refused group is closed as a whole, and the reason may wait on the control stream.
            await self._raise_refusal()
            raise

    async def _raise_refusal(self) -> None:
        """Raise what the syncer says on the control stream, if it says ERROR."""
        control = self._streams[0]
        with trio.move_on_after(REFUSAL_SECONDS), contextlib.suppress(LinkClosed, ProtocolError):
            header = await control.read_header()
            self._places.control.check(header)
            if header.type is MessageType.ERROR:
                text = await control.read_exact(header.length, "an ERROR")
                raise refusal(text)

    async def run(self, initial: tuple[InitialFragment, ...]) -> YetoError:
        """Exchange until the connection ends.

        Args:
            initial: fragments to send as INIT, in order; empty when the syncer has them.

        Returns:
            Why it ended: ``LinkClosed`` or ``ProtocolError`` (dial again), ``PermanentFailure`` or
            ``SessionReleased`` (do not).
        """
        self._shared.arrivals.begin_generation(self.generation)
        self._shared.departures.begin_generation()
        for fragment, init in enumerate(initial):
            self._group.outbox.put(InitHeader(fragment=fragment), memoryview(init.payload), order=(0,))
        end: YetoError = LinkClosed("the connection was closed on this side")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_pushes)
                nursery.start_soon(self._send_news)
                try:
                    await self._group.run()
                except YetoError as error:
                    end = error
                nursery.cancel_scope.cancel()
        finally:
            await close_all(self._streams)
        return end

    # -- outwards -------------------------------------------------------------------------------------

    def _heartbeat(self) -> bytes:
        return Heartbeat(
            learner=self._shared.config.learner_id, local_step=self._shared.departures.local_step
        ).encode()

    async def _send_pushes(self) -> None:
        shared, config = self._shared, self._shared.config
        while True:
            while (push := shared.departures.take_push()) is not None:
                pull = push.answer.pull
                if pull.generation != self.generation:
                    continue
                head, payload = await trio.to_thread.run_sync(
                    encode_push, push, config.learner_id, config.wire_dtype, limiter=shared.workers
                )
                order = (pull.step, pull.attempt, push.answer.base_version)
                self._group.outbox.put(head, memoryview(payload), order=order)
            await shared.pushes_bell.wait()

    async def _send_news(self) -> None:
        """Report what cannot wait for the next heartbeat."""
        departures, outbox = self._shared.departures, self._group.outbox
        budget_reported = False
        while True:
            if departures.budget_steps is not None and not budget_reported:
                budget_reported = True
                done = BudgetDone(local_steps=departures.budget_steps)
                outbox.put_control(MessageType.BUDGET_DONE, done.encode())
            saved = departures.saved
            if saved is not None and saved.is_same(self._cut) and not self.acknowledged.is_set():
                outbox.put_control(MessageType.FINAL_ACK, FinalAck(step=saved.step).encode())
                self.acknowledged.set()
            await self._shared.news_bell.wait()
            outbox.put_control(MessageType.HEARTBEAT, self._heartbeat(), replaces="heartbeat")

    # -- inwards --------------------------------------------------------------------------------------

    async def _on_control(self, kind: MessageType, payload: bytes) -> None:
        self.was_heard = True
        match kind:
            case MessageType.PULL_REQ:
                pull = PullRequest.decode(payload)
                if pull.fragment >= len(self._numels):
                    raise ProtocolError(f"PULL_REQ: there is no fragment {pull.fragment}")
                self._shared.arrivals.put_pull(
                    Pull(
                        generation=self.generation,
                        fragment=pull.fragment,
                        step=pull.step,
                        attempt=pull.attempt,
                    )
                )
            case MessageType.FINAL_MANIFEST:
                self._manifest = FinalManifest.decode(payload)
                self._complete_cut()
            case MessageType.ERROR:
                raise refusal(payload)
            case MessageType.SHUTDOWN:
                raise SessionReleased("the syncer ended the session")
            case _:
                raise ProtocolError(f"{kind.name} is not a control message of the syncer")

    async def _admit(self, kind: MessageType, head: TensorHead, tensor_bytes: int) -> Buffer | None:
        self.was_heard = True
        if kind is MessageType.BCAST_FRAGMENT and self._shared.departures.saved is not None:
            # The final cut was the last word.
            return None
        return new_buffer(tensor_bytes)

    async def _deliver(self, kind: MessageType, head: TensorHead, buffer: Buffer) -> None:
        if isinstance(head, BroadcastHeader):
            broadcast = await trio.to_thread.run_sync(
                self._decode_broadcast, head, buffer, limiter=self._shared.workers
            )
            try:
                self._shared.arrivals.put_broadcast(broadcast)
            except ProtocolError as error:
                raise PermanentFailure(str(error)) from error
            self.anchored.add(head.fragment)
        elif isinstance(head, FinalFragmentHeader):
            self._final[head.fragment] = await trio.to_thread.run_sync(
                self._decode_final, head, buffer, limiter=self._shared.workers
            )
            self._complete_cut()

    def _decode_broadcast(self, head: BroadcastHeader, buffer: Buffer) -> Broadcast:
        values = self._bulk_codec.decode(buffer, self._numels[head.fragment])
        _require_finite(values, "BCAST_FRAGMENT", head.fragment, head.version)
        return Broadcast(
            generation=self.generation,
            fragment=head.fragment,
            version=head.version,
            digest=digest(buffer),
            values=values,
        )

    def _decode_final(self, head: FinalFragmentHeader, buffer: Buffer) -> tuple[int, str, Values]:
        values = f32.decode(buffer, self._numels[head.fragment])
        _require_finite(values, "FINAL_FRAGMENT", head.fragment, head.version)
        return head.version, digest(buffer), values

    def _complete_cut(self) -> None:
        """Hand over the final cut once the manifest and every fragment of its version are here."""
        manifest = self._manifest
        if manifest is None:
            return
        fragments = [self._final.get(fragment) for fragment in range(len(self._numels))]
        parts = [part for part in fragments if part is not None]
        if tuple(version for version, _, _ in parts) != manifest.versions:
            return
        cut = FinalCut(
            step=manifest.step,
            versions=manifest.versions,
            digests=tuple(one for _, one, _ in parts),
            values=tuple(values for _, _, values in parts),
        )
        self._manifest = None
        self._final.clear()
        self._cut = evolve(cut, values=())
        self._shared.arrivals.put_final(cut)


def refusal(payload: bytes) -> PermanentFailure:
    """Return what an ERROR means for this learner."""
    text = ErrorMessage.decode(payload).text
    if text == REFUSAL:
        # The protocol fixes the words, so that they tell a stranger nothing; our user needs the remedy.
        text += "; --auth-key-file must hold the syncer's key on every learner"
    return PermanentFailure(f"refused by the syncer: {text}")


async def close_all(streams: tuple[FrameStream, ...]) -> None:
    """Close every stream of a group, also while cancelled, when closing one would end in ``Cancelled``."""
    with trio.CancelScope(shield=True):
        for stream in streams:
            await stream.close()


def _require_finite(values: Values, what: str, fragment: int, version: int) -> None:
    """Values that are no numbers never reach the weights, whoever sent them."""
    if not is_finite(values):
        raise ProtocolError(
            f"{what}: fragment {fragment}, version {version} holds values that are not finite"
        )
