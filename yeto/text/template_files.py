"""The chat templates of a model as its files have them, for a look before any tokenizer is loaded.

The rule: only what is certain is refused. A template that says nowhere what the assistant generates would be
refused with the first row that it renders. Where no template is found, the tokenizer may have one all the
same, and each row is proved later anyway.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from yeto.errors import ConfigError
from yeto.text.config import TextConfig
from yeto.text.masks import WAYS_OUT
from yeto.text.templates import has_generation


def check_template(folder: Path, config: TextConfig) -> None:
    """Refuse templates without generation blocks, if the loss is to be taken from them.

    Args:
        folder: with the files of the model's tokenizer.
        config: says what carries loss, and which template replaces the model's own.

    Raises:
        ConfigError: no row could be trained on; names the ways out.
    """
    if config.train_on == "all" or config.assistant_mask_mode == "legacy":
        return
    if config.chat_template is not None:
        whose, found = f"--chat-template {config.chat_template}: it", _read(Path(config.chat_template))
    else:
        whose, found = f"--model {config.model}: its chat template", _templates(folder)
    if found and not any(map(has_generation, found)):
        raise ConfigError(
            f"{whose} has no {{% generation %}} blocks, which say what is trained on; {WAYS_OUT}"
        )


def _templates(folder: Path) -> list[str]:
    """Return the templates in files of their own and those in the settings, whichever will be taken."""
    files = [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]
    return _read(*files) + _stated(folder / "tokenizer_config.json")


def _stated(file: Path) -> list[str]:
    try:
        settings = [json.loads(text) for text in _read(file)]
    except ValueError:
        return []
    stated = next((one.get("chat_template") for one in settings if isinstance(one, dict)), None)
    # Several of them are a list of objects, each with its name.
    several = stated if isinstance(stated, list) else [{"template": stated}]
    texts = [one.get("template") for one in several if isinstance(one, dict)]
    return [text for text in texts if isinstance(text, str)]


def _read(*files: Path) -> list[str]:
    """Return the texts of those files that are there; whoever loads the tokenizer says what is wrong."""
    texts = []
    for file in files:
        with suppress(OSError, UnicodeDecodeError):
            texts.append(file.read_text(encoding="utf-8-sig"))
    return texts
