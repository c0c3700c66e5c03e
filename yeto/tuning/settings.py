"""Words for what a flag may not be."""

from __future__ import annotations

from collections.abc import Sequence

from yeto.errors import ConfigError


def require_choice(flag: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a word that is not one of those allowed.

    Raises:
        ConfigError: naming the flag and the words.
    """
    if value not in allowed:
        raise ConfigError(f"{flag} {value}: must be one of {', '.join(allowed)}")


def require_at_least(flag: str, value: int, least: int) -> None:
    """Refuse a number below the least.

    Raises:
        ConfigError: naming the flag and the least number.
    """
    if value < least:
        raise ConfigError(f"{flag} {value}: must be at least {least}")
