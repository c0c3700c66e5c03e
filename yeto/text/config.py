"""Every setting of the causal-LM task, as one frozen object.

The command line, a TOML file and the environment all end here; nothing below this object reads flags.
Each field names its flag by replacing underscores with dashes (``seq_len`` is ``--seq-len``), and what is
impossible is refused at construction, so the rest of the package works on settings it need not doubt.
"""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from yeto.errors import ConfigError
from yeto.tuning.settings import require_at_least, require_choice

ROLES_FOR_COLUMNS = ("system", "user", "assistant")
"""Roles that ``--columns`` can name, in the order in which the messages are built."""


@frozen(kw_only=True)
class TextConfig:
    """What to train on, how to turn it into blocks, and which parameters of which model to train."""

    model: str
    """Hugging Face id or a local model folder."""
    model_revision: str | None = None
    trust_remote_code: bool = False

    data: str | None = None
    """Hugging Face data set id, file, folder, ``save_to_disk`` folder, or an fsspec URL."""
    data_revision: str | None = None
    data_format: str = "auto"
    """``auto``, ``openai``, ``sharegpt``, ``alpaca`` or ``qa`` (question and answer columns)."""
    columns: str | None = None
    """``user=question,assistant=answer``: roles taken from columns, instead of ``data_format``."""
    data_shard: str = "auto"
    """``auto``: row i belongs to learner i mod M; ``off``: every learner has data of its own."""
    eval_data: str | None = None
    """Held-out rows, a source as in ``data``, read with the same format, template and mask."""
    eval_rows: int = 64
    """At most this many held-out rows are scored."""

    train_on: str = "assistant"
    """``assistant``: replies carry loss; ``all``: every token of the templated text does."""
    assistant_mask_mode: str = "native"
    """``native``: the template's generation blocks; ``legacy``: the synthetic ``<|role|>`` format."""
    chat_template: str | None = None
    """File with a chat template that replaces the tokenizer's own."""
    mask_report: int = 0
    """Print this many rows with the supervised tokens marked before training starts."""

    seq_len: int = 2048
    micro_batch_size: int | None = None
    """Blocks of one forward pass; ``None`` (``auto``) probes on CUDA and takes 1 on CPU."""
    packing: str = "documents"
    """``documents``: own positions and an attention boundary each; ``plain``: neither."""
    tokenize: str = "stream"
    """``stream``: tokenize while training; ``preload``: everything up front."""
    stream_workers: int = 2
    shuffle_buffer: int = 1024
    """Most blocks held for shuffling by one stream."""

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
    compile: str = "off"
    """``on``: train through torch.compile."""
    device: str = "auto"
    shard: str = "ddp"
    """With several ranks: ``ddp`` holds the whole model on each, ``fsdp`` a part of every tensor."""

    seed: int = 0
    learner_id: int = 0
    num_learners: int = 1
    rank: int = 0
    """This process's rank inside its island."""
    num_ranks: int = 1

    def __attrs_post_init__(self) -> None:
        require_choice("--data-format", self.data_format, ("auto", "openai", "sharegpt", "alpaca", "qa"))
        require_choice("--data-shard", self.data_shard, ("auto", "off"))
        require_choice("--train-on", self.train_on, ("assistant", "all"))
        require_choice("--assistant-mask-mode", self.assistant_mask_mode, ("native", "legacy"))
        require_choice("--packing", self.packing, ("documents", "plain"))
        require_choice("--tokenize", self.tokenize, ("stream", "preload"))
        require_choice("--tuning", self.tuning, ("lora", "full"))
        require_choice("--base-dtype", self.base_dtype, ("auto", "f32", "bf16"))
        require_choice("--shard", self.shard, ("ddp", "fsdp"))
        require_choice("--compile", self.compile, ("off", "on"))
        require_choice("--gradient-checkpointing", self.gradient_checkpointing, ("auto", "on", "off"))
        require_at_least("--seq-len", self.seq_len, 2)
        require_at_least(
            "--micro-batch-size", 1 if self.micro_batch_size is None else self.micro_batch_size, 1
        )
        require_at_least("--stream-workers", self.stream_workers, 0)
        require_at_least("--shuffle-buffer", self.shuffle_buffer, 1)
        require_at_least("--eval-rows", self.eval_rows, 1)
        require_at_least("--mask-report", self.mask_report, 0)
        require_at_least("--lora-r", self.lora_r, 1)
        require_at_least("--lora-alpha", self.lora_alpha, 1)
        require_at_least("--seed", self.seed, 0)
        require_at_least("--num-learners", self.num_learners, 1)
        if not self.model:
            raise ConfigError("--model is empty; give a Hugging Face id or a model folder")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ConfigError(f"--lora-dropout {self.lora_dropout} must be in [0, 1)")
        if not 0 <= self.learner_id < self.num_learners:
            raise ConfigError(
                f"--learner-id {self.learner_id} is out of range: --num-learners {self.num_learners} "
                f"allows 0 to {self.num_learners - 1}"
            )
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"rank {self.rank} is out of range for {self.num_ranks} ranks")
        if self.columns is not None and self.data_format != "auto":
            raise ConfigError("--columns and --data-format exclude each other; drop one of them")
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ConfigError(f"--chat-template {self.chat_template}: no such file")
        self.column_roles()

    @property
    def is_compiled(self) -> bool:
        """Whether training goes through torch.compile."""
        return self.compile == "on"

    @property
    def is_sharded(self) -> bool:
        """Whether the model is held in parts."""
        return self.shard == "fsdp" and self.num_ranks > 1

    def column_roles(self) -> dict[str, str] | None:
        """Return ``--columns`` as a mapping from role to column name, or ``None`` when it is not set.

        Raises:
            ConfigError: a part is not ``role=column``, a role is unknown or named twice, or user or
                assistant is missing.
        """
        if self.columns is None:
            return None
        roles: dict[str, str] = {}
        for part in self.columns.split(","):
            role, equals, column = (piece.strip() for piece in part.partition("="))
            if not equals or not column or role not in ROLES_FOR_COLUMNS or role in roles:
                raise ConfigError(
                    f"--columns {self.columns!r}: {part.strip()!r} is not one of system=COLUMN, user=COLUMN, "
                    "assistant=COLUMN, each at most once"
                )
            roles[role] = column
        if "user" not in roles or "assistant" not in roles:
            raise ConfigError(f"--columns {self.columns!r} must name both user=COLUMN and assistant=COLUMN")
        return {role: roles[role] for role in ROLES_FOR_COLUMNS if role in roles}
