"""Framed streams: whole frames from any pieces, one kind of error for every end, no half frames."""

import socket

import pytest
import trio
import trio.testing
from link_helpers import OneByteStream, lockstep_pair, memory_pair, read_frame, socket_pair, tls_pair

from yeto.errors import ProtocolError
from yeto.link import FrameStream, LinkClosed, set_socket_options
from yeto.link.framing import DISCARD_BYTES, JOIN_BYTES, READ_AHEAD_BYTES, underlying_socket
from yeto.wire.frames import MessageType, encode_header


class Recorder(OneByteStream):
    """Keeps what is sent."""

    def __init__(self):
        super().__init__(None)
        self.sent = []

    async def send_all(self, data):
        self.sent.append(data)


async def ends(reason, work, *args):
    """Do what is expected to end because the link does."""
    with pytest.raises(LinkClosed, match=reason):
        await work(*args)


async def send_for_ever(stream):
    while True:
        await stream.send(MessageType.CHUNK, bytes(JOIN_BYTES + 1))


class TestReading:
    async def test_a_byte_at_a_time(self):
        left, right = trio.testing.memory_stream_pair()
        sender, receiver = FrameStream(left), FrameStream(OneByteStream(right))
        tensor = bytes(range(256)) * 3
        await sender.send(MessageType.PULL_REQ, b"0123456789abcdef")
        await sender.send(MessageType.BCAST_FRAGMENT, b"head", memoryview(tensor))
        assert await read_frame(receiver) == (MessageType.PULL_REQ, b"0123456789abcdef")
        header = await receiver.read_header()
        assert (header.type, header.length) == (MessageType.BCAST_FRAGMENT, 4 + len(tensor))
        assert await receiver.read_exact(4) == b"head"
        into = bytearray(len(tensor))
        await receiver.read_into(memoryview(into))
        assert into == tensor

    async def test_many_frames_at_once(self):
        sender, receiver = memory_pair()
        frames = b"".join(encode_header(MessageType.HEARTBEAT, 2) + b"%02d" % i for i in range(100))
        await sender.stream.send_all(frames)
        for i in range(100):
            assert await read_frame(receiver) == (MessageType.HEARTBEAT, b"%02d" % i)

    @pytest.mark.parametrize("size", [0, 1, READ_AHEAD_BYTES, READ_AHEAD_BYTES + 1, 3 * READ_AHEAD_BYTES])
    async def test_read_exact_of_any_size(self, size):
        sender, receiver = memory_pair()
        data = bytes(i % 251 for i in range(size))
        await sender.stream.send_all(b"x" + data + b"y")
        assert await receiver.read_exact(1) == b"x"
        assert await receiver.read_exact(size) == data
        assert await receiver.read_exact(1) == b"y"

    async def test_read_into_nothing(self):
        _, receiver = memory_pair()
        await receiver.read_into(memoryview(bytearray()))

    async def test_discard_keeps_what_follows(self):
        sender, receiver = memory_pair()
        for _ in range(2):
            await sender.stream.send_all(bytes(3 * DISCARD_BYTES + 7) + b"after")
            await receiver.discard(3 * DISCARD_BYTES + 7)
            assert await receiver.read_exact(5) == b"after"

    async def test_not_a_frame(self):
        sender, receiver = memory_pair()
        await sender.stream.send_all(b"GET / HTTP/1.1\r\n")
        with pytest.raises(ProtocolError, match="magic"):
            await receiver.read_header()

    async def test_sockets_read_into_the_callers_memory(self):
        left, right = await socket_pair()
        sender, receiver = FrameStream(left), FrameStream(right)
        data = bytes(i % 241 for i in range(1_000_000))
        into = bytearray(len(data))
        async with sender.stream, receiver.stream, trio.open_nursery() as nursery:
            nursery.start_soon(sender.send, MessageType.BCAST_FRAGMENT, b"head", memoryview(data))
            await receiver.read_header()
            assert await receiver.read_exact(4) == b"head"
            await receiver.read_into(memoryview(into))
        assert into == data

    async def test_tls(self, tls):
        client, server = await tls_pair(tls)
        data = bytes(i % 241 for i in range(200_000))
        into = bytearray(len(data))
        sender, receiver = FrameStream(client), FrameStream(server)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send, MessageType.BCAST_FRAGMENT, memoryview(data))
            await receiver.read_header()
            await receiver.read_into(memoryview(into))
        assert into == data
        await sender.close()
        with pytest.raises(LinkClosed, match=r"the peer closed the connection$"):
            await receiver.read_header()
        await receiver.close()


class TestEnds:
    async def test_between_frames(self):
        sender, receiver = memory_pair()
        await sender.close()
        with pytest.raises(LinkClosed, match=r"the peer closed the connection$"):
            await receiver.read_header()

    async def test_in_a_header(self):
        sender, receiver = memory_pair()
        await sender.stream.send_all(encode_header(MessageType.SHUTDOWN, 0)[:5])
        await sender.close()
        with pytest.raises(LinkClosed, match=r"in the middle of a frame header \(5 of 13 bytes\)"):
            await receiver.read_header()

    @pytest.mark.parametrize("size", [10, READ_AHEAD_BYTES + 1])
    async def test_in_a_payload(self, size):
        sender, receiver = memory_pair()
        await sender.stream.send_all(b"123")
        await sender.close()
        with pytest.raises(LinkClosed, match=rf"in the middle of an ERROR \(3 of {size} bytes\)"):
            await receiver.read_exact(size, "an ERROR")

    async def test_in_a_tensor_on_a_socket(self):
        left, right = await socket_pair()
        async with right:
            await left.send_all(b"12345678")
            await left.aclose()
            with pytest.raises(LinkClosed, match=r"in the middle of a slice \(8 of 20 bytes\)"):
                await FrameStream(right).read_into(memoryview(bytearray(20)), "a slice")

    async def test_reset_by_the_peer(self):
        left, right = await socket_pair()
        # Linger 0 sends a reset instead of an orderly end.
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        await left.aclose()
        receiver = FrameStream(right)
        with pytest.raises(LinkClosed, match=r"receiving failed: .*reset"):
            await receiver.read_into(memoryview(bytearray(1)))
        await ends("sending failed", send_for_ever, receiver)
        await ends("sending failed", receiver.send, MessageType.SHUTDOWN)

    async def test_a_failed_send_is_what_the_reader_tells_too(self):
        """It closes the stream, which wakes the reader: the end of a group may be told by either."""
        left, right = trio.testing.memory_stream_pair()
        stream = FrameStream(right)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends, "sending failed", stream.read_into, memoryview(bytearray(1)))
            await trio.testing.wait_all_tasks_blocked()
            await left.receive_stream.aclose()
            await ends("sending failed", stream.send, MessageType.SHUTDOWN)
        await left.aclose()

    @pytest.mark.parametrize("sockets", [False, True])
    async def test_closed_on_this_side_while_reading(self, sockets):
        if sockets:
            left, right = await socket_pair()
        else:
            left, right = trio.testing.memory_stream_pair()
        receiver = FrameStream(right)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends, "closed on this side", receiver.read_into, memoryview(bytearray(1)))
            await trio.testing.wait_all_tasks_blocked()
            await receiver.close()
        await left.aclose()

    async def test_silence(self, mock_clock):
        sender, receiver = memory_pair()
        mock_clock.jump(5)
        assert receiver.silent_seconds == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receiver.read_exact, 2)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(3)
            assert receiver.silent_seconds == 3
            await sender.stream.send_all(b"a")
            await trio.testing.wait_all_tasks_blocked()
            assert receiver.silent_seconds == 0
            mock_clock.jump(2)
            assert receiver.silent_seconds == 2
            await sender.stream.send_all(b"b")
        mock_clock.jump(10)
        assert receiver.silent_seconds == 0


class TestSending:
    async def test_small_frames_go_out_in_one_piece(self):
        recorder = Recorder()
        await FrameStream(recorder).send(MessageType.CHUNK, b"a", b"", memoryview(b"b"))
        await FrameStream(recorder).send(MessageType.SHUTDOWN)
        assert recorder.sent == [
            encode_header(MessageType.CHUNK, 2) + b"ab",
            encode_header(MessageType.SHUTDOWN, 0),
        ]

    async def test_large_payloads_are_sent_from_where_they_lie(self):
        recorder = Recorder()
        tensor = memoryview(bytes(JOIN_BYTES))
        await FrameStream(recorder).send(MessageType.CHUNK, b"head", tensor)
        assert recorder.sent[0] == encode_header(MessageType.CHUNK, JOIN_BYTES + 4) + b"head"
        assert recorder.sent[1] is tensor

    async def test_a_cancelled_send_closes_the_stream(self, autojump_clock):
        sender, receiver = lockstep_pair()
        with trio.move_on_after(1) as scope:
            await sender.send(MessageType.CHUNK, bytes(100))
        assert scope.cancelled_caught
        with pytest.raises(LinkClosed, match="closed on this side"):
            await sender.send(MessageType.SHUTDOWN)
        await read_frame(receiver)
        with pytest.raises(LinkClosed, match="the peer closed"):
            await receiver.read_header()

    async def test_the_peer_is_gone(self):
        sender, receiver = memory_pair()
        await receiver.close()
        with pytest.raises(LinkClosed, match="sending failed: "):
            await sender.send(MessageType.SHUTDOWN)


class TestEnded:
    async def test_sockets(self):
        left, right = await socket_pair()
        async with right:
            stream = FrameStream(right)
            assert not await stream.ended()
            await left.send_all(b"abc")
            assert not await stream.ended()
            await left.aclose()
            assert await stream.ended()
            # What came before the end is still there.
            assert await stream.read_exact(3) == b"abc"
            with pytest.raises(LinkClosed):
                await stream.read_exact(1)

    async def test_a_look_whose_time_is_up_loses_nothing(self, mock_clock):
        left, right = await socket_pair()

        async def jump():
            mock_clock.jump(1.0)

        async with right:
            stream = FrameStream(right)
            for _ in range(20):  # the one or the other has its turn first
                await left.send_all(b"abc")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(stream.ended)
                    nursery.start_soon(jump)
            await left.aclose()
            assert await stream.read_exact(60) == 20 * b"abc"

    @pytest.mark.parametrize("unread", [READ_AHEAD_BYTES + 1, 60_000])
    async def test_an_end_behind_much_that_is_unread(self, unread):
        """A training manifest of some hundred tensors lies between a HELLO and the end of its dial."""
        left, right = await socket_pair()
        async with right:
            stream = FrameStream(right)
            await left.send_all(bytes(unread))
            assert not await stream.ended()
            await left.aclose()
            assert await stream.ended()
            assert len(await stream.read_exact(unread)) == unread

    async def test_where_the_system_does_not_tell_it_looks_as_far_as_the_read_ahead(self, monkeypatch):
        monkeypatch.setattr("yeto.link.framing.HUNG_UP", 0)
        for unread, seen in ((READ_AHEAD_BYTES - 1, True), (READ_AHEAD_BYTES + 1, False)):
            left, right = await socket_pair()
            async with right:
                await left.send_all(bytes(unread))
                await left.aclose()
                assert await FrameStream(right).ended() == seen

    async def test_a_reset_is_an_end(self):
        left, right = await socket_pair()
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        await left.aclose()
        assert await FrameStream(right).ended()
        await right.aclose()

    async def test_tls(self, tls):
        client, server = await tls_pair(tls)
        stream = FrameStream(server)
        assert not await stream.ended()
        # A record of which only a part has arrived: nothing to be seen yet.
        await client.raw.send_all(b"\x17\x03\x03\x00\x40half")
        assert not await stream.ended()
        await client.raw.aclose()
        assert await stream.ended()
        await stream.close()

    async def test_streams_without_a_socket(self):
        _, receiver = memory_pair()
        assert not await receiver.ended()


class TestCloseAfterPeer:
    async def test_the_peer_gets_the_last_word_though_it_sends_all_the_while(self):
        left, right = await socket_pair()
        leaving, talking = FrameStream(left), FrameStream(right)

        async with trio.open_nursery() as nursery:
            # Far more than the leaving side ever asks for: closing on it would reset the connection.
            nursery.start_soon(ends, ".", send_for_ever, talking)
            await leaving.read_header()
            await leaving.send(MessageType.ERROR, b"why")
            nursery.start_soon(leaving.close_after_peer, 30)
            assert await read_frame(talking) == (MessageType.ERROR, b"why")
            with pytest.raises(LinkClosed, match="the peer closed"):
                await talking.read_header()
            await talking.close()

    async def test_waits_no_longer_than_it_is_told(self, autojump_clock):
        leaving, silent = memory_pair()
        start = trio.current_time()
        await leaving.close_after_peer(3)
        assert trio.current_time() - start == 3
        with pytest.raises(LinkClosed):
            await silent.read_header()

    async def test_after_a_failure(self):
        leaving, _ = memory_pair()
        await leaving.close()
        await leaving.close_after_peer(3)

    async def test_streams_that_cannot_half_close(self):
        left, right = trio.testing.memory_stream_pair()
        await right.send_all(b"unread")
        await right.aclose()
        await FrameStream(OneByteStream(left)).close_after_peer(3)


class TestSockets:
    async def test_options(self):
        left, right = await socket_pair()
        async with left, right:
            set_socket_options(left)
            get = left.getsockopt
            assert get(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert get(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert get(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
            assert get(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 5
            assert get(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
            assert get(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000

    async def test_options_that_a_system_does_not_have(self, monkeypatch):
        monkeypatch.delattr(socket, "TCP_USER_TIMEOUT")
        left, right = await socket_pair()
        async with left, right:
            before = left.getsockopt(socket.IPPROTO_TCP, 18)
            set_socket_options(left)
            assert left.getsockopt(socket.IPPROTO_TCP, 18) == before
            assert left.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3

    async def test_options_under_tls(self, tls):
        client, server = await tls_pair(tls)
        set_socket_options(client)
        assert underlying_socket(client).getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        await trio.aclose_forcefully(client)
        await trio.aclose_forcefully(server)

    async def test_options_of_streams_that_have_none(self):
        left, right = trio.socket.socketpair()
        async with trio.SocketStream(left) as stream, trio.SocketStream(right):
            set_socket_options(stream)
            assert FrameStream(stream).peer == "?"
        set_socket_options(trio.testing.memory_stream_pair()[0])

    async def test_peer(self):
        left, right = await socket_pair()
        stream = FrameStream(left)
        host, port = right.socket.getsockname()
        assert stream.peer == f"{host}:{port}"
        await stream.close()
        assert stream.peer == "?"
        assert memory_pair()[0].peer == "?"
        await right.aclose()

    async def test_peer_of_an_ipv6_stream(self):
        try:
            [listener] = await trio.open_tcp_listeners(0, host="::1")
        except OSError as error:
            pytest.skip(f"no IPv6 loopback here: {error}")
        port = listener.socket.getsockname()[1]
        async with listener, await trio.open_tcp_stream("::1", port) as stream:
            assert FrameStream(stream).peer == f"[::1]:{port}"
