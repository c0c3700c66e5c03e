"""An iterator that runs beside its consumer: a thread makes the next items while the last one is used.

A bounded number of items waits, so a slow consumer stops the producer. A consumer that goes away stops it,
too: closing the generator ends the thread before it returns.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _Item(Generic[T]):
    """Tells an item from the end, whatever the items are."""

    def __init__(self, value: T) -> None:
        self.value = value


def beside(items: Iterator[T], *, ahead: int, name: str) -> Generator[T, None, None]:
    """Run an iterator in a thread; its exceptions are raised here.

    Args:
        items: what the thread goes through.
        ahead: most items that wait.
        name: of the thread.
    """
    ready: queue.Queue[_Item[T] | BaseException | None] = queue.Queue(ahead)
    stop = threading.Event()

    def work() -> None:
        end: BaseException | None = None
        try:
            for one in items:
                ready.put(_Item(one))
                if stop.is_set():
                    return
        except BaseException as error:
            end = error
        ready.put(end)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        while isinstance(one := ready.get(), _Item):
            yield one.value
        if one is not None:
            raise one
    finally:
        stop.set()
        # Make room, so that a producer that waits to put sees the stop; it puts at most once more.
        while not ready.empty():
            ready.get_nowait()
        thread.join()
