"""One connection generation: what the syncer sends goes to the arrivals, what training leaves goes out.

Nothing of a generation outlives it but the broadcasts it brought: pulls, pushes in preparation, partial
messages and a partial final cut die with the connection, because the next one starts from what the syncer
has then.

Decoding and encoding happen in worker threads, so that neither heartbeats nor training wait for them.
"""

from __future__ import annotations

import trio
from attrs import evolve, field, frozen

from yeto.errors import ProtocolError, YetoError
from yeto.learner.bells import Bell
from yeto.learner.config import LearnerConfig
from yeto.learner.exchanged import Pull
from yeto.learner.identity import Identity, InitialFragment
from yeto.learner.incoming import Incoming
from yeto.learner.last_words import PermanentFailure, SessionReleased, refusal
from yeto.learner.mailbox import Arrivals, Departures, FinalCut
from yeto.learner.push import encode_push
from yeto.link import Dialler, FrameStream, Group, LinkClosed, LinkRefused, Places, new_buffer
from yeto.wire.frames import MessageType
from yeto.wire.legality import TensorSizes
from yeto.wire.messages import (
    BroadcastHeader,
    BudgetDone,
    DataHello,
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

DIALS_AT_A_TIME = 32
"""Data streams that are opened together: half of the syncer's places for newcomers. 256 of them take eight
times two or three round trips, which is within the ten seconds that they have."""

SILENCE_SECONDS = 3600.0
"""A connection on which the syncer has said nothing for so long is dialled anew.

A dead machine or network shows within 20 s, by TCP. What does not is something between that goes on answering
for a syncer it has lost. No step and no wait of a round takes so long; if one did, the work that was to be
merged in it would be merged in the next."""

REFUSAL_SECONDS = 2.0
"""How long the reason of a failed introduction is looked for."""


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
        heard: set when the syncer has sent anything at all.
        acknowledged: set when the ACK of a saved cut was sent.
    """

    def __init__(self, shared: Shared, generation: int, control: FrameStream, sizes: TensorSizes) -> None:
        """Make the group of an open control stream; ``introduce`` says HELLO and opens the others."""
        config = shared.config
        self._shared = shared
        self._streams = [control]
        self._numels = [fragment.numel for fragment in shared.identity.layout.fragments]
        self._incoming = Incoming(generation, self._numels, config.wire_dtype)
        self._places = Places.learner(sizes)
        self._cut: FinalCut | None = None
        self.generation = generation
        self.anchored: set[int] = set()
        self.heard = trio.Event()
        self.acknowledged = trio.Event()
        self._group = Group(
            control,
            config.wan_streams,
            places=self._places,
            outbox_bytes_max=2 * (sum(sizes.bulk) + sum(sizes.delta)) + OUTBOX_SPARE_BYTES,
            on_control=self._on_control,
            admit=self._admit,
            deliver=self._deliver,
            heartbeat=self._heartbeat,
            silence_seconds=SILENCE_SECONDS,
        )

    @property
    def has_cut(self) -> bool:
        """Whether a complete final cut came over this connection."""
        return self._cut is not None

    async def introduce(self, dialler: Dialler) -> None:
        """Say who this is, and open the data streams; the caller limits the time.

        A data stream says whose it is as soon as it is open, and only some are opened at a time: the syncer
        has few places for connections that have said nothing.

        Args:
            dialler: has opened the control stream.

        Raises:
            LinkClosed: the connection ended. What was opened is for ``close`` to close.
            LinkRefused: it ended because one side does not take the other's TLS.
            PermanentFailure: it ended because the syncer refuses this learner.
        """
        shared, config = self._shared, self._shared.config
        control = self._streams[0]
        failures: list[LinkClosed] = []
        at_a_time = trio.CapacityLimiter(DIALS_AT_A_TIME)

        async def join(index: int) -> None:
            hello = DataHello(learner=config.learner_id, generation=self.generation, stream=index)
            async with at_a_time:
                try:
                    stream = await dialler.open()
                    self._streams.append(stream)
                    await stream.send(MessageType.DATA_HELLO, hello.encode())
                except LinkClosed as error:
                    failures.append(error)
                    nursery.cancel_scope.cancel()
                else:
                    self._group.attach(index, stream)

        try:
            await control.send(MessageType.HELLO, shared.identity.hello(config, self.generation))
            if shared.identity.manifest is not None:
                await control.send(MessageType.MANIFEST, shared.identity.manifest)
            async with trio.open_nursery() as nursery:
                for index in range(1, config.wan_streams + 1):
                    nursery.start_soon(join, index)
            if failures:
                raise failures[0]
        except LinkClosed:
            # A refused group is closed as a whole, and the reason may wait on the control stream.
            await self._raise_refusal()
            raise

    async def close(self) -> None:
        """Close every stream, also while cancelled, when closing one would end in ``Cancelled``."""
        with trio.CancelScope(shield=True):
            for stream in self._streams:
                await stream.close()

    async def _raise_refusal(self) -> None:
        """Raise what the syncer says on the control stream, if it says ERROR or does not take our TLS."""
        control = self._streams[0]
        with trio.move_on_after(REFUSAL_SECONDS):
            try:
                header = await control.read_header()
                self._places.control.check(header)
                if header.type is MessageType.ERROR:
                    text = await control.read_exact(header.length, "an ERROR")
                    raise refusal(text)
            except LinkRefused:
                raise
            except (LinkClosed, ProtocolError):
                pass  # it says nothing, or nothing that makes sense; our own reason stands then

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
            await self.close()
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
        self.heard.set()
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
                self._offer(self._incoming.cut_by(FinalManifest.decode(payload)))
            case MessageType.ERROR:
                raise refusal(payload)
            case MessageType.SHUTDOWN:
                raise SessionReleased("the syncer ended the session")
            case _:
                raise ProtocolError(f"{kind.name} is not a control message of the syncer")

    async def _admit(self, kind: MessageType, head: TensorHead, tensor_bytes: int) -> Buffer | None:
        self.heard.set()
        if kind is MessageType.BCAST_FRAGMENT and self._shared.departures.saved is not None:
            # The final cut was the last word.
            return None
        return new_buffer(tensor_bytes)

    async def _deliver(self, kind: MessageType, head: TensorHead, buffer: Buffer) -> None:
        if isinstance(head, BroadcastHeader):
            broadcast = await trio.to_thread.run_sync(
                self._incoming.broadcast, head, buffer, limiter=self._shared.workers
            )
            try:
                self._shared.arrivals.put_broadcast(broadcast)
            except ProtocolError as error:
                raise PermanentFailure(str(error)) from error
            self.anchored.add(head.fragment)
        elif isinstance(head, FinalFragmentHeader):
            part = await trio.to_thread.run_sync(
                self._incoming.final, head, buffer, limiter=self._shared.workers
            )
            self._offer(self._incoming.cut_with(head.fragment, part))

    def _offer(self, cut: FinalCut | None) -> None:
        """Hand over the final cut, if there is one now."""
        if cut is not None:
            self._cut = evolve(cut, values=())
            self._shared.arrivals.put_final(cut)
