import io
import json

import pytest
from recorded_run import record, record_with_restart
from rich.console import Console

from yeto.core.decisions import LearnerRefused
from yeto.core.events import LearnerLeft
from yeto.errors import TapeError
from yeto.tape import Record, Summary, find_restarts, read
from yeto.view.follow import TapeFollower
from yeto.view.live import JsonLog, LearnerPulse, duration, headline, plain_line, table
from yeto.view.run import RunView


@pytest.fixture(scope="module")
def tape(tmp_path_factory):
    path = tmp_path_factory.mktemp("view") / "events.jsonl"
    record(path)
    return path


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    path = tmp_path_factory.mktemp("view") / "events.jsonl"
    record_with_restart(path)
    return path


def fold(path):
    view = RunView()
    for entry in read(path):
        view.feed(entry)
    return view


@pytest.mark.parametrize("name", ["tape", "restarted"])
def test_the_view_tells_the_numbers_of_the_replay(name, request):
    path = request.getfixturevalue(name)
    view = fold(path)
    summary = Summary(find_restarts(path))
    for entry in read(path):
        summary.feed(entry)
    told = summary.to_json()
    assert view.phase == "ended"
    assert view.exit_code == 0
    assert view.step == view.total_steps
    for learner, theirs in told["learners"].items():
        assert view.learners[int(learner)].merges == theirs["merges"]
    assert view.resumes == len(told["session"]["restarts"])
    # A restart begins the shares anew; without one they are the replay's.
    shares = [view.contribution(learner) for learner in view.learners]
    assert sum(shares) == pytest.approx(1.0)
    if name == "tape":
        assert shares == [pytest.approx(theirs["contribution"]) for theirs in told["learners"].values()]


def test_a_resumed_run_does_not_say_that_it_was_stopped(restarted):
    view = RunView()
    for entry in read(restarted):
        view.feed(entry)
        if entry.kind == "session_resumed":
            break
    assert headline(view) == f"round {view.step}/{view.total_steps}, {view.why}"
    assert view.why == f"resumed at step {view.step}, waiting for learners"


def test_strangers_get_no_place(tape):
    view = fold(tape)
    known = set(view.learners)
    at = view.at
    for body in (
        LearnerRefused(learner=4_000_000_000, generation="aa", reason="learner_out_of_range", why="too high"),
        LearnerLeft(at=at, learner=4_000_000_000, generation="aa", reason="gone"),
    ):
        view.feed(Record(seq=0, at=at, kind=body.kind, because=None, body=body))
    assert set(view.learners) == known


def test_following_gives_each_record_once_and_waits_for_a_torn_one(tape, tmp_path):
    whole = tape.read_bytes()
    growing = tmp_path / "events.jsonl"
    follower = TapeFollower(growing)
    assert list(follower.poll()) == []
    seen = []
    for size in (10, 2000, len(whole) // 2, len(whole)):
        growing.write_bytes(whole[:size])
        seen += [record.seq for record in follower.poll()]
    assert seen == [record.seq for record in read(tape)]
    growing.write_bytes(whole[:2000])
    with pytest.raises(TapeError, match="gone again"):
        list(follower.poll())


def test_the_time_left_follows_the_pace(tape):
    view = RunView()
    assert view.seconds_left() is None
    seen = set()
    for entry in read(tape):
        view.feed(entry)
        left = view.seconds_left()
        if left is not None and view.step < view.total_steps:
            assert left >= 0
            seen.add(view.step)
    assert seen
    assert view.seconds_left() == 0.0


def test_a_log_line_counts_when_it_is_whole(tmp_path):
    path = tmp_path / "learner.jsonl"
    log = JsonLog(path)
    assert list(log.poll()) == []
    path.write_text('{"kind":"phase","phase":"training"}\n{"kind":"st')
    assert list(log.poll()) == [{"kind": "phase", "phase": "training"}]
    path.write_text('{"kind":"phase","phase":"training"}\n{"kind":"step","local_step":2}\ntorn\n')
    assert list(log.poll()) == [{"kind": "step", "local_step": 2}]


def test_plain_line_and_table_show_steps_loss_and_merges(tape):
    view = fold(tape)
    pulse = LearnerPulse()
    for entry in (
        {"kind": "phase", "phase": "training"},
        {"kind": "step", "local_step": 7, "loss": 2.0, "tokens_per_second": 1234.5},
        {"kind": "step", "local_step": 8, "loss": 1.0, "tokens_per_second": 1000.0},
        {"kind": "step", "local_step": 9, "loss": None, "tokens_per_second": None},
        {"kind": "later", "local_step": 99},
    ):
        pulse.feed(json.loads(json.dumps(entry)))
    assert pulse.loss == pytest.approx(1.9)
    line = plain_line(view, {0: pulse})
    assert f"round {view.step}/{view.total_steps}" in line
    assert "step 9 loss 1.900" in line
    text = io.StringIO()
    Console(file=text, width=200).print(table(view, {0: pulse, 1: LearnerPulse()}))
    for part in ("training", "1.900", str(view.learners[0].merges)):
        assert part in text.getvalue()


def test_durations_are_for_people():
    assert duration(3661.4) == "1:01:01"


def test_a_missing_link_is_said_while_it_matters(tape):
    view = fold(tape)
    pulse = LearnerPulse()
    for entry, state in (
        ({"kind": "phase", "phase": "loading"}, "loading,"),
        ({"kind": "phase", "phase": "training"}, "training, no link,"),
        ({"kind": "phase", "phase": "finishing"}, "finishing,"),
        ({"kind": "exit", "code": 0}, "done,"),
        ({"kind": "exit", "code": 4}, "ended with code 4,"),
    ):
        pulse.feed(entry)
        view.learners[0].linked = False
        assert f"learner 0: {state} step" in plain_line(view, {0: pulse})
