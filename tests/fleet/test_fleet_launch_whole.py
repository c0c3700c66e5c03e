"""A fleet on this machine as a user launches it: real processes, a real (tiny) model, two accidents."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from yeto.core.events import LearnerJoined
from yeto.fleet.processes import RUN_VARIABLE
from yeto.fleet.registry import DONE, find_run
from yeto.tape import read, replay
from yeto.view.follow import Watcher

SECONDS_MAX = 240
"""Far more than a run takes; a hang fails here instead of at the end of everybody's patience."""

pytestmark = [pytest.mark.begins_early, pytest.mark.timeout(4 * SECONDS_MAX)]


def processes_of(folder):
    """Return every process that says it belongs to a run, by its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get(RUN_VARIABLE) == str(folder)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process.cmdline())
        except psutil.Error:
            continue
    return found


def pid_of(run, name):
    return next((child.pid for child in run.state().children if child.name == name), None)


def test_a_fleet_whose_island_and_head_are_killed_ends_with_a_verified_adapter(
    fixtures, tmp_path, monkeypatch, yeto
):
    monkeypatch.setenv("YETO_RUNS_DIR", str(tmp_path / "runs"))
    output, mirror = tmp_path / "result", tmp_path / "mirror"
    words = [sys.executable, "-m", "yeto", "launch", "--gpu", "local:1xcpu,local:1xcpu", "--name", "trial"]
    settings = {
        "model": fixtures / "tiny-llama",
        "data": fixtures / "chat" / "train.jsonl",
        "output": output,
        "mirror": mirror,
        "fragments": 2,
        "total_steps": 10,
        "sync_interval_steps": 6,
        "seq_len": 64,
        "micro_batch_size": 2,
        "stream_workers": 0,
        "state_every": 2,
    }
    words += [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    launched = subprocess.run([*words, "--detach"], capture_output=True, text=True, timeout=SECONDS_MAX)
    assert launched.returncode == 0, launched.stderr
    assert "yeto status trial   yeto logs trial   yeto down trial" in launched.stdout
    run = find_run(tmp_path / "runs", "trial")
    watcher = Watcher(run.tape)

    def until(condition):
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            watcher.look()
            if condition(watcher.board.shadow):
                return watcher.board.shadow
            logs = "\n".join(path.read_text() for path in sorted((run.folder / "logs").iterdir()))
            assert not run.state().over, logs
            assert time.monotonic() < deadline, logs
            time.sleep(0.05)

    try:
        until(lambda view: view.durable >= 2)
        code, out, err = yeto("status", "trial", "--once")
        assert code == 0, err
        assert out.startswith("trial: running: the head and 2 islands are up")

        # At one moment, as when a machine goes that both are on. A learner trains on while it waits, so two
        # accidents one after the other would be twice the work and show no more.
        island, head = pid_of(run, "island-1"), pid_of(run, "head")
        port = json.loads((run.head / "ready.json").read_text())["port"]
        durable = watcher.board.shadow.durable
        os.kill(island, signal.SIGKILL)
        os.kill(head, signal.SIGKILL)
        until(lambda _: len(watcher.board.summary.restarts) == 1)
        # Nothing whose broadcast left may be gone.
        assert watcher.board.shadow.step >= durable
        # Both islands are needed for a round.
        until(lambda view: view.step > durable and view.current.keys() == {0, 1})
        assert pid_of(run, "island-1") not in (None, island)
        assert pid_of(run, "head") not in (None, head)
        assert json.loads((run.head / "ready.json").read_text())["port"] == port

        code, out, err = yeto("logs", "trial", "island-1")
        assert code == 0, err
        assert out.count("learner 1: LoRA r=16") == 2
        assert "learner 1: global result of step 10 saved" in out
    except BaseException:
        yeto("down", "trial")
        raise
    # Everything has ended by itself.
    assert yeto("down", "trial")[:2] == (0, "trial: nothing of it runs any more\n")
    assert processes_of(run.folder) == []

    state = run.state()
    assert (state.phase, state.exit_code, state.why) == (DONE, 0, f"the result is in {output}")
    code, out, err = yeto("logs", "trial", "--no-follow")
    assert code == 0, err
    assert "verified: 56 tensors" in out
    assert "versions, digests and ledger are what the tape says" in out
    adapter = json.loads((output / "adapter_config.json").read_text())
    assert adapter["peft_type"] == "LORA"
    assert adapter["base_model_name_or_path"] == str(fixtures / "tiny-llama")
    verdict = replay(run.tape)
    assert (verdict.divergence, verdict.state.step) == (None, 10)
    # With the same ids, before and after.
    joined = [record.body.learner for record in read(run.tape) if isinstance(record.body, LearnerJoined)]
    assert sorted(joined) == [0, 0, 1, 1]
    controller = yeto("logs", "trial", "controller")[1]
    assert "island-1 was killed by signal 9; starting it again" in controller
    assert "the head was killed by signal 9; starting it again from its files" in controller
    assert any(path.is_file() for path in mirror.rglob("*"))
    code, out, _ = yeto("status", "--json")
    assert [(entry["name"], entry["phase"]) for entry in json.loads(out)] == [("trial", DONE)]
    code, _, err = yeto("launch", "--resume", "trial")
    assert (code, err) == (2, f"yeto: --resume trial: the run is over: the result is in {output}\n")
