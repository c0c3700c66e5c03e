"""Ctrl-C and SIGTERM in every phase of a real process."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NOBODY = "127.0.0.1:1"


@contextmanager
def learner(phase, syncer, folder):
    """Run a learner process until it says that it is in the phase."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "signal_learner.py"), phase, syncer, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline().strip() == phase, process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process):
    _, errors = process.communicate(timeout=200)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("phase", "syncer", "number"),
    [
        ("loading", NOBODY, signal.SIGTERM),
        ("waiting", NOBODY, signal.SIGINT),
        ("training", "none", signal.SIGTERM),
    ],
)
def test_one_signal_stops_at_the_next_opportunity(tmp_path, phase, syncer, number):
    with learner(phase, syncer, tmp_path / "out") as process:
        process.send_signal(number)
        code, errors = end(process)
    assert code == 4, errors
    assert "Traceback" not in errors
    if phase == "training":
        assert f"stopped by {number.name}; local weights of step" in errors
        weights = json.loads((tmp_path / "out" / "unmerged-0" / "weights.json").read_text())
        assert set(weights) == {"layers.0.weight", "layers.1.bias"}
    else:
        assert "nothing was trained" in errors
        assert not (tmp_path / "out").exists()


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    with learner("one-step", "none", tmp_path / "out") as process:
        process.send_signal(signal.SIGINT)
        line = process.stderr.readline()
        while "once more ends the process at once" not in line:
            line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        code, errors = end(process)
    assert code == 130, errors
    assert not (tmp_path / "out").exists()
