"""The inner loop: AdamW over accumulation groups, deaf to the network.

Three rules. The gradient of a group is that of the *token mean*: the summed loss of all its micro batches
over the exact number of targets in them, so that one batch of four and four batches of one are the same step.
The group is the whole island's: with several ranks its micro batches are those of all of them.
A group without a single target is skipped and counted, never divided by. And every trained parameter must
have a gradient in the first step: a parameter that silently gets none (a wrong adapter target, checkpointing
without input gradients) would be merged for days without ever having moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import nn

from yeto.errors import ConfigError, DataError
from yeto.learner.chance import Chance, accelerators, put_back_torch, torch_state
from yeto.learner.config import LearnerConfig
from yeto.learner.gradients import Gradients
from yeto.learner.island import SOLO, Island
from yeto.learner.saved import SavedLoop, SavedRank
from yeto.learner.saved_ranks import gather_ranks
from yeto.learner.sharded import in_parts_like, own, own_part, whole
from yeto.learner.stopwatch import Stopwatch
from yeto.learner.task import Batch, Task

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
"""As in the paper (arXiv 1412.6980) and in every library."""

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
    """Raw tokens of the group; like the others over all ranks."""
    learning_rate: float
    gradient_norm: float
    """Norm of the whole gradient before clipping."""


def learning_rate(step: int, config: LearnerConfig) -> float:
    """Return the rate of optimizer step ``step``, counted from 0.

    Linear warm-up over ``warmup_steps`` steps to ``inner_lr``; then constant, or a half cosine that would
    reach 0 one step after the last one planned. Local steps alone decide: merging leaves the schedule alone.
    """
    if step < config.warmup_steps:
        return config.inner_lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.inner_lr
    assert config.planned_steps is not None, "a cosine without an end is refused by the configuration"
    length = max(1, config.planned_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / length)
    return config.inner_lr * 0.5 * (1.0 + math.cos(math.pi * progress))


@frozen(kw_only=True)
class _Group:
    """An accumulation group: this rank's micro batches, and the counts of all ranks."""

    batches: list[Batch]
    targets: int
    tokens: int


class InnerLoop:
    """Takes optimizer steps; used on the training thread only."""

    def __init__(
        self,
        task: Task,
        parameters: Mapping[str, nn.Parameter],
        config: LearnerConfig,
        stopwatch: Stopwatch,
        saved: SavedLoop | None = None,
        island: Island = SOLO,
    ) -> None:
        """Make the optimizer of ``parameters``; the first batch is fetched by the first step.

        Args:
            task: what is trained.
            parameters: by canonical name; overwritten from ``saved``.
            config: how to train.
            stopwatch: told where the time goes.
            saved: go on from here, as if nothing had been between.
            island: the ranks that take each step together.

        Raises:
            ConfigError: the saved position in the rows belongs to other rows or settings.
        """
        self._task = task
        self._config = config
        self._parameters = dict(parameters)
        self._island = island
        self._gradients = Gradients(island, self._parameters)
        self._accelerators = accelerators(self._parameters.values())
        self._stopwatch = stopwatch
        self._position: Any = None if saved is None else saved.ranks[island.rank].position
        self._batches: Iterator[Batch] = task.batches(self._position)
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
        if saved is not None:
            self._restore(saved)

    def step(self, interrupted: Callable[[], bool]) -> StepResult | None:
        """Take one optimizer step.

        Args:
            interrupted: asked between micro batches; a stop must not wait for a long group. One rank that
                says yes interrupts all.

        Returns:
            What the step saw; None when it was interrupted, and then nothing has changed but the rows at
            hand: whoever goes on from saved state takes the group once more.

        Raises:
            ConfigError: a trained parameter got no gradient in the first step.
            DataError: the data has no targets.
        """
        group = self._next_group(interrupted)
        if group is None:
            return None
        with self._stopwatch.section("compute"):
            chance = torch_state(self._accelerators)
            loss_sum = self._accumulate(group, interrupted)
            if loss_sum is None:
                put_back_torch(chance, self._accelerators)
                self._optimizer.zero_grad(set_to_none=True)
                return None
            if self.steps == 0:
                self._require_gradients()
            rate = learning_rate(self.steps, self._config)
            for parameter_group in self._optimizer.param_groups:
                parameter_group["lr"] = rate
            norm = self._gradients.clip(self._config.clip_norm)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            # The one place where the host waits for the device.
            loss = float(loss_sum) / group.targets
        self.steps += 1
        self.tokens += group.tokens
        self._position = group.batches[-1].position
        return StepResult(
            loss=loss,
            targets=group.targets,
            tokens=group.tokens,
            learning_rate=rate,
            gradient_norm=float(norm),
        )

    def contribute(self) -> None:
        """Give this rank's part of what the head saves, in the order in which ``saved`` asks for it."""
        gather_ranks(self._island, self._own())
        if self._gradients.is_sharded:
            for parameter in self._parameters.values():
                whole(parameter)
            for parameter in self._parameters.values():
                for part in self._optimizer.state.get(parameter, {}).values():
                    whole(part)

    def saved(self) -> SavedLoop:
        """Return a copy, on the host, of everything that the next step depends on.

        The head of several ranks calls it while the others contribute.
        """
        states = self._optimizer.state
        return SavedLoop(
            steps=self.steps,
            tokens=self.tokens,
            empty_groups=self.empty_groups,
            ranks=gather_ranks(self._island, self._own()),
            parameters={name: _copied(parameter) for name, parameter in self._parameters.items()},
            optimizer={
                name: {word: _copied(part) for word, part in states[parameter].items()}
                for name, parameter in self._parameters.items()
                if parameter in states
            },
        )

    def _own(self) -> SavedRank:
        """What this rank alone can tell."""
        return SavedRank(position=self._position, chance=Chance.now(self._accelerators))

    def _restore(self, saved: SavedLoop) -> None:
        self.steps, self.tokens, self.empty_groups = saved.steps, saved.tokens, saved.empty_groups
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                values = torch.from_numpy(saved.parameters[name])
                own(parameter).copy_(own_part(parameter, values))
        # The optimizer's own way in knows which of its tensors belong on the device.
        self._optimizer.load_state_dict(
            {
                "state": {
                    number: {
                        word: in_parts_like(parameter, torch.from_numpy(part))
                        for word, part in saved.optimizer[name].items()
                    }
                    for number, (name, parameter) in enumerate(self._parameters.items())
                    if name in saved.optimizer
                },
                "param_groups": self._optimizer.state_dict()["param_groups"],
            }
        )
        saved.ranks[self._island.rank].chance.put_back(self._accelerators)

    def close(self) -> None:
        """Let go of the data, with the processes that may stand behind it."""
        if isinstance(self._batches, Generator):
            self._batches.close()

    def _next_group(self, interrupted: Callable[[], bool]) -> _Group | None:
        """Return the next accumulation group that has a target; None when interrupted."""
        for _ in range(EMPTY_GROUPS_MAX):
            batches: list[Batch] = []
            with self._stopwatch.section("data"):
                while len(batches) < self._config.grad_accum and not interrupted():
                    batches.append(next(self._batches))
                targets, tokens, interruptions = self._island.sum(
                    sum(batch.targets for batch in batches),
                    sum(batch.tokens for batch in batches),
                    int(len(batches) < self._config.grad_accum or interrupted()),
                )
            if interruptions:
                return None
            if targets:
                return _Group(batches=batches, targets=targets, tokens=tokens)
            self.empty_groups += 1
        raise DataError(
            f"{EMPTY_GROUPS_MAX} accumulation groups in a row have no target to learn from; "
            "check the data's masks with --mask-report 5"
        )

    def _accumulate(self, group: _Group, interrupted: Callable[[], bool]) -> torch.Tensor | None:
        """Leave the gradient of the group's token mean in the parameters; return its summed loss."""
        gradients = self._gradients
        divisor = gradients.divisor(group.targets)
        total: torch.Tensor | None = None
        for number, batch in enumerate(group.batches):
            if number and self._island.sum(int(interrupted())) != (0,):
                return None
            if batch.targets == 0 and not gradients.is_sharded:
                continue
            loss = self._task.loss(batch)
            (loss / divisor).backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        if total is None:
            # Only other ranks have targets.
            total = torch.zeros((), device=next(iter(self._parameters.values())).device)
        gradients.add_up(total)
        return total

    def _require_gradients(self) -> None:
        missing = sorted(self._gradients.missing())
        if missing:
            shown = ", ".join(missing[:NAMES_SHOWN])
            more = f" and {len(missing) - NAMES_SHOWN} more" if len(missing) > NAMES_SHOWN else ""
            raise ConfigError(
                f"{len(missing)} of {len(self._parameters)} trained parameters got no gradient in the first "
                f"step: {shown}{more}; check --lora-targets, or try --gradient-checkpointing off"
            )


def _copied(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = whole(tensor).to("cpu", copy=True).numpy()
    return array
