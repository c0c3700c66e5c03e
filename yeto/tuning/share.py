"""Which rows are whose: dealt out by number, so that nobody has to know how many there are.

Row i of the source belongs to learner i mod M, and inside the learner to its ranks (and a rank's workers) in
the same way. So shares are disjoint and together they are everything, without a word between those who read.
"""

from __future__ import annotations

import sys
from typing import Protocol

from attrs import frozen

from yeto.errors import DataError


class Seat(Protocol):
    """Settings that say which of all readers of the rows this process is."""

    @property
    def data_shard(self) -> str:
        """``auto``: learners share the rows; ``off``: each has rows of its own."""
        ...

    @property
    def seed(self) -> int:
        """The root of all chance."""
        ...

    @property
    def learner_id(self) -> int:
        """From 0."""
        ...

    @property
    def num_learners(self) -> int:
        """Of the run."""
        ...

    @property
    def rank(self) -> int:
        """Inside the island, from 0."""
        ...

    @property
    def num_ranks(self) -> int:
        """Of the island."""
        ...


@frozen(kw_only=True)
class Share:
    """The rows i with i mod ``count`` = ``index``."""

    index: int = 0
    count: int = 1

    def part(self, index: int, count: int) -> Share:
        """Return every ``count``-th row of this share, beginning with its row number ``index``."""
        return Share(index=self.index + self.count * index, count=self.count * count)

    def rows(self) -> range:
        """Return the row numbers; the end is out of any source's reach."""
        return range(self.index, sys.maxsize, self.count)


def share_of(seat: Seat) -> Share:
    """Return the rows of this process: learner modulo M (unless ``--data-shard off``), then its rank."""
    learner = Share()
    if seat.data_shard == "auto":
        learner = learner.part(seat.learner_id, seat.num_learners)
    return learner.part(seat.rank, seat.num_ranks)


def data_seed(seat: Seat) -> int:
    """Return root + learner + M * rank: a rank of one large group and its twin in an island draw alike."""
    return seat.seed + seat.learner_id + seat.num_learners * seat.rank


def seat_words(seat: Seat) -> str:
    """Return what an error message calls this process."""
    where = f"learner {seat.learner_id} of {seat.num_learners}"
    return where if seat.num_ranks == 1 else f"{where}, rank {seat.rank} of {seat.num_ranks}"


def no_rows(seat: Seat, data: str | None) -> DataError:
    """Return the error of a share without a single row, with the remedy."""
    return DataError(
        f"--data {data}: no rows for {seat_words(seat)}; give at least one row for each learner and rank, "
        "use fewer of them, or give each learner its own file with --data-shard off"
    )
