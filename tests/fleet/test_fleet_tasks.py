"""The tasks that SkyPilot gets. That its own parser takes them is shown by tools/check-sky."""

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
import yaml
from attrs import evolve

from yeto.fleet.launch import Launch
from yeto.fleet.registry import Run, create_run
from yeto.fleet.tasks import Software, installed_software, make_tasks, wanted_extras

KEY = "5e" * 32
SOFTWARE = Software(folder="/site/yeto", requirements=("attrs>=24.2", "torch>=2.6"))


def launch_of(islands, **more):
    settings = {
        "name": "trial",
        "islands": islands,
        "model": "owner/model",
        "data": "/data/rows.jsonl",
        "output": "s3://bucket/run",
        "mirror": "s3://bucket/run/mirror",
        "quorum": 1,
        "syncer_words": ("--total-steps=64",),
    } | more
    return Launch(**settings)


@pytest.fixture
def tasks(tmp_path):
    def make(launch, environ=None):
        run = Run(folder=tmp_path / "runs" / launch.name)
        if not run.folder.exists():
            create_run(run.folder.parent, launch, KEY + "\n")
        return make_tasks(launch, run, SOFTWARE, environ or {})

    return make


ISLAND = """\
name: trial-island-0
num_nodes: 4
resources:
  infra: aws/us-east-2
  accelerators: A100-80GB:8
  use_spot: true
  disk_size: 300
  job_recovery:
    max_restarts_on_errors: 5
envs:
  SYNCER_ADDRESS: null
file_mounts:
  ~/.yeto-secret/auth.key: RUN/auth.key
  ~/yeto-code/yeto: /site/yeto
  ~/yeto-run/inputs/0/rows.jsonl: /data/rows.jsonl
setup: |
  set -euo pipefail
  command -v uv || python3 -m pip install --quiet uv
  [ -x ~/yeto-env/bin/python ] || uv venv --python 3.12 ~/yeto-env
  uv pip install --quiet --python ~/yeto-env/bin/python 'attrs>=24.2' 'torch>=2.6'
run: |
  set -euo pipefail
  mkdir -p ~/yeto-run && cd ~/yeto-run
  chmod 600 ~/.yeto-secret/auth.key && install -m 600 ~/.yeto-secret/auth.key auth.key
  export PYTHONPATH=$HOME/yeto-code
  echo "$SYNCER_ADDRESS" > syncer.address
  export PET_NODE_RANK="$SKYPILOT_NODE_RANK"
  export PET_MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"
  exec ~/yeto-env/bin/python -m torch.distributed.run --nnodes=4 --master-port=29500 --nproc-per-node=8 \
-m yeto run --debug --role=learner --syncer=@syncer.address --learner-id=0 --num-learners=1 \
--auth-key-file=auth.key --output-dir=out --state-dir=state --log-jsonl=learner.jsonl \
--model=owner/model --data=inputs/0/rows.jsonl
"""


def test_the_task_of_an_island(tasks, tmp_path):
    _, island = tasks(launch_of("aws:4x8xa100-80gb@us-east-2", disk_gb=300))
    assert island.text.replace(str(tmp_path / "runs" / "trial"), "RUN") == ISLAND


@pytest.mark.parametrize(
    "launch",
    [
        launch_of("aws:8xa100@us-east-2,runpod:8xh100@CA"),
        launch_of("gcp:2x8xh100,azure:1xa100,lambda:1xa10g", head_infra="gcp/us-central1", head_memory_gb=64),
        launch_of(
            "kubernetes:8xh200", model="/models/m", eval_data="/data/held/rows.jsonl", data="s3://b/rows"
        ),
    ],
    ids=lambda launch: launch.islands,
)
def test_what_holds_for_every_fleet(tasks, launch):
    made = tasks(launch, {"HF_TOKEN": "hf_secret", "AWS_SECRET_ACCESS_KEY": "aws_secret"})
    islands = launch.parsed()
    assert [task.name for task in made] == ["head", *(f"island-{i}" for i in range(len(islands)))]
    values = [yaml.safe_load(task.text) for task in made]
    # A job each, so that none takes another one down with it.
    assert len({value["name"] for value in values}) == len(made)
    for task, value in zip(made, values, strict=True):
        assert task.secrets == ("HF_TOKEN",)
        assert value["secrets"] == {"HF_TOKEN": None}
        for secret in (KEY, "hf_secret", "aws_secret"):
            assert secret not in task.text
        assert Path(value["file_mounts"]["~/.yeto-secret/auth.key"]).read_text() == KEY + "\n"
        for script in (value["setup"], value["run"]):
            assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    head, *rest = values
    # The one open port is behind the key.
    assert head["resources"]["ports"] == 29400
    assert head["resources"]["autostop"]["down"] is True
    assert "use_spot" not in head["resources"]
    assert all("ports" not in value["resources"] and value["resources"]["use_spot"] for value in rest)
    for island, value in zip(islands, rest, strict=True):
        assert value["num_nodes"] == island.nodes
        assert value["resources"]["accelerators"] == f"{island.gpu.name}:{island.count}"
        assert value["resources"]["infra"].split("/")[0] == island.cloud
        assert value["envs"] == {"SYNCER_ADDRESS": None}


def test_stores_get_the_package_that_reaches_them(tasks):
    head, island = (
        yaml.safe_load(task.text)["setup"] for task in tasks(launch_of("aws:1xa100", data="gs://b/rows"))
    )
    assert "fsspec[s3]" in head
    assert "fsspec[gcs]" not in head
    assert "fsspec[gcs]" in island


def test_inputs_of_one_name_lie_apart(tasks):
    launch = launch_of("aws:1xa100", data="/a/rows.jsonl", eval_data="/b/rows.jsonl")
    island = yaml.safe_load(tasks(launch)[1].text)
    assert island["file_mounts"]["~/yeto-run/inputs/0/rows.jsonl"] == "/a/rows.jsonl"
    assert island["file_mounts"]["~/yeto-run/inputs/1/rows.jsonl"] == "/b/rows.jsonl"
    assert "--data=inputs/0/rows.jsonl --eval-data=inputs/1/rows.jsonl" in island["run"]


PYTHON = """#!/usr/bin/env bash
/usr/bin/env python3 -c '
import json, os, sys
print(json.dumps({"words": sys.argv[1:], "folder": os.getcwd(), "path": os.environ["PYTHONPATH"],
                  "rank": os.environ.get("PET_NODE_RANK"), "first": os.environ.get("PET_MASTER_ADDR")}))
' "$@"
"""


@pytest.mark.parametrize("part", [0, 1])
def test_the_script_of_a_machine_does_what_it_says(tasks, tmp_path, part):
    launch = launch_of("aws:2x8xa100", syncer_words=("--total-steps=64", "--log-level=it's $HOME"))
    task = tasks(launch)[part]
    home = tmp_path / "home"
    (home / "yeto-env" / "bin").mkdir(parents=True)
    (home / ".yeto-secret").mkdir()
    key = home / ".yeto-secret" / "auth.key"
    key.write_text(KEY + "\n")
    # As a bucket gives it back.
    key.chmod(0o644)
    python = home / "yeto-env" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environ = {"HOME": str(home), "PATH": os.environ["PATH"], "SYNCER_ADDRESS": "192.0.2.1:29400"}
    environ |= {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    script = yaml.safe_load(task.text)["run"]
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert said["folder"] == str(home / "yeto-run")
    assert said["path"] == str(home / "yeto-code")
    own = home / "yeto-run" / "auth.key"
    assert stat.S_IMODE(own.stat().st_mode) == stat.S_IMODE(key.stat().st_mode) == 0o600
    assert own.read_text() == KEY + "\n"
    if part == 0:
        # Words arrive as they are, whatever a shell would make of them.
        assert said["words"][-1] == "--log-level=it's $HOME"
        assert said["words"][:2] == ["-m", "yeto.fleet.head"]
    else:
        assert (home / "yeto-run" / "syncer.address").read_text() == "192.0.2.1:29400\n"
        assert (said["rank"], said["first"]) == ("1", "10.0.0.1")
        assert said["words"][:2] == ["-m", "torch.distributed.run"]


def test_the_installed_software_is_this_one():
    software = installed_software()
    assert (Path(software.folder) / "fleet" / "tasks.py").exists()
    names = {re.match("[a-z0-9_-]+", line, re.IGNORECASE)[0].lower() for line in software.requirements}
    assert {"torch", "transformers", "trio"} <= names
    assert not {"diffusers", "wandb", "tensorboard", "pytest", "scipy"} & names
    assert not any(";" in line for line in software.requirements)


@pytest.mark.parametrize(
    ("more", "package"),
    [
        ({"task": "diffusion"}, "diffusers"),
        ({"learner_words": ("--wandb=project",)}, "wandb"),
        ({"learner_words": ("--tensorboard=curves",)}, "tensorboard"),
    ],
)
def test_what_a_flag_asks_for_is_installed_there(tasks, more, package):
    launch = launch_of("aws:1xa100", **more)
    plain, wanted = installed_software(), installed_software(wanted_extras(launch))
    assert {line for line in set(wanted.requirements) - set(plain.requirements) if line.startswith(package)}
    secrets = tasks(launch, {"WANDB_API_KEY": "wandb_secret"})[1].secrets
    assert secrets == (("WANDB_API_KEY",) if package == "wandb" else ())


def test_a_longest_name_fits_every_cloud(tasks):
    launch = evolve(launch_of(",".join(["aws:1xa100"] * 256)), name="a" * 30)
    names = [yaml.safe_load(task.text)["name"] for task in tasks(launch)[-2:]]
    assert names == ["a" * 30 + "-island-254", "a" * 30 + "-island-255"]
    assert max(map(len, names)) <= 41
