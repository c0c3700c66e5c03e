import json

import pytest

from yeto.errors import DataError
from yeto.text.formats import conversation


def messages(row, **options):
    return conversation(row, "f.jsonl line 9", **options).messages


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Ho "}]


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": TURNS}, {}),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": " Ho "}]}, {}),
        ({"instruction": "Hi", "output": " Ho ", "input": ""}, {}),
        ({"instruction": "Hi", "output": " Ho "}, {"data_format": "alpaca"}),
        ({"question": "Hi", "answer": " Ho "}, {}),
        ({"question": "Hi", "answer": " Ho ", "split": "x"}, {"data_format": "qa"}),
        ({"question": "Hi", "answer": " Ho "}, {"columns": {"user": "question", "assistant": "answer"}}),
        ({"messages": TURNS, "conversations": None, "tools": None}, {}),
        ({"messages": TURNS, "conversations": []}, {"data_format": "openai"}),
    ],
)
def test_every_format_gives_the_same_messages(row, options):
    assert messages(row, **options) == TURNS


def test_alpaca_joins_instruction_and_input_and_knows_a_system_text():
    row = {"system": "Be brief.", "instruction": "Add.", "input": "1 2", "output": "3"}
    assert messages(row) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add.\n\n1 2"},
        {"role": "assistant", "content": "3"},
    ]


def test_columns_may_name_a_system_column_that_a_row_lacks():
    columns = {"system": "s", "user": "q", "assistant": "a"}
    with_system = messages({"s": "S", "q": "Q", "a": "A"}, columns=columns)
    without = messages({"s": None, "q": "Q", "a": "A"}, columns=columns)
    assert [message["role"] for message in with_system] == ["system", "user", "assistant"]
    assert without == with_system[1:]


def test_text_parts_become_one_text():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert messages({"messages": [{"role": "user", "content": parts}]})[0]["content"] == "one two"


CALL = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "raw",
    [
        {"type": "function", "function": CALL},
        {"type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}},
        CALL,
    ],
)
def test_tool_calls_have_one_shape(raw):
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [raw]}]}
    (message,) = messages(row)
    assert message["content"] == ""
    assert message["tool_calls"] == [{"type": "function", "function": CALL}]


def test_sharegpt_calls_and_observations():
    row = {
        "system": "S",
        "conversations": [
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "2"},
        ],
    }
    assert messages(row) == [
        {"role": "system", "content": "S"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": CALL}],
        },
        {"role": "tool", "content": "2"},
    ]


@pytest.mark.parametrize("given", [[{"name": "add"}], json.dumps([{"name": "add"}])])
def test_tools_as_a_list_or_as_json(given):
    assert conversation({"messages": TURNS, "tools": given}, "r").tools == [{"name": "add"}]


@pytest.mark.parametrize("given", [None, [], "", "[]", " "])
def test_no_tools(given):
    assert conversation({"messages": TURNS, "tools": given}, "r").tools is None


def test_further_keys_of_a_message_are_kept_and_null_ones_dropped():
    row = {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "y", "name": None}]}
    assert messages(row) == [{"role": "assistant", "content": "x", "reasoning_content": "y"}]


def test_a_list_of_no_calls_is_none():
    """As tables have it that fill what a row lacks."""
    row = {"messages": [TURNS[0] | {"tool_calls": []}, TURNS[1] | {"tool_calls": []}], "tools": []}
    assert messages(row) == TURNS


def turn(**change):
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"} | change]}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "a"}, "columns text fit no format"),
        ({}, r"columns \(none\) fit no format"),
        ({"messages": TURNS, "conversations": []}, "fits several formats"),
        ({"messages": []}, "no messages"),
        ({"messages": "hi"}, "messages is str, not a list"),
        ({"messages": ["hi"]}, "message 0 is str, not an object"),
        (turn(role="robot"), "message 1: role 'robot' is not one of"),
        (turn(role=None), "message 1: role None is not one of"),
        (turn(content=7), "message 1: text is int, not a string"),
        (turn(content=[{"type": "image"}]), "message 1: content part 'image' is not text"),
        (turn(content="\ud83d"), "message 1: half a surrogate pair at character 0"),
        ({"messages": [{"role": "assistant"}]}, "message 0 has neither content nor tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "message 0 has neither content nor tool_c"),
        (turn(tool_calls="[]"), "message 1: tool_calls is str, not a list of calls"),
        (turn(tool_calls=["x"]), "message 1: a tool call is str"),
        (turn(tool_calls=[{"id": "1"}]), "message 1: a tool call has no function with a name"),
        (turn(tool_calls=[{"name": "f", "arguments": "{"}]), "tool-call arguments is not JSON"),
        ({"messages": TURNS, "tools": "{"}, "tools: a list is not JSON"),
        ({"messages": TURNS, "tools": {"a": 1}}, "tools is dict, not a list"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "message 0: from 'alien' is not one of"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "message 0: from .*'human'.* is not one of"),
        ({"conversations": [{"from": "human"}]}, "message 0: text is missing"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "a function call is not JSON"),
        ({"instruction": ["a"], "output": "b"}, "column instruction: text is list"),
    ],
)
def test_what_cannot_be_understood_is_refused_by_row_and_message(row, problem):
    with pytest.raises(DataError, match=f"^f.jsonl line 9: .*{problem}|^f.jsonl line 9: {problem}"):
        messages(row)


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("row", "where"),
    [
        (turn(name=HALF), "message 1"),
        (turn(reasoning_content=HALF), "message 1"),
        (turn(tool_calls=[{"name": "add", "arguments": {"a": [{"b": HALF}]}}]), "message 1"),
        (turn(tool_calls=[{"name": "add", "arguments": json.dumps({HALF: 1})}]), "message 1"),
        (
            {"conversations": [{"from": "function_call", "value": json.dumps(CALL | {"a": HALF})}]},
            "message 0",
        ),
        ({"messages": TURNS, "tools": [{"name": "add", "description": HALF}]}, "tools"),
    ],
)
def test_half_a_character_is_refused_wherever_a_template_might_write_it(row, where):
    """Half an emoji, as texts have it that were cut by the wrong unit: no tokenizer reads it."""
    with pytest.raises(DataError, match=f"^f.jsonl line 9: {where}: half a surrogate pair in it"):
        messages(row)


@pytest.mark.parametrize(
    "row",
    [
        turn(tool_calls=[{"name": "add", "arguments": "[" * 100_000}]),
        {"conversations": [{"from": "function_call", "value": "[" * 100_000}]},
        {"messages": TURNS, "tools": "[" * 100_000},
    ],
)
def test_json_in_a_text_may_be_too_deep(row):
    with pytest.raises(DataError, match=r"^f.jsonl line 9: .*nested too deeply$"):
        messages(row)


def test_missing_columns_are_named():
    with pytest.raises(
        DataError, match=r"no column 'answer' \(--columns assistant=answer\); the row has question"
    ):
        messages({"question": "x"}, columns={"user": "question", "assistant": "answer"})
    with pytest.raises(DataError, match="no column 'answer', which qa rows have"):
        messages({"question": "x"}, data_format="qa")
    with pytest.raises(DataError, match="no column 'output', which alpaca rows have"):
        messages({"instruction": "x"}, data_format="alpaca")
