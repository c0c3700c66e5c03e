"""TLS streams: bytes to where they belong, ends that are told apart, refusals that both sides can explain."""

import ssl
from contextlib import suppress

import pytest
import trio
from link_helpers import handshakes, read_frame, socket_pair, tls_pair

from yeto.link import FrameStream, LinkClosed, LinkRefused, TlsStream
from yeto.link.tls import RECORD_BYTES, SEND_BYTES
from yeto.link.tls_words import explain
from yeto.wire.frames import MessageType


def pattern(size):
    return bytes(i * i % 251 for i in range(size))


class TestBytes:
    async def test_both_ways_at_once_and_in_any_sizes(self, tls):
        client, server = await tls_pair(tls)
        data = pattern(3 * SEND_BYTES + 12_345)
        got = {"client": bytearray(len(data)), "server": bytearray(len(data))}

        async def receive(name, stream):
            view, filled, size = memoryview(got[name]), 0, 1
            while filled < len(view):
                filled += await stream.receive_into(view[filled : filled + size])
                size = size % 100_000 * 3 + 1

        async with trio.open_nursery() as nursery:
            for name, stream in (("client", client), ("server", server)):
                nursery.start_soon(stream.send_all, data)
                nursery.start_soon(receive, name, stream)
        assert got["client"] == got["server"] == data
        await client.aclose()
        assert await server.receive_into(memoryview(bytearray(9))) == 0
        await server.aclose()

    async def test_one_read_takes_every_record_that_is_here(self, tls):
        client, server = await tls_pair(tls)
        data = pattern(3 * RECORD_BYTES)
        await client.send_all(data)
        into = bytearray(len(data) + 5)
        # One byte waits for all of it to arrive; loopback delivers a send in one piece.
        assert await server.receive_some(1) == data[:1]
        filled = await server.receive_into(memoryview(into))
        assert filled > RECORD_BYTES
        assert into[:filled] == data[1 : 1 + filled]
        await client.aclose()
        await server.aclose()

    async def test_what_was_read_and_not_asked_for_stays_encrypted_until_it_is(self, tls):
        """A receive after one into memory must not write there."""
        client, server = await tls_pair(tls)
        await client.send_all(b"0123456789")
        into = bytearray(4)
        assert await server.receive_into(memoryview(into)) == 4
        assert await server.receive_some(100) == b"456789"
        assert into == b"0123"
        await client.aclose()
        await server.aclose()

    async def test_version_and_tickets(self, tls):
        client, server = await tls_pair(tls)
        assert client._secure.version() == server._secure.version() == "TLSv1.3"
        # Nothing unread is left in a client that only sends: at its end that would reset the connection.
        with trio.move_on_after(0.1) as scope:
            await client.raw.receive_some()
        assert scope.cancelled_caught
        await client.aclose()
        await server.aclose()


class TestEnds:
    async def test_close_notify_reaches_a_peer_that_insists_on_it(self, authority):
        left, right = await socket_pair()
        strict = trio.SSLStream(left, authority.client(), server_hostname="localhost")
        server = TlsStream(right, authority.server(), server_side=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(strict.do_handshake)
            nursery.start_soon(server.handshake)
        await FrameStream(server).send(MessageType.ERROR, b"why")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(FrameStream(server).close_after_peer, 30)
            assert (await strict.receive_some())[-3:] == b"why"
            assert await strict.receive_some() == b""
            await strict.aclose()

    async def test_the_last_word_arrives_though_the_peer_sends_all_the_while(self, tls):
        client, server = await tls_pair(tls)
        talking, leaving = FrameStream(client), FrameStream(server)

        async def talk():
            with suppress(LinkClosed):
                while True:
                    await talking.send(MessageType.CHUNK, bytes(100_000))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk)
            await leaving.read_header()
            await leaving.send(MessageType.ERROR, b"why")
            nursery.start_soon(leaving.close_after_peer, 30)
            assert await read_frame(talking) == (MessageType.ERROR, b"why")
            with pytest.raises(LinkClosed, match=r"the peer closed the connection$"):
                await talking.read_header()
            await talking.close()

    async def test_a_cut_in_the_middle_of_a_frame_is_seen(self, tls):
        client, server = await tls_pair(tls)
        await client.send_all(b"\xde\xc0\x70\xd1\x03")
        await client.aclose()
        with pytest.raises(LinkClosed, match="in the middle of a frame header"):
            await FrameStream(server).read_header()
        await server.aclose()

    async def test_bytes_that_somebody_changed_end_the_connection(self, tls):
        client, server = await tls_pair(tls)
        await client.raw.send_all(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(LinkClosed, match="receiving failed") as caught:
            await FrameStream(server).read_header()
        assert not isinstance(caught.value, LinkRefused)
        await client.aclose()
        await server.aclose()

    async def test_what_came_before_a_failure_is_not_lost(self, tls):
        """A good record and a bad one behind it lie in the buffer together."""
        client, server = await tls_pair(tls)
        into = memoryview(bytearray(100))
        await client.send_all(b"before")
        await client.raw.send_all(b"\x17\x03\x03\x00\x20" + bytes(32))
        while len(await server.raw.socket.recv(1000, trio.socket.MSG_PEEK)) < 6 + 22 + 37:
            await trio.sleep(0.01)
        assert await server.receive_into(into) == 6
        assert into[:6] == b"before"
        with pytest.raises(trio.BrokenResourceError) as caught:
            await server.receive_into(into)
        assert "bad record mac" in str(caught.value.__cause__)
        await client.aclose()
        await server.aclose()

    async def test_closed_on_this_side(self, tls):
        client, server = await tls_pair(tls)
        stream = FrameStream(client)
        await stream.close()
        for use in (stream.read_header, lambda: stream.send(MessageType.SHUTDOWN)):
            with pytest.raises(LinkClosed, match="closed on this side"):
                await use()
        await server.aclose()

    async def test_an_end_in_the_handshake_is_an_ordinary_one(self, authority):
        left, right = await socket_pair()
        await left.aclose()
        with pytest.raises(LinkClosed, match="ended in the TLS handshake") as caught:
            await TlsStream(right, authority.server(), server_side=True).handshake()
        assert not isinstance(caught.value, LinkRefused)
        await right.aclose()


class TestRefusals:
    @pytest.mark.parametrize(
        ("case", "by_server", "by_client"),
        [
            ("authority", "which its --tls-ca did not sign", "--tls-ca must hold the CA that signed it"),
            ("name", "another name than it dialled", "Hostname mismatch.*example.org.*--tls-server-name"),
            ("expired", "which has expired for it", "certificate has expired; give the syncer a new"),
            ("future", "not valid yet", "not yet valid; check the clocks"),
            ("old", "does not speak TLS 1.3", "does not speak TLS 1.3"),
        ],
    )
    async def test_what_the_client_sees_the_server_is_told(
        self, authority, stranger, monkeypatch, case, by_server, by_client
    ):
        # A syncer would not start with some of these; they go bad while it runs.
        monkeypatch.setattr("yeto.link.tls_files._rehearse", lambda *_, **__: None)
        server, client, name = authority.server(), authority.client(), "localhost"
        match case:
            case "authority":
                client = stranger.client()
            case "name":
                name = "example.org"
            case "expired" | "future":
                from yeto.link import server_context

                server = server_context(*getattr(authority, case)("localhost"))
            case "old":
                client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_2
        at_server, at_client, *streams = await handshakes(server, client, name)
        for error, pattern_ in ((at_server, by_server), (at_client, by_client)):
            assert isinstance(error, LinkRefused)
            with pytest.raises(LinkRefused, match=pattern_):
                raise error
        for stream in streams:
            await stream.aclose()

    @pytest.mark.parametrize(
        ("case", "by_server", "by_client"),
        [
            ("none", "it has no client certificate", "demands a client certificate; give --tls-cert"),
            ("authority", "issuer certificate; --tls-client-ca must", "its --tls-client-ca must have signed"),
            ("expired", "certificate has expired", "this learner's certificate, which has expired"),
        ],
    )
    async def test_client_certificates(self, authority, stranger, monkeypatch, case, by_server, by_client):
        monkeypatch.setattr("yeto.link.tls_files._rehearse", lambda *_, **__: None)
        pair = {
            "none": (None, None),
            "authority": stranger.sign("learner"),
            "expired": authority.expired("learner"),
        }[case]
        server = authority.server(client_ca=authority)
        at_server, at_client, server, client = await handshakes(server, authority.client(pair))
        with pytest.raises(LinkRefused, match=by_server):
            raise at_server
        # In TLS 1.3 a client has shaken hands before the server has seen its certificate.
        assert at_client is None
        with pytest.raises(LinkRefused, match=by_client):
            await FrameStream(client).read_header()
        await client.aclose()
        await server.aclose()

    async def test_a_good_client_certificate(self, authority):
        server = authority.server(client_ca=authority)
        at_server, at_client, *streams = await handshakes(server, authority.client(authority.sign("me")))
        assert at_server is at_client is None
        for stream in streams:
            await stream.aclose()

    @pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", bytes(99), b"\xde\xc0\x70\xd1" + bytes(99)])
    @pytest.mark.parametrize("server_side", [True, False])
    async def test_what_is_no_tls(self, tls, data, server_side):
        left, right = await socket_pair()
        stream = TlsStream(
            left, tls[0] if server_side else tls[1], server_side=server_side,
            server_name=None if server_side else "localhost",
        )  # fmt: skip
        await right.send_all(data)
        with pytest.raises(LinkRefused, match="does not speak TLS;"):
            await stream.handshake()
        await left.aclose()
        await right.aclose()

    def test_other_failures_are_no_refusals(self):
        error = ssl.SSLError(1, "x")
        assert explain(error, server_side=True) is None
        error.reason = "DECRYPTION_FAILED_OR_BAD_RECORD_MAC"
        assert explain(error, server_side=False) is None
