"""The published goodput figures (Decoupled DiLoCo, arXiv 2604.21428) beside ours.

Table 1 says how much of the chips' time is spent training when each chip fails once a year, for fleets that
are one data-parallel group or M learners. Its simulator was not published, so this is a model with fitted
times, not that simulator:

* Each chip fails at random (Poisson), and only while its learner takes steps: a learner that is paused can
  wait for one cause at a time. The slice that the chip belongs to is away until it is repaired.
* A failure pauses its learner for ``SHRINK_SECONDS``, in which the rest is re-formed without the slice. A
  slice that returns while the learner steps pauses it for ``GROW_SECONDS``; one that returns during a pause
  is taken in with it, at no cost. Learners do not wait for each other.
* A group that is not elastic waits for the repair too: ``REPAIR_SECONDS + GROW_SECONDS`` for each failure.
* Goodput is the share of the time in which a learner steps, times the share of its slices that are there.

What the table can tell of these times is little. The elastic rows fix the sum of shrink and grow at about
32 s. They leave the split open (a shrink of 4 or of 12 s in the same sum moves the error by a tenth of a
point), and the repair too (from 30 s to 10 minutes: two tenths); the row that is not elastic fixes repair and
grow together at about 80 s. Chips to a slice are a guess that no cell depends on: less than a tenth of a
percent is away.

Each cell has a generator of its own, so no cell depends on another.

The figures on learners of different speed need no model: :func:`published_speeds` runs the coordinator itself
with such a fleet.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from random import Random

from attrs import frozen

from yeto.core import CoreConfig
from yeto.sim.config import LearnerSpec, SimConfig, SyncerSpec

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
"""Chips of the whole fleet, one for each column."""
FAILURE_SECONDS = 365.25 * 86_400
"""Mean stepping time between two failures of one chip."""
SLICE_CHIPS = 256
SHRINK_SECONDS = 8.0
GROW_SECONDS = 24.0
REPAIR_SECONDS = 58.0
"""Mean of the time that a slice is away (exponential)."""

CELL_FAILURES = 20_000
"""Failures that a cell's chips would have without a pause, which sets how long it is simulated. Its goodput
then has a standard deviation of at most half a point from seed to seed."""
RMS_POINTS_MAX = 1.5
"""Largest root mean square error of the elastic cells, in percentage points, that still counts as a fit."""


@frozen(kw_only=True)
class Row:
    """One line of the published table: goodput in percent for each of ``CHIPS``."""

    name: str
    num_learners: int
    elastic: bool
    paper: tuple[int, ...]


ROWS = (
    Row(name="data parallel, not elastic", num_learners=1, elastic=False, paper=(72, 57, 38, 27, 18)),
    Row(name="data parallel, elastic", num_learners=1, elastic=True, paper=(88, 80, 69, 58, 40)),
    Row(name="M = 2", num_learners=2, elastic=True, paper=(94, 88, 80, 70, 54)),
    Row(name="M = 4", num_learners=4, elastic=True, paper=(96, 93, 89, 82, 73)),
    Row(name="M = 8", num_learners=8, elastic=True, paper=(98, 96, 94, 88, 80)),
    Row(name="M = 16", num_learners=16, elastic=True, paper=(99, 98, 96, 93, 86)),
)


@frozen(kw_only=True)
class Cell:
    """One number of the table beside the model's. All in percent."""

    row: Row
    num_chips: int
    paper: int
    goodput: float
    uptime: float
    """Share of the time in which at least one learner steps."""

    @property
    def error(self) -> float:
        """Model minus paper, in points."""
        return self.goodput - self.paper


@frozen(kw_only=True)
class Stretch:
    """A time in which a learner stepped without a pause; seconds from the start."""

    begin: float
    end: float
    share: float
    """Share of its slices that were there."""


def published_table(seed: int = 0) -> tuple[Cell, ...]:
    """Return the model of every cell, row by row."""
    return tuple(
        _cell(row, num_chips, paper, seed)
        for row in ROWS
        for num_chips, paper in zip(CHIPS, row.paper, strict=True)
    )


@frozen(kw_only=True)
class Speeds:
    """A published figure on learners of different speed. In percent."""

    name: str
    quorum: int
    lockstep: bool
    paper: int
    goodput: float

    @property
    def error(self) -> float:
        """Simulation minus paper, in points."""
        return self.goodput - self.paper


FAST_STRETCH_SECONDS = 100.0
"""Between two merges; long beside the network, which the published figures leave out."""
SLOW_SHARE = 1.18
SPEED_JITTER = 0.1
SPEED_ROUNDS = 600
"""Stretches simulated. One lasts as long as the slowest of 8 learners takes, give or take 7 percent of it, so
the mean of so many is known to 0.3 percent."""


def published_speeds(seed: int = 0) -> tuple[Speeds, ...]:
    """Return the two figures on 4 + 4 learners whose speeds are 18 percent apart, with 10 percent jitter."""
    return (
        _speeds("waiting for all 8", quorum=8, lockstep=True, paper=84, seed=seed),
        _speeds("quorum 1", quorum=1, lockstep=False, paper=100, seed=seed),
    )


def _speeds(name: str, *, quorum: int, lockstep: bool, paper: int, seed: int) -> Speeds:
    from yeto.sim import simulate

    def learner(pace: float) -> LearnerSpec:
        # A stretch between two merges counts as one step, so in lockstep a round costs the slowest one's.
        return LearnerSpec(
            step_seconds=FAST_STRETCH_SECONDS * pace,
            step_jitter=0.0,
            phase_jitter=SPEED_JITTER,
            up_rate=1e12,
            down_rate=1e12,
            latency_seconds=1e-3,
            lockstep=lockstep,
        )

    result = simulate(
        SimConfig(
            core=CoreConfig(
                num_learners=8,
                total_steps=2 * SPEED_ROUNDS * 8,
                quorum=quorum,
                wait_for=8,
                pipeline=1,
                sync_interval_steps=0.0,
                grace_cap_seconds=0.0,
                checkpoint_every=0,
            ),
            learners=(learner(1.0),) * 4 + (learner(SLOW_SHARE),) * 4,
            num_fragments=1,
            syncer=SyncerSpec(
                merge_seconds=0.0, outer_seconds=0.0, fsync_seconds=0.0, checkpoint_seconds=0.0
            ),
            seed=seed,
            until_seconds=SPEED_ROUNDS * FAST_STRETCH_SECONDS * SLOW_SHARE * (1 + SPEED_JITTER),
        )
    )
    return Speeds(name=name, quorum=quorum, lockstep=lockstep, paper=paper, goodput=100.0 * result.goodput)


def rms_error(cells: tuple[Cell, ...]) -> float:
    """Return the root mean square error over the elastic cells, in points."""
    errors = [cell.error for cell in cells if cell.row.elastic]
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def _cell(row: Row, num_chips: int, paper: int, seed: int) -> Cell:
    seconds = CELL_FAILURES * FAILURE_SECONDS / num_chips
    learners = [
        list(
            _learner_stretches(
                num_chips // row.num_learners,
                seconds,
                Random(f"{seed}/{num_chips}/{row.num_learners}/{row.elastic}/{learner}"),
                elastic=row.elastic,
            )
        )
        for learner in range(row.num_learners)
    ]
    worked = sum((one.end - one.begin) * one.share for stretches in learners for one in stretches)
    return Cell(
        row=row,
        num_chips=num_chips,
        paper=paper,
        goodput=100.0 * worked / (row.num_learners * seconds),
        uptime=100.0 * _covered(one for stretches in learners for one in stretches) / seconds,
    )


def _learner_stretches(
    num_chips: int, seconds: float, random: Random, *, elastic: bool = True
) -> Iterator[Stretch]:
    """Yield the stretches in which one learner steps, up to the moment ``seconds``."""
    slices = num_chips / SLICE_CHIPS
    slice_rate = SLICE_CHIPS / FAILURE_SECONDS
    now = 0.0
    away: list[float] = []  # when each slice that is away comes back, the earliest first
    while now < seconds:
        # Failures have no memory, so the time to the next is drawn anew after each change.
        active = slices - len(away)
        failure = now + random.expovariate(active * slice_rate)
        back = away[0] if away else math.inf
        yield Stretch(begin=now, end=min(failure, back, seconds), share=active / slices)
        if back < failure:
            now = back + GROW_SECONDS
        elif elastic:
            heapq.heappush(away, failure + random.expovariate(1.0 / REPAIR_SECONDS))
            now = failure + SHRINK_SECONDS
        else:
            now = failure + random.expovariate(1.0 / REPAIR_SECONDS) + GROW_SECONDS
        while away and away[0] <= now:
            heapq.heappop(away)


def _covered(stretches: Iterator[Stretch]) -> float:
    """Return the length of the union of all stretches."""
    covered = reached = 0.0
    for begin, end in sorted((one.begin, one.end) for one in stretches):
        if end > reached:
            covered += end - max(begin, reached)
            reached = end
    return covered
