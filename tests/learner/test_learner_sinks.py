"""Curves: what TensorBoard and Weights & Biases are given, and what becomes of a run when they fail."""

import io
import json
import math
import os
import resource
import socket
import struct
import subprocess
import sys
from importlib.util import find_spec

import pytest
from attrs import evolve
from learner_fakes import TinyTask, config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from yeto.cli.run_learner import LearnerFlags, run_learner_command
from yeto.errors import ConfigError
from yeto.learner import app as app_module
from yeto.learner import sinks as sinks_module
from yeto.learner.app import run_learner
from yeto.learner.loop import StepResult
from yeto.learner.progress import Progress
from yeto.learner.sinks import SCALARS, open_sinks
from yeto.learner.task import Evaluation

HAS_WANDB = find_spec("wandb") is not None
needs_wandb = pytest.mark.skipif(not HAS_WANDB, reason="needs the package wandb: pip install 'yeto[wandb]'")


def alone(folder, **changes):
    """Return settings of a learner without a syncer."""
    return config(
        syncer="none", output_dir=folder / "out", max_local_steps=6, log_jsonl=folder / "log.jsonl", **changes
    )


def step(loss=1.5):
    return StepResult(loss=loss, targets=3, tokens=10, learning_rate=0.01, gradient_norm=2.0)


def logged(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def curves(folder):
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {name: [(p.step, p.value) for p in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def test_tensorboards_own_reader_finds_what_the_log_has(tmp_path):
    settings = alone(tmp_path, tensorboard=tmp_path / "deep" / "board", eval_every=3, learner_id=0)
    assert run_learner(settings, TinyTask) == 0
    records = logged(settings.log_jsonl)
    found = curves(tmp_path / "deep" / "board" / "learner-0")
    assert set(found) == {curve for names in SCALARS.values() for curve in names.values()}
    for kind, names in SCALARS.items():
        of_kind = [record for record in records if record["kind"] == kind]
        assert len(of_kind) == {"step": 6, "eval": 3}[kind]
        for field, curve in names.items():
            wanted = [(record["local_step"], record[field]) for record in of_kind]
            assert [point for point, _ in found[curve]] == [point for point, _ in wanted]
            assert [value for _, value in found[curve]] == pytest.approx([value for _, value in wanted])


def test_learners_and_lives_share_a_folder(tmp_path):
    settings = config(output_dir=tmp_path, tensorboard=tmp_path / "board", num_learners=2)
    for learner_id, first in ((0, 1), (1, 1), (0, 2)):
        sinks = open_sinks(evolve(settings, learner_id=learner_id))
        with Progress(learner_id=learner_id, sinks=sinks, stream=io.StringIO()) as progress:
            progress.stepped(step(), local_step=first, tokens=10)
    assert sorted(path.name for path in (tmp_path / "board").iterdir()) == ["learner-0", "learner-1"]
    assert [point for point, _ in curves(tmp_path / "board" / "learner-0")["train/loss"]] == [1, 2]


def test_a_killed_process_has_written_every_point_and_a_nan_is_seen(tmp_path):
    sinks = open_sinks(config(output_dir=tmp_path, tensorboard=tmp_path))
    progress = Progress(learner_id=0, sinks=sinks, stream=io.StringIO())
    progress.stepped(step(math.nan), local_step=1, tokens=10)
    progress.evaluated(Evaluation(loss_sum=6.0, targets=4, rows=2))
    # Nothing was closed.
    found = curves(tmp_path / "learner-0")
    assert math.isnan(found["train/loss"][0][1])
    assert found["eval/loss"] == [(1, 1.5)]
    sinks.close()


def test_a_full_disk_ends_the_curves_and_not_the_training(tmp_path, capfd):
    settings = alone(tmp_path, tensorboard=tmp_path / "board")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Filling(TinyTask):
        """Lets no file grow beyond what the first two steps wrote."""

        def loss(self, batch):
            if self.batches_given == 3:
                size = max(path.stat().st_size for path in (tmp_path / "board" / "learner-0").iterdir())
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
            return super().loss(batch)

    try:
        # The log is larger than the limit: a run that must not stop writes to none.
        code = run_learner(evolve(settings, log_jsonl=None), lambda: Filling(rows_per_batch=4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 0
    said = capfd.readouterr().err
    assert said.count("ends here") == 1
    assert (
        f"learner 0: --tensorboard {tmp_path / 'board'} ends here: File too large; training goes on" in said
    )
    assert "Traceback" not in said
    assert len(curves(tmp_path / "board" / "learner-0")["train/loss"]) == 2


def test_a_folder_that_cannot_be_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--tensorboard .*file/board: Not a directory"):
        run_learner(alone(tmp_path, tensorboard=tmp_path / "file" / "board"), pytest.fail)


def test_a_package_that_is_missing_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    # What Python itself takes for a package that cannot be imported, also where it is installed.
    monkeypatch.setitem(sys.modules, "wandb", None)
    message = r"--wandb needs the package wandb, which is not installed: pip install 'yeto\[wandb\]'"
    with pytest.raises(ConfigError, match=message):
        run_learner(alone(tmp_path, wandb="project"), pytest.fail)
    flags = LearnerFlags(syncer="10.0.0.1:29400", model="no-model", data="no-data", wandb="project")
    with pytest.raises(ConfigError, match=message):
        run_learner_command(flags)


@pytest.fixture
def fresh_wandb():
    """Have the package forget what other tests told it."""
    import wandb

    wandb.teardown()
    yield
    wandb.teardown()


@needs_wandb
def test_a_service_that_is_away_stops_nobody(tmp_path, monkeypatch, capfd, fresh_wandb):
    monkeypatch.setattr(sinks_module, "REACH_SECONDS", 1.0)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    with socket.socket() as taken:
        # Bound and not listening: nobody can be there.
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        settings = alone(tmp_path, wandb="project")
        assert run_learner(settings, TinyTask) == 0
    said = capfd.readouterr().err
    assert said.count("learner 0: --wandb project ends here") == 1
    assert len([record for record in logged(settings.log_jsonl) if record["kind"] == "step"]) == 6


@needs_wandb
def test_who_is_not_logged_in_is_told(tmp_path):
    # In a process of its own: the package remembers who was logged in.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [
            sys.executable,
            *("-c", "from yeto.learner.sinks import WeightsAndBiases; WeightsAndBiases('project', 0, 1)"),
        ],
        env=environment | {"HOME": str(tmp_path)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("yeto.errors")]
    assert "--wandb project: " in said
    assert said.endswith("log in (wandb login), or keep the run on disk: WANDB_MODE=offline")


STAND_IN = """
import threading
from pathlib import Path

class Settings:
    def __init__(self, **given): pass

class Run:
    dir = str(Path(__file__).parent / "wandb" / "run-1" / "files")
    points = []
    def define_metric(self, name, step_metric): pass
    def log(self, point): self.points.append(point)
    def finish(self): ending.wait()

ending = threading.Event()
run = Run()
def init(**given): return run
"""


@pytest.fixture
def wandb_that_never_ends(tmp_path, monkeypatch):
    """Put a module in the package's place whose runs do not come to an end before the test does."""
    (tmp_path / "stand-in").mkdir()
    (tmp_path / "stand-in" / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "stand-in")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    yield wandb
    wandb.ending.set()
    sys.modules.pop("wandb")


def test_a_run_of_curves_that_does_not_end_keeps_no_learner(
    tmp_path, monkeypatch, capfd, wandb_that_never_ends
):
    monkeypatch.setattr(sinks_module, "FINISH_SECONDS", 0.01)
    # It would end the process of the test; to end without waiting for anything is what it is there for.
    left = []
    monkeypatch.setattr(app_module, "leave_now", left.append)
    settings = alone(tmp_path, wandb="project")
    assert run_learner(settings, TinyTask) == 0
    assert left == [0]
    folder = tmp_path / "stand-in" / "wandb" / "run-1"
    assert (
        f"learner 0: --wandb project ends here: not all was sent within 0 s (wandb sync {folder} sends the "
        "rest); the result is not touched by that"
    ) in capfd.readouterr().err
    assert len(wandb_that_never_ends.run.points) == 6
    assert (settings.output_dir / "weights.json").exists()


def leveldb_records(content):
    """Yield the records of a log in LevelDB's format, behind the package's own 7 bytes."""
    at, parts = 7, []
    while at + 7 <= len(content):
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        # Whole, or the last part of one.
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []
        left = 32768 - at % 32768
        at += left if left < 7 else 0


@needs_wandb
def test_weights_and_biases_gets_what_the_log_has(tmp_path, monkeypatch, fresh_wandb):
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    settings = alone(tmp_path, wandb="project", eval_every=3)
    assert run_learner(settings, TinyTask) == 0
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    points = []
    for data in leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            points.append(
                {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            )
    records = logged(settings.log_jsonl)
    for kind, names in SCALARS.items():
        for field, curve in names.items():
            found = [(point["local_step"], point[curve]) for point in points if curve in point]
            wanted = [(record["local_step"], record[field]) for record in records if record["kind"] == kind]
            assert found == wanted
