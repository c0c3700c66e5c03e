"""Whether a model can be trained on an island: what one accelerator and one machine have to hold.

The rule: an estimate that is printed with its terms, so that a person can disagree with one of them. Weights
and optimizer are divided among the island's accelerators (``--shard fsdp``), activations are not.
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from yeto.errors import ConfigError
from yeto.fleet.gpus import Gpu
from yeto.fleet.models import BF16_BYTES, ModelSize

NODES_MAX = 8
"""Most machines of an island."""
USABLE = 0.92
"""Share of an accelerator's memory that can be used; the rest is lost to fragments and the driver."""
FIXED_GB = 2.0
"""Context, libraries and communication buffers of one process."""
ACTIVATIONS_GB = 6.0
"""Of one sequence of 2048 tokens at a hidden size of 4096."""
ACTIVATIONS_SEQ_LEN = 2048
ACTIVATIONS_HIDDEN = 4096
FULL_FACTOR = 8.0
"""Full tuning: 16 bytes a parameter (f32 master, gradient, two moments) for the 2 of its bf16 weight."""
FIGURE_MAX = 1 << 20
"""Of rank, tokens, rows and hidden size."""
F32_BYTES = 4
HOST_COPIES = 4
"""f32 copies of what is trained on an island's head: anchors, waiting broadcasts, snapshots, final cut."""
HEAD_COPIES = 5
"""f32 copies on the syncer's machine: parameters, momentum, the version before, an encoded broadcast."""


@frozen(kw_only=True)
class Training:
    """What is trained, and how: all that memory depends on."""

    model: ModelSize
    tuning: Literal["lora", "full"] = "lora"
    lora_r: int = 16
    seq_len: int = ACTIVATIONS_SEQ_LEN
    micro_batch_size: int = 1

    def validated(self) -> Training:
        """Return self.

        Raises:
            ConfigError: a figure is out of range.
        """
        for flag, value in (
            ("--lora-r", self.lora_r),
            ("--seq-len", self.seq_len),
            ("--micro-batch-size", self.micro_batch_size),
            ("--hidden-size", self.hidden_size),
        ):
            if not 1 <= value <= FIGURE_MAX:
                raise ConfigError(f"{flag} {value}: must be from 1 to {FIGURE_MAX:,}")
        return self

    @property
    def hidden_size(self) -> int:
        """The model's; where nobody said it, that of the reference."""
        return ACTIVATIONS_HIDDEN if self.model.hidden_size is None else self.model.hidden_size

    @property
    def trained_parameters(self) -> float:
        """Parameters that are trained.

        An adapter of rank r on a square matrix of the hidden size h has 2 r / h of its parameters. Experts
        get none, so of a mixture of experts the active weights count.
        """
        if self.tuning == "full":
            return self.model.weights_gb * 1e9 / BF16_BYTES
        share = min(1.0, 2 * self.lora_r / self.hidden_size)
        return self.model.active_gb * 1e9 / BF16_BYTES * share

    @property
    def factor(self) -> float:
        """Bytes for weights and optimizer, in units of the bf16 weights."""
        if self.tuning == "full":
            return FULL_FACTOR
        all_parameters = self.model.weights_gb * 1e9 / BF16_BYTES
        return 1.0 + FULL_FACTOR * self.trained_parameters / all_parameters

    @property
    def activations_gb(self) -> float:
        """Memory that one accelerator needs for activations."""
        return (
            ACTIVATIONS_GB
            * (self.seq_len / ACTIVATIONS_SEQ_LEN)
            * (self.hidden_size / ACTIVATIONS_HIDDEN)
            * self.micro_batch_size
        )

    def need_gb(self, gpus: int) -> float:
        """Return what each accelerator of an island of so many has to hold."""
        return self.model.weights_gb / gpus * self.factor + FIXED_GB + self.activations_gb

    def smallest_nodes(self, count: int, gpu: Gpu) -> int | None:
        """Return how many machines of ``count`` accelerators it takes; None if the most do not do."""
        nodes = range(1, NODES_MAX + 1)
        return next((one for one in nodes if self.need_gb(one * count) <= limit_gb(gpu)), None)

    def arithmetic(self, gpus: int, gpu: Gpu) -> str:
        """Return the comparison of need and limit for people, with every term of the need."""
        need, limit = self.need_gb(gpus), limit_gb(gpu)
        sign = "<=" if need <= limit else ">"
        return (
            f"{_figure(self.model.weights_gb)} / {gpus} * {self.factor:.3f} + {FIXED_GB:g} + "
            f"{_figure(self.activations_gb)} = {_figure(need)} GB a GPU {sign} {_figure(limit)} "
            f"({USABLE:.0%} of {gpu.memory_gb:g})"
        )

    @property
    def formula(self) -> str:
        """What the terms of ``arithmetic`` stand for."""
        factor = (
            f"{FULL_FACTOR:g} (f32 master, gradient and two moments)"
            if self.tuning == "full"
            else f"{self.factor:.3f} (1 and the optimizer of rank {self.lora_r} adapters)"
        )
        return (
            f"weights {_figure(self.model.weights_gb)} GB / GPUs * {factor} + {FIXED_GB:g} GB + "
            f"{ACTIVATIONS_GB:g} GB * {self.seq_len}/{ACTIVATIONS_SEQ_LEN} tokens * "
            f"{self.hidden_size}/{ACTIVATIONS_HIDDEN} hidden * {self.micro_batch_size} rows"
        )

    @property
    def host_memory_gb(self) -> float:
        """Main memory of an island's first machine for what it exchanges with a syncer, anchors foremost."""
        return HOST_COPIES * F32_BYTES * self.trained_parameters / 1e9

    def head_memory_gb(self, islands: int) -> float:
        """Return the main memory that the syncer's machine needs: its own copies, a push of every island."""
        return (HEAD_COPIES + islands) * F32_BYTES * self.trained_parameters / 1e9


def limit_gb(gpu: Gpu) -> float:
    """Return the memory of an accelerator that can be used."""
    return USABLE * gpu.memory_gb


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"
