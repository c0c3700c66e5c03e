import logging
import math
import re
from itertools import islice

import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from yeto.errors import ConfigError, DataError
from yeto.learner.task import Task
from yeto.text import loss as loss_module
from yeto.text.evaluate import evaluate_rows, heldout_loss
from yeto.text.legacy import LEGACY_TEMPLATE
from yeto.text.loss import summed_cross_entropy
from yeto.text.masks import Encoded
from yeto.text.model import probe_micro_batch
from yeto.text.packing import Packer
from yeto.text.task import build_task
from yeto.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tiny_model(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    return model.eval()


def reference(model, ids, weights):
    """Sum the cross-entropy of one document in float64, from full logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    return float((losses * torch.tensor(weights[1:])).sum())


def documents(seed=0, lengths=(9, 5, 14, 4)):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(6, 600, (length,), generator=generator).tolist()
        weights = [0, *(torch.rand(length - 1, generator=generator) < 0.6).int().tolist()]
        rows.append(Encoded.of(ids, weights))
    return rows


def packed(rows, seq_len, **options):
    packer = Packer(seq_len, **options)
    return [block for row in rows for block in packer.add(row)]


def loss_of(model, block, positions):
    return float(
        summed_cross_entropy(
            model,
            torch.from_numpy(block.ids).long().unsqueeze(0),
            torch.from_numpy(block.weights).long().unsqueeze(0),
            torch.from_numpy(block.positions).long().unsqueeze(0) if positions else None,
        )
    )


@torch.no_grad()
def test_documents_in_one_block_have_the_loss_they_have_alone(tiny_model):
    rows = documents()
    (block,) = packed(rows, sum(len(row.ids) for row in rows), documents=True, windows=True)
    alone = sum(reference(tiny_model, row.ids.tolist(), row.weights.tolist()) for row in rows)
    assert loss_of(tiny_model, block, True) == pytest.approx(alone, rel=1e-5)
    assert block.targets == sum(int(row.weights[1:].sum()) for row in rows)
    # Without the boundary the documents see each other, and the figure is another one.
    assert loss_of(tiny_model, block, False) != pytest.approx(alone, rel=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("blocks", [1, 2])
def test_documents_in_one_block_have_the_logits_they_have_alone(tiny_model, blocks):
    rows = documents() + documents(seed=1, lengths=(4, 14, 5, 9))[: 4 * (blocks - 1)]
    packs = packed(rows, sum(len(row.ids) for row in documents()), documents=True, windows=True)
    assert len(packs) == blocks

    def logits(ids, **options):
        return tiny_model(input_ids=torch.from_numpy(ids).long(), use_cache=False, **options).logits

    positions = torch.from_numpy(np.stack([pack.positions for pack in packs])).long()
    joined = logits(np.stack([pack.ids for pack in packs]), position_ids=positions).flatten(0, 1)
    start = 0
    for row in rows:
        (alone,) = logits(row.ids[None])
        torch.testing.assert_close(joined[start : start + len(row.ids)], alone, rtol=1e-5, atol=1e-5)
        start += len(row.ids)


@torch.no_grad()
def test_plain_packing_is_the_loss_of_the_joined_tokens(tiny_model):
    rows = documents()
    (block,) = packed(rows, sum(len(row.ids) for row in rows), documents=False, windows=True)
    joined = reference(tiny_model, block.ids.tolist(), block.weights.tolist())
    assert loss_of(tiny_model, block, False) == pytest.approx(joined, rel=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 1024])
def test_sums_and_gradients_do_not_depend_on_chunks_or_batches(tiny_model, monkeypatch, chunk):
    monkeypatch.setattr(loss_module, "CHUNK_TARGETS", chunk)
    rows = documents(lengths=(12, 12, 12))
    ids = torch.stack([torch.from_numpy(row.ids).long() for row in rows])
    weights = torch.stack([torch.from_numpy(row.weights).long() for row in rows])
    weight = tiny_model.model.layers[0].mlp.up_proj.weight

    def gradient(total):
        (result,) = torch.autograd.grad(total, weight)
        return result

    together = summed_cross_entropy(tiny_model, ids, weights, None)
    one_by_one = sum(
        summed_cross_entropy(tiny_model, ids[place : place + 1], weights[place : place + 1], None)
        for place in range(3)
    )
    expected = sum(reference(tiny_model, row.ids.tolist(), row.weights.tolist()) for row in rows)
    assert together.item() == pytest.approx(expected, rel=1e-5)
    assert one_by_one.item() == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(gradient(together), gradient(one_by_one), rtol=1e-3, atol=1e-5)


def test_a_block_without_targets_has_a_zero_that_can_be_differentiated(tiny_model):
    ids = torch.arange(8, 16).unsqueeze(0)
    total = summed_cross_entropy(tiny_model, ids, torch.zeros_like(ids), None)
    assert total.item() == 0.0
    total.backward()
    tiny_model.zero_grad(set_to_none=True)


@torch.no_grad()
def test_a_model_that_cannot_keep_logits_gives_the_same_loss(tiny_model, monkeypatch):
    (row,) = documents(lengths=(15,))
    (block,) = packed([row], 15, documents=True, windows=True)
    expected = loss_of(tiny_model, block, True)
    monkeypatch.setattr(loss_module, "keeps_logits", lambda model: False)
    assert loss_of(tiny_model, block, True) == pytest.approx(expected, rel=1e-6)


# The task.


def step(task, batches, optimizer):
    batch = next(batches)
    total = task.loss(batch)
    (total / batch.targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    return total.item() / batch.targets


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tuning": "full"},
        {"packing": "plain", "train_on": "all"},
        {"base_dtype": "bf16", "gradient_checkpointing": "on", "micro_batch_size": 2, "seq_len": 24},
        {"lora_dropout": 0.1, "assistant_mask_mode": "legacy", "seq_len": 200},
    ],
    ids=["lora", "full", "plain, all tokens", "bf16", "legacy"],
)
def test_training_lowers_the_loss(config, change):
    task: Task = build_task(evolve(config, **change))
    parameters = task.trainable_parameters()
    optimizer = torch.optim.AdamW(parameters.values(), lr=3e-3)
    batches = task.batches()
    losses = [step(task, batches, optimizer) for _ in range(10)]
    batches.close()
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"gradient_checkpointing": "on"},
        {"gradient_checkpointing": "on", "lora_targets": "attention", "base_dtype": "bf16"},
        {"gradient_checkpointing": "on", "tuning": "full"},
    ],
    ids=["plain", "checkpointing", "checkpointing, attention only", "checkpointing, full"],
)
def test_every_trainable_has_a_gradient_in_the_first_step(config, change):
    """Layers behind frozen ones get none from a checkpointed forward pass, unless the inputs ask for it."""
    task = build_task(evolve(config, **change))
    task.loss(next(task.batches())).backward()
    parameters = task.trainable_parameters()
    assert [name for name, p in parameters.items() if p.grad is None] == []
    # An adapter's B begins at zero, so its A has a gradient of zeros in this one step.
    moving = [name for name in parameters if "lora_A" not in name]
    assert [name for name in moving if not parameters[name].grad.any()] == []


def test_small_updates_of_a_bf16_base_are_not_rounded_away(config):
    task = build_task(evolve(config, base_dtype="bf16"))
    parameters = task.trainable_parameters()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-6)
    step(task, task.batches(), optimizer)
    moved = [name for name, p in parameters.items() if not torch.equal(before[name], p)]
    assert any("lora_B" in name for name in moved)


def test_what_is_trained_is_said(config, caplog):
    with caplog.at_level(logging.INFO, logger="yeto.text.task"):
        task = build_task(evolve(config, lora_targets="attention"))
    assert "LoRA r=4 alpha=8 on 16 modules: k_proj, o_proj, q_proj, v_proj" in caplog.text
    said = task.describe()
    trained = sum(p.numel() for p in task.trainable_parameters().values())
    assert said["trainable_parameters"] == trained
    assert said["trainable_percent"] == pytest.approx(100 * trained / said["parameters"], abs=1e-4)


@pytest.mark.parametrize(("tuning", "fits", "expected"), [("lora", 5, 4), ("full", 1, 1)])
def test_the_probe_takes_real_steps_until_the_device_is_full(config, tuning, fits, expected):
    task = build_task(evolve(config, tuning=tuning))
    before = {name: p.detach().clone() for name, p in task.trainable_parameters().items()}
    tried = []

    def allocate(module, args, options):
        tried.append(len(options["input_ids"]))
        if tried[-1] > fits:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    hook = task._model.module.register_forward_pre_hook(allocate, with_kwargs=True)
    assert probe_micro_batch(task._try_step) == expected
    hook.remove()
    assert tried == [2**power for power in range(len(tried))]
    assert tried[-1] == 2 * expected
    for name, parameter in task.trainable_parameters().items():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def test_counts_of_a_batch(config):
    batch = next(build_task(evolve(config, micro_batch_size=3)).batches())
    assert batch.tokens == 3 * config.seq_len
    assert batch.inputs.ids.shape == (3, config.seq_len)
    assert batch.targets == int(batch.inputs.weights.sum())


def test_two_tasks_of_one_configuration_are_equal_bit_for_bit(config):
    def run():
        task = build_task(evolve(config, lora_dropout=0.2))
        optimizer = torch.optim.AdamW(task.trainable_parameters().values(), lr=1e-3)
        batches = task.batches()
        return [step(task, batches, optimizer) for _ in range(4)]

    assert run() == run()


def test_learners_see_different_rows(config):
    def first(learner):
        task = build_task(evolve(config, learner_id=learner, num_learners=2))
        return next(task.batches()).inputs.ids.tolist()

    assert first(0) != first(1)


def test_the_binding_has_no_path_and_no_float(config, tmp_path):
    binding = build_task(config).binding()
    assert binding == {
        "model": {"digest": binding["model"]["digest"]},
        "tuning": "lora",
        "seed": 0,
        "num_learners": 1,
        "lora": {
            "r": 4,
            "alpha": 8,
            "targets": ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
        },
    }
    assert "lora" not in build_task(evolve(config, tuning="full")).binding()


MINE = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


def test_a_template_of_ones_own_is_part_of_the_binding(config, tmp_path):
    (tmp_path / "mine.jinja").write_text(MINE)
    mine = evolve(config, chat_template=str(tmp_path / "mine.jinja"))
    assert build_task(mine).binding()["chat_template"] == MINE
    legacy = evolve(config, assistant_mask_mode="legacy")
    assert build_task(legacy).binding()["chat_template"] == LEGACY_TEMPLATE


def test_the_mask_report_shows_rows(config, capsys):
    build_task(evolve(config, mask_report=2))
    text = capsys.readouterr().err
    assert text.count("tokens supervised") == 2
    assert "⟦" in text
    assert "<|eos|>⟧" in text


def test_no_row_of_the_mask_report_steers_a_terminal(config, write_rows, capsys):
    reply = "one\ntwo\x1b[2J\r\x9b\u202e\u2028 日本 🗼"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": reply}]
    build_task(evolve(config, data=write_rows([{"messages": messages}]), mask_report=1))
    shown = "⟦one\ntwo\\x1b[2J\\r\\x9b\\u202e\\u2028 日本 🗼<|eos|>"
    assert shown in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(config, fixtures, tmp_path, tiny):
    """A tokenizer with more tokens than the model has is caught before one is looked up."""
    small = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "model")
    task = build_task(evolve(config, model=str(tmp_path / "model")))
    with pytest.raises(DataError, match="the model has only 300"):
        list(islice(task.batches(), 20))
    heldout = evolve(task.config, eval_data=str(fixtures / "chat" / "heldout.jsonl"))
    for score in (build_task, lambda config: heldout_loss(config.model, None, config)):
        with pytest.raises(DataError, match=f"^--model {tmp_path / 'model'}: .* the model has only 300"):
            score(heldout)


def test_a_saved_adapter_gives_the_tasks_own_loss(config, fixtures, tmp_path):
    config = evolve(config, eval_data=str(fixtures / "chat" / "heldout.jsonl"), eval_rows=10)
    task = build_task(config)
    optimizer = torch.optim.AdamW(task.trainable_parameters().values(), lr=3e-3)
    batches = task.batches()
    for _ in range(8):
        step(task, batches, optimizer)
    batches.close()
    task.save(tmp_path / "adapter")
    mine = task.evaluate()
    assert heldout_loss(config.model, tmp_path / "adapter", config).loss == pytest.approx(mine.loss, rel=1e-5)
    base = heldout_loss(config.model, None, config)
    assert base.targets == mine.targets
    assert base.rows == 10
    assert mine.loss < base.loss


def test_evaluation_leaves_training_as_it_was(config, fixtures):
    config = evolve(config, eval_data=str(fixtures / "chat" / "heldout.jsonl"), lora_dropout=0.5)
    task = build_task(config)
    state = torch.get_rng_state()
    first = task.evaluate()
    assert torch.equal(torch.get_rng_state(), state)
    assert task.evaluate() == first
    assert task._model.module.training


@torch.no_grad()
def test_held_out_loss_is_that_of_each_row_by_itself(tiny_model):
    rows = documents(lengths=(9, 30, 5, 14))
    expected = sum(reference(tiny_model, row.ids.tolist(), row.weights.tolist()) for row in rows)
    found = evaluate_rows(
        tiny_model, rows, seq_len=64, device=torch.device("cpu"), compute_dtype=torch.float32
    )
    assert found.loss_sum == pytest.approx(expected, rel=1e-5)
    assert found.targets == sum(int(row.weights.sum()) for row in rows)
    assert found.rows == 4


def test_rows_must_be_named(config):
    with pytest.raises(ConfigError, match="--data is missing"):
        build_task(evolve(config, data=None))


def test_no_held_out_rows_no_evaluation(config):
    assert build_task(config).evaluate() is None


def test_columns_of_a_data_set_of_questions_and_answers(config, write_rows):
    path = write_rows([{"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}] * 3)
    task = build_task(
        evolve(config, data=path, columns="user=question,assistant=answer", seq_len=48, mask_report=1)
    )
    assert next(task.batches()).targets > 0


NO_ROW = [{"colour": "red"}]
NO_REPLY = [{"messages": [{"role": "user", "content": "Hello?"}]}]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"data": "/nowhere/rows.jsonl"}, "--data /nowhere/rows.jsonl: no such file"),
        ({"eval_data": "/nowhere/rows.jsonl"}, "--eval-data /nowhere/rows.jsonl: no such file"),
        ({"data": []}, "no rows for learner 0 of 1"),
        ({"data": NO_ROW}, "rows.jsonl line 1: columns colour fit no format"),
        ({"eval_data": NO_ROW}, "rows.jsonl line 1: columns colour fit no format"),
        ({"eval_data": NO_REPLY}, "without a supervised token"),
    ],
)
def test_wrong_rows_are_found_before_the_model_is_loaded(config, write_rows, monkeypatch, change, problem):
    monkeypatch.setattr("yeto.text.task.load_model", lambda config: pytest.fail("loaded the model first"))
    change = {name: write_rows(rows) if isinstance(rows, list) else rows for name, rows in change.items()}
    with pytest.raises((ConfigError, DataError), match=re.escape(problem)):
        build_task(evolve(config, **change))


def test_a_template_file_may_begin_with_a_byte_order_mark(config, tmp_path):
    plain, marked = tmp_path / "plain.jinja", tmp_path / "marked.jinja"
    text = load_tokenizer(config).chat_template
    plain.write_text(text, encoding="utf-8")
    marked.write_text("\ufeff" + text, encoding="utf-8")
    for path in (plain, marked):
        assert load_tokenizer(evolve(config, chat_template=str(path))).chat_template == text


def test_a_template_that_is_no_text_is_refused(config, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read as UTF-8 text"):
        build_task(evolve(config, chat_template=str(template)))
