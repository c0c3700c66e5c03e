"""The settings that every task has: which model, which rows, which adapters, and whose share.

A task's own settings go on from these. Each field names its flag by replacing underscores with dashes
(``lora_r`` is ``--lora-r``), and what is impossible is refused at construction, so the rest of the package
works on settings it need not doubt.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from yeto.errors import ConfigError
from yeto.tuning.settings import require_at_least, require_choice


@frozen(kw_only=True)
class TuningConfig:
    """What to train on, and which parts of which model."""

    model_folder: ClassVar[str] = "a model folder"
    """What a folder that ``--model`` names is, for messages."""

    model: str
    """Hugging Face id, or a local folder."""
    model_revision: str | None = None
    trust_remote_code: bool = False

    data: str | None = None
    """Hugging Face data set id, file, folder, ``save_to_disk`` folder, or an fsspec URL."""
    data_revision: str | None = None
    data_shard: str = "auto"
    """``auto``: row i belongs to learner i mod M; ``off``: every learner has data of its own."""
    eval_data: str | None = None
    """Held-out rows, a source as in ``data``, read in the same way."""
    eval_rows: int = 64
    """At most this many held-out rows are scored."""
    shuffle_buffer: int = 1024
    """Most blocks (rows, for diffusion) that are shuffled among each other."""

    tuning: str = "lora"
    """``lora`` or ``full``."""
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_targets: str = "auto"
    """``auto``, ``attention``, ``all-linear`` or a comma-separated list of module names."""
    base_dtype: str = "auto"
    """Frozen weights: ``f32``, ``bf16``, or ``auto`` (bf16 on accelerators, f32 on CPU)."""
    gradient_checkpointing: str = "auto"
    """``on``, ``off``, or ``auto`` (on with an accelerator)."""
    device: str = "auto"

    seed: int = 0
    learner_id: int = 0
    num_learners: int = 1
    rank: int = 0
    """This process's rank inside its island."""
    num_ranks: int = 1

    def __attrs_post_init__(self) -> None:
        require_choice("--data-shard", self.data_shard, ("auto", "off"))
        require_choice("--tuning", self.tuning, ("lora", "full"))
        require_choice("--base-dtype", self.base_dtype, ("auto", "f32", "bf16"))
        require_choice("--gradient-checkpointing", self.gradient_checkpointing, ("auto", "on", "off"))
        require_at_least("--eval-rows", self.eval_rows, 1)
        require_at_least("--shuffle-buffer", self.shuffle_buffer, 1)
        require_at_least("--lora-r", self.lora_r, 1)
        require_at_least("--lora-alpha", self.lora_alpha, 1)
        require_at_least("--seed", self.seed, 0)
        require_at_least("--num-learners", self.num_learners, 1)
        if not self.model:
            raise ConfigError(f"--model is empty; give a Hugging Face id or {self.model_folder}")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ConfigError(f"--lora-dropout {self.lora_dropout} must be in [0, 1)")
        if not 0 <= self.learner_id < self.num_learners:
            raise ConfigError(
                f"--learner-id {self.learner_id} is out of range: --num-learners {self.num_learners} "
                f"allows 0 to {self.num_learners - 1}"
            )
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"rank {self.rank} is out of range for {self.num_ranks} ranks")
