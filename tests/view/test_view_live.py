"""What a terminal and a log show of a moment, and the logs of learners that are read beside the tape."""

import io
import json
import os

import attrs
import pytest
from recorded_run import Run, record, record_with_restart
from rich.console import Console
from view_tapes import ROOT

from yeto.core import CoreConfig
from yeto.core.decisions import LearnerRefused
from yeto.core.events import LearnerLeft
from yeto.tape import Record, read
from yeto.view.board import Board
from yeto.view.follow import Watcher
from yeto.view.live import COLUMNS, headline, learner_grid, plain_line, screen, text, waited
from yeto.view.logs import JsonLog, LearnerPulse, LogFolder
from yeto.view.model import LearnerLive, Live
from yeto.view.present import present
from yeto.view.units import duration, size
from yeto.view.writers import is_written

FAULTY = ROOT / "fixtures" / "tapes" / "faulty-v1.jsonl"


@pytest.fixture(scope="module")
def tape(tmp_path_factory):
    path = tmp_path_factory.mktemp("view") / "events.jsonl"
    record(path)
    return path


def seen(path, *, lines=None, tmp_path=None):
    if lines is not None:
        whole = path.read_bytes().splitlines(keepends=True)
        path = tmp_path / "events.jsonl"
        path.write_bytes(b"".join(whole[:lines]))
    watcher = Watcher(path, running=lambda _: None)
    watcher.look()
    return watcher


def shown(moment, width, height=40):
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(screen(moment, width, height))
    return out.getvalue()


def test_strangers_get_no_place(tape):
    board = seen(tape).board
    known, at = set(board.shadow.seats), board.at
    for body in (
        LearnerRefused(learner=4_000_000_000, generation="aa", reason="learner_out_of_range", why="too high"),
        LearnerLeft(at=at, learner=4_000_000_000, generation="aa", reason="gone"),
    ):
        board.feed(Record(seq=0, at=at, kind=body.kind, because=None, body=body))
    assert set(board.shadow.seats) == known
    assert {one.learner for one in present(board).learners} == known


def test_every_wait_names_whom_and_since_when():
    named, phases = set(), set()
    for name in ("faulty-v1", "budget-v1", "stop-v1"):
        board = Board()
        for record_ in read(FAULTY.with_name(f"{name}.jsonl")):
            board.feed(record_)
            moment = present(board)
            wait = moment.wait
            phases.add(moment.phase)
            if moment.phase == "ended":
                assert (wait.since, wait.whom) == (None, ())
                continue
            assert wait.since is not None
            assert wait.since <= moment.at
            what = wait.sentence.partition(" for ")[2]
            if "learner" in what and "connected" not in what:
                assert wait.whom, wait.sentence
            for learner in wait.whom:
                assert str(learner) in what or "connected" in what
                one = moment.learners[learner]
                assert one.waited_since is not None
                named.add(one.waited_for.split()[0])
            assert headline(moment).startswith(f"round {moment.step}/{moment.total_steps}, ")
            assert "so far)" in waited(wait, moment.now)
    assert phases >= {"provisional", "waiting", "running", "budget", "stopping", "finalising", "ended"}
    assert named >= {"round", "its", "the"}


def test_a_run_that_was_started_again_does_not_say_that_it_was_stopped(tmp_path):
    path = tmp_path / "whole.jsonl"
    record_with_restart(path)
    lines = path.read_bytes().splitlines()
    resumed = next(i for i, line in enumerate(lines) if b'"kind":"session_resumed"' in line)
    moment = seen(path, lines=resumed + 2, tmp_path=tmp_path).moment()
    assert moment.phase == "waiting"
    assert moment.wait.sentence.startswith("waiting for 2 of 2: learners 0, 1")
    assert {one.link for one in moment.learners} == {"away"}
    assert {one.link_why for one in moment.learners} == {"the syncer was started again"}


def test_who_has_left_is_away_and_no_longer_counted(tmp_path):
    path = tmp_path / "events.jsonl"
    run = Run(path, CoreConfig(num_learners=3, total_steps=60, quorum=2, wait_for=3))
    run.start()
    run.play(until=lambda state: state.step == 2)
    for _ in range(20):
        run.leave(2)
        run.join(2)
    run.leave(2, "connection closed")
    run.play(until=lambda state: state.step == 6)
    run.close()
    moment = seen(path).moment()
    gone = moment.learners[2]
    assert (gone.link, gone.link_why, gone.joins, gone.leaves) == ("away", "connection closed", 21, 21)
    assert gone.steps_per_second is None
    for one in moment.rounds:
        assert 2 not in one.members
        assert one.quorum == 2
    assert "away" in text(moment)


def test_the_time_left_is_unknown_at_first_and_right_at_half_way(tmp_path):
    """Also when it is asked between two commits."""
    path = tmp_path / "whole.jsonl"
    config = CoreConfig(num_learners=2, total_steps=60, quorum=2, wait_for=2, sync_interval_steps=0.0)
    record(path, config)
    lines = path.read_bytes().splitlines()
    commits = [i for i, line in enumerate(lines) if b'"kind":"merge"' in line]
    early = seen(path, lines=commits[1], tmp_path=tmp_path).moment()
    assert early.eta_seconds is None
    assert "time left unknown" in headline(early)
    last_at = json.loads(lines[commits[-1]])["at"]
    for cut in range(commits[29] + 1, commits[31]):
        half = seen(path, lines=cut, tmp_path=tmp_path).moment()
        assert half.eta_seconds == pytest.approx(last_at - half.at, rel=0.2)
        assert half.merges_per_hour == pytest.approx(3600 * 30 / (last_at - half.at), rel=0.25)
    assert seen(path).moment().eta_seconds == 0.0


def test_a_log_line_counts_when_it_is_whole(tmp_path):
    path = tmp_path / "learner.jsonl"
    log = JsonLog(path)
    assert list(log.poll()) == []
    path.write_text('{"kind":"phase","phase":"training"}\n{"kind":"st')
    assert list(log.poll()) == [{"kind": "phase", "phase": "training"}]
    path.write_text('{"kind":"phase","phase":"training"}\n{"kind":"step","local_step":2}\ntorn\n')
    assert list(log.poll()) == [{"kind": "step", "local_step": 2}]
    path.write_text('{"kind":"phase","phase":"saving"}\n')
    assert list(log.poll()) == [{"kind": "phase", "phase": "saving"}]


def test_what_learners_log_stands_beside_what_the_tape_knows(tmp_path):
    tape, logs = tmp_path / "events.jsonl", tmp_path / "logs"
    record(tape)
    logs.mkdir()
    entries = (
        {"kind": "phase", "phase": "training"},
        {"kind": "step", "local_step": 7, "loss": 2.0, "tokens_per_second": 1234.5},
        {"kind": "step", "local_step": 8, "loss": 1.0, "tokens_per_second": 1000.0},
        {"kind": "step", "local_step": 9, "loss": None, "tokens_per_second": None},
        {"kind": "later", "local_step": 99},
    )
    (logs / "learner-1.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    moment = seen(tape).moment()
    told = moment.learners[1]
    assert (told.phase, told.local_step, told.loss) == ("training", 9, pytest.approx(1.9))
    assert moment.learners[0].loss is None
    line = plain_line(moment)
    assert f"round {moment.step}/{moment.total_steps}" in line
    assert "learner 1: training, released, step 9 loss 1.900, 6 merges" in line
    wide = shown(moment, 200)
    for part in ("training", "1.900", str(told.merges)):
        assert part in wide
    assert LogFolder(tmp_path / "nowhere").look(2) == {}


@pytest.mark.parametrize(
    ("entry", "state"),
    [
        ({"kind": "phase", "phase": "loading"}, "loading,"),
        ({"kind": "phase", "phase": "training"}, "training, no link,"),
        ({"kind": "phase", "phase": "finishing"}, "finishing,"),
        ({"kind": "exit", "code": 0}, "done,"),
        ({"kind": "exit", "code": 4}, "ended with code 4,"),
    ],
)
def test_a_missing_link_is_said_while_it_matters(tape, entry, state):
    pulse = LearnerPulse()
    pulse.feed(entry)
    live = Live(learners={0: LearnerLive(phase=pulse.phase)})
    moment = present(seen(tape).board, live=live)
    first = attrs.evolve(moment.learners[0], link="away")
    assert f"learner 0: {state} step" in plain_line(attrs.evolve(moment, learners=(first,)))


def test_narrow_screens_get_fewer_columns_and_no_torn_ones(tmp_path):
    bare = seen(FAULTY, lines=480, tmp_path=tmp_path).moment()
    full = [attrs.evolve(one, loss=1.25, bytes_out=3 << 20) for one in bare.learners]
    moment = attrs.evolve(bare, learners=tuple(full))
    # What nobody knows has no column.
    columns = learner_grid(bare, 200).columns
    assert [column.name for column in COLUMNS if column.name not in columns] == ["loss", "out"]
    for width in (32, 40, 60, 72, 80, 90, 104, 114, 122, 132, 144, 200):
        lines = shown(moment, width).splitlines()
        assert max(map(len, lines)) <= width
        names = [column.name for column in COLUMNS if width >= column.least_width]
        head = next(line for line in lines if line.lstrip().startswith("learner"))
        assert [part for name in names for part in name.split()] == head.split()
        first = next(line for line in lines if line.lstrip().startswith("0 "))
        assert "…" not in first


def test_of_many_learners_a_screen_shows_those_that_are_waited_for(tmp_path):
    path = tmp_path / "events.jsonl"
    run = Run(path, CoreConfig(num_learners=300, total_steps=6, quorum=299, wait_for=300))
    run.start()
    run.play(until=lambda state: state.rounds)
    opened = next(order for order in run.orders if order.kind == "attempt_opened")
    for member in opened.members:
        if member.learner != 250:
            run.push(opened, member)
    run.close()
    moment = seen(path).moment()
    assert moment.rounds[0].owing == (250,)
    printed = shown(moment, 100, height=40)
    assert len(printed.splitlines()) <= 40
    assert any(line.split()[:2] == ["250", "connected"] for line in printed.splitlines()), printed
    assert " more" in printed
    assert len(text(moment).splitlines()) > 300


def test_nothing_of_a_tape_steers_the_terminal(tmp_path):
    path = tmp_path / "events.jsonl"
    run = Run(path)
    run.start()
    run.play(until=lambda state: state.step == 2)
    run.leave(1, "\x1b[2Jgone\nand [bold]more[/bold]")
    run.close()
    moment = seen(path).moment()
    assert moment.learners[1].link_why.startswith("\x1b[2J")
    for printed in (shown(moment, 300), text(moment), plain_line(moment)):
        assert "\x1b[2J" not in printed


def test_durations_and_sizes_are_for_people():
    assert duration(3661.4) == "1:01:01"
    assert duration(1e300) == "100000000 days, 0:00:00"
    assert [size(count) for count in (None, 12, 2048, 3 * 2**30)] == ["-", "12 B", "2.0 KiB", "3.0 GiB"]


def test_who_writes_a_tape_is_seen_without_touching_its_lock(tmp_path):
    path = tmp_path / "events.jsonl"
    run = Run(path)
    if is_written(path) is None:
        pytest.fail("this system has no table of locks: name it in yeto/view/writers.py")
    assert is_written(path)
    run.start()
    run.play(until=lambda state: state.step == 2)
    run.writer.flush()
    began = 1_767_323_045.0  # the wall clock that the harness writes
    now = began + run.at + 100.0
    watcher = Watcher(path, clock=lambda: now)
    watcher.look()
    moment = watcher.moment()
    assert (moment.writer, moment.now) == ("running", pytest.approx(run.at + 100.0))
    assert moment.silent_seconds == pytest.approx(100.0)
    assert moment.disk_free_bytes > 0
    run.close()
    assert not is_written(path)
    moment = watcher.moment()
    assert (moment.writer, moment.now) == ("gone", moment.at)
    assert [alert.kind for alert in moment.alerts] == ["syncer_gone"]
    assert os.path.exists(f"{path}.lock")
