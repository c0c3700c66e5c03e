"""The columns over the rounds: right for every round, and as small for a long run as for a short one."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from recorded_run import record
from view_tapes import ROOT

from yeto.core import CoreConfig
from yeto.tape import Summary, find_restarts, read
from yeto.view.columns import SECONDS_EDGES, Histogram, Table
from yeto.view.follow import Watcher
from yeto.view.history import (
    BUCKETS_MAX,
    LEARNER_BUCKETS_MAX,
    LEARNERS_MAX,
    MARKS_MAX,
    RECENT_MAX,
    RUN_COUNTS,
    History,
    history_json,
)
from yeto.view.open_rounds import OpenRound
from yeto.view.seats import Seat

FAULTY = ROOT / "fixtures" / "tapes" / "faulty-v1.jsonl"


def read_history(path):
    watcher = Watcher(path, history=True)
    watcher.look()
    return watcher


def test_what_the_merges_told_of_their_learners_stands_there(tmp_path):
    record(tmp_path / "events.jsonl")
    watcher = read_history(tmp_path / "events.jsonl")
    series = history_json(watcher.history)["run"]["series"]
    commits = [entry.body for entry in read(tmp_path / "events.jsonl") if entry.kind == "merge"]
    moment = watcher.moment()
    assert moment.agreement.rounds == min(len(commits), 8)
    for name in ("delta_cosine", "norm_ratio", "offset_ratio"):
        told = [getattr(commit, name) for commit in commits]
        assert None not in told
        assert series[name]["mean"] == pytest.approx(told)
        assert getattr(moment.agreement, name) == pytest.approx(sum(told[-8:]) / len(told[-8:]))
        for fragment in moment.fragments:
            assert getattr(fragment, name) in told


def test_each_round_of_a_recorded_run_stands_there_as_its_records_say():
    watcher = read_history(FAULTY)
    told = history_json(watcher.history)
    restarts = find_restarts(FAULTY)
    commits, opened, sealed = {}, {}, {}
    for entry in read(FAULTY):
        body = entry.body
        if entry.kind == "attempt_opened":
            if body.attempt == 1:
                opened[body.step] = entry.at
        elif entry.kind == "attempt_sealed":
            sealed[body.step] = entry.at
        elif entry.kind == "merge" and not any(r.seq > entry.seq and r.step < body.step for r in restarts):
            commits[body.step] = entry, opened[body.step], sealed[body.step]
    run = told["run"]
    assert run["width"] == 1
    assert run["step"] == sorted(commits) == list(range(1, 25))
    series = {name: columns["mean"] for name, columns in run["series"].items()}
    for index, step in enumerate(run["step"]):
        (entry, opened_at, sealed_at), body = commits[step], commits[step][0].body
        assert series["committed_at"][index] == pytest.approx(entry.at)
        assert series["round_seconds"][index] == pytest.approx(entry.at - opened_at, rel=1e-5)
        assert series["gather_seconds"][index] == pytest.approx(body.quorum_seconds, rel=1e-5)
        assert series["attempts"][index] == body.attempt
        assert series["responders"][index] == len(body.responders)
        assert series["missed"][index] == len(body.missed)
        norms = [one.delta_norm for one in body.responders]
        assert series["delta_norm"][index] == pytest.approx(sum(norms) / len(norms), rel=1e-5)
        parts = ("grace_seconds", "merge_seconds", "turn_seconds", "commit_seconds")
        assert sum(series[name][index] for name in parts[1:]) == pytest.approx(entry.at - sealed_at, abs=1e-4)
    # Of this format no merge told whether its learners agree.
    for name in ("delta_cosine", "norm_ratio", "offset_ratio"):
        assert series[name] == [None] * len(commits)
    summary = Summary(restarts)
    for entry in read(FAULTY):
        summary.feed(entry)
    for learner, theirs in summary.to_json()["learners"].items():
        counts = told["learners"]["by_learner"][learner]["counts"]
        assert sum(counts["missed"]) == theirs["missed"]
        assert sum(counts["left_out"]) == theirs["left_out"]
        assert sum(counts["merged"]) == theirs["staleness"]["count"]
    assert [one["step"] for one in told["recent"]] == run["step"]
    assert sum(told["histograms"]["quorum_seconds"]["counts"]) == len(commits)
    assert sum(told["histograms"]["grace_seconds"]["counts"]) == summary.grace_seconds.count
    assert sum(told["histograms"]["waited_seconds"]["counts"]) == len(commits)
    # A fault is counted at the round that it affects, and what came after the last commit stands alone.
    counted, after = Counter(), Counter()
    for mark in told["marks"]:
        if mark["kind"] in RUN_COUNTS:
            ended = mark["step"] > run["step"][-1]
            (after if ended else counted)[RUN_COUNTS[mark["kind"]], 0 if ended else mark["step"]] += 1
    assert {
        (name, step): count
        for name, counts in run["counts"].items()
        for step, count in zip(run["step"], counts, strict=True)
        if count
    } == counted
    assert {(name, 0): count for name, count in run["counts_after"].items() if count} == after
    assert after["restarts", 0] == 1
    assert sum(run["counts"]["restarts"]) == 2
    for one in told["recent"]:
        assert {learner for learner, _ in one["refused"]} <= set(one["missed"])
        assert all(f"of learner {learner} for round {one['step']} " in why for learner, why in one["refused"])
    refused = Counter(learner for one in told["recent"] for learner, _ in one["refused"])
    assert refused == {0: 1, 1: 2, 3: 3}
    by_learner = told["learners"]["by_learner"]
    assert refused == {int(one): n for one in by_learner if (n := sum(by_learner[one]["counts"]["refused"]))}
    marks = [one["kind"] for one in told["marks"]]
    assert marks.count("restart") == len(summary.restarts) == 3
    assert marks.count("retry") == sum(summary.discarded.values())
    assert marks.count("push_refused") == sum(one.count for one in summary.refused_pushes.values())
    assert set(marks) >= {"join", "leave", "refused", "checkpoint", "ended"}
    assert told["marks_left_out"] == 0


def test_what_is_put_together_keeps_its_extremes_and_its_mean():
    chance, table = random.Random(1), Table(64)
    series, counts, values = table.series(), table.counts(), {}
    for step in range(5, 1005):
        table.begin(step)
        values[step] = [chance.uniform(-1.0, 1.0) for _ in range(chance.choice((0, 1, 1, 3)))]
        for value in values[step]:
            series.add(value)
        counts[-1] += step % 2
    assert table.width == 16
    for points in (64, 20, 7, 1):
        number, axis = table.axis(points)
        told, counted = table.series_json(series, number, digits=12), [0] * len(axis["step"])
        assert len(axis["step"]) <= points
        assert sum(axis["rounds"]) == 1000
        for index, first in enumerate(axis["step"]):
            steps = range(first, min(first + axis["width"], 1005))
            inside = [value for step in steps for value in values[step]]
            assert axis["rounds"][index] == len(steps)
            counted[index] = sum(step % 2 for step in steps)
            assert told["mean"][index] == pytest.approx(sum(inside) / len(inside))
            assert told["min"][index] == pytest.approx(min(inside))
            assert told["max"][index] == pytest.approx(max(inside))
        assert sum(counted) == sum(counts)


def test_what_comes_late_is_nothing_before(tmp_path):
    table = Table(8)
    early = table.series()
    for step in range(1, 21):
        table.begin(step)
        early.add(1.0)
    late = table.series()
    late.add(7.0)
    assert table.width == 4
    assert table.series_json(late, 1)["mean"] == [None] * 4 + [7.0]
    assert table.series_json(early, 1)["mean"] == [1.0] * 5


def synthetic(num_rounds, num_learners):
    """Return a history of a long run, told of it directly."""
    history, seats = History(), {learner: Seat(xi_step=0.5) for learner in range(num_learners)}
    responders = tuple(
        SimpleNamespace(
            learner=learner, staleness=1, contribution=0.5, delta_norm=1.0, cosine_to_momentum=None
        )
        for learner in range(num_learners)
    )
    for step in range(1, num_rounds + 1):
        at = 10.0 * step
        round_ = OpenRound(
            step, 0, 1, 1, 0, False, at - 8, at - 8, at, {}, quorum_at=at - 4, sealed_at=at - 3
        )
        round_.merged_at = round_.ordered_at = at - 1
        history.committed(
            at,
            round_,
            SimpleNamespace(
                step=step,
                fragment=0,
                attempt=1,
                responders=responders,
                missed=(),
                left_out=(),
                quorum_seconds=4.0,
                merge_seconds=1.0,
                gradient_norm=float(step),
                no_op=False,
                delta_cosine=0.25,
                norm_ratio=1.25,
                offset_ratio=None,
            ),
            seats,
        )
        history.mark(at, step + 1, "leave", "learner 0 left", 0)
    return history


def test_a_fault_of_a_round_that_is_committed_already_goes_to_that_round():
    history = synthetic(3_000, 1)
    before = history_json(history)["run"]["counts"]["refusals"]
    history.mark(1e6, 2_000, "push_refused", "came late", 0)
    history.mark(1e6, 3_001, "push_refused", "came early", 0)
    told = history_json(history)["run"]
    after = told["counts"]["refusals"]
    place = [old != new for old, new in zip(before, after, strict=True)].index(True)
    assert sum(after) == sum(before) + 1
    assert told["step"][place] <= 2_000 < told["step"][place] + told["width"]
    assert told["counts_after"]["refusals"] == 1


def test_a_long_run_stays_small():
    history = synthetic(5_000, 2)
    told = history_json(history)
    assert len(told["run"]["step"]) <= 600
    assert len(told["learners"]["step"]) <= 200
    assert len(json.dumps(told)) < 600_000
    assert len(told["recent"]) == RECENT_MAX
    assert len(told["marks"]) == MARKS_MAX
    assert told["marks_left_out"] == 5_000 - MARKS_MAX
    assert sum(told["run"]["rounds"]) == 5_000
    assert told["run"]["series"]["gradient_norm"]["max"][-1] == 5_000
    assert told["run"]["series"]["gradient_norm"]["min"][0] == 1
    assert sum(told["run"]["counts"]["leaves"]) == 5_000 - 1
    assert told["run"]["counts_after"]["leaves"] == 1  # it waits for a commit
    _, axis = history.run.axis(BUCKETS_MAX)
    assert BUCKETS_MAX / 2 <= len(axis["step"]) <= BUCKETS_MAX
    _, axis = history.learners.axis(LEARNER_BUCKETS_MAX)
    assert LEARNER_BUCKETS_MAX / 2 <= len(axis["step"]) <= LEARNER_BUCKETS_MAX


def test_of_a_large_fleet_the_first_learners_have_columns():
    told = history_json(synthetic(3, LEARNERS_MAX + 10))
    assert list(told["learners"]["by_learner"]) == [str(learner) for learner in range(LEARNERS_MAX)]
    assert told["learners"]["left_out"] == 10


def test_a_run_without_commits_has_empty_columns(tmp_path):
    path = tmp_path / "events.jsonl"
    record(path, CoreConfig(num_learners=2, total_steps=2, quorum=2, wait_for=2))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    told = history_json(read_history(path).history)
    assert told["run"]["step"] == []
    assert all(columns["mean"] == [] for columns in told["run"]["series"].values())
    assert told["learners"]["by_learner"] == {}


def test_times_fall_into_their_bins():
    histogram = Histogram()
    for seconds in (0.0, 0.0005, 0.001, 0.3, 1.0, 4.0, 1e6):
        histogram.add(seconds)
    told = histogram.to_json()
    assert len(told["edges"]) == len(told["counts"]) + 1 == len(SECONDS_EDGES)
    found = {edge: count for edge, count in zip(told["edges"], told["counts"], strict=False) if count}
    assert found == {0.0: 2, 0.001: 1, 0.2: 1, 1.0: 1, 2.0: 1, 10_000.0: 1}
    assert Histogram().to_json() == {"edges": [], "counts": []}
