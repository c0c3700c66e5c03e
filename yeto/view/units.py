"""Numbers with their units, for people."""

from __future__ import annotations

from datetime import timedelta

from yeto.storage import size_text

SECONDS_MAX = 86_400.0 * 10**8
"""Longer spans cannot be split into days."""


def duration(seconds: float) -> str:
    """Return a time span, to the second; of a clock that is far off, as much as can be said."""
    return str(timedelta(seconds=round(min(seconds, SECONDS_MAX))))


def ago(at: float | None, now: float) -> str:
    """Return how long ago something was."""
    return "-" if at is None else f"{duration(max(0.0, now - at))} ago"


def fine(value: float | None) -> str:
    """Return a time of which fractions of a second matter."""
    return "-" if value is None else f"{value:.3g} s"


def size(count: int | None) -> str:
    """Return a number of bytes."""
    return "-" if count is None else size_text(count)


def number(count: int, what: str) -> str:
    """Return how many there are of something that takes an s when there are several."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
