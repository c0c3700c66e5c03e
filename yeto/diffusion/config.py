"""Every setting of the diffusion task, as one frozen object.

Each field names its flag by replacing underscores with dashes, and what is impossible is refused at
construction, so the rest of the package works on settings it need not doubt.
"""

from __future__ import annotations

from attrs import frozen

from yeto.errors import ConfigError
from yeto.tuning.settings import require_at_least, require_choice

WEIGHTINGS = ("none", "sigma", "snr", "min-snr")
RESIZE_MODES = ("stretch", "center-crop")
SIDE_MAX = 1 << 14
"""Longest side of an image that is trained on, in pixels; longer ones are a mistake in a row or a flag."""


@frozen(kw_only=True)
class DiffusionConfig:
    """What to train on, at which size, and which parts of which pipeline to adapt."""

    model: str
    """Hugging Face id or a local folder of a diffusers pipeline."""
    model_revision: str | None = None
    trust_remote_code: bool = False

    data: str | None = None
    """File, folder, data set id or URL of rows: images or latents, prompts or their embeddings."""
    data_revision: str | None = None
    data_shard: str = "auto"
    """``auto``: row i belongs to learner i mod M; ``off``: every learner has data of its own."""
    eval_data: str | None = None
    """Held-out rows, a source as in ``data``."""
    eval_rows: int = 64
    """At most this many held-out rows are scored."""
    height: int | None = None
    """Pixels; None takes a row's own, or its image's."""
    width: int | None = None
    resize_mode: str = "center-crop"
    """``stretch`` an image to the size, or scale it to cover the size and cut what is over."""
    shuffle_buffer: int = 1024
    """Most rows that are shuffled among each other."""
    micro_batch_size: int = 1
    """Samples of one forward pass, all of one shape."""

    loss_weighting: str = "none"
    """How the error at a noise level weighs: ``none``, ``sigma``, ``snr`` or ``min-snr``."""

    tuning: str = "lora"
    """Only ``lora``."""
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
        require_choice("--resize-mode", self.resize_mode, RESIZE_MODES)
        require_choice("--diffusion-loss-weighting", self.loss_weighting, WEIGHTINGS)
        require_choice("--tuning", self.tuning, ("lora", "full"))
        require_choice("--base-dtype", self.base_dtype, ("auto", "f32", "bf16"))
        require_choice("--gradient-checkpointing", self.gradient_checkpointing, ("auto", "on", "off"))
        require_at_least("--eval-rows", self.eval_rows, 1)
        require_at_least("--shuffle-buffer", self.shuffle_buffer, 1)
        require_at_least("--micro-batch-size", self.micro_batch_size, 1)
        require_at_least("--lora-r", self.lora_r, 1)
        require_at_least("--lora-alpha", self.lora_alpha, 1)
        require_at_least("--seed", self.seed, 0)
        require_at_least("--num-learners", self.num_learners, 1)
        for flag, pixels in (("--height", self.height), ("--width", self.width)):
            if pixels is not None and not 1 <= pixels <= SIDE_MAX:
                raise ConfigError(f"{flag} {pixels} must be from 1 to {SIDE_MAX}")
        if self.tuning == "full":
            raise ConfigError("--tuning full is for --task text; --task diffusion trains adapters: say lora")
        if not self.model:
            raise ConfigError("--model is empty; give a Hugging Face id or a folder of a diffusers pipeline")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ConfigError(f"--lora-dropout {self.lora_dropout} must be in [0, 1)")
        if not 0 <= self.learner_id < self.num_learners:
            raise ConfigError(
                f"--learner-id {self.learner_id} is out of range: --num-learners {self.num_learners} "
                f"allows 0 to {self.num_learners - 1}"
            )
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"rank {self.rank} is out of range for {self.num_ranks} ranks")
