"""Whether the libraries of the extra ``diffusion`` are there, without loading any."""

from __future__ import annotations

from importlib.util import find_spec

from yeto.errors import ConfigError


def require_diffusers() -> None:
    """Refuse to begin without them.

    Raises:
        ConfigError: naming the extra that brings them.
    """
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"diffusion needs the package {' and '.join(missing)}, which is not installed: "
            "pip install 'yeto[diffusion]'"
        )


_PACKAGES = {"diffusers": "diffusers", "PIL": "pillow"}
"""By the name that is imported, the one that is installed."""
