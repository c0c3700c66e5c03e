"""The commands of head and islands: as text, and the same on this machine and on rented ones."""

import os
import shlex
import socket
import subprocess
import sys

import pytest
from attrs import evolve

from yeto.fleet.commands import HERE, RANKS_PORT, Place, head_command, island_command
from yeto.fleet.launch import Launch

LAUNCH = Launch(
    name="trial",
    islands="local:1xcpu,local:2xcpu",
    model="/models/tiny",
    data="/data/rows.jsonl",
    output="/out",
    quorum=2,
    syncer_words=("--total-steps=14", "--grace-ms=500"),
    learner_words=("--fragments=2",),
    export_words=("--no-verify",),
)
THERE = Place(host="0.0.0.0", port=29400, input=lambda name: f"inputs{name}")


def test_the_commands_on_this_machine():
    assert shlex.join(head_command(LAUNCH, HERE)) == (
        "yeto.fleet.head --host=127.0.0.1 --port=0 --model=/models/tiny --output=/out "
        "--export-word=--no-verify -- --learners=2 --total-steps=14 --grace-ms=500"
    )
    learner = (
        "yeto run --debug --role=learner --syncer=@syncer.address --learner-id={} --num-learners=2 "
        "--auth-key-file=auth.key --output-dir=out --state-dir=state --log-jsonl=learner.jsonl "
        "--model=/models/tiny --data=/data/rows.jsonl --device=cpu --torch-threads=1 --fragments=2"
    )
    launch = evolve(LAUNCH, torch_threads=1)
    assert shlex.join(island_command(launch, 0, HERE)) == learner.format(0)
    # One learner of two processes.
    assert shlex.join(island_command(launch, 1, HERE)) == (
        "torch.distributed.run --standalone --nproc-per-node=2 -m " + learner.format(1)
    )


def test_an_island_of_several_machines_runs_the_same_words_on_each():
    launch = evolve(LAUNCH, islands="aws:4x8xa100@us-east-2")
    words = island_command(launch, 0, THERE)
    assert words[:5] == [
        *("torch.distributed.run", "--nnodes=4", "--master-port=29500", "--nproc-per-node=8", "-m")
    ]
    assert not any("rank" in word or "$" in word for word in words)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"mirror": "s3://bucket/mirror"},
        {"eval_data": "/data/held.jsonl", "chat_template": "/data/chat.jinja"},
    ],
)
def test_only_the_place_differs_between_this_machine_and_rented_ones(more):
    here = evolve(LAUNCH, islands="local:1xcpu", **more)
    there = evolve(LAUNCH, islands="aws:1xa100", **more)

    def common(words):
        return [
            word.replace("inputs/", "/")
            for word in words
            if not word.startswith(("--host", "--port", "--device"))
        ]

    assert common(head_command(here, HERE)) == common(head_command(there, THERE))
    assert common(island_command(here, 0, HERE)) == common(island_command(there, 0, THERE))


def test_the_machines_of_an_island_find_each_other_by_the_words_and_two_variables(tmp_path):
    words = island_command(evolve(LAUNCH, islands="aws:2x2xa100"), 0, THERE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # torchrun itself, with a program that says which one it is in the place of the learner.
    words = [word.replace(str(RANKS_PORT), str(port)) for word in words[: words.index("-m") + 1]] + ["shown"]
    (tmp_path / "shown.py").write_text(
        "from os import environ\n"
        "said = (environ[key] for key in ('LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR'))\n"
        "with open(environ['RANK'], 'w') as file:\n    file.write(' '.join(said))\n"
    )
    machines = [
        subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=tmp_path,
            env={
                **os.environ,
                "PET_NODE_RANK": str(rank),
                "PET_MASTER_ADDR": "127.0.0.1",
                "OMP_NUM_THREADS": "1",
            },
            stderr=subprocess.DEVNULL,
        )
        for rank in (0, 1)
    ]
    assert [machine.wait(200) for machine in machines] == [0, 0]
    said = {path.name: path.read_text() for path in tmp_path.iterdir() if path.name.isdigit()}
    assert said == {str(rank): f"{rank % 2} 4 127.0.0.1" for rank in range(4)}
