"""A bar for work that goes row by row, on stderr, where no program reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def with_progress(items: Iterator[T], words: str) -> Iterator[T]:
    """Yield items, and show how many there were.

    Args:
        items: of any number.
        words: what is being done.
    """
    # How many there will be is not known, so that only what is done is shown.
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(words), TextColumn("{task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield from progress.track(items)
