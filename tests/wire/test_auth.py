import hashlib
import hmac
import os

import pytest

from yeto.errors import ConfigError, ProtocolError
from yeto.wire.auth import KEY_BYTES_MAX, authenticated_body, hello_mac, load_key, read_key_file
from yeto.wire.errors import AuthenticationError


@pytest.fixture
def key_file(tmp_path):
    def make(data, mode=0o600):
        path = tmp_path / "auth.key"
        path.write_bytes(data)
        path.chmod(mode)
        return path

    return make


def test_mac_is_hmac_sha256_under_its_own_prefix():
    expected = hmac.new(b"key", b"yeto-hello-mac-v1\0body", hashlib.sha256).digest()
    assert hello_mac(b"key", b"body") == expected


def test_authenticated_body():
    mac = hello_mac(b"key", b"body")
    assert bytes(authenticated_body(b"key", b"body" + mac)) == b"body"
    assert bytes(authenticated_body(b"key", hello_mac(b"key", b""))) == b""
    for wrong in (b"", b"body", b"Body" + mac, b"body" + mac[:-1], mac):
        with pytest.raises(AuthenticationError):
            authenticated_body(b"key", wrong)
    assert issubclass(AuthenticationError, ProtocolError)


def test_comparison_is_constant_time(monkeypatch):
    calls = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: calls.append((bytes(a), bytes(b))) or True)
    authenticated_body(b"key", b"body" + bytes(32))
    assert calls == [(hello_mac(b"key", b"body"), bytes(32))]


@pytest.mark.parametrize(
    ("data", "key"),
    [(b"secret\n", b"secret"), (b"secret", b"secret"), (b"secret\n\n", b"secret\n"), (b"a b\0", b"a b\0")],
)
def test_one_trailing_newline_is_no_part_of_the_key(key_file, data, key):
    assert read_key_file(key_file(data)) == key


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o601])
def test_a_key_that_others_can_read_is_refused(key_file, mode):
    with pytest.raises(ConfigError, match=rf"auth.key: mode {mode:04o} .* chmod 600"):
        read_key_file(key_file(b"secret", mode))


def test_a_read_only_key_is_fine(key_file):
    assert read_key_file(key_file(b"secret", 0o400)) == b"secret"


@pytest.mark.parametrize("data", [b"", b"\n"])
def test_an_empty_key_is_refused(key_file, data):
    with pytest.raises(ConfigError, match="the key is empty"):
        read_key_file(key_file(data))


def test_longest_key(key_file):
    key = b"k" * KEY_BYTES_MAX
    assert read_key_file(key_file(key + b"\n")) == key
    with pytest.raises(ConfigError, match="longer than 4096 bytes"):
        read_key_file(key_file(key + b"k"))
    with pytest.raises(ConfigError, match="longer than 4096 bytes"):
        read_key_file(key_file(bytes(10 * KEY_BYTES_MAX)))


def test_what_is_no_key_file(tmp_path):
    with pytest.raises(ConfigError, match=r"missing: No such file .* 'yeto keys new'"):
        read_key_file(tmp_path / "missing")
    with pytest.raises(ConfigError, match="--auth-key-file"):
        read_key_file(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_key_file(pipe)


def test_file_before_environment_before_none(key_file):
    environ = {"YETO_ISLAND_HMAC_KEY": "from the environment\n"}
    path = key_file(b"from the file\n")
    assert load_key(path, environ) == b"from the file"
    assert load_key(None, environ) == b"from the environment"
    assert load_key(None, {}) is None
    with pytest.raises(ConfigError, match="YETO_ISLAND_HMAC_KEY: the key is empty"):
        load_key(None, {"YETO_ISLAND_HMAC_KEY": ""})
