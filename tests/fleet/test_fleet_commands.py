"""The commands of head and islands: as text, and the same on this machine and on rented ones."""

import shlex

import pytest
from attrs import evolve

from yeto.fleet.commands import HERE, Place, head_command, island_command
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
