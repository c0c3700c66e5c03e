"""``yeto launch`` and its sisters: what is refused in one line, planned, shown, and watched."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import fleet_stand_in
import pytest
from sky_stand_in import Sky

from yeto.cli import launch_follow
from yeto.cli.launch_follow import AddedLines, follow
from yeto.fleet.controller import prepare
from yeto.fleet.detached import controller_of, end
from yeto.fleet.launch import Launch
from yeto.fleet.processes import RUN_VARIABLE
from yeto.fleet.registry import RUNNING, create_run, find_run

OFFERS = """\
cloud,region,gpu,count,price,spot,quota,score
aws,us-east-2,a100-80gb,8,12.30,true,16,5
gcp,us-central1,l4,1,0.30,false,1,
"""


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("YETO_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def inputs(fixtures):
    return ["--model", fixtures / "tiny-llama", "--data", fixtures / "chat" / "train.jsonl"]


GPU = ["--gpu", "local:1xcpu"]
RENTED = ["--gpu", "aws:8xa100", "--output", "s3://b/r"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--gpu is missing (see yeto launch --help)"),
        (GPU, "--output is missing: the folder or URI that the result goes to"),
        (
            ["--gpu", "local:1xcpu,aws:8xa100", "--output", "s3://b/r"],
            "--gpu: local: islands run beside a head",
        ),
        (
            ["--gpu", "aws:8xa100", "--output", "here"],
            "--output here: a folder of this machine, which a rented",
        ),
        ([*RENTED, "--mirror", "here"], "--mirror here: a folder of this machine, which a rented"),
        ([*RENTED, "--head-infra", "awz"], "--head-infra awz: cloud or cloud/region; known clouds are aws, "),
        (
            [*GPU, "--output", "out", "--head-infra", "aws"],
            "--head-infra aws: with local: islands the head is",
        ),
        ([*RENTED, "--disk-gb", "0"], "--disk-gb"),
        ([*RENTED, "--weights-gb", "-3"], "--weights-gb -3.0"),
        ([*GPU, "--output", "full"], "--output full is there and not empty"),
        (
            [*GPU, "--output", "out", "--name", "No Name"],
            "'No Name' cannot be the name of a run: it has lower-case letters",
        ),
        ([*GPU, "--output", "out", "--quorum", "2"], "--quorum"),
        ([*GPU, "--output", "out", "--seq-len", "-1"], "--seq-len"),
        ([*GPU, "--output", "out", "--total-steps", "0"], "--total-steps 0: need at least 1"),
        (
            [*GPU, "--output", "out", "--epochs", "2", "--token-budget", "9"],
            "--token-budget and --epochs: give",
        ),
        ([*GPU, "--output", "out", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (
            [*RENTED, "--data", "./nowhere.jsonl"],
            "--data ./nowhere.jsonl: no such file or folder",
        ),
        ([*GPU, "--output", "out", "--chat-template", "none.jinja"], "--chat-template none.jinja: no such"),
        ([*RENTED, "--chat-template", "none.jinja"], "--chat-template none.jinja: no such file"),
        ([*GPU, "--output", "out", "--confirm"], "--confirm goes with --budget"),
        ([*GPU, "--output", "out", "--budget", "9"], "--gpu and --budget: give one of them"),
        (["--budget", "9", "--task", "diffusion"], "--budget plans for --task text only"),
        (
            ["--resume", "trial"],
            "--resume trial goes on with the run as it was launched; leave out --model, --data",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_takes_no_name(yeto, inputs, runs, tmp_path, words, said):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("")
    code, out, err = yeto("launch", *words, *(inputs[:2] if "--data" in words else inputs))
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not runs.exists()


@pytest.mark.parametrize("command", ["status", "logs", "down"])
def test_a_run_that_is_not_there_is_one_line(yeto, command):
    code, out, err = yeto(command, "nothing")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "nothing: n" in err


def test_no_runs_at_all(yeto, runs):
    assert yeto("status") == (
        0,
        f"no runs in {runs}, and no events.jsonl here; yeto launch --help says how to begin one\n",
        "",
    )
    assert json.loads(yeto("status", "--json")[1]) == []


def test_a_dry_run_on_this_machine_prints_the_commands_and_starts_nothing(yeto, inputs, runs):
    words = ["--output", "out", "--mirror", "copies", "--dry-run", "--fragments", 2]
    code, out, err = yeto("launch", *GPU, *inputs, *words)
    assert code == 0, err
    head, island = out.splitlines()[1:]
    assert head.startswith("python -m yeto.fleet.head --host=127.0.0.1 --port=0 ")
    # Relative names are those of here, and not of the head's folder.
    assert f"--output={Path.cwd()}/out --mirror={Path.cwd()}/copies -- " in head
    assert head.endswith("-- --learners=1 --total-steps=16")
    assert island.startswith(
        "python -m yeto run --debug --role=learner --syncer=@syncer.address --learner-id=0"
    )
    assert "--device=cpu" in island
    assert not runs.exists()


def test_an_amount_of_training_is_as_many_steps_of_all_ranks_together(yeto, inputs):
    words = ["--gpu", "local:2xcpu,local:1xcpu", "--output", "out", "--dry-run", "--fragments", 4]
    words += ["--micro-batch-size", 2, "--grad-accum", 5, "--seq-len", 100, "--sync-interval-steps", 10]
    code, out, err = yeto("launch", *words, *inputs, "--token-budget", 2 * 5 * 100 * 3 * 10 * 7)
    assert code == 0, err
    assert out.startswith("--token-budget: 210,000 tokens are about 28 global steps\n")
    assert " -- --learners=2 --total-steps=28 " in out


@pytest.mark.parametrize(
    ("words", "alpha", "outer"),
    [
        ([], "--merge-alpha=carry", None),
        (["--merge-alpha", "0.5"], "--merge-alpha=0.5", None),
        (["--outer", "stock"], None, "--outer=stock"),
        (["--matrix-merge", "iso"], None, "--outer=stock"),
    ],
)
def test_learners_and_syncer_get_settings_that_fit_each_other(yeto, inputs, words, alpha, outer):
    code, out, err = yeto("launch", "--gpu", "local:1xcpu", *inputs, "--output", "out", "--dry-run", *words)
    assert code == 0, err
    assert re.findall(r"--merge-alpha=\S+", out) == ([alpha] if alpha else [])
    assert re.findall(r"--outer=\S+", out) == ([outer] if outer else [])


def test_a_diffusion_fleet_exports_with_its_own_program(yeto, tmp_path, fixtures):
    words = [
        "--task",
        "diffusion",
        "--height",
        "64",
        "--width",
        "64",
        "--weights-gb",
        "5",
        "--name",
        "pictures",
    ]
    code, _, err = yeto(
        "launch", *RENTED, "--model", "owner/pipe", "--data", "owner/rows", "--dry-run", *words
    )
    assert code == 0, err
    head = (tmp_path / "pictures-tasks" / "head.yaml").read_text()
    island = (tmp_path / "pictures-tasks" / "island-0.yaml").read_text()
    assert "-m yeto.fleet.head --host=0.0.0.0 --port=29400 --model=owner/pipe" in head
    assert "--task=diffusion --mirror=s3://b/r/mirror --" in head
    assert "--task=diffusion --height=64 --width=64" in island
    assert "diffusers>=" in island


def test_the_head_has_memory_for_the_syncer_and_the_export(yeto, tmp_path):
    def head_of(*words):
        name = f"size-{len(list(tmp_path.iterdir()))}"
        given = ["--model", "owner/model", "--data", "owner/rows", "--weights-gb", 60, "--name", name]
        code, _, err = yeto("launch", *RENTED, *given, "--dry-run", *words)
        assert code == 0, err
        return (tmp_path / f"{name}-tasks" / "head.yaml").read_text()

    # The export holds the model: 60 * 1.25 + 8.
    assert "memory: 83+\n  disk_size: 256\n" in head_of()
    # Full tuning: 30e9 parameters in f32, five copies and a push of each island: 4 * 30 * 6 + 8.
    assert "memory: 728+\n" in head_of("--tuning", "full")
    assert "memory: 16+\n" in head_of("--no-verify")
    assert "memory: 99+\n  disk_size: 1000\n" in head_of("--head-memory-gb", 99, "--disk-gb", 1000)


def test_a_budget_is_planned_shown_and_only_launched_when_confirmed(
    yeto, inputs, runs, tmp_path, monkeypatch
):
    sky = Sky(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{sky.folder}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "offers.csv").write_text(OFFERS)
    words = ["--budget", 30, "--offers", "offers.csv", *inputs, "--output", "s3://b/r", "--name", "planned"]
    code, out, err = yeto("launch", *words)
    assert code == 0, err
    assert "nothing is rented yet; to launch this plan, give the same command with --confirm" in out
    assert not runs.exists()
    assert sky.asked() == []
    code, out, err = yeto("launch", *words, "--confirm")
    assert code == 0, err
    launch = find_run(runs, "planned").launch()
    islands = launch.parsed()
    assert {str(island) for island in islands} == {"aws:8xa100-80gb@us-east-2", "gcp:1xl4@us-central1"}
    assert launch.on_demand == tuple(i for i, island in enumerate(islands) if island.cloud == "gcp")
    # What its memory was planned for.
    assert {"--shard=fsdp", "--micro-batch-size=1"} <= set(launch.learner_words)
    assert sorted(sky.known["jobs"]) == [f"planned-island-{i}" for i in range(len(islands))]
    # And a budget that buys nothing.
    code, _, err = yeto("launch", "--budget", 0.5, *words[2:], "--confirm")
    assert code == 1
    assert "yeto: no plan: " in err


@pytest.fixture
def standing(runs, monkeypatch):
    """A run whose head and island train nothing, under a controller of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(fleet_stand_in.__file__).parent))
    launch = Launch(name="trial", islands="local:1xcpu", model="/m", data="/d", output="/o", quorum=1)
    run = create_run(runs, launch, "ab\n")
    prepare(run)
    words = [sys.executable, "-m", "fleet_stand_in", "controller", str(run.folder)]
    environ = {**os.environ, RUN_VARIABLE: str(run.folder)}
    with (
        run.controller_log.open("ab") as log,
        subprocess.Popen(words, stdout=log, stderr=log, env=environ) as process,
    ):
        while run.state().phase != RUNNING:
            assert process.poll() is None, run.controller_log.read_text()
        yield run
        end(run, print)


def test_ctrl_c_ends_the_watching_and_says_how_to_come_back(standing, capsys, monkeypatch):
    monkeypatch.setattr(launch_follow, "LINE_SECONDS", 0.0)
    said = threading.Event()
    real_print = print

    def heard(*words, **more):
        real_print(*words, **more)
        said.set()

    monkeypatch.setattr(launch_follow, "print", heard, raising=False)

    def interrupt():
        said.wait(200)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert follow(standing) == 0
    thread.join()
    out = capsys.readouterr().out
    assert out.startswith("the head and 1 islands are up\n")
    assert "detached; the run goes on.   yeto status trial   yeto logs trial   yeto down trial" in out
    assert standing.state().phase == RUNNING
    assert controller_of(standing) is not None


def test_watching_ends_with_the_run_and_has_its_exit_code(standing, capsys):
    thread = threading.Thread(target=end, args=(standing, lambda _: None))
    thread.start()
    assert follow(standing) == 4
    thread.join()
    out = capsys.readouterr().out
    assert "stopping: the head writes a checkpoint first\n" in out
    assert out.endswith("stopped: stopped before the final cut; yeto launch --resume trial goes on\n")
    assert out.count("stopped: ") == 1


def test_watching_ends_when_the_controller_is_killed(standing, capsys):
    os.kill(standing.state().controller.pid, signal.SIGKILL)
    assert follow(standing) == 1
    assert capsys.readouterr().out == (
        "failed: its controller is gone; yeto launch --resume trial goes on with it\n"
        "yeto logs trial shows what was said, yeto launch --resume trial goes on from the checkpoint, "
        "yeto down trial --forget removes the run\n"
    )


def test_a_run_is_shown_in_status_and_followed_in_logs(standing, yeto):
    code, out, _ = yeto("status", "trial", "--once")
    assert (code, out) == (0, "trial: running: the head and 1 islands are up\n")
    (row,) = json.loads(yeto("status", "--json")[1])
    assert (row["name"], row["phase"], row["islands"]) == ("trial", "running", "local:1xcpu")
    # One that cannot be read hides no other.
    broken = standing.folder.with_name("broken")
    broken.mkdir()
    (broken / "launch.json").write_text("{")
    rows = {row["name"]: row["phase"] for row in json.loads(yeto("status", "--json")[1])}
    assert rows == {"trial": "running", "broken": "unreadable"}
    assert yeto("logs", "trial", "--no-follow")[1] == "head is up\n"
    thread = threading.Thread(target=end, args=(standing, lambda _: None))
    thread.start()
    # Follows until the run is over.
    assert yeto("logs", "trial", "controller")[1].splitlines()[-1].startswith("stopped: ")
    thread.join()
    assert yeto("down", "trial", "--forget")[0] == 0
    assert not standing.folder.exists()
    create_run(
        standing.folder.parent,
        Launch(name="trial", islands="local:1xcpu", model="/m", data="/d", output="/o", quorum=1),
        "ab\n",
    )
    assert yeto("status", "trial", "--once")[:2] == (0, "trial: launching: the launch has begun\n")


def test_lines_of_a_log_come_whole_and_once(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_follow, "READ_BYTES_MAX", 8)
    path = tmp_path / "log"
    lines = AddedLines(path)
    assert lines.new() == []
    path.write_bytes(b"one\ntw")
    assert (lines.new(), lines.behind) == (["one"], False)
    path.write_bytes(b"one\ntwo\nthree is long\n\xff\n")
    seen = lines.new()
    while lines.behind:
        seen += lines.new()
    assert "".join(seen) == "twothree is long\ufffd"
    assert lines.new() == []
