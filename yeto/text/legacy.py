"""The synthetic format of ``--assistant-mask-mode legacy``, for models whose template marks no replies.

Each message is a header line, its text, and a newline; tools stand in front as a system message, and BOS and
EOS around all. ``LEGACY_TEMPLATE`` writes the same text, so a model that was trained on it can be given the
template it has to be prompted with.
"""

from __future__ import annotations

import json
from typing import Any, Final

from yeto.text.formats import Conversation, Message

LEGACY_TEMPLATE: Final = (
    "{{- bos_token or '' }}"
    "{%- if tools %}{{- '<|system|>\\n' + tools | tojson(separators=(',', ':')) + '\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- set text = message.content or '' %}"
    "{%- if message.tool_calls %}"
    "{%- set text = text + '<|tool_calls|>' + message.tool_calls | tojson(separators=(',', ':')) %}"
    "{%- endif %}"
    "{{- '<|' + message.role + '|>\\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{- text + '\\n' }}{% endgeneration %}"
    "{%- else %}{{- text + '\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}"
    "{%- else %}{% generation %}{{- eos_token or '' }}{% endgeneration %}{%- endif %}"
)


def legacy_parts(conversation: Conversation) -> list[tuple[str, int]]:
    """Return (text, weight) pieces: a header line, the text, a newline for each message; no BOS, no EOS."""
    parts: list[tuple[str, int]] = []
    if conversation.tools is not None:
        parts += [("<|system|>\n", 0), (_compact(conversation.tools) + "\n", 0)]
    for message in conversation.messages:
        weight = int(message["role"] == "assistant")
        parts += [(f"<|{message['role']}|>\n", 0), (_text(message) + "\n", weight)]
    return parts


def _text(message: Message) -> str:
    text: str = message["content"]
    if "tool_calls" in message:
        text += "<|tool_calls|>" + _compact(message["tool_calls"])
    return text


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
