"""An amount of training as global steps."""

import pytest

from yeto.cli.length import DEFAULT_MERGES, steps_of_run, tokens_of_rows
from yeto.errors import ConfigError
from yeto.text.config import TextConfig

STEP_TOKENS = 4 * 2 * 128 * 3
"""Of the settings below: micro batch, accumulation, block, ranks."""


def steps(micro_batch_size=4, data="rows.jsonl", model="m", text=True, interval=6.0, **length):
    config = TextConfig(model=model, data=data, seq_len=128, micro_batch_size=micro_batch_size)
    flags = {"total_steps": None, "token_budget": None, "epochs": None} | length
    return steps_of_run(
        config if text else None, **flags, fragments=5, grad_accum=2, ranks=3, interval=interval
    )


def test_a_budget_of_tokens_is_as_many_merges_as_it_has_intervals(capsys):
    assert steps(token_budget=STEP_TOKENS * 6 * 10) == 10 * 5
    assert (
        capsys.readouterr().out == f"--token-budget: {STEP_TOKENS * 60:,} tokens are about 50 global steps\n"
    )
    # A part of a round is one, and every fragment is merged once at least.
    assert steps(token_budget=STEP_TOKENS * 6 * 10 + 1) == 51
    assert steps(token_budget=1) == 5


def test_epochs_are_those_of_the_rows(fixtures, capsys):
    rows = {"model": str(fixtures / "tiny-llama"), "data": str(fixtures / "chat" / "heldout.jsonl")}
    tokens = tokens_of_rows(TextConfig(**rows))
    assert steps(epochs=30.0, **rows) == steps(token_budget=30 * tokens)
    assert steps(epochs=0.5, **rows) == steps(token_budget=-(-tokens // 2))
    # Rows that are not dealt out are everybody's.
    assert tokens_of_rows(TextConfig(**rows, num_learners=3)) == tokens
    assert tokens_of_rows(TextConfig(**rows, num_learners=3, data_shard="off")) == 3 * tokens


def test_without_an_amount_it_is_the_steps_that_are_given():
    assert steps(total_steps=7, text=False) == 7
    assert steps(text=False) == DEFAULT_MERGES * 5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"total_steps": 4, "epochs": 1.0}, "--total-steps and --epochs: give one of them"),
        ({"token_budget": 4, "text": False}, "--token-budget is for --task text, else give --total-steps"),
        ({"token_budget": 4, "interval": 0.0}, "needs a --sync-interval-steps above 0"),
        ({"epochs": 4.0, "micro_batch_size": None}, "--epochs needs --micro-batch-size as a number"),
        ({"token_budget": 0}, "--token-budget 0: must be finite and above 0"),
        ({"epochs": float("nan")}, "--epochs nan: must be finite and above 0"),
        ({"epochs": float("inf")}, "--epochs inf: must be finite and above 0"),
    ],
)
def test_what_cannot_be_worked_out_is_one_line(flags, said):
    with pytest.raises(ConfigError, match=said):
        steps(**flags)
