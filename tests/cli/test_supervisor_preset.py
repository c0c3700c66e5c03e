"""``--preset``: what it stands for, and that everything else goes before it."""

import subprocess
import sys
from typing import Annotated

import pytest
from cyclopts import Parameter

from yeto.cli import run_supervisor, run_syncer
from yeto.cli.main import main
from yeto.cli.preset import MILES_SIX_ISLANDS, PRESETS, PresetFlag
from yeto.cli.run_supervisor import SupervisorFlags, SyncerPart
from yeto.cli.run_syncer import SyncerFlags
from yeto.core.outer import with_numbers

PRESET = f"--preset={MILES_SIX_ISLANDS}"


@pytest.fixture
def syncer(monkeypatch, capsys):
    """Run ``yeto run --role syncer`` up to its start; return the flags, or the complaint."""

    def run(*words, role="syncer"):
        seen = []

        def command(flags: Annotated[SyncerFlags, Parameter(name="*")], *, preset: PresetFlag = None):
            seen.append(flags)

        monkeypatch.setattr(run_syncer, "run_syncer_command", command)
        with pytest.raises(SystemExit) as end:
            main(["run", f"--role={role}", *words])
        return seen[0] if end.value.code == 0 else capsys.readouterr().err

    return run


def test_the_miles_six_islands(syncer):
    flags = syncer(PRESET, "--total-steps=100")
    config = flags.config()
    core = with_numbers(config.core)
    assert (core.num_learners, core.quorum, core.wait_for, core.pipeline) == (6, 6, 6, 16)
    assert (core.quorum_timeout_seconds, core.sync_interval_steps) == (7200.0, 24.0)
    assert (core.delta_correction, core.outer, core.outer_lr, core.outer_momentum) == (
        *("heloco", "stock"),
        *(0.7, 0.9),
    )
    assert (core.grace_cap_seconds, core.grace_gamma, core.grace_tau) == (1.0, 0.8, 2.0)
    assert core.mark_final_checkpoint
    assert core.svd_pool
    assert config.iso_backend == "torch-svd"
    assert config.svd.devices == tuple(f"cuda:{number}" for number in range(8))
    assert (config.svd.python, config.svd.queue_capacity) == ("python3", 16)
    # What it does not name is as it was.
    named = {flag[2:].replace("-", "_") for flag in PRESETS[MILES_SIX_ISLANDS]}
    plain = syncer("--learners=6", "--total-steps=100")
    for name in SyncerFlags.__annotations__.keys() - named:
        assert getattr(flags, name) == getattr(plain, name)


def test_every_value_gives_way_to_the_file_to_the_environment_and_to_the_flag(syncer, monkeypatch, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[syncer]\npreset = 'miles-six-islands'\ntotal-steps = 9\npipeline = 3\nquorum = 5\n")
    assert syncer(f"--config={file}").pipeline == 3
    assert syncer(f"--config={file}").learners == 6, "the preset may be named in the file"
    monkeypatch.setenv("YETO_PIPELINE", "4")
    assert syncer(f"--config={file}").pipeline == 4
    assert syncer(f"--config={file}", "--pipeline=5").pipeline == 5
    # A flag at its own default is said all the same.
    assert syncer(f"--config={file}", "--pipeline=2").pipeline == 2
    assert syncer(f"--config={file}").quorum == 5
    monkeypatch.setenv("YETO_PRESET", MILES_SIX_ISLANDS)
    assert syncer("--total-steps=9").quorum == 6
    assert syncer("--total-steps=9", "--learners=7").learners == 7


def test_the_python_of_the_workers(syncer, monkeypatch):
    words = (PRESET, "--total-steps=9")
    assert syncer(*words).iso_worker_python == "python3"
    monkeypatch.setenv("ISO_WORKER_PYTHON", "/opt/python")
    assert syncer(*words).iso_worker_python == "/opt/python"
    assert syncer(*words, "--iso-worker-python=/usr/bin/python3").iso_worker_python == "/usr/bin/python3"


def test_without_workers_there_are_no_devices(syncer):
    config = syncer(PRESET, "--total-steps=9", "--iso-backend=scalar").config()
    assert (config.iso_backend, config.svd, config.core.svd_pool) == ("scalar", None, False)
    assert syncer(PRESET, "--total-steps=9", "--iso-backend=torch-svd").config().svd is not None


def test_what_there_is_not(syncer):
    said = syncer("--preset=miles-seven-islands", "--total-steps=9")
    assert "--preset miles-seven-islands: there is none of that name; known: miles-six-islands" in said
    assert "--learners is missing" in syncer("--total-steps=9")
    learner = ("--model=x", "--data=y", "--syncer=none")
    assert "--preset: there is no such flag" in syncer(PRESET, *learner, role="learner")
    assert "--learner-budget-steps is missing" in syncer(PRESET, role="supervisor")
    assert "--learner-budget-steps 0: need at least 1" in syncer(
        PRESET, "--learner-budget-steps=0", role="supervisor"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--checkpoint-path=.",), "--checkpoint-path .: has no name of its own; write it out"),
        (("--checkpoint-path=file/x",), "--checkpoint-path file/x: cannot be written: "),
        (("--ready-file=folder",), "--ready-file folder: cannot be replaced: Is a directory"),
        (("--syncer-log=folder",), "--syncer-log folder: cannot be written: Is a directory"),
    ],
)
def test_places_of_a_supervisor_that_cannot_be(monkeypatch, tmp_path, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit) as end:
        main(["run", "--role=supervisor", PRESET, "--learner-budget-steps=9", *words])
    error = capsys.readouterr().err
    assert (end.value.code, error.count("\n")) == (2, 1)
    assert message in error


def test_a_supervisor_has_the_values_of_its_syncer(monkeypatch, tmp_path):
    """All but the mark, which is its own to make; and what it hands on is what it was told."""
    seen = []

    class Supervised:
        def __init__(self, **settings):
            seen.append(settings)

        def run(self):
            return 0

    monkeypatch.setattr("yeto.fleet.supervisor.Supervised", Supervised)
    monkeypatch.setenv("ISO_WORKER_PYTHON", sys.executable)
    monkeypatch.setenv("YETO_ISLAND_HMAC_KEY", "k" * 40)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["run", "--role=supervisor", PRESET, "--learner-budget-steps=1000", "--pipeline=2"])
    assert end.value.code == 0
    (settings,) = seen
    assert (settings["num_learners"], settings["budget"]) == (6, 1000)
    assert settings["kept_variables"] == ["YETO_ISLAND_HMAC_KEY"]
    words = settings["syncer_words"]
    devices = ",".join(f"cuda:{number}" for number in range(8))
    assert set(words) == {
        *("--total-steps=24600576", f"--iso-worker-python={sys.executable}", "--quorum=6"),
        *("--quorum-timeout-s=7200.0", "--iso-backend=torch-svd", f"--iso-worker-devices={devices}"),
        "--outer=stock",
    }
    offered = {f"--{name.replace('_', '-')}" for cls in (SupervisorFlags, SyncerPart) for name in fields(cls)}
    assert PRESETS[MILES_SIX_ISLANDS].keys() - offered == {"--mark-final-checkpoint"}
    assert {"budget_finish", "resume", "mark_final_checkpoint"} <= run_supervisor.LEFT_OUT


def test_supervisor_and_mirror_need_no_tensor_library():
    """They run beside the syncer for as long as it does, and start when it is started."""
    script = (
        "import sys, yeto.cli.run_supervisor, yeto.fleet.supervisor, yeto.fleet.mirror; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "numba", "transformers", "peft", "datasets"} & set(done.stdout.split())


def fields(cls):
    return [field.name for field in cls.__attrs_attrs__]
