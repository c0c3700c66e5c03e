"""The worked examples of docs/PROTOCOL.md are what the code produces, and none is missing."""

import json
import re
from pathlib import Path

import pytest
from wire_examples import BINDING, MANIFEST

from yeto.wire import MessageType, legality
from yeto.wire.contract import canonical_json

DOC = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text(encoding="utf-8")


def examples():
    blocks = re.findall(r"^```hex (\w+)\n(.*?)^```$", DOC, flags=re.MULTILINE | re.DOTALL)
    return {name: [line.split()[0] for line in body.splitlines()] for name, body in blocks}


def test_every_message_has_an_example_and_no_other_has():
    assert sorted(examples()) == sorted(kind.name for kind in MessageType)


@pytest.mark.parametrize("name", [kind.name for kind in MessageType])
def test_example_is_the_recorded_frame(name, fixtures):
    """The recorded frames are compared with the code's own bytes in test_messages."""
    recorded = json.loads((fixtures / "wire" / "messages.json").read_text(encoding="utf-8"))
    assert examples()[name] == recorded[name]


def test_every_message_is_in_the_table():
    rows = dict(re.findall(r"^\| (\d+) \| ([A-Z_]+) \| (?:L to S|S to L|both) \|", DOC, flags=re.MULTILINE))
    assert {int(number): name for number, name in rows.items()} == {int(k): k.name for k in MessageType}


def test_texts_of_manifest_and_contract():
    assert MANIFEST.encode().decode() in DOC
    assert canonical_json(BINDING).decode() in DOC


@pytest.mark.parametrize(
    "limit",
    [legality.HELLO_BYTES_MAX, legality.MANIFEST_BYTES_MAX, legality.ERROR_BYTES_MAX, legality.SLICE_BYTES],
)
def test_limits_are_told(limit):
    assert f"{limit:,}" in DOC
