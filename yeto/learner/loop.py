"""The inner loop: AdamW over accumulation groups, deaf to the network.

Three rules. The gradient of a group is that of the *token mean*: the summed loss of all its micro batches
over the exact number of targets in them, so that one batch of four and four batches of one are the same step.
A group without a single target is skipped and counted, never divided by. And every trained parameter must
have a gradient in the first step: a parameter that silently gets none (a wrong adapter target, checkpointing
without input gradients) would be merged for days without ever having moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping

import torch
from attrs import frozen
from torch import nn

from yeto.errors import ConfigError, DataError
from yeto.learner.config import LearnerConfig
from yeto.learner.stopwatch import Stopwatch
from yeto.learner.task import Batch, Task

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8

EMPTY_GROUPS_MAX = 1000
"""Groups without a target in a row after which the data, not chance, is at fault."""

NAMES_SHOWN = 5
"""Parameter names in an error: enough to see the pattern, few enough for one line."""


@frozen(kw_only=True)
class StepResult:
    """What one optimizer step saw."""

    loss: float
    """Loss per target before the step, over the whole group."""
    targets: int
    tokens: int
    """Raw tokens of the group."""
    learning_rate: float
    gradient_norm: float
    """Norm of the whole gradient before clipping."""


def learning_rate(step: int, config: LearnerConfig) -> float:
    """Return the rate of optimizer step ``step``, counted from 0.

    Linear warm-up over ``warmup_steps`` steps to ``inner_lr``; then constant, or a half cosine that would
    reach 0 one step after ``max_local_steps``. Local steps alone decide: merging does not touch the schedule.
    """
    if step < config.warmup_steps:
        return config.inner_lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.inner_lr
    assert config.max_local_steps is not None, "a cosine without an end is refused by the configuration"
    length = max(1, config.max_local_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / length)
    return config.inner_lr * 0.5 * (1.0 + math.cos(math.pi * progress))


class InnerLoop:
    """Takes optimizer steps; used on the training thread only."""

    def __init__(
        self,
        task: Task,
        parameters: Mapping[str, nn.Parameter],
        config: LearnerConfig,
        stopwatch: Stopwatch,
    ) -> None:
        """Make the optimizer of ``parameters``; the first batch is fetched by the first step."""
        self._task = task
        self._config = config
        self._parameters = dict(parameters)
        self._stopwatch = stopwatch
        self._batches: Iterator[Batch] = task.batches()
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=config.inner_lr,
            betas=ADAM_BETAS,
            eps=ADAM_EPS,
            weight_decay=config.weight_decay,
        )
        self.steps = 0
        """Optimizer steps done."""
        self.tokens = 0
        """Raw tokens in them."""
        self.empty_groups = 0
        """Groups skipped because they had no target."""

    def step(self, interrupted: Callable[[], bool]) -> StepResult | None:
        """Take one optimizer step.

        Args:
            interrupted: asked between micro batches; a stop must not wait for a long group.

        Returns:
            What the step saw; None when it was interrupted, and then nothing has changed but the data's
            position.

        Raises:
            ConfigError: a trained parameter got no gradient in the first step.
            DataError: the data has no targets.
        """
        group = self._next_group(interrupted)
        if group is None:
            return None
        targets = sum(batch.targets for batch in group)
        with self._stopwatch.section("compute"):
            loss_sum = self._accumulate(group, targets, interrupted)
            if loss_sum is None:
                self._optimizer.zero_grad(set_to_none=True)
                return None
            if self.steps == 0:
                self._require_gradients()
            rate = learning_rate(self.steps, self._config)
            for parameter_group in self._optimizer.param_groups:
                parameter_group["lr"] = rate
            norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._config.clip_norm or math.inf)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            # The one place where the host waits for the device.
            loss = float(loss_sum) / targets
        tokens = sum(batch.tokens for batch in group)
        self.steps += 1
        self.tokens += tokens
        return StepResult(
            loss=loss, targets=targets, tokens=tokens, learning_rate=rate, gradient_norm=float(norm)
        )

    def close(self) -> None:
        """Let go of the data, with the processes that may stand behind it."""
        if isinstance(self._batches, Generator):
            self._batches.close()

    def _next_group(self, interrupted: Callable[[], bool]) -> list[Batch] | None:
        """Return the next accumulation group that has a target; None when interrupted."""
        for _ in range(EMPTY_GROUPS_MAX):
            group: list[Batch] = []
            with self._stopwatch.section("data"):
                while len(group) < self._config.grad_accum:
                    if interrupted():
                        return None
                    group.append(next(self._batches))
            if any(batch.targets for batch in group):
                return group
            self.empty_groups += 1
        raise DataError(
            f"{EMPTY_GROUPS_MAX} accumulation groups in a row have no target to learn from; "
            "check the data's masks with --mask-report 5"
        )

    def _accumulate(
        self, group: list[Batch], targets: int, interrupted: Callable[[], bool]
    ) -> torch.Tensor | None:
        """Leave the gradient of the group's token mean in the parameters; return its summed loss."""
        total: torch.Tensor | None = None
        for batch in group:
            if batch.targets == 0:
                continue
            if interrupted():
                return None
            loss = self._task.loss(batch)
            (loss / targets).backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        return total

    def _require_gradients(self) -> None:
        missing = sorted(name for name, parameter in self._parameters.items() if parameter.grad is None)
        if missing:
            shown = ", ".join(missing[:NAMES_SHOWN])
            more = f" and {len(missing) - NAMES_SHOWN} more" if len(missing) > NAMES_SHOWN else ""
            raise ConfigError(
                f"{len(missing)} of {len(self._parameters)} trained parameters got no gradient in the first "
                f"step: {shown}{more}; check --lora-targets, or try --gradient-checkpointing off"
            )
