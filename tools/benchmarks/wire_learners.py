"""Bare learners: many in one process, the protocol and nothing else.

They keep the rules that the syncer counts on: initial values from learner 0, an answer only after this
connection's broadcast of the fragment, none before the broadcast that has their last push in it, the final
cut acknowledged. They train nothing, decode no tensor, and send the same delta each time. One thread and one
selector serve them all, so that hundreds take a small part of what the syncer needs for them.

Fragments are tiny: every message fits into one slice.
"""

from __future__ import annotations

import random
import selectors
import socket
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Semaphore
from typing import Final

from attrs import define, field, frozen

from yeto.wire import codecs
from yeto.wire.contract import TrainingManifest
from yeto.wire.fingerprint import layout_fingerprint
from yeto.wire.frames import HEADER_BYTES, MessageType, decode_header, encode_header
from yeto.wire.hello import Hello, HelloLayout
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec
from yeto.wire.messages import (
    TENSOR_HEADS,
    BroadcastHeader,
    ChunkHeader,
    DataHello,
    ErrorMessage,
    FinalAck,
    FinalFragmentHeader,
    FinalManifest,
    Heartbeat,
    InitHeader,
    PullRequest,
    PushHeader,
    TensorHead,
)

BEAT_SECONDS: Final = 5.0
RECEIVE_BYTES: Final = 64 * 1024
STEPS_A_PUSH: Final = 4


@frozen(kw_only=True)
class Fleet:
    """What all learners of a run have in common."""

    host: str
    port: int
    layout: Layout
    dtype: str
    num_streams: int

    def tensor(self, fragment: int, dtype: str) -> bytes:
        """Return some bytes of a fragment."""
        import numpy as np

        values = np.random.default_rng(fragment).standard_normal(self.layout.fragments[fragment].numel)
        return bytes(codecs.by_name(dtype).encode(0.01 * values.astype(np.float32)))


def tiny_layout(fragments: int, numel: int) -> Layout:
    """Return a layout of fragments of one matrix each."""
    return Layout(
        fragments=tuple(
            FragmentLayout(
                mode=MergeMode.RDA,
                tensors=(TensorSpec(name=f"layers.{index}.weight", shape=(numel // 4, 4)),),
            )
            for index in range(fragments)
        )
    )


@define(eq=False)
class BareLearner:
    """One learner: its sockets, and what it remembers of each fragment."""

    learner: int
    fleet: Fleet
    deltas: Sequence[bytes]
    """Of each fragment, in the session dtype; shared by all learners."""
    sockets: list[socket.socket] = field(factory=list)
    """The control stream, then the data streams."""
    released: bool = False
    _rests: list[bytes] = field(factory=list)
    """Of each socket, the beginning of a frame."""
    _anchors: dict[int, int] = field(factory=dict)
    _pushed: dict[int, int] = field(factory=dict)
    _pulls: dict[int, PullRequest] = field(factory=dict)
    _final: dict[int, int] = field(factory=dict)
    _manifest: FinalManifest | None = None
    _local_step: int = 0
    _messages: int = 0

    def connect(self) -> None:
        """Dial every stream and say who it is; learner 0 brings the initial values."""
        fleet, generation = self.fleet, random.getrandbits(64) | 1
        manifest = TrainingManifest(binding={"model": "bench"}, merge_alpha=0.5, layout=fleet.layout)
        hello = Hello(
            learner=self.learner,
            generation=generation,
            dtype=fleet.dtype,
            layout=HelloLayout.of(fleet.layout),
            fingerprint=layout_fingerprint(fleet.layout),
            contract=manifest.contract(),
            num_streams=fleet.num_streams,
        )
        self._dial(MessageType.HELLO, hello.encode())
        for index in range(1, fleet.num_streams + 1):
            data_hello = DataHello(learner=self.learner, generation=generation, stream=index)
            self._dial(data_hello.TYPE, data_hello.encode())
        for sock in self.sockets:
            sock.setblocking(False)
        if self.learner == 0:
            for fragment in range(len(fleet.layout.fragments)):
                bulk = codecs.bulk_dtype(fleet.dtype)
                self._send_bulk(InitHeader(fragment=fragment), fleet.tensor(fragment, bulk))
        self.beat()

    def _dial(self, kind: MessageType, payload: bytes) -> None:
        sock = socket.create_connection((self.fleet.host, self.fleet.port), timeout=60.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(encode_header(kind, len(payload)) + payload)
        self.sockets.append(sock)
        self._rests.append(b"")

    def beat(self) -> None:
        """Say that it is alive, and its local step."""
        beat = Heartbeat(learner=self.learner, local_step=self._local_step)
        self._send(0, beat.TYPE, beat.encode())

    def receive(self, index: int) -> None:
        """Take what has arrived on a stream."""
        data = self.sockets[index].recv(RECEIVE_BYTES)
        if not data:
            raise RuntimeError(f"learner {self.learner}: the syncer hung up")
        data = self._rests[index] + data
        start = 0
        while len(data) - start >= HEADER_BYTES:
            header = decode_header(data[start : start + HEADER_BYTES])
            end = start + HEADER_BYTES + header.length
            if end > len(data):
                break
            self._take(header.type, data[start + HEADER_BYTES : end])
            start = end
        self._rests[index] = data[start:]

    def _take(self, kind: MessageType, payload: bytes) -> None:
        match kind:
            case MessageType.PULL_REQ:
                pull = PullRequest.decode(payload)
                self._pulls[pull.fragment] = pull
                self._answer(pull.fragment)
            case MessageType.CHUNK:
                self._take_bulk(payload[ChunkHeader.BYTES :])
            case MessageType.FINAL_MANIFEST:
                self._manifest = FinalManifest.decode(payload)
                self._acknowledge()
            case MessageType.SHUTDOWN:
                self.released = True
            case _:
                text = ErrorMessage.decode(payload).text if kind is MessageType.ERROR else kind.name
                raise RuntimeError(f"learner {self.learner}: {text}")

    def _take_bulk(self, frame: bytes) -> None:
        kind = decode_header(frame[:HEADER_BYTES]).type
        decode = TENSOR_HEADS[kind]
        head = decode.decode(frame[HEADER_BYTES : HEADER_BYTES + decode.BYTES])
        if isinstance(head, BroadcastHeader):
            self._anchors[head.fragment] = head.version
            self._answer(head.fragment)
        elif isinstance(head, FinalFragmentHeader):
            self._final[head.fragment] = head.version
            self._acknowledge()

    def _answer(self, fragment: int) -> None:
        pull, anchor = self._pulls.get(fragment), self._anchors.get(fragment)
        if pull is None or anchor is None or anchor < self._pushed.get(fragment, 0):
            return
        del self._pulls[fragment]
        self._local_step += STEPS_A_PUSH
        self._pushed[fragment] = pull.step
        head = PushHeader(
            learner=self.learner,
            fragment=fragment,
            step=pull.step,
            attempt=pull.attempt,
            base_version=anchor,
            local_step=self._local_step,
            c_steps=STEPS_A_PUSH,
            c_tokens=100,
        )
        self._send_bulk(head, self.deltas[fragment])

    def _acknowledge(self) -> None:
        manifest = self._manifest
        if manifest is not None and self._final == dict(enumerate(manifest.versions)):
            ack = FinalAck(step=manifest.step)
            self._send(0, ack.TYPE, ack.encode())

    def _send_bulk(self, head: TensorHead, tensor: bytes) -> None:
        encoded = head.encode()
        inner = encode_header(head.TYPE, len(encoded) + len(tensor)) + encoded + tensor
        chunk = ChunkHeader(message_id=self._messages, total=len(inner), offset=0)
        streams = self.fleet.num_streams
        index = 1 + self._messages % streams if streams else 0
        self._messages += 1
        self._send(index, chunk.TYPE, chunk.encode() + inner)

    def _send(self, index: int, kind: MessageType, payload: bytes) -> None:
        frame = encode_header(kind, len(payload)) + payload
        if self.sockets[index].send(frame) != len(frame):
            raise RuntimeError(f"learner {self.learner}: the syncer does not read")


def live(fleet: Fleet, ids: Sequence[int], connected: Semaphore) -> None:
    """Be these learners until the syncer has released them all; tell when they are connected."""
    deltas = [fleet.tensor(fragment, fleet.dtype) for fragment in range(len(fleet.layout.fragments))]
    learners = [BareLearner(learner, fleet, deltas) for learner in ids]
    with selectors.DefaultSelector() as selector:
        for learner in learners:
            # One after the other: a syncer keeps only so many that have not said who they are.
            learner.connect()
            for index, sock in enumerate(learner.sockets):
                selector.register(sock, selectors.EVENT_READ, (learner, index))
        connected.release()
        beat_at = time.monotonic() + BEAT_SECONDS
        left = len(learners)
        while left:
            for key, _ in selector.select(max(beat_at - time.monotonic(), 0)):
                learner, index = key.data
                if learner.released:
                    continue
                learner.receive(index)
                if learner.released:
                    left -= 1
                    for sock in learner.sockets:
                        selector.unregister(sock)
                        sock.close()
            if time.monotonic() >= beat_at:
                beat_at += BEAT_SECONDS
                for learner in learners:
                    if not learner.released:
                        learner.beat()
