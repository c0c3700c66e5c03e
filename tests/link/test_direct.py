"""System calls on a socket: whole, giving way where they must, and with Trio's word for a closed socket."""

import pytest
import trio
import trio.testing
from link_helpers import socket_pair

from yeto.link import direct


async def test_more_than_the_kernel_holds_arrives_whole():
    left, right = await socket_pair()
    data = bytes(i % 251 for i in range(20_000_000))
    got = bytearray(len(data))
    async with left, right, trio.open_nursery() as nursery:
        nursery.start_soon(direct.send_all, left.socket, data)
        filled = 0
        while filled < len(data):
            filled += await direct.receive_into(right.socket, memoryview(got)[filled:])
    assert got == data


async def test_who_reads_gives_way_also_when_much_is_there():
    left, right = await socket_pair()
    async with left, right:
        await direct.send_all(left.socket, bytes(100))
        with trio.testing.assert_checkpoints():
            assert len(await direct.receive(right.socket, 10)) == 10
        with trio.testing.assert_checkpoints():
            assert await direct.receive_into(right.socket, memoryview(bytearray(10))) == 10


@pytest.mark.parametrize("into", [False, True])
async def test_a_read_that_is_cancelled_has_taken_nothing(into):
    left, right = await socket_pair()
    taken = []

    async def read(scope):
        with scope:
            if into:
                taken.append(await direct.receive_into(right.socket, memoryview(bytearray(60))))
            else:
                taken.append(len(await direct.receive(right.socket, 60)))

    async def cancel(scope):
        scope.cancel()

    async with left, right:
        for _ in range(20):  # the one or the other has its turn first
            await direct.send_all(left.socket, bytes(100))
            scope = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, scope)
                nursery.start_soon(cancel, scope)
            assert sum(taken) + len(await direct.receive(right.socket, 1000)) == 100
            taken.clear()


async def test_a_small_frame_goes_out_at_once():
    left, right = await socket_pair()
    async with left, right:
        with trio.testing.assert_no_checkpoints():
            await direct.send_all(left.socket, b"a frame")
        with trio.testing.assert_no_checkpoints():
            await direct.send_all(left.socket, b"")
        assert await direct.receive(right.socket, 100) == b"a frame"


async def test_the_end_of_the_stream_is_no_bytes():
    left, right = await socket_pair()
    async with right:
        await left.aclose()
        assert await direct.receive(right.socket, 10) == b""
        assert await direct.receive_into(right.socket, memoryview(bytearray(10))) == 0


@pytest.mark.parametrize("waiting", [False, True])
async def test_closed_on_this_side(waiting):
    left, right = await socket_pair()
    reads = (
        lambda: direct.receive(right.socket, 10),
        lambda: direct.receive_into(right.socket, memoryview(bytearray(10))),
    )
    closed = []

    async def expect_closed(call):
        with pytest.raises(trio.ClosedResourceError):
            await call()
        closed.append(call)

    async with left, trio.open_nursery() as nursery:
        if waiting:
            nursery.start_soon(expect_closed, reads[0])
            await trio.testing.wait_all_tasks_blocked()
        await right.aclose()
        for read in reads:
            await expect_closed(read)
        await expect_closed(lambda: direct.send_all(right.socket, b"x"))
    assert len(closed) == 3 + waiting
