"""The main job as a user runs it: real processes, real sockets, a real (tiny) model."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from yeto.cli.export import main as export
from yeto.cli.main import main
from yeto.tape import replay
from yeto.view.follow import Watcher

SECONDS_MAX = 240
"""Far more than a run takes; a hang fails here instead of at the end of everybody's patience."""

PLAIN = {"learners": 1, "eval_data": None, "eval_rows": None, "sync_interval_steps": 1}
"""Of runs that are about processes: a learner and few steps are enough, and nobody looks at a score."""

UNTAGGED = Path(__file__).parents[2] / "fixtures" / "templates" / "untagged.jinja"

pytestmark = [pytest.mark.begins_early, pytest.mark.timeout(4 * SECONDS_MAX)]


def words_of(fixtures, run_dir, **flags):
    """Return the words of a small run; a flag that is None is left out, True is a switch."""
    settings = {
        "learners": 2,
        "run_dir": run_dir,
        "model": fixtures / "tiny-llama",
        "data": fixtures / "chat" / "train.jsonl",
        "eval_data": fixtures / "chat" / "heldout.jsonl",
        "eval_rows": 16,
        "fragments": 2,
        "total_steps": 6,
        "sync_interval_steps": 6,
        "seq_len": 64,
        "micro_batch_size": 2,
        "inner_lr": 3e-3,
        "stream_workers": 0,
    } | flags
    words = ["run", "--role", "local"]
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        words += [] if value is None else [flag] if value is True else [flag, str(value)]
    return words


def command(fixtures, run_dir, **flags):
    """Return the command line of a process that is a small run."""
    return [sys.executable, "-m", "yeto", *words_of(fixtures, run_dir, **flags)]


def processes_of(run_dir):
    """Return the processes whose command line names the folder of a run."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(run_dir) in word for word in process.info["cmdline"] or ())
    ]


@contextmanager
def started(words, tmp_path):
    """Start a run with its output in a file; end everything that belongs to it on the way out."""
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process, output
    finally:
        process.kill()
        process.wait()


class Watch:
    """What the tape says while the run goes on."""

    def __init__(self, run_dir, process, output):
        self._watcher = Watcher(run_dir / "events.jsonl")
        self._process = process
        self._output = output

    @property
    def view(self):
        return self._watcher.board.shadow

    @property
    def restarts(self):
        return len(self._watcher.board.summary.restarts)

    def until(self, condition):
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            self._watcher.look()
            if condition(self.view):
                return self.view
            assert self._process.poll() is None, self._output.read_text()
            assert time.monotonic() < deadline, self._output.read_text()
            time.sleep(0.05)


def child(run_dir, *words):
    """Return the child of a run whose command line has all these words."""
    return next(p for p in processes_of(run_dir) if all(word in p.info["cmdline"] for word in words))


def finished(process, output):
    assert process.wait(timeout=SECONDS_MAX) == 0, output.read_text()
    return output.read_text()


def test_a_run_whose_children_are_killed_ends_with_a_better_verified_model(fixtures, tmp_path, capsys):
    run_dir = tmp_path / "run"
    payloads = tmp_path / "payloads"
    words = command(
        fixtures,
        run_dir,
        quorum=1,
        wait_for=2,
        total_steps=14,
        matrix_merge="iso",
        state_every=2,
        record_payloads=payloads,
    )
    with started(words, tmp_path) as (process, output):
        watch = Watch(run_dir, process, output)
        durable = watch.until(lambda view: view.durable >= 3).durable
        child(run_dir, "--role=syncer").send_signal(signal.SIGKILL)
        committed = watch.until(lambda _: watch.restarts == 1).step
        # Nothing whose broadcast left may be gone, and none leaves before its checkpoint is durable.
        assert committed >= durable >= 3
        watch.until(lambda view: view.step >= committed + 2)
        child(run_dir, "--role=learner", "--learner-id=1").send_signal(signal.SIGKILL)
        watch.until(lambda view: 1 not in view.current)
        gone = watch.view.step
        watch.until(lambda view: view.step > gone)
        text = finished(process, output)
    assert processes_of(run_dir) == []
    verdict = replay(run_dir / "events.jsonl")
    assert verdict.divergence is None
    assert verdict.state.step == 14
    base, tuned = (float(figure) for figure in re.findall(r"│ (?:base|fine-tuned) +│ +([\d.]+) │", text))
    assert tuned < 0.8 * base
    assert "verified: 56 tensors" in text
    assert "resumed at local step" in (run_dir / "logs" / "learner-1.log").read_text()
    assert "resumed at local step" not in (run_dir / "logs" / "learner-0.log").read_text()
    settings = json.loads((run_dir / "adapter" / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA"
    assert settings["base_model_name_or_path"] == str(fixtures / "tiny-llama")
    # What the killed syncer and the one after it merged can be computed again, bit for bit.
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(run_dir / "events.jsonl"), "--threads=2", "--tensors", str(payloads)])
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    assert re.search(r"(\d+) of \1 average and RDA merges are bit-equal", said.out)
    assert re.search(r"(\d+) of \1 iso merges are bit-equal", said.out)


def test_a_run_that_is_interrupted_then_resumed_then_extended_and_killed_loses_nothing(
    fixtures, tmp_path, monkeypatch, capsys
):
    run_dir = tmp_path / "run"
    with started(command(fixtures, run_dir, total_steps=400, **PLAIN), tmp_path) as (process, output):
        Watch(run_dir, process, output).until(lambda view: view.step >= 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=SECONDS_MAX) == 4, output.read_text()
        assert "--resume" in output.read_text()
    assert processes_of(run_dir) == []
    stopped_at = replay(run_dir / "events.jsonl").state.step

    # Everything is gone; the checkpoint alone gives the model.
    words = ["--checkpoint", str(run_dir / "yeto-state.ckpt"), "--model", str(fixtures / "tiny-llama")]
    monkeypatch.setattr(sys, "argv", ["yeto-export", *words, "--output-dir", str(tmp_path / "exported")])
    with pytest.raises(SystemExit) as ended:
        export()
    assert not ended.value.code, capsys.readouterr().err
    assert (tmp_path / "exported" / "adapter_model.safetensors").exists()

    words = command(fixtures, run_dir, resume=True, total_steps=stopped_at + 4, **PLAIN)
    with started(words, tmp_path) as (process, output):
        text = finished(process, output)
    assert "every decision follows from its events" in text
    verdict = replay(run_dir / "events.jsonl")
    assert verdict.divergence is None
    assert verdict.state.step == stopped_at + 4
    assert processes_of(run_dir) == []
    assert "resumed at local step" in (run_dir / "logs" / "learner-0.log").read_text()
    assert (run_dir / "learners" / "0" / "state" / "done.json").exists()

    # The learner's part was over; that of the run is not, once more is asked of it. Its parent is killed.
    words = command(fixtures, run_dir, resume=True, total_steps=400, **PLAIN)
    with started(words, tmp_path) as (process, output):
        Watch(run_dir, process, output).until(lambda view: view.step > stopped_at + 4)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + SECONDS_MAX
        while processes_of(run_dir):
            assert time.monotonic() < deadline, "children outlived their parent"
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        ({"data": "/nowhere/rows.jsonl"}, 2, "--data /nowhere/rows.jsonl: no such file"),
        ({"eval_data": "/nowhere/rows.jsonl"}, 2, "--eval-data /nowhere/rows.jsonl: no such file"),
        ({"model": "/nowhere/model"}, 2, "--model /nowhere/model: no such folder"),
        (
            {"model": "nope/nope"},
            2,
            "--model nope/nope: no such folder, and as a Hugging Face id: HF_HUB_OFFLINE",
        ),
        ({"chat_template": UNTAGGED}, 2, "untagged.jinja: it has no {% generation %} blocks"),
        ({"learners": 0}, 2, "--learners 0"),
        ({"quorum": 3}, 2, "--quorum 3"),
        ({"resume": True}, 2, "--resume: there is no run"),
        ({"token_budget": 1000}, 2, "--total-steps and --token-budget"),
        ({"merge_alpha": 1.5}, 2, "--merge-alpha 1.5"),
    ],
)
def test_wrong_input_is_one_line_with_the_remedy(fixtures, tmp_path, capsys, flags, code, named):
    run_dir = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(words_of(fixtures, run_dir, **flags))
    said = capsys.readouterr().err
    assert ended.value.code == code, said
    assert named in said
    assert said.count("\n") == 1, said
    # Nothing was started that could have found it.
    assert not (run_dir / "logs").exists()


HEADLESS = '{"instruction": "a", "output": "b"}\n{"instruction": "c", "output": null}\n'


@pytest.mark.parametrize(
    ("rows", "flags", "named"),
    [
        # All rows are seen where they are split, and otherwise the first one.
        (
            HEADLESS,
            {"eval_data": None, "eval_rows": 1},
            "rows.jsonl line 2: columns instruction fit no format",
        ),
        (HEADLESS, {"eval_data": None, "eval_rows": 1}, "(output: null, as good as not there)"),
        (HEADLESS, {"columns": "user=instruction,assistant=outputt"}, "line 1: no column 'outputt'"),
    ],
)
def test_rows_of_another_format_are_found_before_anything_starts(
    fixtures, tmp_path, capsys, rows, flags, named
):
    (tmp_path / "rows.jsonl").write_text(rows)
    with pytest.raises(SystemExit) as ended:
        main(words_of(fixtures, tmp_path / "run", data=tmp_path / "rows.jsonl", **flags))
    said = capsys.readouterr().err
    assert ended.value.code == 1, said
    assert named in said
    assert said.count("\n") == 1, said
    assert not (tmp_path / "run" / "logs").exists()


def test_what_is_said_before_the_training(fixtures, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("yeto.fleet.local.LocalRun.train", lambda run: 4)
    tokens = 64 * 2 * 2 * 6 * 5
    with pytest.raises(SystemExit) as ended:
        main(words_of(fixtures, tmp_path / "run", total_steps=None, token_budget=tokens, http_port=0))
    assert ended.value.code == 4
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"--token-budget: {tokens:,} tokens are about 10 global steps"
    assert said[1] == f"2 learners, 10 global steps; everything is in {tmp_path / 'run'}"
    assert said[2] == f"the address of the dashboard is in {tmp_path / 'run' / 'logs' / 'syncer.log'}"


def test_the_folder_is_held_from_before_its_rows_are_written_until_the_end(
    fixtures, tmp_path, capsys, monkeypatch
):
    words = words_of(fixtures, tmp_path / "run", eval_data=None, eval_rows=1)

    def train(run):
        # A second command, while this one is at it.
        with pytest.raises(SystemExit):
            main(words)
        return 4

    monkeypatch.setattr("yeto.fleet.local.LocalRun.train", train)
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert ended.value.code == 4, said.err
    wrong = f"--run-dir {tmp_path / 'run'}: another command is running in it; wait for it, or stop it"
    assert said.err == f"yeto: {wrong}\n"
    assert said.out.count("held out") == 1


def test_a_folder_of_another_run_is_refused(fixtures, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    done = subprocess.run(
        command(fixtures, tmp_path / "run"), capture_output=True, text=True, timeout=SECONDS_MAX
    )
    assert done.returncode == 2
    assert "is not empty" in done.stderr
