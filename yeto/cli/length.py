"""How long a run is: global steps, or an amount of training that they are worked out from.

A syncer counts rounds. What they come to in tokens follows from the learners' settings, so it is said by the
commands that know both sides.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from yeto.errors import ConfigError

if TYPE_CHECKING:
    from yeto.text.config import TextConfig

DEFAULT_MERGES = 8
"""Merges of every fragment when no length is given: enough to see a training work."""


def steps_of_run(
    text: TextConfig | None,
    *,
    total_steps: int | None,
    token_budget: int | None,
    epochs: float | None,
    fragments: int,
    grad_accum: int,
    ranks: int,
    interval: float,
) -> int:
    """Return the length of a run in global steps, from whichever flag says it; prints what it comes to.

    Args:
        text: what is trained on which rows; None for a task that has no tokens.
        total_steps: of the flag of that name, as the next two; None where it was not given.
        token_budget: raw tokens of all learners together.
        epochs: passes over the training rows, which are tokenized to count them.
        fragments: P, as it is wished for.
        grad_accum: micro batches of a step.
        ranks: processes that train, over all learners.
        interval: H, inner steps between two merges of one fragment.

    Raises:
        ConfigError: two of the flags are given, or what the amount is worked out with is not known.
    """
    amounts = {"--total-steps": total_steps, "--token-budget": token_budget, "--epochs": epochs}
    given = {flag: amount for flag, amount in amounts.items() if amount is not None}
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: give one of them")
    if not given:
        return DEFAULT_MERGES * fragments
    if total_steps is not None:
        return total_steps
    [(flag, amount)] = given.items()
    if text is None:
        raise ConfigError(f"{flag} is for --task text, else give --total-steps")
    if interval <= 0:
        raise ConfigError(f"{flag} needs a --sync-interval-steps above 0, else give --total-steps")
    if text.micro_batch_size is None:
        raise ConfigError(f"{flag} needs --micro-batch-size as a number, else give --total-steps")
    if not 0 < amount < math.inf:
        raise ConfigError(f"{flag} {amount}: must be finite and above 0")
    tokens = math.ceil(amount if epochs is None else amount * tokens_of_rows(text))
    inner_steps = tokens / (text.micro_batch_size * grad_accum * text.seq_len * ranks)
    steps = max(fragments, math.ceil(inner_steps / interval * fragments))
    print(f"{flag}: {tokens:,} tokens are about {steps} global steps", flush=True)
    return steps


def tokens_of_rows(text: TextConfig) -> int:
    """Count the tokens of all training rows, for all learners together, by tokenizing them once.

    Raises:
        YetoError: the rows or the tokenizer cannot be used.
    """
    from yeto.text.stream import encoder_of
    from yeto.text.tokenizer import load_tokenizer
    from yeto.tuning.rows import Cursor, open_source

    assert text.data is not None, "there is something to train on"
    encoder = encoder_of(text, load_tokenizer(text))
    source = open_source(text.data, revision=text.data_revision)
    tokens = sum(len(row.ids) for row in encoder.each(source.rows(Cursor())))
    # Rows that are not dealt out are read by every learner.
    return tokens * (text.num_learners if text.data_shard == "off" else 1)
