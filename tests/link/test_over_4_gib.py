"""A fragment of more than 4 GiB over real sockets, in sparse memory: three of its slices."""

import numpy as np
import pytest
import trio
from link_helpers import push_head, socket_pair, tls_pair

from yeto.errors import ProtocolError
from yeto.link import FrameStream, Inbox
from yeto.wire.frames import HEADER_BYTES, SLICE_BYTES, MessageType, encode_header
from yeto.wire.legality import TensorSizes, server_data, server_inner
from yeto.wire.messages import ChunkHeader, PushHeader
from yeto.wire.striping import Assembler

NUMEL = 3 * 2**30
"""6 GiB of bf16."""

SIZES = TensorSizes.of([NUMEL], "bf16")
HEAD_BYTES = HEADER_BYTES + PushHeader.BYTES
TOTAL = HEAD_BYTES + 2 * NUMEL


class Sparse:
    """Takes the push into memory of which only what is written to is really there."""

    def __init__(self):
        self.buffer = np.empty(2 * NUMEL, dtype=np.uint8).data

    async def admit(self, kind, head, tensor_bytes):
        assert tensor_bytes == 2 * NUMEL
        return self.buffer

    async def deliver(self, kind, head, buffer):
        raise AssertionError("most of its slices are missing")


async def send_slice(stream, index):
    offset = index * SLICE_BYTES
    chunk = ChunkHeader(message_id=0, total=TOTAL, offset=offset)
    prefix = b""
    if index == 0:
        head = push_head()
        prefix = encode_header(head.TYPE, TOTAL - HEADER_BYTES) + head.encode()
    data = bytes([index % 251 + 1]) * (chunk.slice_bytes - len(prefix))
    await stream.send(MessageType.CHUNK, chunk.encode(), prefix, memoryview(data))


@pytest.mark.parametrize("carrier", ["tcp", "tls"])
async def test_slices_land_where_they_belong(carrier, tls):
    left, right = await (socket_pair() if carrier == "tcp" else tls_pair(tls))
    sender, receiver = FrameStream(left), FrameStream(right)
    sparse = Sparse()
    inbox = Inbox(
        Assembler(server_inner(SIZES, learner=0)), SIZES, sparse.admit, sparse.deliver, num_streams=1
    )
    legal = server_data(SIZES, learner=0)
    last = (TOTAL - 1) // SLICE_BYTES
    indices = [0, 2**32 // SLICE_BYTES + 1, last]
    async with trio.open_nursery() as nursery:
        for index in indices:
            nursery.start_soon(send_slice, sender, index)
            header = await receiver.read_header()
            legal.check(header)
            await inbox.receive(receiver, header)
    for index in indices:
        first = max(0, index * SLICE_BYTES - HEAD_BYTES)
        end = min(TOTAL, (index + 1) * SLICE_BYTES) - HEAD_BYTES
        assert bytes(sparse.buffer[first:end]) == bytes([index % 251 + 1]) * (end - first)
    (progress,) = inbox.progress
    assert progress.received_bytes == sum(min(SLICE_BYTES, TOTAL - index * SLICE_BYTES) for index in indices)
    await sender.close()
    await receiver.close()


async def test_one_byte_too_many_is_refused_by_name(tls):
    left, right = await socket_pair()
    sender, receiver = FrameStream(left), FrameStream(right)
    inbox = Inbox(Assembler(server_inner(SIZES, learner=0)), SIZES, None, None, num_streams=1)
    chunk = ChunkHeader(message_id=0, total=TOTAL + 1, offset=2**32)
    await sender.send(MessageType.CHUNK, chunk.encode(), bytes(100))
    with pytest.raises(ProtocolError, match=f"claims {TOTAL + 1} bytes, the largest that is legal here has"):
        await inbox.receive(receiver, await receiver.read_header())
    await sender.close()
    await receiver.close()
