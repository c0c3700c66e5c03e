"""``yeto keys new``: the key that learners and syncer authenticate each other with, and certificates."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter, validators

from yeto.errors import ConfigError
from yeto.hosts import with_port

if TYPE_CHECKING:
    from yeto.cli.certificates import Certificates

keys_app = App(name="keys", help="Make the key that learners authenticate with, and certificates for TLS.")

DAYS_MAX = 36_500
"""A certificate has its end before the year 10,000."""

PRIVATE = 0o600
PUBLIC = 0o644


@keys_app.command(name="new")
def new_key(
    path: Annotated[Path, Parameter(help="Where to write the key; must not exist yet.")] = Path("yeto.key"),
    *,
    tls: Annotated[
        str | None,
        Parameter(
            help="Make certificates, too: HOST[,HOST...], the names and addresses by which learners will "
            "reach the syncer. The files are written beside the key, and named after it."
        ),
    ] = None,
    tls_clients: Annotated[
        int,
        Parameter(
            help="Make certificates for so many learners, with which the syncer knows its own.",
            validator=validators.Number(gte=0),
        ),
    ] = 0,
    tls_days: Annotated[
        int,
        Parameter(
            help="For how long the certificates are valid.", validator=validators.Number(gte=1, lte=DAYS_MAX)
        ),
    ] = 365,
) -> int:
    """Write a fresh 256-bit key (hex, mode 0600) and, with --tls, certificates.

    Copy the key to every machine, and pass it as --auth-key-file. What --tls wrote, and which machine needs
    what, is printed with both command lines. No file is ever overwritten.
    """
    files = {path: (secrets.token_hex(32).encode() + b"\n", PRIVATE)}
    if tls is None:
        if tls_clients:
            raise ConfigError("--tls-clients: needs --tls HOST, which names the syncer")
        write_new(files)
        print(f"wrote {path} (mode 0600): pass it as --auth-key-file to the syncer and to every learner")
        return 0
    try:
        # Not at the top: a plain key needs none of it.
        from yeto.cli.certificates import make_certificates, parse_hosts
    except ImportError as error:
        raise ConfigError(
            "--tls makes certificates with cryptography, which is not installed: pip install 'yeto[tls]'"
        ) from error
    hosts = parse_hosts(tls)
    made = make_certificates(hosts, clients=tls_clients, days=tls_days)
    files |= tls_files(path, made)
    write_new(files)
    print("\n".join(instructions(path, hosts, made)))
    return 0


def ca_path(path: Path) -> Path:
    """Return where the authority's certificate is."""
    return path.with_name(f"{path.stem}-ca.pem")


def pair_paths(path: Path, whose: str) -> tuple[Path, Path]:
    """Return where a certificate and its key are: ``syncer``, ``learner-0``, ..."""
    return path.with_name(f"{path.stem}-{whose}.pem"), path.with_name(f"{path.stem}-{whose}-key.pem")


def tls_files(path: Path, made: Certificates) -> dict[Path, tuple[bytes, int]]:
    """Return content and mode of every file beside the key."""
    files = {ca_path(path): (made.ca, PUBLIC)}
    owners = {"syncer": made.server, **{f"learner-{i}": pair for i, pair in enumerate(made.clients)}}
    for whose, pair in owners.items():
        cert, key = pair_paths(path, whose)
        files |= {cert: (pair.cert, PUBLIC), key: (pair.key, PRIVATE)}
    return files


def write_new(files: dict[Path, tuple[bytes, int]]) -> None:
    """Write all files, or none: one that exists belongs to a running fleet.

    Raises:
        ConfigError: one of them exists, or cannot be written.
    """
    written: list[Path] = []
    try:
        for path, (content, mode) in files.items():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            written.append(path)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
    except OSError as error:
        for done in written:
            with contextlib.suppress(OSError):
                done.unlink()
        if isinstance(error, FileExistsError):
            raise ConfigError(f"{path} exists already; name another file or remove it first") from None
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def instructions(path: Path, hosts: tuple[str, ...], made: Certificates) -> list[str]:
    """Return what to copy where, and the flags of both sides."""
    ca, (cert, key), (own_cert, own_key) = (
        ca_path(path),
        pair_paths(path, "syncer"),
        pair_paths(path, "learner-N"),
    )
    address = with_port(hosts[0].replace("*", "HEAD"), 29400)
    lines = [
        f"certificates for {', '.join(hosts)}, valid until {made.until:%Y-%m-%d}; keys have mode 0600",
        "",
        f"to the syncer's machine:     {path} {cert} {key}" + (f" {ca}" if made.clients else ""),
        f"to every learner's machine:  {path} {ca}",
    ]
    if made.clients:
        lines.append(f"to that of learner N:        {own_cert} {own_key}")
    syncer = [f"--auth-key-file {path} --tls-cert {cert} --tls-key {key}"]
    learner = [f"--auth-key-file {path} --tls-ca {ca}"]
    if made.clients:
        syncer.append(f"--tls-client-ca {ca}")
        learner.append(f"--tls-cert {own_cert} --tls-key {own_key}")
    return [
        *lines,
        "",
        " \\\n    ".join(["yeto run --role syncer --host 0.0.0.0", *syncer]) + " ...",
        " \\\n    ".join([f"yeto run --role learner --syncer {address}", *learner]) + " ...",
        *_by_another_name(hosts[0]),
    ]


def _by_another_name(host: str) -> list[str]:
    """Return how a learner dials a syncer whose certificate has a name that no network knows."""
    # Not at the top: a plain key needs none of it.
    from yeto.cli.certificates import is_address

    if is_address(host) or "*" in host:
        return []
    return [f"  (where no network knows {host}: --syncer ADDRESS:29400 --tls-server-name {host})"]
