"""Certificates for one fleet: an authority, the syncer's certificate, and some for learners.

The authority lives as long as this call. It signs what was asked for, and its key is never written anywhere,
so nobody, whoever gets hold of the files, can make another certificate that the fleet accepts. The price is
that one more name or one more learner means a new set of files on every machine.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from typing import Final

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from yeto.errors import ConfigError

EARLY: Final = datetime.timedelta(hours=1)
"""Certificates are valid from so long ago: the other machine's clock may be behind."""

NAME = re.compile(r"(?:\*\.)?(?!-)[a-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?", re.IGNORECASE)
"""A host name as DNS has it, perhaps with a wildcard in front."""

NUMBERS = re.compile(r"[0-9.]+")
"""What looks like an address and need not be one."""


@frozen(kw_only=True)
class Pair:
    """A certificate and its key, both PEM."""

    cert: bytes
    key: bytes


@frozen(kw_only=True)
class Certificates:
    """What one authority signed."""

    ca: bytes
    """The authority's own certificate, PEM."""
    server: Pair
    clients: tuple[Pair, ...]
    until: datetime.datetime


def parse_hosts(text: str) -> tuple[str, ...]:
    """Split ``HOST[,HOST...]`` into host names and addresses.

    Raises:
        ConfigError: one of them is neither.
    """
    hosts = tuple(part.strip().removeprefix("[").removesuffix("]") for part in text.split(","))
    for host in hosts:
        is_name = len(host) <= 253 and NAME.fullmatch(host) and not NUMBERS.fullmatch(host)
        if not (is_name or is_address(host)):
            raise ConfigError(
                f"--tls {text}: {host!r} is neither a host name nor an address; write HOST[,HOST...] without "
                "ports, as learners write it in --syncer"
            )
    return hosts


def make_certificates(hosts: tuple[str, ...], *, clients: int, days: int) -> Certificates:
    """Make an authority and have it sign.

    Args:
        hosts: names and addresses of the syncer.
        clients: how many learners get a certificate.
        days: validity of everything.
    """
    authority = _Authority(days)
    return Certificates(
        ca=authority.cert,
        server=authority.issue("yeto syncer", hosts, ExtendedKeyUsageOID.SERVER_AUTH),
        clients=tuple(
            authority.issue(f"yeto learner {i}", (f"learner-{i}",), ExtendedKeyUsageOID.CLIENT_AUTH)
            for i in range(clients)
        ),
        until=authority.until,
    )


class _Authority:
    """Signs, and is forgotten."""

    def __init__(self, days: int) -> None:
        now = datetime.datetime.now(datetime.UTC)
        self._start = now - EARLY
        self.until = now + datetime.timedelta(days=days)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("yeto authority")
        self.cert = self._sign(
            self._name, self._key, _usage(is_authority=True), x509.BasicConstraints(ca=True, path_length=0)
        )

    def issue(self, name: str, hosts: tuple[str, ...], purpose: x509.ObjectIdentifier) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.IPAddress(ipaddress.ip_address(host)) if is_address(host) else x509.DNSName(host.rstrip("."))
            for host in hosts
        ]
        cert = self._sign(
            _name(name),
            key,
            _usage(is_authority=False),
            x509.BasicConstraints(ca=False, path_length=None),
            x509.ExtendedKeyUsage([purpose]),
            x509.SubjectAlternativeName(names),
        )
        return Pair(cert=cert, key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._start)
            .not_valid_after(self.until)
        )
        for extension in (
            *extensions,
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
        ):
            critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def is_address(host: str) -> bool:
    """Whether a host is an address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
