"""Ctrl-C and SIGTERM in every phase of a real process."""

import json
import signal
from contextlib import contextmanager

import pytest

NOBODY = "127.0.0.1:1"


@pytest.fixture
def learner(template, tmp_path):
    """Run a learner process until it says that it is in the phase."""

    @contextmanager
    def run(phase, syncer):
        arguments = (phase, syncer, tmp_path / "out")
        with template.process("signal_learner:run", *arguments, output=tmp_path / "said.txt") as process:
            process.until(lambda line: line == phase)
            yield process

    return run


def end(process):
    code = process.wait()
    return code, "\n".join(process.said)


@pytest.mark.parametrize(
    ("phase", "syncer", "number"),
    [
        ("loading", NOBODY, signal.SIGTERM),
        ("waiting", NOBODY, signal.SIGINT),
        ("training", "none", signal.SIGTERM),
    ],
)
def test_one_signal_stops_at_the_next_opportunity(learner, tmp_path, phase, syncer, number):
    with learner(phase, syncer) as process:
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


def test_a_second_signal_ends_the_process_at_once(learner, tmp_path):
    with learner("one-step", "none") as process:
        process.send_signal(signal.SIGINT)
        process.until(lambda line: "once more ends the process at once" in line)
        process.send_signal(signal.SIGINT)
        code, errors = end(process)
    assert code == 130, errors
    assert not (tmp_path / "out").exists()
