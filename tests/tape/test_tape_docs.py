"""docs/TAPE.md against the code: every kind, every field, and examples that are real lines."""

import ast
import inspect
import re
from pathlib import Path

import attrs
import pytest

from yeto.core.config import CoreConfig
from yeto.core.decisions import DECISIONS
from yeto.core.events import EVENTS, Heartbeat
from yeto.core.values import (
    FragmentMark,
    FragmentVersionRef,
    LedgerEntry,
    Member,
    OuterMark,
    Responder,
    SessionTerms,
    Weighted,
)
from yeto.tape import Decoder, Header, encode

PAGE = (Path(__file__).parents[2] / "docs" / "TAPE.md").read_text(encoding="utf-8")
# Heading -> text up to the next heading of whatever level.
SECTIONS = dict(re.findall(r"^#+ (.+)\n((?:(?!^#+ ).*\n)*)", PAGE, re.MULTILINE))
KINDS = {**EVENTS, **DECISIONS}
VALUES = [Member, SessionTerms, FragmentMark, OuterMark, FragmentVersionRef, LedgerEntry, Weighted, Responder]


def fields(cls):
    return [field.name for field in attrs.fields(cls)]


def example(section):
    (line,) = re.findall(r"```json\n(.*)\n```", section)
    return line.encode("ascii") + b"\n"


def test_kinds_stand_in_the_order_of_the_code():
    assert re.findall(r"^### `(\w+)`$", PAGE, re.MULTILINE) == list(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_kind_is_explained(kind):
    section = SECTIONS[f"`{kind}`"].split("```json")[0]
    own = [name for name in fields(KINDS[kind]) if name not in ("at", "why")]
    listed = [
        name
        for line in re.findall(r"^- (.*?): ", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", line)
    ]
    assert sorted(listed) == sorted(own)


def reasons(kind):
    """Return what the note below a decision's ``reason`` field lists."""
    source = Path(inspect.getfile(DECISIONS[kind])).read_text(encoding="utf-8")
    (cls,) = [
        node for node in ast.parse(source).body if getattr(node, "name", "") == DECISIONS[kind].__name__
    ]
    fields = [getattr(getattr(node, "target", None), "id", "") for node in cls.body]
    return re.findall(r"``(\w+)``", cls.body[fields.index("reason") + 1].value.value)


@pytest.mark.parametrize("kind", ["learner_refused", "push_refused", "attempt_discarded"])
def test_every_reason_is_named(kind):
    (listed,) = re.findall(r"^- `reason`: (.*)$", SECTIONS[f"`{kind}`"], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(set(reasons(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_a_kind_is_a_line_as_the_writer_writes_it(kind):
    line = example(SECTIONS[f"`{kind}`"])
    decoder = Decoder("docs/TAPE.md", line=int(re.match(rb'{"seq":(\d+)', line)[1]))
    if kind in DECISIONS:
        decoder = Decoder("docs/TAPE.md", line=decoder.line - 1)
        event = Heartbeat(at=412.250113, learner=0, generation="", local_step=1)
        decoder.decode(encode(seq=decoder.line, at=event.at, body=event))
    record = decoder.decode(line)
    assert record.kind == kind
    assert encode(seq=record.seq, at=record.at, body=record.body, because=record.because) == line


def test_the_header_is_explained_with_a_real_line():
    section = SECTIONS["Header"]
    assert re.findall(r"^- `(\w+)`: ", section, re.MULTILINE) == fields(Header)
    line = example(section)
    record = Decoder("docs/TAPE.md").decode(line)
    assert encode(seq=0, at=0.0, body=record.body) == line


def test_every_field_of_nested_values_and_settings_is_named():
    listed = set(re.findall(r"`(\w+)`", SECTIONS["Values"]))
    assert listed >= {name for cls in VALUES for name in fields(cls)}
    assert set(re.findall(r"`(\w+)`", SECTIONS["Settings"])) >= set(fields(CoreConfig))


def test_durable_decisions_are_named():
    named = set(re.findall(r"`(\w+)`", SECTIONS["What is durable when"]))
    assert named & set(DECISIONS) == {kind for kind, cls in DECISIONS.items() if cls.durable}
