"""Rows, for ever, in batches of one shape: shards, epochs, a bounded shuffle, and a position to come back to.

A process reads its share of the rows (:mod:`yeto.tuning.share`) in windows of a bounded number of rows. The
rows of a window are permuted and put together by their shape, and what is left of a shape at the end of a
window is a batch that is not full. So

* every row of the share comes once in an epoch, whatever the shapes are: a shape that only one row has gives
  a batch of one, and the loss, a sum over elements, weighs it rightly;
* the order depends on (seed, epoch, window) alone, and a position is a handful of numbers:

    (epoch, window, cursor of the window's first row, batches taken of the window)

  Coming back to it reads the heads of one window's files, never the whole source;
* memory holds the plans of a window, which name files, and a few batches that are loaded already. Rows that
  bring their tensors along are heavy themselves; of those a window has fewer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from attrs import evolve, field, frozen

from yeto.diffusion.rows import PlannedRow, RowReader, Shape
from yeto.tuning.position import cursor_from_json, cursor_to_json
from yeto.tuning.rows import Cursor, Row, RowSource
from yeto.tuning.share import Share

logger = logging.getLogger(__name__)

FIRST_WINDOW_ROWS: Final = 64
"""Windows begin so small, for the first batch's sake, and double up to the shuffle buffer."""
HELD_BYTES_MAX: Final = 1 << 28
"""Memory of one window's rows that stand in the rows' file themselves (lists, pictures in a table)."""


@frozen(kw_only=True)
class Place:
    """Where a stream of batches stands, right after one of them."""

    epoch: int = 0
    window: int = 0
    """Number of the window inside the epoch."""
    start: Cursor = field(factory=Cursor)
    """Where the window's rows begin in the source."""
    batches: int = 0
    """Batches of the window that were given out."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "epoch": self.epoch,
            "window": self.window,
            "start": cursor_to_json(self.start),
            "batches": self.batches,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Place:
        """Return what :meth:`to_json` wrote."""
        return cls(
            epoch=value["epoch"],
            window=value["window"],
            start=cursor_from_json(value["start"]),
            batches=value["batches"],
        )


@frozen(kw_only=True)
class _Counts:
    """What one window was."""

    rows: int
    batches: int
    shapes: int


def stream_batches(
    source: RowSource,
    share: Share,
    reader: RowReader,
    *,
    batch_size: int,
    shuffle_buffer: int,
    seed: int,
    place: Place,
) -> Iterator[tuple[Sequence[PlannedRow], Place]]:
    """Yield batches of rows of one shape, not loaded yet, for ever, epoch after epoch.

    Ends when a whole epoch has no row: everything else would read for ever.

    Args:
        source: the rows of everybody.
        share: which of them are ours.
        reader: understands them.
        batch_size: most rows of a batch.
        shuffle_buffer: most rows of a window.
        seed: root of the permutations.
        place: where to go on.

    Raises:
        DataError: a row cannot be read or understood.
    """
    while True:
        told: list[_Counts] = []
        rows = source.rows(place.start, share.rows())
        most = _window_rows(place.window, shuffle_buffer, batch_size)
        while window := _window(rows, reader, most):
            planned, after = window
            order = np.random.default_rng([seed, place.epoch, place.window]).permutation(len(planned))
            batches = _batches([planned[number] for number in order.tolist()], batch_size)
            if place.epoch == 0:
                told.append(_counts(planned, batches))
            for number in range(place.batches, len(batches)):
                yield batches[number], evolve(place, batches=number + 1)
            place = Place(epoch=place.epoch, window=place.window + 1, start=after)
            most = _window_rows(place.window, shuffle_buffer, batch_size)
        if place.window == 0:
            return
        if place.epoch == 0:
            _tell(told, batch_size)
        place = Place(epoch=place.epoch + 1)


def _window(rows: Iterator[Row], reader: RowReader, most: int) -> tuple[list[PlannedRow], Cursor] | None:
    """Return the plans of the next rows and where those behind them begin; None at the end."""
    planned: list[PlannedRow] = []
    held, after = 0, Cursor()
    for row in rows:
        planned.append(reader.plan(row))
        held, after = held + planned[-1].held_bytes, row.after
        if len(planned) == most or held >= HELD_BYTES_MAX:
            break
    return (planned, after) if planned else None


def _batches(rows: Sequence[PlannedRow], size: int) -> list[list[PlannedRow]]:
    """Put rows of one shape together in the order in which they come; those left over at the end."""
    batches: list[list[PlannedRow]] = []
    filling: dict[Shape, list[PlannedRow]] = {}
    for row in rows:
        batch = filling.setdefault(row.shape, [])
        batch.append(row)
        if len(batch) == size:
            batches.append(filling.pop(row.shape))
    return [*batches, *filling.values()]


def _window_rows(window: int, shuffle_buffer: int, batch_size: int) -> int:
    """Return how many rows a window has, whole batches if it can be."""
    # The exponent is capped because a long epoch has many windows; 2**40 is above any buffer.
    rows = min(shuffle_buffer, max(FIRST_WINDOW_ROWS, batch_size) << min(window, 40))
    return max(1, rows // batch_size) * batch_size if rows >= batch_size else rows


def _counts(planned: Sequence[PlannedRow], batches: Sequence[Sequence[PlannedRow]]) -> _Counts:
    return _Counts(rows=len(planned), batches=len(batches), shapes=len({row.shape for row in planned}))


def _tell(windows: Sequence[_Counts], batch_size: int) -> None:
    """Say so after the first pass where many batches are not full, because shapes are many."""
    rows, batches = sum(one.rows for one in windows), sum(one.batches for one in windows)
    shapes = max(one.shapes for one in windows)
    if shapes > 1 and rows < 0.75 * batches * batch_size:
        logger.warning(
            "%d rows of up to %d shapes at a time gave %d batches, %.1f rows in each instead of %d: give "
            "--height and --width to make them one shape, or a larger --shuffle-buffer",
            rows,
            shapes,
            batches,
            rows / batches,
            batch_size,
        )
