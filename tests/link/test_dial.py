"""Dialling: addresses, files with addresses, every address tried, and waits that are spread."""

import itertools
import random
import socket
from contextlib import contextmanager
from functools import partial

import pytest
import trio
import trio.testing
from dialled import dial
from resolver import Resolver
from trio import socket as trio_socket

from yeto.errors import ConfigError
from yeto.link import LinkClosed, LinkRefused, Target, accept_tls, backoff
from yeto.link.dial import parse_address


class TestAddresses:
    @pytest.mark.parametrize(
        ("text", "address"),
        [
            ("syncer.example:7001", ("syncer.example", 7001)),
            ("10.0.0.1:1", ("10.0.0.1", 1)),
            ("[2001:db8::1]:65535", ("2001:db8::1", 65535)),
        ],
    )
    async def test_good(self, text, address):
        assert parse_address(text) == address
        assert await Target.parse(text).address() == address

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "must be HOST:PORT"),
            ("host", "must be HOST:PORT"),
            (":7001", "must be HOST:PORT"),
            ("[]:7001", "must be HOST:PORT"),
            ("host:", "port '' must be a number from 1 to 65535"),
            ("host:0", "port '0'"),
            ("host:65536", "port '65536'"),
            ("host:-1", "port '-1'"),
            ("host:x", "port 'x'"),
            ("host:７", "port '７'"),
            ("2001:db8::1:7001", "write an IPv6 address as"),
            ("[2001:db8::1]", "write an IPv6 address as"),
        ],
    )
    def test_bad(self, text, reason):
        with pytest.raises(ConfigError, match=f"--syncer {text}: {reason}".replace("[", r"\[")):
            Target.parse(text)

    def test_a_file_without_a_name(self):
        with pytest.raises(ConfigError, match="--syncer @: name the file"):
            Target.parse("@")

    async def test_a_file_is_read_anew_each_time(self, tmp_path):
        path = tmp_path / "address"
        target = Target.parse(f"@{path}")
        with pytest.raises(LinkClosed, match=f"no syncer address in {path}: .*No such file"):
            await target.address()
        path.write_text("")
        with pytest.raises(LinkClosed, match="must be HOST:PORT"):
            await target.address()
        for port in (7001, 7002):
            path.write_text(f"syncer.example:{port}\n")
            assert await target.address() == ("syncer.example", port)
        path.write_text("\ufeffsyncer.example:7003\r\n", encoding="utf-8")
        assert await target.address() == ("syncer.example", 7003)


class Server:
    """Accepts connections and keeps them."""

    def __init__(self):
        self.accepted = []

    async def start(self, nursery, handler=None):
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, handler or self.keep, [listener])
        return listener.socket.getsockname()[1]

    async def keep(self, stream):
        self.accepted.append(stream)
        await trio.sleep_forever()


@contextmanager
def closed_port():
    """Yield a port on which nobody listens, and which nobody else can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        yield taken.getsockname()[1]


class TestDial:
    async def test_opens_all_streams_of_a_group(self):
        server = Server()
        async with trio.open_nursery() as nursery:
            port = await server.start(nursery)
            streams = await dial("127.0.0.1", port, 4)
            assert [stream.peer for stream in streams] == [f"127.0.0.1:{port}"] * 5
            for stream in streams:
                get = stream.stream.getsockopt
                assert get(trio_socket.SOL_SOCKET, trio_socket.SO_KEEPALIVE)
                await stream.close()
            nursery.cancel_scope.cancel()

    async def test_tries_every_address_and_stays_with_the_one_that_answers(self):
        # Nobody has 127.0.0.2 open: as a dead address first, the good one second.
        resolver = Resolver("127.0.0.2", "127.0.0.1")
        trio_socket.set_custom_hostname_resolver(resolver)
        async with trio.open_nursery() as nursery:
            port = await Server().start(nursery)
            streams = await dial("syncer.example", port, 2)
            assert [stream.peer for stream in streams] == [f"127.0.0.1:{port}"] * 3
            assert resolver.asked == [b"syncer.example"]
            for stream in streams:
                await stream.close()
            nursery.cancel_scope.cancel()

    async def test_names_everything_that_was_tried(self):
        trio_socket.set_custom_hostname_resolver(Resolver("127.0.0.2", "127.0.0.1"))
        with closed_port() as port, pytest.raises(LinkClosed) as caught:
            await dial("syncer.example", port, 0)
        assert str(caught.value).startswith(f"cannot connect to syncer.example:{port}: ")
        assert "127.0.0.2" in str(caught.value)
        assert "127.0.0.1" in str(caught.value)
        assert "\n" not in str(caught.value)

    async def test_a_name_without_an_address(self):
        trio_socket.set_custom_hostname_resolver(Resolver())
        with pytest.raises(LinkClosed, match=r"cannot connect to nowhere.example:1: no results"):
            await dial("nowhere.example", 1, 0)

    async def test_tls(self, tls):
        server_context, client_context = tls
        said = []

        async def answer(stream):
            secure = await accept_tls(stream, server_context)
            said.append(await secure.receive_some(3))

        async with trio.open_nursery() as nursery:
            port = await Server().start(nursery, answer)
            trio_socket.set_custom_hostname_resolver(Resolver("127.0.0.1"))
            streams = await dial("localhost", port, 1, tls=client_context)
            for stream in streams:
                await stream.stream.send_all(b"abc")
                assert stream.peer == f"127.0.0.1:{port}"
            while len(said) < 2:
                await trio.testing.wait_all_tasks_blocked()
            for stream in streams:
                await stream.close()
            nursery.cancel_scope.cancel()
        assert said == [b"abc", b"abc"]

    async def test_tls_for_another_name(self, tls):
        server_context, client_context = tls

        async def answer(stream):
            with pytest.raises(LinkRefused, match="this syncer's certificate: another name"):
                await accept_tls(stream, server_context)
            await stream.aclose()

        async with trio.open_nursery() as nursery:
            port = await Server().start(nursery, answer)
            told = rf"cannot connect to 127.0.0.1:{port}: the syncer's certificate is not accepted: IP addr"
            with pytest.raises(LinkRefused, match=told):
                await dial("127.0.0.1", port, 1, tls=client_context)
            nursery.cancel_scope.cancel()

    async def test_cancelled_leaves_nothing_open(self, tls):
        server = Server()
        async with trio.open_nursery() as nursery:
            port = await server.start(nursery)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as dialling:
                    # The server never answers the handshake.
                    dialling.start_soon(partial(dial, "127.0.0.1", port, 1, tls=tls[1]))
                    while not server.accepted:
                        await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
            [stream] = server.accepted
            while await stream.receive_some():
                pass
            nursery.cancel_scope.cancel()


class TestBackoff:
    def test_the_limit_doubles_up_to_the_cap(self):
        class Highest(random.Random):
            def uniform(self, low, high):
                assert low == 0
                return high

        assert list(itertools.islice(backoff(Highest()), 8)) == [1, 2, 4, 8, 16, 30, 30, 30]

    def test_learners_do_not_come_back_together(self):
        waits = [list(itertools.islice(backoff(random.Random(seed)), 6)) for seed in range(50)]
        last = sorted(wait[-1] for wait in waits)
        assert last[0] < 5
        assert last[-1] > 25
        assert all(0 <= wait <= 30 for wait in last)
        assert waits[0] == list(itertools.islice(backoff(random.Random(0)), 6))
