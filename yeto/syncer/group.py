"""One learner's connection group as the syncer sees it: what arrives becomes events, orders become frames.

Identity comes from the HELLO and from nowhere else: a message that names another learner ends the group.
Sizes come from the session, never from the peer: a push is offered to the coordinator by its header, and
only an admitted one gets a buffer, which belongs to the attempt that wants it (`yeto.syncer.rounds`). What
says nothing new is not told, and what is told is metered (`yeto.syncer.allowances`).

Worst memory for one learner: one upload of each open attempt, and whatever it has left unfinished of ended
ones (at most 64 messages, none above the largest fragment), 32 MiB of slices that overtook their first, and
its outbox, which holds references to bytes that all outboxes share.

Nothing a peer does here is an error of the syncer. Whatever ends the group becomes the reason of one
``learner_left``, and the run goes on.
"""

from __future__ import annotations

import logging

import trio

from yeto.core.decisions import PushAdmitted
from yeto.core.events import BudgetReported, FinalAckReceived, Heartbeat, PushOffered, UploadProgress
from yeto.core.values import Member
from yeto.errors import ProtocolError
from yeto.link import FrameStream, Group, LinkClosed, Places, Traffic
from yeto.syncer.allowances import PUSHES_A_PULL, Allowance, Allowances
from yeto.syncer.config import Bounds
from yeto.syncer.pump import UNSTAMPED
from yeto.syncer.receivers import Receivers
from yeto.syncer.words import in_one_line
from yeto.wire import messages
from yeto.wire.contract import TrainingManifest
from yeto.wire.frames import MessageType
from yeto.wire.hello import Hello
from yeto.wire.legality import TensorSizes
from yeto.wire.messages import (
    BroadcastHeader,
    BudgetDone,
    ErrorMessage,
    FinalAck,
    FinalFragmentHeader,
    FinalManifest,
    InitHeader,
    PullRequest,
    PushHeader,
    Shutdown,
    TensorHead,
    check_bounds,
    format_generation,
)
from yeto.wire.striping import Buffer

log = logging.getLogger("yeto.syncer")


def outbox_bytes_max(sizes: TensorSizes) -> int:
    """Return the bound of what waits for one learner.

    Every fragment may wait once and be under way once, and the final cut may follow: a learner that reads
    at all never reaches this. It is a bound on references; the bytes are shared by all outboxes.
    """
    heads = 64 * 1024
    return 2 * sum(sizes.bulk) + sum(sizes.final) + heads


class LearnerGroup:
    """One generation of one learner, from its HELLO to its end."""

    def __init__(
        self,
        control: FrameStream,
        hello: Hello,
        *,
        receivers: Receivers,
        allowances: Allowances,
        bounds: Bounds,
        traffic: Traffic,
    ) -> None:
        """Make the group of a HELLO that was well formed and authentic; its bytes count in ``traffic``."""
        self.hello = hello
        self.control = control
        self.member = Member(learner=hello.learner, generation=format_generation(hello.generation))
        self.address = control.peer
        self.manifest: TrainingManifest | None = None
        self.ended = trio.Event()
        """Set when the group is over and its sockets are closed."""
        self.refusal: str | None = None
        """Why this side ended it; None when the peer or the network did."""
        self.finishing = False
        """Whether its last frame is on its way and it ends when the learner has read it."""
        self._facts = receivers.facts
        self._pushes = receivers.pushes
        self._first_values = receivers.first_values
        self._bounds = bounds
        self._allowances = allowances
        # What was told last; the same once more is no news. Nor is step 0: until its first step a learner
        # waits for weights or compiles, and a pace that began there would hold back everybody's next round.
        self._local_step = 0
        self._acknowledged: int | None = None
        self._budget: int | None = None
        self._resends = 0
        self._first_beat_at: float | None = None
        sizes = TensorSizes.of(hello.layout.numels, hello.dtype)
        self._link = Group(
            control,
            hello.num_streams,
            places=Places.syncer(sizes, learner=hello.learner),
            outbox_bytes_max=outbox_bytes_max(sizes),
            on_control=self._on_control,
            admit=self._admit,
            deliver=self._deliver,
            silence_seconds=bounds.silence_seconds,
            traffic=traffic,
        )

    @property
    def name(self) -> str:
        """How the log calls it."""
        return f"learner {self.member.learner} ({self.address})"

    def attach(self, index: int, stream: FrameStream) -> None:
        """Add a data stream; see ``yeto.link.Group.attach``."""
        self._link.attach(index, stream)

    async def completed(self) -> None:
        """Wait until all data streams are attached."""
        await self._link.completed()

    async def run(self) -> str:
        """Serve the group until it ends; return why it did."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_progress)
            try:
                await self._link.run()
                reason = self.refusal or "released"
            except ProtocolError as error:
                reason = in_one_line(str(error))
                log.warning("%s broke the protocol: %s; connection closed", self.name, reason)
            except LinkClosed as error:
                reason = self.refusal or str(error)
            nursery.cancel_scope.cancel()
        return reason

    # Orders. None of them waits: everything goes into the outbox.

    def pull(self, fragment: int, step: int, attempt: int) -> None:
        """Ask for a push. Of the pulls of one fragment that wait, only the newest is sent."""
        request = PullRequest(fragment=fragment, step=step, attempt=attempt)
        self._allowances.pushes.grant(PUSHES_A_PULL)
        self._link.outbox.put_control(request.TYPE, request.encode(), replaces=fragment)

    def broadcast(self, fragment: int, version: int, tensor: memoryview, *, again: bool = False) -> None:
        """Send a fragment at a version; with ``again`` although it was sent before."""
        if again:
            self._resends += 1
        head = BroadcastHeader(fragment=fragment, version=version)
        self._link.outbox.put(head, tensor, order=(version, self._resends))

    def final_cut(self, step: int, cut: tuple[tuple[int, memoryview], ...]) -> None:
        """Send the manifest of the final cut and every fragment as f32.

        Args:
            step: Global step of the cut.
            cut: Version and f32 bytes of fragment 0, 1, ...
        """
        manifest = FinalManifest(step=step, versions=tuple(version for version, _ in cut))
        self._link.outbox.put_control(manifest.TYPE, manifest.encode())
        for fragment, (version, tensor) in enumerate(cut):
            head = FinalFragmentHeader(fragment=fragment, version=version)
            self._link.outbox.put(head, tensor, order=(version,))

    def release(self) -> None:
        """Tell the learner that its part is done, and end in order."""
        self.finishing = True
        self._link.outbox.put_control(Shutdown.TYPE, Shutdown().encode())
        self._link.finish()

    def refuse(self, text: str, *, permanent: bool) -> None:
        """End the group; a permanent refusal says why in an ERROR, after which a client does not retry."""
        self.refusal = text
        if permanent:
            self.finishing = True
            self._link.outbox.put_control(ErrorMessage.TYPE, ErrorMessage(text=text).encode())
            self._link.finish()
        else:
            self._link.outbox.fail(LinkClosed(text))

    # Arrivals.

    async def _on_control(self, kind: MessageType, payload: bytes) -> None:
        learner, generation = self.member.learner, self.member.generation
        self._meter(self._allowances.control, f"{kind.name}: more control messages")
        match kind:
            case MessageType.HEARTBEAT:
                beat = messages.Heartbeat.decode(payload)
                check_bounds(beat, learner=learner)
                self._require_initial(beat.local_step)
                if beat.local_step > self._local_step and self._allowances.heartbeats.take():
                    self._local_step = beat.local_step
                    await self._facts.tell(
                        Heartbeat(
                            at=UNSTAMPED, learner=learner, generation=generation, local_step=beat.local_step
                        )
                    )
            case MessageType.FINAL_ACK:
                step = FinalAck.decode(payload).step
                if step != self._acknowledged:
                    self._acknowledged = step
                    await self._facts.tell(
                        FinalAckReceived(at=UNSTAMPED, learner=learner, generation=generation, step=step)
                    )
            case MessageType.BUDGET_DONE:
                steps = BudgetDone.decode(payload).local_steps
                if steps != self._budget:
                    self._budget = steps
                    await self._facts.tell(
                        BudgetReported(
                            at=UNSTAMPED, learner=learner, generation=generation, local_steps=steps
                        )
                    )
            case MessageType.MANIFEST:
                if self.manifest is not None:
                    raise ProtocolError("MANIFEST: it was sent before; one belongs behind a HELLO")
                self.manifest = await read_manifest(self.hello, payload)
                self._first_values.manifest_arrived(self.manifest)
            case _:
                raise ProtocolError(f"{kind.name} is not a control message")

    async def _admit(self, kind: MessageType, head: TensorHead, size: int) -> Buffer | None:
        check_bounds(head, learner=self.member.learner)
        if isinstance(head, InitHeader):
            return self._first_values.init_buffer(self.member, head, size)
        assert isinstance(head, PushHeader), f"{kind.name} is not legal towards a syncer"
        self._meter(self._allowances.pushes, f"{kind.name}: more pushes than were asked for")
        self._local_step = max(self._local_step, head.local_step)
        decisions = await self._facts.ask(
            PushOffered(
                at=UNSTAMPED,
                learner=self.member.learner,
                generation=self.member.generation,
                fragment=head.fragment,
                step=head.step,
                attempt=head.attempt,
                base_version=head.base_version,
                local_step=head.local_step,
                c_steps=head.c_steps,
                c_tokens=head.c_tokens,
                payload_bytes=size,
            )
        )
        if any(isinstance(decision, PushAdmitted) for decision in decisions):
            return self._pushes.push_buffer(self.member, head, size)
        return None

    def _require_initial(self, local_step: int) -> None:
        """Refuse a learner 0 that is still in another run: it sent its initial values there, once for all.

        Only a learner that is connected to another syncer than before can have trained and send none. Without
        this both would wait in silence. Initial values go out before the first heartbeat.
        """
        now = trio.current_time()
        if self._first_beat_at is None:
            self._first_beat_at = now
        is_late = now - self._first_beat_at >= self._bounds.initial_seconds
        if local_step > 0 and is_late and not self.finishing and self._first_values.waits_for(self.member):
            self.refuse(
                f"this syncer is at the beginning of a run, and learner {self.member.learner}, at local "
                f"step {local_step} of another, sends no initial values; to begin with it, start it again; "
                "to go on with its run, start the syncer of that with --resume",
                permanent=True,
            )

    def _meter(self, allowance: Allowance, what: str) -> None:
        """Raise ProtocolError when a learner says something more often than it has reason to."""
        if not allowance.take():
            raise ProtocolError(
                f"{what}: at most {allowance.rate.burst:g} at once and {allowance.rate.per_second:g} a second"
            )

    async def _deliver(self, kind: MessageType, head: TensorHead, buffer: Buffer) -> None:
        # Handed over: this reader must see the next heartbeat while a large tensor is examined.
        if isinstance(head, InitHeader):
            self._first_values.init_arrived(self.member, head, buffer)
        elif isinstance(head, PushHeader):
            await self._pushes.push_arrived(self.member, head, buffer)

    async def _report_progress(self) -> None:
        """Tell of uploads that advanced since they were last looked at."""
        seen: dict[tuple[int, int], int] = {}
        while True:
            await trio.sleep(self._bounds.progress_seconds)
            now: dict[tuple[int, int], int] = {}
            for upload in self._link.inbox.progress:
                if not isinstance(upload.head, PushHeader):
                    continue
                key = (upload.head.step, upload.head.attempt)
                now[key] = upload.received_bytes
                if upload.received_bytes > seen.get(key, 0):
                    await self._facts.tell(
                        UploadProgress(
                            at=UNSTAMPED,
                            learner=self.member.learner,
                            generation=self.member.generation,
                            step=key[0],
                            attempt=key[1],
                            received_bytes=upload.received_bytes,
                        )
                    )
            seen = now


async def read_manifest(hello: Hello, payload: bytes) -> TrainingManifest:
    """Do what `checked_manifest` does in a thread: tens of thousands of tensors take it seconds."""
    return await trio.to_thread.run_sync(checked_manifest, hello, payload, abandon_on_cancel=True)


def checked_manifest(hello: Hello, payload: bytes) -> TrainingManifest:
    """Decode a training manifest and check that it is the one its HELLO's contract was made from.

    Raises:
        ProtocolError: it is malformed, or hashes to another contract.
    """
    manifest = TrainingManifest.decode(payload)
    if manifest.contract() != hello.contract:
        raise ProtocolError("MANIFEST: it does not hash to the session contract that the HELLO stated")
    return manifest
