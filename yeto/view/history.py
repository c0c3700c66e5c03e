"""How a run went, round by round, in a memory that does not grow with it.

What is kept of every round goes to columns whose buckets get wider (:mod:`yeto.view.columns`). A series costs
64 KiB for the run and 16 KiB for a learner: with 64 learners about 7 MiB in all, for a run of any length.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from attrs import frozen

from yeto.core.decisions import RoundCommitted
from yeto.view.columns import Histogram, Series, Table, add_all, joined
from yeto.view.json import plain
from yeto.view.model import FORMAT
from yeto.view.open_rounds import OpenRound
from yeto.view.seats import Seat

BUCKETS_MAX = 2048
"""Of the run; twice what a wide screen has pixels for, after the halving."""
LEARNER_BUCKETS_MAX = 512
LEARNERS_MAX = 64
"""Learners that have series of their own: the ones with the lowest ids. A page cannot show more rows."""
RECENT_MAX = 256
SLOWEST_MAX = 20
MARKS_MAX = 500
POINTS = 600
"""Buckets of the run in the JSON, at most, unless told otherwise."""
LEARNER_POINTS = 200

RUN_SERIES = (
    *("committed_at", "earlier_seconds", "gather_seconds", "grace_seconds", "merge_seconds", "turn_seconds"),
    *(
        "commit_seconds",
        "round_seconds",
        "attempts",
        "responders",
        "missed",
        "staleness",
        "gradient_norm",
        "delta_norm",
    ),
    *("cosine", "delta_cosine", "norm_ratio", "offset_ratio"),
)
RUN_COUNTS = {
    "join": "joins",
    "leave": "leaves",
    "refused": "refusals",
    "push_refused": "refusals",
    "retry": "retries",
    "restart": "restarts",
}
"""By kind of mark, the count it goes to."""
HISTOGRAMS = ("grace_seconds", "waited_seconds", "quorum_seconds", "merge_seconds")
LEARNER_SERIES = ("staleness", "contribution", "delta_norm", "cosine", "steps_per_second")
LEARNER_COUNTS = ("merged", "missed", "left_out", "refused")


@frozen
class RecentRound:
    """One committed round, with all its times."""

    step: int
    fragment: int
    attempt: int
    sweep: bool
    opened_at: float
    attempt_at: float
    quorum_at: float | None
    sealed_at: float | None
    merged_at: float | None
    ordered_at: float | None
    committed_at: float
    responders: tuple[int, ...]
    missed: tuple[int, ...]
    left_out: tuple[int, ...]
    quorum: int
    answers: tuple[tuple[int, float], ...]
    """Learner and time of each answer to the last attempt, in the order they came."""
    refused: tuple[tuple[int, str], ...]
    """Those of ``missed`` whose push to the last attempt was refused, with the sentence why."""

    @property
    def seconds(self) -> float:
        """From the opening of the first attempt to the commit."""
        return self.committed_at - self.opened_at


@frozen
class Mark:
    """Something out of the ordinary, at its time."""

    at: float
    step: int
    """The round that it affects; see :meth:`History.mark`."""
    kind: str
    learner: int | None
    text: str


class History:
    """The columns; a :class:`~yeto.view.board.Board` tells it of every commit that stands, and of faults."""

    def __init__(self) -> None:
        self.run = Table(BUCKETS_MAX)
        self.learners = Table(LEARNER_BUCKETS_MAX)
        self.num_learners = 0
        self.recent: deque[RecentRound] = deque(maxlen=RECENT_MAX)
        self.slowest: list[tuple[float, int, RecentRound]] = []
        """A heap of the rounds that took longest, by seconds and step."""
        self.marks: deque[Mark] = deque(maxlen=MARKS_MAX)
        self.num_marks = 0
        self._run = {name: self.run.series() for name in RUN_SERIES}
        self._run_counts = {name: self.run.counts() for name in sorted(set(RUN_COUNTS.values()))}
        self._of_learner: dict[int, tuple[dict[str, Series], dict[str, array[int]]]] = {}
        self.histograms = {name: Histogram() for name in HISTOGRAMS}
        self._pending: dict[int, Counter[str]] = {}
        """Faults of rounds that are not committed so far; they go to the buckets of these."""

    def grace(self, seconds: float) -> None:
        """A grace was granted."""
        self.histograms["grace_seconds"].add(seconds)

    def mark(self, at: float, step: int, kind: str, text: str, learner: int | None) -> None:
        """Something out of the ordinary happened.

        Args:
            at: when.
            step: the round that it affects: that of a push or an attempt, the first one after a restart, or
                else the one that was to be committed next.
            kind: of the mark.
            text: what happened, as a sentence.
            learner: whom it is about, if it is one.
        """
        self.num_marks += 1
        self.marks.append(Mark(at, step, kind, learner, text))
        if kind in RUN_COUNTS:
            name, place = RUN_COUNTS[kind], self.run.place(step)
            if place is None:
                self._pending.setdefault(step, Counter())[name] += 1
            else:
                self._run_counts[name][place] += 1

    def committed(
        self, at: float, round_: OpenRound, commit: RoundCommitted, seats: Mapping[int, Seat]
    ) -> None:
        """A round was committed, and stands."""
        responders = commit.responders
        self.run.begin(commit.step)
        if self._pending:
            for step in [step for step in self._pending if step <= commit.step]:
                for name, number in self._pending.pop(step).items():
                    self._run_counts[name][-1] += number
        waited = _between(round_.quorum_at, round_.sealed_at)
        add_all(
            self._run.values(),
            (
                at,
                round_.attempt_at - round_.opened_at,
                commit.quorum_seconds,
                waited,
                _between(round_.sealed_at, round_.merged_at),
                _between(round_.merged_at, round_.ordered_at),
                _between(round_.ordered_at, at),
                at - round_.opened_at,
                round_.attempt,
                len(responders),
                len(commit.missed),
                _mean([responder.staleness for responder in responders]),
                None if commit.no_op else commit.gradient_norm,
                _mean([responder.delta_norm for responder in responders]),
                _mean([responder.cosine_to_momentum for responder in responders]),
                commit.delta_cosine,
                commit.norm_ratio,
                commit.offset_ratio,
            ),  # in the order of RUN_SERIES
        )
        self.histograms["quorum_seconds"].add(commit.quorum_seconds)
        self.histograms["merge_seconds"].add(commit.merge_seconds)
        if waited is not None:
            self.histograms["waited_seconds"].add(waited)
        refused = [
            (learner, round_.refused[learner]) for learner in commit.missed if learner in round_.refused
        ]
        self._enter_learners(commit, seats, [learner for learner, _ in refused])
        told = RecentRound(
            commit.step,
            commit.fragment,
            commit.attempt,
            round_.sweep,
            round_.opened_at,
            round_.attempt_at,
            round_.quorum_at,
            round_.sealed_at,
            round_.merged_at,
            round_.ordered_at,
            at,
            tuple([responder.learner for responder in responders]),
            commit.missed,
            commit.left_out,
            round_.quorum,
            tuple(round_.answers.items()),
            tuple(refused),
        )
        self.recent.append(told)
        if len(self.slowest) < SLOWEST_MAX or told.seconds > self.slowest[0][0]:
            heappush(self.slowest, (told.seconds, -told.step, told))
            if len(self.slowest) > SLOWEST_MAX:
                heappop(self.slowest)

    def _enter_learners(
        self, commit: RoundCommitted, seats: Mapping[int, Seat], refused: Sequence[int]
    ) -> None:
        self.learners.begin(commit.step)
        self.num_learners = max(self.num_learners, len(seats))
        for responder in commit.responders:
            learner = responder.learner
            if learner >= LEARNERS_MAX:
                continue
            series, counts = self.of_learner(learner)
            counts["merged"][-1] += 1
            seat = seats.get(learner)
            add_all(
                series.values(),
                (
                    responder.staleness,
                    responder.contribution,
                    responder.delta_norm,
                    responder.cosine_to_momentum,
                    None if seat is None else seat.steps_per_second,
                ),  # in the order of LEARNER_SERIES
            )
        for name, ids in (("missed", commit.missed), ("left_out", commit.left_out), ("refused", refused)):
            for learner in ids:
                if learner < LEARNERS_MAX:
                    self.of_learner(learner)[1][name][-1] += 1

    def of_learner(self, learner: int) -> tuple[dict[str, Series], dict[str, array[int]]]:
        """Return a learner's series and counts by name, made on first mention."""
        columns = self._of_learner.get(learner)
        if columns is None:
            table = self.learners
            columns = self._of_learner[learner] = (
                {name: table.series() for name in LEARNER_SERIES},
                {name: table.counts() for name in LEARNER_COUNTS},
            )
        return columns

    def to_json(self, points: int, learner_points: int) -> dict[str, Any]:
        """Return everything as plain JSON values; see :func:`history_json`."""
        number, run = self.run.axis(points)
        run["series"] = {
            name: self.run.series_json(series, number, digits=9 if name == "committed_at" else 6)
            for name, series in self._run.items()
        }
        run["counts"] = {name: joined(counts, number) for name, counts in self._run_counts.items()}
        pending = sum(self._pending.values(), Counter[str]())
        run["counts_after"] = {name: pending[name] for name in self._run_counts}
        number, learners = self.learners.axis(learner_points)
        learners["by_learner"] = {}
        for learner in range(min(self.num_learners, LEARNERS_MAX)):
            series, counts = self.of_learner(learner)
            learners["by_learner"][str(learner)] = {
                "series": {name: self.learners.series_json(one, number) for name, one in series.items()},
                "counts": {name: joined(one, number) for name, one in counts.items()},
            }
        learners["left_out"] = max(0, self.num_learners - LEARNERS_MAX)
        return {
            "format": FORMAT,
            "run": run,
            "learners": learners,
            "histograms": {name: histogram.to_json() for name, histogram in self.histograms.items()},
            "recent": plain(list(self.recent)),
            "slowest": plain([told for *_, told in sorted(self.slowest, reverse=True)]),
            "marks": plain(list(self.marks)),
            "marks_left_out": self.num_marks - len(self.marks),
        }


def history_json(
    history: History, *, points: int = POINTS, learner_points: int = LEARNER_POINTS
) -> dict[str, Any]:
    """Return a history as plain JSON values, at most so many buckets of each series."""
    return history.to_json(points, learner_points)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def _mean(values: list[float] | list[int] | list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
