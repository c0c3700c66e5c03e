"""Columns over the rounds of a run, in a memory that does not grow with it.

Rounds are put in buckets of equal width, 1 at first. When there are too many, neighbours become one and the
width doubles; of what is put together minimum, mean and maximum are kept, so no spike is lost. A series costs
32 bytes a bucket.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

SECONDS_EDGES = (
    0.0,
    *(digit * 10.0**exponent for exponent in range(-3, 4) for digit in (1, 2, 5)),
    10.0**4,
    10.0**9,
)
"""Bins of times: three to a decade, the last one for whatever is longer than three hours."""


class Series:
    """Count, sum and extremes of a quantity, bucket by bucket; the last bucket is not in the columns yet."""

    __slots__ = ("_columns", "_count", "_least", "_most", "_total")

    def __init__(self, buckets: int) -> None:
        self._columns = tuple(array("d", bytes(8 * buckets)) for _ in range(4))
        self._count, self._total, self._least, self._most = 0, 0.0, 0.0, 0.0

    def add(self, value: float | None) -> None:
        """Take a value into the last bucket; None is no value."""
        if value is None:
            return
        if not self._count:
            self._least = self._most = value
        elif value < self._least:
            self._least = value
        elif value > self._most:
            self._most = value
        self._count += 1
        self._total += value

    def close(self) -> None:
        """Put the last bucket into the columns and begin the next."""
        counts, totals, least, most = self._columns
        counts.append(self._count)
        totals.append(self._total)
        least.append(self._least)
        most.append(self._most)
        self._count, self._total, self._least, self._most = 0, 0.0, 0.0, 0.0

    def join(self, number: int) -> None:
        """Put each ``number`` neighbouring buckets of the columns together."""
        counts, totals, least, most = self._columns
        joined = tuple(array("d") for _ in range(4))
        for begin in range(0, len(counts), number):
            end = min(begin + number, len(counts))
            some = counts[begin:end]
            if all(some):
                joined[0].append(sum(some))
                joined[1].append(math.fsum(totals[begin:end]))
                joined[2].append(min(least[begin:end]))
                joined[3].append(max(most[begin:end]))
                continue
            filled = [i for i in range(begin, end) if counts[i]]
            joined[0].append(sum(some))
            joined[1].append(math.fsum(totals[i] for i in filled))
            joined[2].append(min((least[i] for i in filled), default=0.0))
            joined[3].append(max((most[i] for i in filled), default=0.0))
        self._columns = joined

    def copy(self) -> Series:
        """Return the same with the last bucket in its columns."""
        other = Series(0)
        other._columns = tuple(column[:] for column in self._columns)
        other._count, other._total, other._least, other._most = (
            *(self._count, self._total, self._least, self._most),
        )
        other.close()
        return other

    def to_json(self, *, digits: int, all_same: bool) -> dict[str, list[float | None]]:
        """Return mean, and unless all are the same, min and max; null where a bucket has no value."""
        counts, totals, *extremes = self._columns
        mean = [
            _short(total / count, digits) if count else None
            for total, count in zip(totals, counts, strict=True)
        ]
        if all_same:
            return {"mean": mean}
        least, most = (
            [_short(value, digits) if count else None for value, count in zip(column, counts, strict=True)]
            for column in extremes
        )
        return {"mean": mean, "min": least, "max": most}


def add_all(columns: Iterable[Series], values: Iterable[float | None]) -> None:
    """Take one value into each series, as ``Series.add`` does, without a call for each."""
    for series, value in zip(columns, values, strict=True):
        if value is None:
            continue
        count = series._count
        if not count:
            series._least = series._most = value
        elif value < series._least:
            series._least = value
        elif value > series._most:
            series._most = value
        series._count = count + 1
        series._total += value


class Table:
    """Series and counts that share their buckets.

    Args:
        buckets_max: the width doubles rather than that there are more.
    """

    def __init__(self, buckets_max: int) -> None:
        self._buckets_max = buckets_max
        self.width = 1
        self._first = 0
        """Step that the first bucket begins with."""
        self._end = 0
        """Step that the last bucket ends before."""
        self._rounds = array("q")
        self._series: list[Series] = []
        self._counts: list[array[int]] = []

    def series(self) -> Series:
        """Return a new series."""
        series = Series(max(0, len(self._rounds) - 1))
        self._series.append(series)
        return series

    def counts(self) -> array[int]:
        """Return new counts; their last item is that of the last bucket. They are emptied in place."""
        counts = array("q", bytes(8 * len(self._rounds)))
        self._counts.append(counts)
        return counts

    def begin(self, step: int) -> None:
        """Take the next round; what is added from here on is of it. Steps only go up."""
        if not self._rounds:
            self._first = self._end = step
        while step >= self._end:
            if self._rounds:
                for series in self._series:
                    series.close()
            if len(self._rounds) == self._buckets_max:
                self._halve()
            self._rounds.append(0)
            for counts in self._counts:
                counts.append(0)
            self._end += self.width
        self._rounds[-1] += 1

    def place(self, step: int) -> int | None:
        """Return the bucket that a round belongs to; None for one that is still to come."""
        return max(0, step - self._first) // self.width if step < self._end else None

    def _halve(self) -> None:
        """Put pairs of buckets together; all of them are closed, and their number is even."""
        for series in self._series:
            series.join(2)
        for counts in (self._rounds, *self._counts):
            counts[:] = array("q", joined(counts, 2))
        self.width *= 2

    def axis(self, points: int) -> tuple[int, dict[str, Any]]:
        """Return how many buckets become one so that at most ``points`` remain, and what these are."""
        number = max(1, math.ceil(len(self._rounds) / points))
        rounds = joined(self._rounds, number)
        width = self.width * number
        step = [self._first + index * width for index in range(len(rounds))]
        return number, {"width": width, "step": step, "rounds": rounds}

    def series_json(self, series: Series, number: int, digits: int = 6) -> dict[str, list[float | None]]:
        """Return a series of this table, ``number`` buckets put together."""
        if not self._rounds:
            return {"mean": []}
        whole = series.copy()
        if number > 1:
            whole.join(number)
        return whole.to_json(digits=digits, all_same=self.width * number == 1)


class Histogram:
    """How often a time fell into each bin."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_EDGES) - 1)

    def add(self, seconds: float) -> None:
        """Take one more."""
        last = len(self.counts) - 1
        self.counts[max(0, min(bisect_right(SECONDS_EDGES, seconds) - 1, last))] += 1

    def to_json(self) -> dict[str, Any]:
        """Return the bins up to the last that is not empty."""
        used = max((index + 1 for index, count in enumerate(self.counts) if count), default=0)
        edges = [_short(edge, 6) for edge in SECONDS_EDGES[: used + 1]] if used else []
        return {"edges": edges, "counts": self.counts[:used]}


def joined(counts: array[int], number: int) -> list[int]:
    """Return the sums of each ``number`` neighbouring counts."""
    return [sum(counts[begin : begin + number]) for begin in range(0, len(counts), number)]


def _short(value: float, digits: int) -> float:
    """Return a number with so many significant digits: what is not seen need not be sent."""
    return float(f"{value:.{digits}g}")
