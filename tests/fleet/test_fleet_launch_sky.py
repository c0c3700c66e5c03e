"""Rented fleets: what is asked of SkyPilot, in which order: a launch, a resume, a failure, the end."""

import json
import os
import sys

import pytest
from sky_stand_in import Sky

from yeto.fleet import skypilot
from yeto.fleet.registry import FAILED, RUNNING, STOPPED, find_run

FLEET = "aws:8xa100@us-east-2,runpod:8xh100"


@pytest.fixture
def sky(tmp_path, monkeypatch):
    sky = Sky(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{sky.folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("YETO_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.chdir(tmp_path)
    return sky


@pytest.fixture
def launch(fixtures, yeto):
    def run(*more, gpu=FLEET, name="trial"):
        inputs = ["--model", fixtures / "tiny-llama", "--data", fixtures / "chat" / "train.jsonl"]
        return yeto(
            "launch",
            "--gpu",
            gpu,
            "--name",
            name,
            *inputs,
            "--output",
            "s3://bucket/run",
            "--quorum",
            1,
            *more,
        )

    return run


@pytest.fixture
def registry(tmp_path):
    return lambda name="trial": find_run(tmp_path / "runs", name)


def words_of(sky):
    return [" ".join(entry["words"]) for entry in sky.asked()]


def test_a_launch_rents_the_head_and_then_each_island_alone(sky, launch, registry, yeto):
    code, out, err = launch()
    assert code == 0, err
    asked = sky.asked()
    tasks = registry().tasks
    assert [" ".join(entry["words"]) for entry in asked] == [
        f"launch --cluster trial-head --yes --detach-run --secret HF_TOKEN {tasks}/head.yaml",
        "status trial-head --endpoint 29400",
        *(
            f"jobs launch --name trial-island-{i} --yes --detach-run --env SYNCER_ADDRESS=192.0.2.1:29400 "
            f"--secret HF_TOKEN {tasks}/island-{i}.yaml"
            for i in (0, 1)
        ),
    ]
    # The secrets went the ways that nobody sees: the environment, and a file.
    key = registry().key.read_text().strip()
    assert {entry["token"] for entry in asked} == {"hf_secret"}
    for path in (*tasks.iterdir(), registry().folder / "launch.json", registry().folder / "state.json"):
        assert key not in path.read_text()
        assert "hf_secret" not in path.read_text()
    state = registry().state()
    assert state.phase == RUNNING
    assert [(entry.name, entry.address) for entry in state.rented] == [
        (name, "192.0.2.1:29400") for name in ("head", "island-0", "island-1")
    ]
    assert "yeto status trial   yeto logs trial   yeto down trial" in out
    code, out, _ = yeto("status", "trial")
    assert code == 0
    assert "head: cluster trial-head: UP, 192.0.2.1:29400" in out
    assert "island-1: job trial-island-1: STARTING" in out
    assert "the head does not answer" in out
    code, out, _ = yeto("status", "trial", "--json")
    assert json.loads(out)["jobs"] == {"trial-island-0": "STARTING", "trial-island-1": "STARTING"}
    sky.asked()
    assert "said by trial-head" in yeto("logs", "trial", "--no-follow")[1]
    assert "said by trial-island-1" in yeto("logs", "trial", "island-1")[1]
    assert words_of(sky) == ["logs trial-head --no-follow", "jobs logs --name trial-island-1 --follow"]
    code, _, err = yeto("logs", "trial", "island-2")
    assert (code, err) == (2, "yeto: island-2: trial has no such part; it has head, island-0, island-1\n")


def test_a_launch_that_fails_half_way_says_what_to_do_and_a_resume_does_the_rest(sky, launch, registry, yeto):
    sky.change(failing=["jobs launch --name trial-island-1"])
    code, _, err = launch()
    assert code == 1
    assert "yeto launch --resume trial goes on, yeto down trial gives back what was rented" in err
    assert err.splitlines()[-1].startswith("yeto: sky jobs launch --name trial-island-1")
    assert registry().state().phase == FAILED
    assert "the launch was not finished" in registry().state().why
    # What was asked for is known, whether it came to be or not.
    assert [entry.name for entry in registry().state().rented] == ["head", "island-0", "island-1"]
    sky.change(failing=[])
    sky.asked()
    code, out, err = yeto("launch", "--resume", "trial")
    assert code == 0, err
    assert [words for words in words_of(sky) if "launch" in words.split()[:2]] == [
        f"jobs launch --name trial-island-1 --yes --detach-run --env SYNCER_ADDRESS=192.0.2.1:29400 "
        f"--secret HF_TOKEN {registry().tasks}/island-1.yaml"
    ]
    assert "the head is there and works" in out
    assert "island-0 is there (STARTING)" in out
    assert registry().state().phase == RUNNING


def test_a_job_on_its_way_out_is_no_island(sky, launch, registry, yeto):
    assert launch()[0] == 0
    both = ["RUNNING", "CANCELLING"]
    sky.change(jobs={"trial-island-0": "CANCELLING", "trial-island-1": both})
    sky.asked()
    code, out, err = yeto("launch", "--resume", "trial")
    assert code == 0, err
    assert [words.partition(" --yes")[0] for words in words_of(sky) if words.startswith("jobs")] == [
        *("jobs queue --all --output json", "jobs launch --name trial-island-0")
    ]
    assert "island-1 is there (RUNNING)" in out
    for statuses in (both, both[::-1]):
        sky.change(jobs={"trial-island-1": statuses}, stubborn=["trial-island-1"])
        code, _, err = yeto("down", "trial")
        assert (code, "left over: job trial-island-1 (RUNNING)" in err) == (1, True)


def test_a_question_has_an_end(sky, launch, yeto, monkeypatch):
    assert launch()[0] == 0
    monkeypatch.setattr(skypilot, "ASK_SECONDS", 0.2)
    (sky.folder / "sky").write_text("#!/bin/sh\nexec sleep 30\n")
    code, _, err = yeto("launch", "--resume", "trial")
    assert code == 1
    assert err.splitlines()[-1] == "yeto: sky logs trial-head --status did not answer for 0 s"


def test_a_head_that_is_lost_comes_back_elsewhere_and_every_island_is_told(sky, launch, registry, yeto):
    assert launch()[0] == 0
    sky.change(clusters={}, address="http://[2001:db8::1]:31999", head=102)
    sky.asked()
    code, _, err = yeto("launch", "--resume", "trial")
    assert code == 0, err
    asked = [words.partition(" --yes")[0] for words in words_of(sky)]
    assert asked == [
        *("logs trial-head --status", "launch --cluster trial-head", "status trial-head --endpoint 29400"),
        "jobs queue --all --output json",
        *("jobs cancel --name trial-island-0", "jobs launch --name trial-island-0"),
        *("jobs cancel --name trial-island-1", "jobs launch --name trial-island-1"),
    ]
    assert {entry.address for entry in registry().state().rented} == {"[2001:db8::1]:31999"}


def test_down_gives_everything_back_and_names_what_is_left(sky, launch, registry, yeto, tmp_path):
    assert launch()[0] == 0
    sky.change(stubborn=["trial-island-0", "trial-head"])
    sky.asked()
    code, out, err = yeto("down", "trial")
    assert words_of(sky)[:3] == [
        *("jobs cancel --name trial-island-0 --yes", "jobs cancel --name trial-island-1 --yes"),
        "down --yes trial-head",
    ]
    assert code == 1
    assert err == (
        "yeto: trial: left over: job trial-island-0 (STARTING); cluster trial-head (UP); "
        "run yeto down trial again\n"
    )
    assert registry().state().phase == RUNNING
    # Somebody else's are none of ours.
    sky.change(stubborn=[], jobs={"trial-island-0": "RUNNING", "trial-2-island-0": "RUNNING"})
    code, out, err = yeto("down", "trial", "--forget")
    assert code == 0, err
    assert "trial: nothing of it runs any more" in out
    assert sky.known["jobs"] == {"trial-2-island-0": "RUNNING"}
    assert not (tmp_path / "runs" / "trial").exists()


def test_down_tries_everything_also_when_something_fails(sky, launch, registry, yeto):
    assert launch()[0] == 0
    sky.change(failing=["jobs cancel --name trial-island-0"])
    code, out, _ = yeto("down", "trial")
    assert code == 1
    assert "sky jobs cancel --name trial-island-0 --yes failed" in out
    assert sky.known["clusters"] == {}
    assert list(sky.known["jobs"]) == ["trial-island-0"]
    sky.change(failing=[])
    assert yeto("down", "trial")[0] == 0
    assert (registry().state().phase, registry().state().rented) == (STOPPED, ())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("", "said no address but ''"),
        ("warning\nnowhere", "said no address but 'nowhere'"),
        ("h:123456", "'h:123456'"),
    ],
)
def test_what_is_no_address_is_given_to_no_island(sky, launch, answer, said):
    sky.change(address=answer)
    code, _, err = launch()
    assert code == 1
    assert said in err
    assert sky.known["jobs"] == {}


def test_a_dry_run_writes_what_a_launch_would_and_asks_nothing(sky, launch, registry, tmp_path, yeto):
    code, out, err = launch("--dry-run")
    assert code == 0, err
    assert sky.asked() == []
    assert not (tmp_path / "runs").exists()
    commands = [line.partition("   #")[0] for line in out.splitlines() if line.startswith("sky ")]
    assert launch()[0] == 0
    there = str(registry().tasks)
    assert [
        "sky " + words.replace("192.0.2.1:29400", "HOST:PORT").replace(there, "trial-tasks")
        for words in words_of(sky)
    ] == commands
    for path in registry().tasks.iterdir():
        assert (tmp_path / "trial-tasks" / path.name).read_text() == path.read_text()
    # What is there is not written over.
    code, _, err = launch("--dry-run")
    assert (code, err) == (2, "yeto: --dry-run: cannot make the folder trial-tasks: File exists\n")


def test_without_skypilot_the_remedy_is_one_line_and_no_name_is_taken(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("YETO_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    code, _, err = launch()
    assert code == 2
    assert (
        err
        == "yeto: --gpu: rented islands need SkyPilot, which is not installed: pip install 'yeto[fleet]'\n"
    )
    assert not (tmp_path / "runs").exists()
