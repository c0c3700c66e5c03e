"""Fixtures of the tests of the link."""

import shutil
import ssl
import subprocess

import pytest
from link_helpers import SLICE

from yeto.wire import messages, striping


@pytest.fixture
def _small_slices(monkeypatch):
    """Cut messages into slices of ``SLICE`` bytes instead of 4 MiB."""
    monkeypatch.setattr(messages, "SLICE_BYTES", SLICE)
    monkeypatch.setattr(striping, "SLICE_BYTES", SLICE)


@pytest.fixture(scope="session")
def tls(tmp_path_factory):
    """Return server and client contexts for a certificate of our own for localhost."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl program to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout {key} -out {certificate}".split(),
        check=True,
        capture_output=True,
    )
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=certificate)
