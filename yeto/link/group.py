"""A group: the control stream and the data streams of one learner, living and dying together.

All tasks of a group run in one nursery: a reader and a writer per stream, the heartbeat (learner) or the
watch for silence (syncer). **The first thing that goes wrong on any stream ends the whole group**, and is the
reason that `Group.run` raises: a message never straddles two generations, so nothing half-received or
half-sent outlives its group, and what one learner does never reaches another's nursery.

What one group can hold at most: the slices that came early (32 MiB), control messages that wait (4 MiB), the
read-ahead and scratch of its streams (80 KiB each), the tensors its outbox keeps alive (`outbox_bytes_max`,
shared with all others as long as they are current), and the buffers that `admit` gave out.

An orderly end is `Group.finish`: what waits on the control stream (a SHUTDOWN, an ERROR) still goes out, and
the data streams stay open until the peer had time to read it, so that their end cannot overtake the reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import trio
from attrs import frozen

from yeto.errors import ProtocolError, YetoError
from yeto.link.errors import LinkClosed
from yeto.link.framing import FrameStream
from yeto.link.inbox import Admit, Deliver, Inbox, receive_bulk
from yeto.link.outbox import Outbox, write_bulk, write_control
from yeto.link.traffic import Traffic
from yeto.wire import legality
from yeto.wire.frames import MessageType
from yeto.wire.legality import Legality, TensorSizes
from yeto.wire.messages import TENSOR_HEADS
from yeto.wire.striping import Assembler

HEARTBEAT_SECONDS: Final = 5.0
"""Between two heartbeats. Whoever watches for silence should let three of them be missed."""

LINGER_SECONDS: Final = 5.0
"""Most that an orderly end waits for the peer, for each of its two steps."""

OnControl: TypeAlias = Callable[[MessageType, bytes], Awaitable[None]]
"""Told every control message, in order: type and payload, legal here but not decoded.

What it raises ends the group and comes out of `Group.run`."""

_BULK: Final = frozenset({MessageType.CHUNK, *TENSOR_HEADS})


@frozen(kw_only=True)
class Places:
    """What may arrive where on one side of a group, and how large the session's tensors are."""

    control: Legality
    data: Legality
    inner: Legality
    sizes: TensorSizes

    @classmethod
    def syncer(cls, sizes: TensorSizes, *, learner: int) -> Places:
        """Return what the syncer reads from this learner."""
        return cls(
            control=legality.server_control(sizes, learner=learner),
            data=legality.server_data(sizes, learner=learner),
            inner=legality.server_inner(sizes, learner=learner),
            sizes=sizes,
        )

    @classmethod
    def learner(cls, sizes: TensorSizes) -> Places:
        """Return what a learner reads from the syncer."""
        return cls(
            control=legality.client_control(sizes),
            data=legality.client_data(sizes),
            inner=legality.client_inner(sizes),
            sizes=sizes,
        )


class Group:
    """One generation of one learner, on either side, after its HELLO.

    Attributes:
        outbox: Takes what is to be sent, at any time, also before `run` and after the end.
        inbox: Knows what is under way.
        traffic: Bytes of all its streams, from their HELLO on.
    """

    def __init__(
        self,
        control: FrameStream,
        num_streams: int,
        *,
        places: Places,
        outbox_bytes_max: int,
        on_control: OnControl,
        admit: Admit,
        deliver: Deliver,
        heartbeat: Callable[[], bytes] | None = None,
        silence_seconds: float | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """Make a group of a control stream; its data streams are attached one by one.

        Args:
            control: The stream that HELLO went over.
            num_streams: S, how many data streams belong to it; 0 sends bulk on the control stream.
            places: What may arrive on this side.
            outbox_bytes_max: Bound of the bulk that waits for the peer, see `Outbox`.
            on_control: Takes control messages.
            admit: Says for each bulk message whether it is wanted, and into which buffer.
            deliver: Takes complete bulk messages.
            heartbeat: Makes the payload of a HEARTBEAT, sent every 5 s; None sends none.
            silence_seconds: End the group after so long without a byte on the control stream; None waits
                for ever. Time that `on_control`, `admit` or `deliver` takes is not the peer's silence.
            traffic: Where bytes are counted together with those of other groups.
        """
        self.outbox = Outbox(num_streams, bytes_max=outbox_bytes_max)
        self.inbox = Inbox(Assembler(places.inner), places.sizes, admit, deliver, num_streams=num_streams)
        self._places = places
        self._on_control = on_control
        self._heartbeat = heartbeat
        self._silence_seconds = silence_seconds
        self._control = control
        self.traffic = Traffic() if traffic is None else traffic
        control.count_in(self.traffic)
        self._data: list[FrameStream | None] = [None] * num_streams
        self._nursery: trio.Nursery | None = None
        self._finishing = trio.Event()
        self._complete = trio.Event()
        if not num_streams:
            self._complete.set()
        self._reason: YetoError | None = None

    @property
    def peer(self) -> str:
        """Address of the peer's control stream."""
        return self._control.peer

    @property
    def is_complete(self) -> bool:
        """Whether all data streams are attached."""
        return self._complete.is_set()

    async def completed(self) -> None:
        """Wait until all data streams are attached."""
        await self._complete.wait()

    def attach(self, index: int, stream: FrameStream) -> None:
        """Add a data stream; its reader and writer start at once when the group runs.

        Args:
            index: 1 to S, the stream index that DATA_HELLO states.
            stream: The stream, behind its DATA_HELLO. The group closes it from now on.

        Raises:
            ProtocolError: There is no such stream in the group, or it is attached already.
            LinkClosed: The group has ended.
        """
        if self.outbox.is_closed:
            raise LinkClosed("the group of this data stream has ended")
        if not 1 <= index <= len(self._data):
            raise ProtocolError(f"data stream {index} of a group with {len(self._data)} data streams")
        if self._data[index - 1] is not None:
            raise ProtocolError(f"data stream {index} is attached already")
        self._data[index - 1] = stream
        stream.count_in(self.traffic)
        if self._nursery is not None:
            self._start_data(self._nursery, index - 1, stream)
        if None not in self._data:
            self._complete.set()

    def finish(self) -> None:
        """Have the group end in order: `run` returns when the control messages put so far are sent."""
        self._finishing.set()

    async def run(self) -> None:
        """Read and write all streams until the group is finished; closes them, however it ends.

        Raises:
            LinkClosed: The connection ended on any stream, the peer was silent, or the outbox overflowed.
            ProtocolError: The peer sent what is not legal.
            YetoError: What a callback raised.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._guarded, nursery, self._read_control)
                nursery.start_soon(self._guarded, nursery, write_control, self._control, self.outbox)
                nursery.start_soon(self._guarded, nursery, self.outbox.failed)
                if self._heartbeat is not None:
                    nursery.start_soon(self._guarded, nursery, self._beat, self._heartbeat)
                if self._silence_seconds is not None:
                    nursery.start_soon(self._guarded, nursery, self._watch_silence, self._silence_seconds)
                for index, stream in enumerate(self._data):
                    if stream is not None:
                        self._start_data(nursery, index, stream)
                try:
                    await self._finishing.wait()
                    self.outbox.stop_bulk()
                    with trio.move_on_after(LINGER_SECONDS):
                        await self.outbox.control_flushed()
                    nursery.cancel_scope.cancel()
                finally:
                    # A stream that is attached from here on is only closed: a nursery takes no task after
                    # its last one has ended, which may be some time before we hear of it.
                    self._nursery = None
            if self._reason is None:
                await self._control.close_after_peer(LINGER_SECONDS)
        finally:
            self.outbox.fail(LinkClosed("the group has ended"))
            for open_stream in (self._control, *self._data):
                if open_stream is not None:
                    await open_stream.close()
        if self._reason is not None:
            raise self._reason

    async def _guarded(
        self, nursery: trio.Nursery, work: Callable[..., Awaitable[None]], *args: object
    ) -> None:
        """Run one task of the group; the first expected failure is the reason that the group ends for."""
        try:
            await work(*args)
        except YetoError as error:
            if self._reason is None and not self._finishing.is_set():
                self._reason = error
            nursery.cancel_scope.cancel()

    def _start_data(self, nursery: trio.Nursery, index: int, stream: FrameStream) -> None:
        nursery.start_soon(self._guarded, nursery, receive_bulk, stream, self.inbox, self._places.data)
        nursery.start_soon(self._guarded, nursery, write_bulk, stream, self.outbox, index)

    async def _read_control(self) -> None:
        while True:
            header = await self._control.read_header()
            self._places.control.check(header)
            if header.type in _BULK:
                await self.inbox.receive(self._control, header)
            else:
                payload = await self._control.read_exact(header.length, header.type.name)
                await self._on_control(header.type, payload)

    async def _beat(self, heartbeat: Callable[[], bytes]) -> None:
        while True:
            self.outbox.put_control(MessageType.HEARTBEAT, heartbeat(), replaces="heartbeat")
            await trio.sleep(HEARTBEAT_SECONDS)

    async def _watch_silence(self, silence_seconds: float) -> None:
        while True:
            left = silence_seconds - self._control.silent_seconds
            if left <= 0:
                raise LinkClosed(f"no byte on the control stream for {silence_seconds:g} s")
            await trio.sleep(left)
