"""The settings of the causal-LM task beyond those of every task, as one frozen object.

The command line, a TOML file and the environment all end here; nothing below this object reads flags.
"""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from yeto.errors import ConfigError
from yeto.tuning.config import TuningConfig
from yeto.tuning.settings import require_at_least, require_choice

ROLES_FOR_COLUMNS = ("system", "user", "assistant")
"""Roles that ``--columns`` can name, in the order in which the messages are built."""


@frozen(kw_only=True)
class TextConfig(TuningConfig):
    """What to train on, how to turn it into blocks, and which parameters of which model to train."""

    data_format: str = "auto"
    """``auto``, ``openai``, ``sharegpt``, ``alpaca`` or ``qa`` (question and answer columns)."""
    columns: str | None = None
    """``user=question,assistant=answer``: roles taken from columns, instead of ``data_format``."""
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

    compile: str = "off"
    """``on``: train through torch.compile."""
    shard: str = "ddp"
    """With several ranks: ``ddp`` holds the whole model on each, ``fsdp`` a part of every tensor."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        require_choice("--data-format", self.data_format, ("auto", "openai", "sharegpt", "alpaca", "qa"))
        require_choice("--train-on", self.train_on, ("assistant", "all"))
        require_choice("--assistant-mask-mode", self.assistant_mask_mode, ("native", "legacy"))
        require_choice("--packing", self.packing, ("documents", "plain"))
        require_choice("--tokenize", self.tokenize, ("stream", "preload"))
        require_choice("--shard", self.shard, ("ddp", "fsdp"))
        require_choice("--compile", self.compile, ("off", "on"))
        require_at_least("--seq-len", self.seq_len, 2)
        require_at_least(
            "--micro-batch-size", 1 if self.micro_batch_size is None else self.micro_batch_size, 1
        )
        require_at_least("--stream-workers", self.stream_workers, 0)
        require_at_least("--mask-report", self.mask_report, 0)
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

    @property
    def replaces_template(self) -> bool:
        """Whether the rows are written by another chat template than the model's."""
        return self.chat_template is not None or self.assistant_mask_mode == "legacy"

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
