"""The tokenizer of a run: the model's own, with the chat template the user chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from yeto.errors import ConfigError
from yeto.text.config import TextConfig


def load_tokenizer(config: TextConfig) -> Any:
    """Load the model's tokenizer; ``--chat-template`` replaces its template.

    Raises:
        ConfigError: ``--model`` has no tokenizer that loads.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.model, revision=config.model_revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(f"--model {config.model}: its tokenizer does not load: {cause}") from error
    if config.chat_template is not None:
        tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
    return tokenizer
