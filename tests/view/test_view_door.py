"""Who may look: a table of requests, and what is said to each."""

import pytest

from yeto.errors import ConfigError
from yeto.hosts import is_loopback
from yeto.view.door import Door, host_of, new_token, read_token

TOKEN = "a-token-of-the-test-0123"
LOCAL = Door(token=None, local=True)
OPEN = Door(token=TOKEN, local=False)
HERE = {"host": "localhost:29480"}


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", HERE, None),
        ("HEAD", HERE, None),
        ("GET", {"host": "127.0.0.1:29480"}, None),
        ("GET", {"host": "[::1]:29480"}, None),
        ("GET", {"host": "LOCALHOST"}, None),
        ("POST", HERE, 405),
        ("OPTIONS", HERE, 405),
        ("DELETE", HERE, 405),
        ("GET", HERE | {"content-length": "5"}, 413),
        ("GET", HERE | {"transfer-encoding": "chunked"}, 413),
        ("GET", {}, 421),
        ("GET", {"host": "attacker.example"}, 421),
        ("GET", {"host": "localhost.attacker.example:29480"}, 421),
        ("GET", {"host": "192.0.2.1:29480"}, 421),
    ],
)
def test_this_machine_alone_is_served_without_a_token(method, headers, status):
    refusal = LOCAL.refusal(method, headers, "")
    assert (refusal and refusal[0]) == status


def cookie(door):
    return door.cookie().partition(";")[0]


@pytest.mark.parametrize(
    ("headers", "query", "status"),
    [
        ({}, "", 401),
        ({"authorization": f"Bearer {TOKEN}"}, "", None),
        ({"authorization": f"bearer {TOKEN}"}, "", None),
        ({"authorization": f"Basic {TOKEN}"}, "", 401),
        ({"authorization": "Bearer wrong"}, "", 401),
        ({"authorization": "Bearer \xff"}, "", 401),
        ({}, f"token={TOKEN}", None),
        ({}, f"token={TOKEN}x", 401),
        ({}, "token=", 401),
        ({}, "&".join(f"a{number}=1" for number in range(100)), 401),
        ({"cookie": cookie(OPEN)}, "", None),
        ({"cookie": f"other=1; {cookie(OPEN)}"}, "", None),
        ({"cookie": f"{OPEN.cookie_name}={TOKEN}"}, "", 401),
        ({"cookie": cookie(Door(token=new_token(), local=False))}, "", 401),
        ({"cookie": "= ; \x00"}, "", 401),
    ],
)
def test_others_need_the_token(headers, query, status):
    refusal = OPEN.refusal("GET", {"host": "anything.example"} | headers, query)
    assert (refusal and refusal[0]) == status


def test_a_token_does_not_show_itself():
    assert TOKEN not in repr(OPEN)
    assert TOKEN not in OPEN.cookie()
    assert "HttpOnly" in OPEN.cookie()
    assert "SameSite=Strict" in OPEN.cookie()


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("", False)),
        *(("LocalHost", True), ("::ffff:10.0.0.1", False), ("localhost.example", False)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("head.example", False)),
    ],
)
def test_what_is_this_machine(host, local):
    assert is_loopback(host) is local


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("a:1", "a"),
        ("a", "a"),
        ("[::1]:1", "::1"),
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("", ""),
        ("[::1].a", "[::1].a"),
    ],
)
def test_the_host_of_a_header(header, host):
    assert host_of(header) == host


def test_a_token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"  {TOKEN}\n")
    assert read_token(path) == TOKEN
    for content in (b"", b"short", b"two words that are long enough", "ünïcödé-ünïcödé-ünïcödé".encode()):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"--token-file .*token"):
            read_token(path)
    with pytest.raises(ConfigError, match=r"--http-token-file .*absent"):
        read_token(tmp_path / "absent", "--http-token-file")
