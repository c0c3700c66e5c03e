"""What people and programs are shown."""

import io
import json
import math
from pathlib import Path

import pytest

from yeto.errors import ConfigError
from yeto.learner.exchanged import Answer, Broadcast, Pull, Receipt, Taken
from yeto.learner.loop import StepResult
from yeto.learner.progress import Progress
from yeto.learner.task import Evaluation


def step(loss=1.5):
    return StepResult(loss=loss, targets=3, tokens=10, learning_rate=0.01, gradient_norm=2.0)


def received(progress, taken, *, version=4):
    broadcast = Broadcast(generation=1, fragment=0, version=version, digest="d", values=None)
    progress.received(broadcast, Receipt(taken=taken, alpha=0.5, previous_version=None), global_step=version)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_has_one_object_a_line(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    with Progress(learner_id=1, log_path=path, stream=io.StringIO()) as progress:
        progress.phase("training")
        progress.link("up", "10.0.0.1:29400")
        received(progress, Taken.OVERWROTE)
        received(progress, Taken.BLENDED)
        progress.answered(
            Answer(
                pull=Pull(generation=1, fragment=0, step=8, attempt=2),
                base_version=4,
                anchor=None,
                local_step=0,
                c_steps=1,
                c_tokens=10,
                staleness=2,
                carried=None,
                leaves=None,
                residual_scale=0.5,
            )
        )
        progress.stepped(step(), local_step=1, tokens=10)
        progress.evaluated(Evaluation(loss_sum=6.0, targets=4, rows=2))
        progress.ended(0, "done", seconds={"compute": 1.0}, empty_groups=3)
    records = lines(path)
    kinds = ["phase", "link", "broadcast", "broadcast", "push", "step", "eval", "exit"]
    assert [record.pop("kind") for record in records] == kinds
    assert all(record.pop("at") > 1.7e9 for record in records)
    assert records[3] == {
        "fragment": 0,
        "version": 4,
        "taken": "blended",
        "merges": 1,
        "global_step": 4,
        "local_step": 0,
    }
    assert records[4]["staleness"] == 2
    assert records[5] == {
        "local_step": 1,
        "global_step": 4,
        "loss": 1.5,
        "targets": 3,
        "tokens": 10,
        "tokens_per_second": 0.0,
        "learning_rate": 0.01,
        "gradient_norm": 2.0,
        "merges": 1,
        "staleness": 2,
        "link": "up",
    }
    assert records[6] == {"loss": 1.5, "targets": 4, "rows": 2, "local_step": 1, "global_step": 4}
    assert records[7]["seconds"] == {"compute": 1.0}


def test_a_loss_that_is_no_number_is_null_and_the_log_stays_json(tmp_path):
    path = tmp_path / "log.jsonl"
    with Progress(learner_id=0, log_path=path, stream=io.StringIO()) as progress:
        progress.stepped(step(math.nan), local_step=1, tokens=10)
        progress.stepped(step(math.inf), local_step=2, tokens=20)
    steps = [record for record in lines(path) if record["kind"] == "step"]
    assert [record["loss"] for record in steps] == [None, None]


def test_a_loss_that_is_no_number_is_said_once_with_the_remedy(tmp_path):
    stream, path = io.StringIO(), tmp_path / "log.jsonl"
    with Progress(learner_id=1, log_path=path, stream=stream) as progress:
        for local_step, loss in enumerate([2.5, math.nan, math.inf, 2.5, math.nan], start=1):
            progress.stepped(step(loss), local_step=local_step, tokens=10)
    [said] = [line for line in stream.getvalue().splitlines() if "diverged" in line]
    assert said.startswith("learner 1: the loss of local step 2 is nan: ")
    assert "--inner-lr" in said
    assert "--state-dir" in said
    assert [record["kind"] for record in lines(path)] == ["step", "step", "notice", "step", "step", "step"]


def test_a_restarted_learner_appends(tmp_path):
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        with Progress(learner_id=0, log_path=path, stream=io.StringIO()) as progress:
            progress.phase("loading")
    assert len(lines(path)) == 2


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--log-jsonl .*file/log\.jsonl"):
        Progress(learner_id=0, log_path=tmp_path / "file" / "log.jsonl")


def test_without_a_terminal_lines_are_plain_and_few():
    stream = io.StringIO()
    with Progress(learner_id=2, max_local_steps=100, stream=stream) as progress:
        progress.link("up", "10.0.0.1:29400")
        for local_step in range(1, 50):
            progress.stepped(step(), local_step=local_step, tokens=10 * local_step)
        progress.ended(0, "done", seconds={}, empty_groups=0)
    text = stream.getvalue()
    assert "\x1b" not in text
    first, second, third = text.splitlines()
    assert first == "learner 2: link up: 10.0.0.1:29400"
    assert second.startswith("learner 2: loading, local step 1, loss 1.5000, global step 0")
    assert "0 merges, staleness 0, link up" in second
    assert third == "learner 2: done"


def test_the_line_has_an_eta_when_the_end_is_known(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("yeto.learner.progress.time.monotonic", lambda: now[0])
    progress = Progress(learner_id=0, max_local_steps=100, stream=io.StringIO())
    for local_step in range(1, 11):
        now[0] += 2.0
        progress.stepped(step(), local_step=local_step, tokens=10 * local_step)
    assert progress.line() == ("learner 0: loading, local step 10, loss 1.5000, 5 tokens/s, ETA 0:03:00")


def test_the_line_says_what_a_learner_waits_for():
    stream = io.StringIO()
    progress = Progress(learner_id=1, stream=stream)
    progress.phase("waiting")
    assert progress.line() == "learner 1: waiting for a connection to the syncer"
    progress.link("up", "host:1")
    shown = (
        "learner 1: waiting for the run to open: learner 0 brings the first weights, and the syncer says who"
    )
    assert progress.line().startswith(f"{shown} is missing, global step 0")
    progress.idle()
    progress.idle()
    assert stream.getvalue().count(shown) == 1, "now and then, not every time"
    progress.fragments(2, 8)
    assert "waiting for the first weights: 2 of 8 fragments are here" in progress.line()
    progress.phase("training")
    assert progress.line().startswith("learner 1: training, global step 0")
    progress.phase("frozen")
    assert progress.line().startswith("learner 1: frozen at its budget, until the syncer has merged the rest")
    first = Progress(learner_id=0, stream=stream)
    first.phase("waiting")
    first.link("up", "host:1")
    assert "waiting for the syncer to open the run with this learner's first weights" in first.line()


def test_on_a_terminal_the_line_is_redrawn(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Progress(learner_id=0, stream=stream) as progress:
        progress.stepped(step(), local_step=1, tokens=10)
        progress.notice("a word")
    assert "learner 0: a word" in stream.getvalue()
    assert "\x1b[?25l" in stream.getvalue(), "the cursor is hidden meanwhile"
    assert stream.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in stream.getvalue()


def test_the_same_trouble_with_the_link_is_said_once():
    shown = io.StringIO()
    with Progress(learner_id=0, stream=shown) as progress:
        for _ in range(3):
            progress.link("connecting", "host:1")
            progress.link("down", "refused")
        progress.link("connecting", "host:1")
        progress.link("down", "no route", then="dialling again for up to 900 s")
        progress.link("connecting", "host:1")
        progress.link("up", "host:1")
    assert shown.getvalue().splitlines() == [
        "learner 0: link connecting: host:1",
        "learner 0: link down: refused",
        "learner 0: link down: no route; dialling again for up to 900 s",
        "learner 0: link up: host:1",
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_log_on_a_full_disk_ends_and_training_goes_on():
    shown = io.StringIO()
    with Progress(learner_id=0, log_path=Path("/dev/full"), stream=shown) as progress:
        progress.stepped(step(), local_step=1, tokens=10)
        progress.stepped(step(), local_step=2, tokens=20)
    assert shown.getvalue().count("--log-jsonl ends here: No space left on device") == 1


@pytest.mark.parametrize(("seconds", "words"), [(0.001, "10,000"), (1.0, "10"), (8.0, "1.2"), (40.0, "0.25")])
def test_a_slow_learner_has_a_rate_above_zero(monkeypatch, seconds, words):
    now = [0.0]
    monkeypatch.setattr("yeto.learner.progress.time.monotonic", lambda: now[0])
    for unit in ("tokens", "samples"):
        progress = Progress(learner_id=0, unit=unit, stream=io.StringIO())
        for local_step in range(1, 11):
            now[0] += seconds
            progress.stepped(step(), local_step=local_step, tokens=10 * local_step)
        assert f", {words} {unit}/s" in progress.line()
