"""Text that a peer had a hand in, made fit for one line of a log, a record or an ERROR.

A key of a training manifest can have a mebibyte and line breaks. What is written about it must neither fill a
disk nor look like lines that the syncer wrote.
"""

from __future__ import annotations

from typing import Final

from yeto.tape import printable

SENTENCE_CHARS_MAX: Final = 500
"""Of why a group ended."""

VALUE_CHARS_MAX: Final = 200
"""Of one value in a sentence: any name, size or hash, the beginning of a list."""


def in_one_line(text: str, most: int = SENTENCE_CHARS_MAX) -> str:
    """Return the text as one printable line, cut when it is longer than ``most`` characters."""
    return printable(text if len(text) <= most else f"{text[:most]}...")
