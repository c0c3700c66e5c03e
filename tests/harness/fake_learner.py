"""A learner without a model: the real protocol over real sockets, and deltas that a function makes up.

It follows the rules of the other end: initial values from learner 0, an answer only after this connection's
broadcast of the fragment, the holding rule, the final cut acknowledged. So a run with fakes is a whole run,
only without torch and without waiting for training. Tests and benchmarks bend it by its hooks.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import numpy as np
import trio
from attrs import define, field

from yeto.errors import ProtocolError
from yeto.link import Dialler, FrameStream, Group, LinkClosed, Places, TlsContext, new_buffer
from yeto.wire import codecs
from yeto.wire.contract import TrainingManifest
from yeto.wire.digest import digest
from yeto.wire.fingerprint import layout_fingerprint
from yeto.wire.frames import MessageType
from yeto.wire.hello import Hello, HelloLayout
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec
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
    PushHeader,
)

BINDING = {"model": "fake", "seed": 0, "num_learners": 2}


def small_layout(num_fragments=3, numel=40, mode=MergeMode.RDA):
    """Return a layout of an averaged fragment and, from the second on, fragments of two tensors."""
    fragments = [FragmentLayout(mode=MergeMode.AVG, tensors=(TensorSpec(name="embed", shape=(numel,)),))]
    fragments += [
        FragmentLayout(
            mode=mode,
            tensors=(
                TensorSpec(name=f"layers.{p}.weight", shape=(numel // 4, 4)),
                TensorSpec(name=f"layers.{p}.proj", shape=(6, 3)),
            ),
        )
        for p in range(1, num_fragments)
    ]
    return Layout(fragments=tuple(fragments))


def initial_values(layout, seed=0):
    """Return one f32 array a fragment."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(f.numel).astype(np.float32) for f in layout.fragments]


@define(eq=False)
class FakeLearner:
    """One learner; ``run`` dials, serves one group to its end, and dials again while that makes sense."""

    learner: int
    layout: Layout = field(factory=small_layout)
    dtype: str = "f32"
    num_streams: int = 2
    binding: dict = field(factory=lambda: dict(BINDING))
    key: bytes | None = None
    tls: TlsContext | None = None
    profile: bytes | None = None
    sends_manifest: bool = True
    initial: list | None = None
    """Learner 0's initial values; made up when not given."""
    c_steps: int = 4
    c_tokens: int = 100
    local_step: int = 0
    reconnects: bool = False
    acknowledges: bool = True
    make_delta: Callable[[PullRequest, int], np.ndarray] | None = None
    """(pull, numel) -> f32 delta; small noise by default."""
    before_push: Callable[[FakeLearner, PullRequest], Awaitable[bool]] | None = None
    """Awaited before each push; False leaves the pull unanswered."""
    on_connected: Callable[[FakeLearner], Awaitable[None]] | None = None
    draw_generation: Callable[[], int] = lambda: random.getrandbits(64) | 1

    # What happened.
    error: str | None = None
    released: bool = False
    dials: int = 0
    closed: list[str] = field(factory=list)
    """Why each group ended."""
    versions: list[tuple[int, int]] = field(factory=list)
    """(fragment, version) of each broadcast, in order."""
    pulls: list[PullRequest] = field(factory=list)
    pushes: list[PushHeader] = field(factory=list)
    values: dict[int, np.ndarray] = field(factory=dict)
    final: dict[int, np.ndarray] = field(factory=dict)
    final_manifest: FinalManifest | None = None

    # The present connection.
    streams: tuple[FrameStream, ...] = ()
    group: Group | None = None
    generation: int = 0
    _anchors: dict[int, int] = field(factory=dict)
    _fresh: set[int] = field(factory=set)
    _pushed: dict[int, int] = field(factory=dict)
    _pending: dict[int, PullRequest] = field(factory=dict)
    _final_versions: dict[int, int] = field(factory=dict)
    _nursery: trio.Nursery | None = None
    _rng: np.random.Generator = field(init=False)

    def __attrs_post_init__(self):
        self._rng = np.random.default_rng(1000 + self.learner)
        if self.initial is None and self.learner == 0:
            self.initial = initial_values(self.layout)

    @property
    def manifest(self):
        return TrainingManifest(binding=self.binding, merge_alpha=0.5, layout=self.layout)

    def hello(self):
        """Return the HELLO of the present generation."""
        return Hello(
            learner=self.learner,
            generation=self.generation,
            dtype=self.dtype,
            layout=HelloLayout.of(self.layout),
            fingerprint=layout_fingerprint(self.layout),
            contract=self.manifest.contract(),
            num_streams=self.num_streams,
            profile=self.profile,
        )

    async def run(self, host, port, task_status=trio.TASK_STATUS_IGNORED):
        """Serve until released, refused, or, without ``reconnects``, the first group ends."""
        task_status.started()
        while True:
            try:
                await self.connect(host, port)
                await self.serve()
            except (LinkClosed, ProtocolError) as error:
                self.closed.append(str(error))
            else:
                self.closed.append("finished")
            finally:
                await self.hang_up()
            if self.released or self.error is not None or not self.reconnects:
                return
            await trio.sleep(0.02 + 0.03 * random.random())

    async def connect(self, host, port):
        """Dial a new group and introduce it."""
        self.dials += 1
        self.generation = self.draw_generation()
        dialler = Dialler(host, port, tls=self.tls)
        control = await dialler.open()
        self.streams = (control,)
        await control.send(MessageType.HELLO, self.hello().encode(self.key))
        for index in range(1, self.num_streams + 1):
            stream = await dialler.open()
            self.streams += (stream,)
            hello = DataHello(learner=self.learner, generation=self.generation, stream=index)
            await stream.send(hello.TYPE, hello.encode())
        sizes = TensorSizes.of([f.numel for f in self.layout.fragments], self.dtype)
        self._fresh.clear()
        self._pending.clear()
        self.group = Group(
            control,
            self.num_streams,
            places=Places.learner(sizes),
            outbox_bytes_max=1 << 30,
            on_control=self._on_control,
            admit=self._admit,
            deliver=self._deliver,
        )
        for index, stream in enumerate(self.streams[1:], start=1):
            self.group.attach(index, stream)
        if self.sends_manifest:
            self.group.outbox.put_control(MessageType.MANIFEST, self.manifest.encode())
        if self.initial is not None and len(self._anchors) < len(self.layout.fragments):
            self.send_initial()

    def has_been_sent(self, fragments):
        """Take these for received from an earlier syncer: no initial values are owed to the next."""
        self._anchors.update(dict.fromkeys(fragments, 0))

    def send_initial(self):
        codec = codecs.by_name(codecs.bulk_dtype(self.dtype))
        for fragment, values in enumerate(self.initial):
            self.group.outbox.put(InitHeader(fragment=fragment), memoryview(codec.encode(values)), order=(0,))

    async def serve(self):
        """Serve the connected group to its end."""
        reason = None
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if self.on_connected is not None:
                nursery.start_soon(self.on_connected, self)
            nursery.start_soon(self._beat)
            try:
                await self.group.run()
            except (LinkClosed, ProtocolError) as error:
                reason = error
            nursery.cancel_scope.cancel()
        if reason is not None:
            raise reason

    async def hang_up(self):
        """Cut every socket, as a killed process does."""
        for stream in self.streams:
            await stream.close()

    def beat(self):
        """Report the local step."""
        beat = Heartbeat(learner=self.learner, local_step=self.local_step)
        self.group.outbox.put_control(beat.TYPE, beat.encode(), replaces="beat")

    async def _beat(self):
        while True:
            self.beat()
            await trio.sleep(5)

    async def _on_control(self, kind, payload):
        if kind is MessageType.PULL_REQ:
            pull = PullRequest.decode(payload)
            self.pulls.append(pull)
            self._pending[pull.fragment] = pull
            self._answer(pull.fragment)
        elif kind is MessageType.ERROR:
            self.error = ErrorMessage.decode(payload).text
            raise LinkClosed(f"refused: {self.error}")
        elif kind is MessageType.SHUTDOWN:
            self.released = True
            self.group.finish()
        elif kind is MessageType.FINAL_MANIFEST:
            self.final_manifest = FinalManifest.decode(payload)
            self._acknowledge()

    async def _admit(self, kind, head, size):
        return new_buffer(size)

    async def _deliver(self, kind, head, buffer):
        numel = self.layout.fragments[head.fragment].numel
        if isinstance(head, BroadcastHeader):
            codec = codecs.by_name(codecs.bulk_dtype(self.dtype))
            self.values[head.fragment] = codec.decode(buffer, numel)
            self.versions.append((head.fragment, head.version))
            self._anchors[head.fragment] = head.version
            self._fresh.add(head.fragment)
            self._answer(head.fragment)
        elif isinstance(head, FinalFragmentHeader):
            self.final[head.fragment] = codecs.by_name("f32").decode(buffer, numel)
            self._final_versions[head.fragment] = head.version
            self._acknowledge()

    def _answer(self, fragment):
        """Answer the fragment's pull, when the rules of a learner allow it."""
        pull = self._pending.get(fragment)
        if pull is None or fragment not in self._fresh:
            return
        anchor = self._anchors[fragment]
        if pull.step <= anchor:
            del self._pending[fragment]
            return
        if self._pushed.get(fragment, pull.step) < pull.step and anchor < self._pushed[fragment]:
            return  # held: the broadcast that has our last push in it is still on its way
        del self._pending[fragment]
        self._nursery.start_soon(self._push, pull, anchor)

    async def _push(self, pull, anchor):
        if self.before_push is not None and not await self.before_push(self, pull):
            return
        self.local_step += self.c_steps
        head, tensor = self.push_message(pull, anchor)
        self._pushed[pull.fragment] = pull.step
        self.pushes.append(head)
        self.group.outbox.put(head, tensor, order=(pull.step, pull.attempt, anchor))

    def push_message(self, pull, anchor):
        """Return head and wire bytes of the answer to a pull."""
        numel = self.layout.fragments[pull.fragment].numel
        if self.make_delta is not None:
            delta = self.make_delta(pull, numel)
        else:
            delta = (0.01 * self._rng.standard_normal(numel)).astype(np.float32)
        head = PushHeader(
            learner=self.learner,
            fragment=pull.fragment,
            step=pull.step,
            attempt=pull.attempt,
            base_version=anchor,
            local_step=self.local_step,
            c_steps=self.c_steps,
            c_tokens=self.c_tokens,
        )
        return head, memoryview(codecs.by_name(self.dtype).encode(delta))

    def anchor(self, fragment):
        """Return the version this learner holds."""
        return self._anchors[fragment]

    def report_budget(self, local_steps):
        done = BudgetDone(local_steps=local_steps)
        self.group.outbox.put_control(done.TYPE, done.encode())

    def _acknowledge(self):
        manifest = self.final_manifest
        if (
            not self.acknowledges
            or manifest is None
            or self._final_versions != dict(enumerate(manifest.versions))
        ):
            return
        ack = FinalAck(step=manifest.step)
        self.group.outbox.put_control(ack.TYPE, ack.encode())

    def final_digests(self):
        """Return the digest of each fragment of the final cut."""
        return [digest(self.final[p]) for p in range(len(self.layout.fragments))]
