"""Ports for processes that have to be told theirs before they start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port of the loopback that nobody listens at, for now: another process may be quicker to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
