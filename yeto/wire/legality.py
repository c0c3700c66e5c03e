"""What may arrive where, and how long it may be: tables, consulted before a byte is allocated.

A *place* is one reading end: the first frame of a socket at the syncer, a control or data stream at either
side, the inside of CHUNKs. Each place has the message types that are legal there and the range of their
payload lengths. Types that only the other side may send are in no table of this side, so they are refused
by the same look-up that refuses a heartbeat of a gigabyte.

Tensor lengths come from the session's layout; they bound a frame by the largest fragment, and once the
head has named the fragment, ``TensorSizes.expect`` asks for that fragment's exact size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from attrs import frozen

from yeto.errors import ProtocolError
from yeto.wire import codecs, f32
from yeto.wire.frames import SLICE_BYTES, FrameHeader, MessageType
from yeto.wire.hello import HELLO_BYTES_MAX
from yeto.wire.messages import (
    ERROR_BYTES_MAX,
    BroadcastHeader,
    BudgetDone,
    ChunkHeader,
    DataHello,
    FinalAck,
    FinalFragmentHeader,
    FinalManifest,
    Heartbeat,
    InitHeader,
    PullRequest,
    PushHeader,
    Shutdown,
    TensorHead,
    check_bounds,
)

MANIFEST_BYTES_MAX: Final = 1024 * 1024
"""Training manifest: names and shapes of thousands of tensors; larger models leave it out."""

Lengths = tuple[int, int]
"""Least and most bytes of a payload."""


@frozen(kw_only=True)
class TensorSizes:
    """Exact bytes of each fragment's tensor in the three encodings of a session."""

    bulk: tuple[int, ...]
    """INIT and BCAST."""
    delta: tuple[int, ...]
    """PUSH."""
    final: tuple[int, ...]
    """FINAL_FRAGMENT, always f32."""

    @classmethod
    def of(cls, numels: Sequence[int], dtype: str) -> TensorSizes:
        """Return the sizes in a session.

        Args:
            numels: elements of each fragment; at least one fragment.
            dtype: session dtype.
        """
        bulk = codecs.by_name(codecs.bulk_dtype(dtype))
        delta = codecs.by_name(dtype)
        return cls(
            bulk=tuple(bulk.encoded_size(numel) for numel in numels),
            delta=tuple(delta.encoded_size(numel) for numel in numels),
            final=tuple(f32.encoded_size(numel) for numel in numels),
        )

    def expect(self, head: TensorHead, tensor_bytes: int) -> None:
        """Check the bytes that follow a head against the fragment that it names.

        Raises:
            ProtocolError: the fragment does not exist, or its tensor has another size.
        """
        check_bounds(head, num_fragments=len(self.bulk))
        wanted = self._of_type(head.TYPE)[head.fragment]
        if tensor_bytes != wanted:
            raise ProtocolError(
                f"{head.TYPE.name}: {tensor_bytes} tensor bytes, fragment {head.fragment} has {wanted}"
            )

    def _of_type(self, kind: MessageType) -> tuple[int, ...]:
        match kind:
            case MessageType.PUSH_FRAGMENT:
                return self.delta
            case MessageType.FINAL_FRAGMENT:
                return self.final
            case _:
                return self.bulk


@frozen
class Legality:
    """The table of one place."""

    place: str
    """For the error message: ``syncer, control stream``."""
    lengths: Mapping[MessageType, Lengths]

    def check(self, header: FrameHeader) -> None:
        """Refuse a frame that is not legal here.

        Raises:
            ProtocolError: the type is not legal at this place, or the length is not legal for it.
        """
        legal = self.lengths.get(header.type)
        if legal is None:
            raise ProtocolError(f"{header.type.name} is not legal here ({self.place})")
        least, most = legal
        if not least <= header.length <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise ProtocolError(
                f"{header.type.name} of {header.length} bytes is not legal here ({self.place}): "
                f"{wanted} are expected"
            )

    @property
    def most(self) -> dict[MessageType, int]:
        """Most payload bytes of each legal type."""
        return {kind: most for kind, (_, most) in self.lengths.items()}


def _fixed(size: int) -> Lengths:
    return size, size


def _with_tensor(head_bytes: int, tensor_bytes: Sequence[int]) -> Lengths:
    return head_bytes + min(tensor_bytes), head_bytes + max(tensor_bytes)


_CHUNK: Final = {MessageType.CHUNK: (ChunkHeader.BYTES + 1, ChunkHeader.BYTES + SLICE_BYTES)}

HANDSHAKE: Final = Legality(
    "syncer, first frame of a socket",
    {
        MessageType.HELLO: (1, HELLO_BYTES_MAX),
        MessageType.DATA_HELLO: _fixed(DataHello.BYTES),
    },
)
"""A socket that has not said who it is."""


def server_inner(sizes: TensorSizes, *, learner: int) -> Legality:
    """Return what this learner may cut into CHUNKs on the way to the syncer."""
    return Legality("syncer, sliced message", _to_server(sizes, learner))


def server_data(sizes: TensorSizes, *, learner: int) -> Legality:
    """Return what the syncer reads on this learner's data streams: slices, and tensors not sliced."""
    return Legality("syncer, data stream", _CHUNK | _to_server(sizes, learner))


def server_control(sizes: TensorSizes, *, learner: int) -> Legality:
    """Return what the syncer reads on this learner's control stream after the HELLO."""
    return Legality(
        "syncer, control stream",
        _CHUNK
        | _to_server(sizes, learner)
        | {
            MessageType.HEARTBEAT: _fixed(Heartbeat.BYTES),
            MessageType.FINAL_ACK: _fixed(FinalAck.BYTES),
            MessageType.BUDGET_DONE: _fixed(BudgetDone.BYTES),
            MessageType.MANIFEST: (1, MANIFEST_BYTES_MAX),
        },
    )


def client_inner(sizes: TensorSizes) -> Legality:
    """Return what may be cut into CHUNKs on the way to a learner."""
    return Legality("learner, sliced message", _to_client(sizes))


def client_data(sizes: TensorSizes) -> Legality:
    """Return what a learner reads on a data stream: slices, and tensors that are not sliced."""
    return Legality("learner, data stream", _CHUNK | _to_client(sizes))


def client_control(sizes: TensorSizes) -> Legality:
    """Return what a learner reads on its control stream."""
    return Legality(
        "learner, control stream",
        _CHUNK
        | _to_client(sizes)
        | {
            MessageType.PULL_REQ: _fixed(PullRequest.BYTES),
            MessageType.SHUTDOWN: _fixed(Shutdown.BYTES),
            MessageType.ERROR: (0, ERROR_BYTES_MAX),
            MessageType.FINAL_MANIFEST: _fixed(FinalManifest.HEAD_BYTES + 8 * len(sizes.bulk)),
        },
    )


def _to_server(sizes: TensorSizes, learner: int) -> dict[MessageType, Lengths]:
    legal = {MessageType.PUSH_FRAGMENT: _with_tensor(PushHeader.BYTES, sizes.delta)}
    if learner == 0:  # initial values come from learner 0 alone
        legal[MessageType.INIT_PARAMS] = _with_tensor(InitHeader.BYTES, sizes.bulk)
    return legal


def _to_client(sizes: TensorSizes) -> dict[MessageType, Lengths]:
    return {
        MessageType.BCAST_FRAGMENT: _with_tensor(BroadcastHeader.BYTES, sizes.bulk),
        MessageType.FINAL_FRAGMENT: _with_tensor(FinalFragmentHeader.BYTES, sizes.final),
    }
