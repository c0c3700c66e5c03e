"""Certificates and keys from files: read, checked and tried before anything depends on them.

What is wrong with a certificate would otherwise show when the first peer connects, in another process on
another machine. So the syncer and the learner **rehearse**: they shake hands with themselves over memory, one
end with the certificate, the other trusting exactly that. A handshake that fails says what a peer would have
said (expired, not yet valid, not made for this purpose), through the same code that will judge it later.
"""

from __future__ import annotations

import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from yeto.errors import ConfigError
from yeto.link.tls import TlsContext
from yeto.link.tls_words import openssl_words
from yeto.wire.auth import read_secret

PEM_BYTES_MAX: Final = 1024 * 1024
"""Largest file: a whole system's bundle of CAs has a third of this."""

_NOT_YET_VALID: Final = 9
"""X509_V_ERR_CERT_NOT_YET_VALID."""

REMEDY: Final = "yeto keys new --tls HOST makes certificates"
MISSING: Final = "copy the run's own here; yeto keys new --tls HOST makes those of a new run"
"""New certificates would lock out every learner that has the old."""


def server_context(cert: Path, key: Path, client_ca: Path | None = None) -> TlsContext:
    """Return the syncer's side of TLS 1.3.

    Args:
        cert: its certificate, then the intermediate ones, PEM.
        key: the certificate's key, PEM, not encrypted, for its owner's eyes only.
        client_ca: when given, a learner must have a certificate that a CA in this file signed.

    Raises:
        ConfigError: a file cannot be read or used; the message names the flag and the remedy.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    # A ticket serves to resume, which no learner does, and unread ones would reset a connection at its end.
    context.num_tickets = 0
    _load_pair(context, cert, key)
    _rehearse(cert, key, server_side=True)
    if client_ca is not None:
        _load_ca(context, client_ca, "--tls-client-ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: Path, cert: Path | None = None, key: Path | None = None) -> TlsContext:
    """Return a learner's side of TLS 1.3, which verifies the syncer's certificate and its name.

    Args:
        ca: the CAs that may have signed it, PEM; or the certificate itself.
        cert: certificate to show, when the syncer demands one.
        key: its key, as of `server_context`.

    Raises:
        ConfigError: a file cannot be read or used; the message names the flag and the remedy.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    _load_ca(context, ca, "--tls-ca")
    if cert is not None and key is not None:
        _load_pair(context, cert, key)
        _rehearse(cert, key, server_side=False)
    return context


def _context(protocol: int) -> TlsContext:
    context = TlsContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # What the user names is trusted, a single certificate too.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    _require_certificate(cert, "--tls-cert")
    text = read_secret(key, f"--tls-key {key}", bytes_max=PEM_BYTES_MAX, remedy=REMEDY)
    if b"PRIVATE KEY-----" not in text:
        raise ConfigError(f"--tls-key {key}: holds no PEM private key; {REMEDY}")

    def no_password() -> str:
        raise ConfigError(f"--tls-key {key}: is encrypted; write it anew without a passphrase (mode 0600)")

    try:
        context.load_cert_chain(cert, key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"--tls-key {key}: is not the key of --tls-cert {cert}") from error
        raise ConfigError(
            f"--tls-cert {cert}, --tls-key {key}: cannot be used ({openssl_words(error)}); {REMEDY}"
        ) from error


def _load_ca(context: ssl.SSLContext, ca: Path, flag: str) -> None:
    _require_certificate(ca, flag)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ConfigError(f"{flag} {ca}: cannot be used ({openssl_words(error)}); {REMEDY}") from error
    ends = [ssl.cert_time_to_seconds(str(one["notAfter"])) for one in context.get_ca_certs()]
    if ends and max(ends) < time.time():
        raise ConfigError(f"{flag} {ca}: has expired; {REMEDY}")


def _require_certificate(path: Path, flag: str) -> None:
    """Look whether a file can be read and has a PEM certificate in it."""
    try:
        with path.open("rb") as file:
            text = file.read(PEM_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; {MISSING}") from error
    if b"CERTIFICATE-----" not in text:
        raise ConfigError(f"{flag} {path}: holds no PEM certificate; {REMEDY}")


def _rehearse(cert: Path, key: Path, *, server_side: bool) -> None:
    """Shake hands over memory, the certificate on one side and trusted on the other.

    Raises:
        ConfigError: no peer would accept it.
    """
    server, client = _context(ssl.PROTOCOL_TLS_SERVER), _context(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    verifying = client if server_side else server
    for context in (server, client):
        context.load_cert_chain(cert, key)
    verifying.verify_mode = ssl.CERT_REQUIRED
    verifying.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        # Client's hello; server's flight; client's, verified by the server.
        for _ in range(2):
            for end in ends:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        remedy = REMEDY if error.verify_code != _NOT_YET_VALID else "check this machine's clock"
        raise ConfigError(f"--tls-cert {cert}: {error.verify_message}; {remedy}") from error
    except ssl.SSLError as error:
        raise ConfigError(
            f"--tls-cert {cert}: TLS 1.3 does not work with it ({openssl_words(error)}); {REMEDY}"
        ) from error
