"""What an address promises before anybody connects, and how it is written. Like errors, open to all rooms."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only this machine itself reaches an address or name.

    Any name but ``localhost`` is resolved when it is used; what it points to then cannot be promised now.
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def with_port(host: str, port: int) -> str:
    """Return ``HOST:PORT`` as flags take it and as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
