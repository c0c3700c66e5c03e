"""The tokenizer of a run: the model's own, with the chat template that the rows are written by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from yeto.errors import ConfigError
from yeto.text.config import TextConfig
from yeto.text.legacy import LEGACY_TEMPLATE
from yeto.tuning.hub import cause_of
from yeto.tuning.identity import fetched_commit


def load_tokenizer(config: TextConfig) -> Any:
    """Load the model's tokenizer; ``--chat-template`` or the legacy format replaces its template.

    It is saved beside what is trained, which has to be prompted as it was trained.

    Raises:
        ConfigError: there is no such ``--model``, its tokenizer does not load, or the template is no text.
    """
    commit = fetched_commit(config.model, config.model_revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.model,
            revision=commit or config.model_revision,
            trust_remote_code=config.trust_remote_code,
            # Code that a model brings may itself name other repositories.
            local_files_only=commit is not None and not config.trust_remote_code,
        )
    except Exception as error:
        raise ConfigError(
            f"--model {config.model}: its tokenizer does not load: {cause_of(error)}"
        ) from error
    if config.assistant_mask_mode == "legacy":
        tokenizer.chat_template = LEGACY_TEMPLATE
    elif config.chat_template is not None:
        try:
            tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--chat-template {config.chat_template}: cannot be read as UTF-8 text: {error}"
            ) from error
    return tokenizer
