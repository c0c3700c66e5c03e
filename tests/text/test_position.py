"""Positions in the rows: as JSON, with each batch, and back."""

import json
from itertools import islice

import pytest
from attrs import evolve
from text_helpers import chat

from yeto.errors import ConfigError
from yeto.text.task import build_task


def taken(task, count, start=None):
    """Return the ids and the positions of the first batches."""
    batches = task.batches(start)
    found = [(batch.inputs.ids.tolist(), batch.position) for batch in islice(batches, count)]
    batches.close()
    return [ids for ids, _ in found], [position for _, position in found]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tokenize": "preload"},
        {"packing": "plain", "train_on": "all", "micro_batch_size": 3},
        {"stream_workers": 2, "learner_id": 1, "num_learners": 2},
    ],
    ids=["stream", "preload", "carry", "workers"],
)
@pytest.mark.timeout(600)
def test_batches_go_on_behind_any_batch(config, write_rows, change):
    rows = [chat(f"question {number}", "answer " * (1 + number % 13)) for number in range(40)]
    config = evolve(config, data=write_rows(rows), **change)
    task = build_task(config)
    expected, positions = taken(task, 40)
    assert positions[-1]["streams"][0]["epoch"] > 0, "also behind the first epoch"
    for behind in (0, 7, 30):
        start = json.loads(json.dumps(positions[behind]))
        again, _ = taken(build_task(config), 5, start)
        assert again == expected[behind + 1 : behind + 6]


def test_a_probed_micro_batch_is_not_probed_again(config):
    _, positions = taken(build_task(evolve(config, micro_batch_size=3)), 2)
    again, _ = taken(build_task(evolve(config, micro_batch_size=None)), 1, positions[0])
    assert len(again[0]) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "--seed 1: the saved position in the rows was reached with 0"),
        (
            {"seq_len": 32},
            "--seq-len 32: .* with 64; give the same as before, or remove the folder of --state-dir",
        ),
        ({"learner_id": 1, "num_learners": 2}, "--learner-id 1: "),
        ({"stream_workers": 1}, "--stream-workers 1: "),
    ],
)
def test_another_setting_is_refused_by_its_flag(config, change, message):
    _, positions = taken(build_task(config), 1)
    with pytest.raises(ConfigError, match=message):
        build_task(evolve(config, **change)).batches(positions[0])


def test_other_rows_are_refused_but_the_same_ones_may_lie_elsewhere(config, write_rows):
    rows = [chat("a", "b"), chat("c", "d")]
    _, positions = taken(build_task(evolve(config, data=write_rows(rows))), 1)
    build_task(evolve(config, data=write_rows(rows, "moved.jsonl"))).batches(positions[0])
    other = build_task(evolve(config, data=write_rows(rows[::-1], "other.jsonl")))
    with pytest.raises(ConfigError, match="--data: its first row is not the first row"):
        other.batches(positions[0])
