"""Batches of one shape out of rows of many: once an epoch each, in any split, going on behind any batch."""

import json
import logging
import threading
from collections import Counter
from itertools import islice
from tempfile import TemporaryDirectory

import pytest
import torch
from attrs import evolve
from diffusion_rows import cached_row, write_pictures, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from yeto.diffusion import stream as stream_module
from yeto.diffusion.config import DiffusionConfig
from yeto.diffusion.loader import ExampleLoader, first_row, heldout_examples
from yeto.diffusion.values import RowNeeds
from yeto.errors import ConfigError, DataError


def numbered(folder, widths, name="rows.jsonl"):
    """Write rows with latents of these widths, each with its number for a prompt."""
    rows = [
        {"latents": [[[float(number)] * width]], "prompt": str(number)} for number, width in enumerate(widths)
    ]
    return write_rows(folder, rows, name)


def settings_of(data, **changes):
    return DiffusionConfig(model="unused", data=data, **changes)


def taken(config, count, start=None):
    """Return the first batches."""
    batches = iter(ExampleLoader(config, RowNeeds(), start))
    found = list(islice(batches, count))
    batches.close()
    return found


def epoch_of(config):
    """Return the batches of the first epoch."""
    batches = iter(ExampleLoader(config, RowNeeds()))
    found = []
    for batch in batches:
        if batch.position["epoch"]:
            break
        found.append(batch)
    batches.close()
    return found


def prompts(batches):
    return [[example.prompt for example in batch.examples] for batch in batches]


@settings(max_examples=25)
@given(
    widths=st.lists(st.integers(1, 3), min_size=6, max_size=90),
    learners=st.integers(1, 3),
    ranks=st.integers(1, 2),
    size=st.integers(1, 4),
    buffer=st.integers(1, 100),
)
def test_each_row_comes_once_an_epoch_over_all_learners_and_ranks(widths, learners, ranks, size, buffer):
    seen = Counter()
    with TemporaryDirectory() as folder:
        data = numbered(folder, widths)
        for learner in range(learners):
            for rank in range(ranks):
                config = settings_of(
                    data,
                    learner_id=learner,
                    num_learners=learners,
                    rank=rank,
                    num_ranks=ranks,
                    micro_batch_size=size,
                    shuffle_buffer=buffer,
                )
                for batch in epoch_of(config):
                    assert 1 <= len(batch.examples) <= size
                    assert len({example.latents.shape for example in batch.examples}) == 1
                    for example in batch.examples:
                        number = int(example.prompt)
                        assert number % learners == learner
                        assert torch.equal(example.latents, torch.full((1, 1, widths[number]), float(number)))
                        seen[number] += 1
    assert seen == dict.fromkeys(range(len(widths)), 1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batch_size": 3},
        {"micro_batch_size": 2, "shuffle_buffer": 7, "learner_id": 1, "num_learners": 2},
        {"shuffle_buffer": 1},
    ],
)
def test_batches_go_on_behind_any_batch_bit_for_bit(tmp_path, changes):
    config = settings_of(numbered(tmp_path, [1 + number % 3 for number in range(30)]), **changes)
    all_of_them = taken(config, 40)
    assert all_of_them[-1].position["epoch"] > 0, "also behind the first epoch"
    for behind in (0, 3, 11, 30):
        start = json.loads(json.dumps(all_of_them[behind].position))
        again = taken(config, 5, start)
        expected = all_of_them[behind + 1 : behind + 6]
        assert prompts(again) == prompts(expected)
        assert [batch.position for batch in again] == [batch.position for batch in expected]


def test_pictures_go_on_bit_for_bit(tmp_path):
    rows = write_pictures(tmp_path, [(8, 8), (8, 16), (8, 8), (16, 8), (8, 16), (8, 8)])
    config = settings_of(write_rows(tmp_path, rows), micro_batch_size=2)
    first = taken(config, 8)
    again = taken(config, 5, first[2].position)
    for batch, expected in zip(again, first[3:], strict=True):
        for example, other in zip(batch.examples, expected.examples, strict=True):
            assert torch.equal(example.pixels, other.pixels)


def test_order_depends_on_the_seed_and_changes_with_the_epoch(tmp_path):
    config = settings_of(numbered(tmp_path, [1] * 20))
    one, two = prompts(taken(config, 20)), prompts(taken(config, 40))[20:]
    assert prompts(taken(config, 20)) == one
    assert sorted(one) == sorted(two)
    assert one != two
    assert prompts(taken(evolve(config, seed=1), 20)) != one


def test_pictures_and_latents_of_one_size_do_not_mix(tmp_path):
    cached, _ = cached_row(tmp_path, 9, latents=(3, 8, 8))
    rows = write_pictures(tmp_path, [(8, 8)] * 4)
    rows += [{"latents": cached["latents"], "prompt": "cached"}] * 4
    rows += [{"image": "0.png", "prompt_embeds": cached["prompt_embeds"]}] * 4
    found = epoch_of(settings_of(write_rows(tmp_path, rows), micro_batch_size=4))
    kinds = sorted(
        [(example.pixels is None, example.prompt is None) for example in batch.examples] for batch in found
    )
    assert kinds == [[(False, False)] * 4, [(False, True)] * 4, [(True, False)] * 4]


def test_rows_that_are_heavy_themselves_make_smaller_windows(tmp_path, monkeypatch):
    config = settings_of(numbered(tmp_path, [64] * 20))
    assert {batch.position["window"] for batch in epoch_of(config)} == {0}
    monkeypatch.setattr(stream_module, "HELD_BYTES_MAX", 4 * 256)
    found = epoch_of(config)
    assert [batch.position["window"] for batch in found] == [number // 4 for number in range(20)]
    assert sorted(int(name) for (name,) in prompts(found)) == list(range(20))


def test_many_shapes_that_fill_no_batch_are_told_once(tmp_path, caplog):
    widths = [1 + number % 10 for number in range(20)]
    with caplog.at_level(logging.WARNING, "yeto.diffusion.stream"):
        taken(settings_of(numbered(tmp_path, widths), micro_batch_size=4), 40)
    (message,) = caplog.messages
    assert message.startswith("20 rows of up to 10 shapes at a time gave 10 batches, 2.0 rows in each instea")
    assert "--height and --width" in message


def test_one_shape_is_no_news(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "yeto.diffusion.stream"):
        taken(settings_of(numbered(tmp_path, [1] * 5), micro_batch_size=4), 10)
    assert not caplog.messages


def test_a_consumer_that_goes_away_ends_the_threads(tmp_path):
    before = threading.active_count()
    taken(settings_of(numbered(tmp_path, [1] * 50)), 1)
    assert threading.active_count() == before


def test_learners_with_files_of_their_own_read_all_of_them(tmp_path):
    config = settings_of(numbered(tmp_path, [1] * 6), data_shard="off", learner_id=1, num_learners=2)
    assert len(epoch_of(config)) == 6


# What is refused.


def test_a_share_without_a_row(tmp_path):
    config = settings_of(numbered(tmp_path, [1] * 2), learner_id=2, num_learners=3)
    with pytest.raises(DataError, match="no rows for learner 2 of 3; give at least one row for each"):
        first_row(config, RowNeeds())
    with pytest.raises(DataError, match="no rows for learner 1 of 2, rank 1 of 2"):
        ExampleLoader(evolve(config, learner_id=1, num_learners=2, rank=1, num_ranks=2), RowNeeds())


def test_the_first_row_is_looked_at_before_anything_else(tmp_path):
    config = settings_of(write_rows(tmp_path, [{"image": "gone.png", "prompt": ""}]))
    for look in (first_row, ExampleLoader):
        with pytest.raises(
            DataError, match=r"rows.jsonl line 1: image .*gone.png: No such file or directory; bring it there"
        ):
            look(config, RowNeeds())


def test_a_row_that_cannot_be_used_ends_training_with_its_line(tmp_path):
    rows = [{"latents": [[[0.0]]], "prompt": str(number)} for number in range(10)]
    rows[7]["latents"] = [[[float("nan")]]]
    config = settings_of(write_rows(tmp_path, rows))
    with pytest.raises(DataError, match=r"rows.jsonl line 8: latents has NaN or infinite values"):
        taken(config, 20)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seed": 1}, "--seed 1: the saved position in the rows was reached with 0; give the same"),
        ({"micro_batch_size": 3}, "--micro-batch-size 3: .* with 2"),
        ({"height": 8, "width": 8}, "--height 8: .* with None"),
        ({"resize_mode": "stretch"}, "--resize-mode stretch: .* with center-crop"),
        ({"shuffle_buffer": 5}, "--shuffle-buffer 5"),
        ({"learner_id": 1, "num_learners": 2}, "--learner-id 1"),
    ],
)
def test_a_position_of_other_settings(tmp_path, changes, problem):
    config = settings_of(numbered(tmp_path, [1] * 6), micro_batch_size=2)
    (batch,) = taken(config, 1)
    with pytest.raises(ConfigError, match=problem):
        ExampleLoader(evolve(config, **changes), RowNeeds(), batch.position)


def test_a_position_in_other_rows_but_the_same_may_lie_elsewhere(tmp_path):
    config = settings_of(numbered(tmp_path, [1] * 6))
    (batch,) = taken(config, 1)
    moved = evolve(config, data=numbered(tmp_path, [1] * 6, "moved.jsonl"))
    assert prompts(taken(moved, 3, batch.position)) == prompts(taken(config, 4))[1:]
    other = evolve(config, data=numbered(tmp_path, [2] * 6, "other.jsonl"))
    with pytest.raises(ConfigError, match="--data: its first row is not the first row of what the saved"):
        ExampleLoader(other, RowNeeds(), batch.position)


def test_held_out_rows_are_the_first_ones_in_their_order(tmp_path):
    config = settings_of(None, eval_data=numbered(tmp_path, [1] * 9), eval_rows=4)
    assert [example.prompt for example in heldout_examples(config, RowNeeds())] == ["0", "1", "2", "3"]
    empty = evolve(config, eval_data=write_rows(tmp_path, [], "empty.jsonl"))
    with pytest.raises(DataError, match=r"--eval-data .*empty.jsonl: it has no rows"):
        list(heldout_examples(empty, RowNeeds()))


def test_pictures_inside_a_table(tmp_path):
    """As data sets of the hub come: parquet files with the pictures themselves in a column."""
    import pyarrow
    import pyarrow.parquet

    write_pictures(tmp_path, [(8, 8), (8, 16)])
    pictures = [(tmp_path / f"{number}.png").read_bytes() for number in range(2)]
    table = pyarrow.table(
        {
            "image": [{"bytes": data, "path": None} for data in pictures],
            "prompt": ["0", "1"],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    config = settings_of(str(tmp_path / "train.parquet"))
    found = {batch.examples[0].prompt: batch.examples[0].pixels.shape for batch in epoch_of(config)}
    assert found == {"0": (3, 8, 8), "1": (3, 8, 16)}
    assert first_row(config, RowNeeds()) == first_row(config, RowNeeds())
