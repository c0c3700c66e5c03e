"""The shapes of a chat row, turned into one: a list of role/content messages and a list of tools.

The rule: a row is understood completely or refused. A role we do not know, a value of the wrong type, a row
that fits no format or several: each is an error that names file, row and message. Guessing would train on
text that nobody wrote.

Message texts are kept to the letter. Three things are made uniform, because chat templates disagree about
them and most render them as Python literals: content given as a list of text parts becomes their
concatenation, tool-call arguments given as a JSON string become the object in it, and keys that hold null,
or a list of no tool calls, are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen

from yeto.errors import DataError
from yeto.text.config import TextConfig
from yeto.tuning.rows import Row

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    **{role: role for role in ROLES},
}

Message = dict[str, Any]


@frozen(kw_only=True)
class Conversation:
    """One row, ready for a chat template."""

    messages: list[Message] = field(repr=False)
    """Each has ``role`` and a text ``content``; some have ``tool_calls`` and whatever else the row gave."""
    tools: list[Any] | None = field(default=None, repr=False)
    """JSON schemas of the tools on offer."""
    origin: str
    """The row's name in error messages."""


def chat_reader(config: TextConfig) -> Callable[[Row], Conversation]:
    """Return what turns each row of a configuration's sources into a conversation, or refuses it."""
    data_format, columns = config.data_format, config.column_roles()

    def read(row: Row) -> Conversation:
        return conversation(row.value, row.origin, data_format=data_format, columns=columns)

    return read


def conversation(
    row: Mapping[str, Any],
    origin: str,
    *,
    data_format: str = "auto",
    columns: Mapping[str, str] | None = None,
) -> Conversation:
    """Turn a row into a conversation.

    Args:
        row: column name to value.
        origin: where the row stands, for error messages.
        data_format: ``openai`` (``messages``), ``sharegpt`` (``conversations``), ``alpaca``
            (``instruction``, ``input``, ``output``), ``qa`` (``question``, ``answer``), or ``auto`` for the
            one whose columns are there.
        columns: role to column name, instead of a format.

    Raises:
        DataError: the row does not have that shape; the message names row and message.
    """
    nulls = [key for key, value in row.items() if value is None]
    row = {key: value for key, value in row.items() if value is not None}
    try:
        if columns is not None:
            messages = _from_columns(row, origin, columns)
        else:
            if data_format == "auto":
                data_format = _detect(row, origin)
            messages = _READERS[data_format](row, origin)
    except DataError as error:
        if not nulls:
            raise
        raise DataError(f"{error} ({', '.join(sorted(nulls))}: null, as good as not there)") from None
    if not messages:
        raise DataError(f"{origin}: no messages")
    return Conversation(messages=messages, tools=_tools(row, origin), origin=origin)


def _detect(row: Mapping[str, Any], origin: str) -> str:
    found = [
        name
        for name, columns in (
            ("openai", ("messages",)),
            ("sharegpt", ("conversations",)),
            ("alpaca", ("instruction", "output")),
            ("qa", ("question", "answer")),
        )
        if all(column in row for column in columns)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(f"{origin}: fits several formats ({', '.join(found)}); say which with --data-format")
    raise DataError(
        f"{origin}: columns {', '.join(sorted(row)) or '(none)'} fit no format: openai needs messages, "
        "sharegpt conversations, alpaca instruction and output, qa question and answer; for others, "
        "--columns user=…,assistant=…"
    )


def _from_columns(row: Mapping[str, Any], origin: str, columns: Mapping[str, str]) -> list[Message]:
    messages = []
    for role, column in columns.items():
        if column not in row:
            if role == "system":
                continue
            raise DataError(
                f"{origin}: no column {column!r} (--columns {role}={column}); the row has "
                f"{', '.join(sorted(row)) or 'none'}"
            )
        messages.append({"role": role, "content": _text(row[column], f"{origin}: column {column}")})
    return messages


def _from_openai(row: Mapping[str, Any], origin: str) -> list[Message]:
    raws = row.get("messages")
    if isinstance(raws, list) and all(map(_is_plain, raws)):
        # Most rows are of this kind, and nothing needs to be done to them.
        return [dict(raw) for raw in raws]
    messages = []
    for number, raw, where in _entries(row, "messages", origin):
        role = raw.get("role")
        if role not in ROLES:
            raise DataError(f"{where}: role {role!r} is not one of {', '.join(ROLES)}")
        message = {key: value for key, value in raw.items() if value is not None}
        if message.get("tool_calls") == []:
            del message["tool_calls"]
        message["content"] = _content(message.get("content"), where)
        if "tool_calls" in message:
            message["tool_calls"] = _tool_calls(message["tool_calls"], where)
        elif "content" not in raw:
            raise DataError(f"{origin}: message {number} has neither content nor tool_calls")
        if len(message) > 2:
            _require_texts(message, where)
        messages.append(message)
    return messages


def _is_plain(raw: Any) -> bool:
    """Tell whether a message is a known role and an ASCII text and nothing else."""
    return (
        type(raw) is dict
        and len(raw) == 2
        and type(content := raw.get("content")) is str
        and content.isascii()
        and raw.get("role") in ROLES
    )


def _from_sharegpt(row: Mapping[str, Any], origin: str) -> list[Message]:
    messages: list[Message] = []
    if "system" in row:
        messages.append({"role": "system", "content": _text(row["system"], f"{origin}: column system")})
    for _, raw, where in _entries(row, "conversations", origin):
        speaker = raw.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise DataError(f"{where}: from {speaker!r} is not one of {', '.join(SHAREGPT_ROLES)}")
        text = _text(raw.get("value"), where)
        if speaker == "function_call":
            calls = _json(text, where, "a function call")
            calls = _tool_calls(calls if isinstance(calls, list) else [calls], where)
            _require_texts(calls, where)
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        else:
            messages.append({"role": SHAREGPT_ROLES[speaker], "content": text})
    return messages


def _from_alpaca(row: Mapping[str, Any], origin: str) -> list[Message]:
    texts = {}
    for column in ("system", "instruction", "input", "output"):
        texts[column] = _text(row.get(column, ""), f"{origin}: column {column}")
    for column in ("instruction", "output"):
        if column not in row:
            raise DataError(f"{origin}: no column {column!r}, which alpaca rows have")
    question = texts["instruction"] + (f"\n\n{texts['input']}" if texts["input"] else "")
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return [*system, {"role": "user", "content": question}, {"role": "assistant", "content": texts["output"]}]


def _from_qa(row: Mapping[str, Any], origin: str) -> list[Message]:
    messages = []
    for role, column in (("user", "question"), ("assistant", "answer")):
        if column not in row:
            raise DataError(f"{origin}: no column {column!r}, which qa rows have")
        messages.append({"role": role, "content": _text(row[column], f"{origin}: column {column}")})
    return messages


_READERS = {"openai": _from_openai, "sharegpt": _from_sharegpt, "alpaca": _from_alpaca, "qa": _from_qa}


def _entries(row: Mapping[str, Any], column: str, origin: str) -> list[tuple[int, dict[str, Any], str]]:
    value = row.get(column)
    if not isinstance(value, list):
        raise DataError(f"{origin}: {column} is {_kind(value)}, not a list of messages")
    entries = []
    for number, raw in enumerate(value):
        if not isinstance(raw, dict):
            raise DataError(f"{origin}: message {number} is {_kind(raw)}, not an object")
        entries.append((number, raw, f"{origin}: message {number}"))
    return entries


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: text is {_kind(value)}, not a string")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: half a surrogate pair at character {error.start}, not a text"
            ) from error
    return value


def _content(value: Any, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, list):
        return _text(value, where)
    parts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise DataError(f"{where}: content part {kind!r} is not text; only text can be trained on")
        parts.append(_text(part.get("text"), where))
    return "".join(parts)


def _tool_calls(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: tool_calls is {_kind(value)}, not a list of calls")
    calls = []
    for raw in value:
        if not isinstance(raw, dict):
            raise DataError(f"{where}: a tool call is {_kind(raw)}, not an object")
        call = {"type": "function", "function": raw} if "function" not in raw and "name" in raw else dict(raw)
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: a tool call has no function with a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json(arguments or "{}", where, "tool-call arguments")
        call["function"] = {**function, "arguments": arguments}
        calls.append(call)
    return calls


def _tools(row: Mapping[str, Any], origin: str) -> list[Any] | None:
    value = row.get("tools")
    if isinstance(value, str):
        value = _json(value, f"{origin}: tools", "a list") if value.strip() else None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(
            f"{origin}: tools is {_kind(value)}, not a list of objects (or that list as JSON text)"
        )
    _require_texts(value, f"{origin}: tools")
    return value


def _json(text: str, where: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: {what} is not JSON: {error}") from error
    except RecursionError as error:
        raise _too_deep(where) from error


def _require_texts(value: Any, where: str) -> None:
    """Refuse what a template can write and no tokenizer can read, wherever it stands in a value."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half a surrogate pair in it, not a text") from error
    except RecursionError as error:
        raise _too_deep(where) from error


def _too_deep(where: str) -> DataError:
    return DataError(f"{where}: nested too deeply")


def _kind(value: Any) -> str:
    return "missing" if value is None else type(value).__name__
