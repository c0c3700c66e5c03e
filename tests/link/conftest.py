"""Fixtures of the tests of the link."""

import pytest
from link_helpers import SLICE
from tls_authority import Authority

from yeto.wire import messages, striping


@pytest.fixture
def _small_slices(monkeypatch):
    """Cut messages into slices of ``SLICE`` bytes instead of 4 MiB."""
    monkeypatch.setattr(messages, "SLICE_BYTES", SLICE)
    monkeypatch.setattr(striping, "SLICE_BYTES", SLICE)


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory):
    """Another authority."""
    return Authority(tmp_path_factory.mktemp("tls-of-others"))


@pytest.fixture(scope="session")
def tls(authority):
    """Return server and client contexts for a certificate for localhost."""
    return authority.server("localhost"), authority.client()
