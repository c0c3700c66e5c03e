"""The inner loop: accumulation, schedule, skipped groups, missing gradients."""

import math
from pathlib import Path

import attrs
import pytest
import torch
from learner_fakes import TinyTask, config

from yeto.errors import ConfigError, DataError
from yeto.learner.loop import InnerLoop, learning_rate
from yeto.learner.stopwatch import UNACCOUNTED, Stopwatch

FOLDER = Path("unused")


def loop_of(task, **changes):
    settings = config(output_dir=FOLDER, **changes)
    return InnerLoop(task, task.trainable_parameters(), settings, Stopwatch())


def never():
    return False


def test_one_batch_of_four_and_four_batches_of_one_are_the_same_step():
    whole, parts = TinyTask(rows_per_batch=4), TinyTask(rows_per_batch=1)
    first = loop_of(whole, grad_accum=1).step(never)
    second = loop_of(parts, grad_accum=4).step(never)
    assert (first.targets, first.tokens) == (second.targets, second.tokens) == (3, 40)
    assert first.loss == pytest.approx(second.loss, rel=1e-6)
    assert first.gradient_norm == pytest.approx(second.gradient_norm, rel=1e-6)
    torch.testing.assert_close(whole.flat(), parts.flat(), rtol=1e-6, atol=1e-7)


def test_the_step_is_adamw_on_the_clipped_token_mean():
    task, twin = TinyTask(rows_per_batch=4), TinyTask(rows_per_batch=4)
    result = loop_of(task, weight_decay=0.1, clip_norm=0.5, inner_lr=0.02).step(never)
    parameters = list(twin.trainable_parameters().values())
    optimizer = torch.optim.AdamW(parameters, lr=0.02, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    batch = next(twin.batches())
    (twin.loss(batch) / batch.targets).backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()
    assert result.gradient_norm == float(norm) > 0.5
    assert torch.equal(task.flat(), twin.flat())


def test_clip_zero_is_off():
    clipped, free = TinyTask(rows_per_batch=4), TinyTask(rows_per_batch=4)
    loop_of(clipped, clip_norm=1e9).step(never)
    loop_of(free, clip_norm=0.0).step(never)
    assert torch.equal(clipped.flat(), free.flat())


def test_groups_without_a_target_are_skipped_and_counted():
    task = TinyTask(rows_per_batch=1)
    loop = loop_of(task)
    results = [loop.step(never) for _ in range(4)]
    # Rows 0, 3, 6, … have no target.
    assert [result.targets for result in results] == [1, 2, 1, 2]
    assert loop.empty_groups == 2
    assert (loop.steps, loop.tokens) == (4, 40)
    assert all(math.isfinite(result.loss) for result in results)


def test_data_without_any_target_is_an_error():
    task = TinyTask()
    task.rows = [(x, y, 0) for x, y, _ in task.rows]
    with pytest.raises(DataError, match="1000 accumulation groups in a row have no target"):
        loop_of(task).step(never)


def test_every_trained_parameter_must_get_a_gradient_in_the_first_step():
    with pytest.raises(ConfigError, match=r"1 of 3 trained parameters got no gradient .*: layers\.2\.dead;"):
        loop_of(TinyTask(rows_per_batch=4, untouched=True)).step(never)


@pytest.mark.parametrize("asked", [1, 2, 3, 4, 5])
def test_an_interrupted_step_changes_nothing(asked):
    task = TinyTask(rows_per_batch=3)
    before = task.flat().clone()
    loop = loop_of(task, grad_accum=2)
    answers = iter([False] * (asked - 1) + [True])
    result = loop.step(lambda: next(answers, False))
    if asked <= 4:
        assert result is None
        assert torch.equal(task.flat(), before)
        assert all(parameter.grad is None for parameter in task.trainable_parameters().values())
    else:
        assert result is not None


def test_an_interrupted_step_draws_what_it_draws_again():
    """Whoever goes on from saved state takes the group once more, with the same dropout."""

    class Drawing(TinyTask):
        def loss(self, batch):
            self.drawn.append(float(torch.rand(())))
            return super().loss(batch)

    task = Drawing(rows_per_batch=3)
    task.drawn = []
    loop = loop_of(task, grad_accum=2)
    answers = iter([False] * 3 + [True])
    assert loop.step(lambda: next(answers)) is None
    loop.step(never)
    assert len(task.drawn) == 3
    assert task.drawn[0] == task.drawn[1]


def test_the_schedule():
    constant = config(output_dir=FOLDER, inner_lr=1.0, warmup_steps=4)
    assert [learning_rate(step, constant) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = config(output_dir=FOLDER, inner_lr=1.0, warmup_steps=2, lr_schedule="cosine", max_local_steps=6)
    rates = [learning_rate(step, cosine) for step in range(7)]
    budget = attrs.evolve(cosine, max_local_steps=None, budget_steps=6)
    assert [learning_rate(step, budget) for step in range(7)] == rates
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[4] == pytest.approx(0.5)
    assert rates[5] == pytest.approx(0.5 * (1 + math.cos(0.75 * math.pi)))
    assert rates[6] == pytest.approx(0.0, abs=1e-12)
    assert learning_rate(0, config(output_dir=FOLDER, inner_lr=1.0)) == 1.0


def test_the_optimizer_follows_the_schedule():
    task = TinyTask(rows_per_batch=4)
    loop = loop_of(task, warmup_steps=3, inner_lr=0.3)
    assert [loop.step(never).learning_rate for _ in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.3])


def test_sections_add_up_to_the_whole():
    now = [0.0]
    stopwatch = Stopwatch(clock=lambda: now[0])
    now[0] += 1
    with stopwatch.section("outer"):
        now[0] += 2
        with stopwatch.section("inner"):
            now[0] += 4
        now[0] += 8
    now[0] += 16
    assert stopwatch.seconds() == {UNACCOUNTED: 17.0, "outer": 10.0, "inner": 4.0}
    assert stopwatch.total == 31.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learner_id": 2, "num_learners": 2}, "--learner-id 2 is out of range: .* allows 0 to 1"),
        ({"learner_id": -1}, "--learner-id -1 is out of range"),
        ({"merge_alpha": 1.0}, "--merge-alpha 1.0"),
        ({"lr_schedule": "cosine"}, "--lr-schedule cosine needs --max-local-steps"),
        ({"lr_schedule": "linear"}, "--lr-schedule linear: must be one of constant, cosine"),
        ({"syncer": "none"}, "--syncer none needs --max-local-steps"),
        ({"budget_steps": 9, "max_local_steps": 8}, "ends before --learner-budget-steps 9"),
        ({"inner_lr": math.nan}, "--inner-lr nan"),
        ({"clip_norm": -1.0}, "--clip-norm -1.0"),
        ({"wan_streams": 257}, "--wan-streams 257"),
        ({"wire_dtype": "f16"}, "--wire-dtype f16: must be one of f32, bf16, q4"),
        ({"syncer": "nowhere"}, "--syncer nowhere"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(output_dir=FOLDER, **changes)
