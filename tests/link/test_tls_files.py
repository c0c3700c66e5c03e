"""Certificates from files: what is wrong with them is said at the start, with the flag and the remedy."""

import datetime
from functools import partial
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives import serialization
from link_helpers import handshakes
from tls_authority import now

from yeto.errors import ConfigError
from yeto.link import client_context, server_context
from yeto.link.tls_files import PEM_BYTES_MAX


def encrypted(key):
    """Write a copy of a key with a passphrase; return its path."""
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    path = key.with_suffix(".locked")
    path.touch(mode=0o600)
    path.write_bytes(
        plain.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    return path


def written(folder, text, mode=0o600):
    path = folder / "file.pem"
    path.touch(mode=0o600)
    path.write_text(text)
    path.chmod(mode)
    return path


def broken(path):
    """Write a copy of a PEM file whose base64 is cut; return its path."""
    copy = path.with_suffix(".broken")
    copy.touch(mode=0o600)
    lines = path.read_text().splitlines(keepends=True)
    copy.write_text("".join(lines[:2] + lines[-1:]))
    return copy


CASES = {
    "no certificate file": lambda a, t: (
        (t / "no.pem", a.sign("x")[1]),
        "--tls-cert .*no.pem: No such file.*; copy the run's own",
    ),
    "no key file": lambda a, t: (
        (a.sign("x")[0], t / "no.pem"),
        "--tls-key .*no.pem: No such file.*keys new --tls",
    ),
    "a folder": lambda a, t: ((t, a.sign("x")[1]), "--tls-cert .*: Is a directory"),
    "no PEM": lambda a, t: ((written(t, "hello"), a.sign("x")[1]), "--tls-cert .*: holds no PEM certificate"),
    "the wrong way round": lambda a, t: (a.sign("x")[::-1], "--tls-cert .*: holds no PEM certificate"),
    "no PEM key": lambda a, t: ((a.sign("x")[0], a.sign("x")[0]), "--tls-key .*: holds no PEM private key"),
    "a broken certificate": lambda a, t: (
        (broken((pair := a.sign("x"))[0]), pair[1]),
        "--tls-cert .*, --tls-key .*: cannot be used",
    ),
    "a broken key": lambda a, t: (
        ((pair := a.sign("x"))[0], broken(pair[1])),
        "--tls-cert .*, --tls-key .*: cannot be used",
    ),
    "the key of another": lambda a, t: (
        (a.sign("x")[0], a.sign("x")[1]),
        "--tls-key .*: is not the key of --tls-cert",
    ),
    "a passphrase": lambda a, t: (
        ((pair := a.sign("x"))[0], encrypted(pair[1])),
        "--tls-key .*: is encrypted",
    ),
    "expired": lambda a, t: (a.expired("x"), "--tls-cert .*: certificate has expired; yeto keys new --tls"),
    "not yet valid": lambda a, t: (a.future("x"), "certificate is not yet valid; check this machine's clock"),
}


@pytest.mark.parametrize("side", ["server", "client"])
@pytest.mark.parametrize("case", CASES)
def test_a_pair_that_cannot_serve(authority, tmp_path, case, side):
    (cert, key), told = CASES[case](authority, tmp_path)
    make = server_context if side == "server" else partial(client_context, authority.path)
    with pytest.raises(ConfigError, match=told) as caught:
        make(cert, key)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read(authority, mode):
    cert, key = authority.sign("x")
    key.chmod(mode)
    with pytest.raises(
        ConfigError, match=f"--tls-key .*: mode {mode:04o} lets others read the key; run chmod 600"
    ):
        server_context(cert, key)


@pytest.mark.parametrize("flag", ["--tls-ca", "--tls-client-ca"])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "No such file"),
        ("hello", "holds no PEM certificate"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", r"cannot be used \("),
        ("x" * PEM_BYTES_MAX + "-----BEGIN CERTIFICATE-----", "holds no PEM certificate"),
    ],
    ids=["missing", "no PEM", "broken", "huge"],
)
def test_an_authority_that_cannot_serve(authority, tmp_path, flag, text, told):
    path = tmp_path / "no.pem" if text is None else written(tmp_path, text)
    make = client_context if flag == "--tls-ca" else partial(server_context, *authority.sign("x"))
    with pytest.raises(ConfigError, match=f"{flag} .*: {told}"):
        make(path)


def test_an_authority_that_has_expired(authority, monkeypatch):
    monkeypatch.setattr("yeto.link.tls_files.time", SimpleNamespace(time=lambda: 1e12))
    with pytest.raises(ConfigError, match=r"--tls-ca .*: has expired; yeto keys new --tls"):
        client_context(authority.path)


async def test_a_single_certificate_can_be_trusted_itself(authority, stranger):
    cert, key = stranger.sign("localhost")
    said_by_server, said_by_client, *streams = await handshakes(
        server_context(cert, key), client_context(cert)
    )
    assert said_by_server is said_by_client is None
    for stream in streams:
        await stream.aclose()


def test_validity_that_ends_soon_is_still_valid(authority):
    soon = now() + datetime.timedelta(minutes=5)
    server_context(*authority.sign("x", not_after=soon))
