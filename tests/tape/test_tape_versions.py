"""Old tapes open for ever: each is proved by its own rules and read by its own format."""

import json

import attrs
import pytest
from recorded_run import record, record_with_restart
from tape_lines import summed_all

from yeto.core import initial_state, step
from yeto.core.decisions import Decision, MergeOrdered
from yeto.errors import TapeError
from yeto.tape import (
    FORMAT_VERSION,
    RULES_VERSION,
    Decoder,
    Header,
    Summary,
    TapeWriter,
    encode,
    find_restarts,
    read,
    replay,
)
from yeto.tape.rules import RULES, UPCASTS, Rules


def always_plain(state, event):
    """The second version: every merge is a plain average."""
    state, decisions = step(state, event)
    return state, tuple(
        attrs.evolve(decision, plain_average=True) if isinstance(decision, MergeOrdered) else decision
        for decision in decisions
    )


@pytest.fixture
def second(monkeypatch):
    """Register a second version of the rules for the length of a test."""
    monkeypatch.setitem(RULES, 2, Rules(initial_state=initial_state, step=always_plain))


@pytest.fixture
def first_tape(tmp_path):
    path = tmp_path / "first.jsonl"
    record_with_restart(path)
    return path


def retold(path, version, rules):
    """Write the events of a tape as these rules would have had it, under a header that names ``version``."""
    header, *records = read(path)
    lines = [encode(seq=0, at=0.0, body=attrs.evolve(header.body, rules_version=version))]
    state = rules.initial_state(header.body.config)
    for event in (entry.body for entry in records if not isinstance(entry.body, Decision)):
        state, decisions = rules.step(state, event)
        because = len(lines)
        lines.append(encode(seq=because, at=event.at, body=event))
        lines += [
            encode(seq=because + place, at=event.at, body=decision, because=because)
            for place, decision in enumerate(decisions, 1)
        ]
    path = path.with_name(f"rules-{version}.jsonl")
    path.write_bytes(b"".join(lines))
    return path


def test_what_is_written_has_the_newest_versions():
    assert max(RULES) == RULES_VERSION
    assert max(UPCASTS) == FORMAT_VERSION
    assert UPCASTS[FORMAT_VERSION] is None
    # No version is ever dropped.
    assert sorted(RULES) == list(range(1, RULES_VERSION + 1))
    assert sorted(UPCASTS) == list(range(1, FORMAT_VERSION + 1))


def test_each_tape_is_replayed_by_the_rules_that_its_header_names(first_tape, second):
    newer = retold(first_tape, 2, RULES[2])
    assert newer.read_bytes() != first_tape.read_bytes()
    for path, version in ((first_tape, 1), (newer, 2)):
        result = replay(path)
        assert (result.header.rules_version, result.divergence) == (version, None)
    assert replay(newer).state == replay(first_tape).state


def test_the_rules_of_another_version_do_not_prove_a_tape(first_tape, second):
    for version, rules in ((1, RULES[2]), (2, RULES[1])):
        divergence = replay(retold(first_tape, version, rules)).divergence
        assert isinstance(divergence.recorded, MergeOrdered)
        assert [name for name, _, _ in divergence.fields()] == ["plain_average"]
    # Whoever asks what other rules would have done says so.
    assert replay(first_tape, step=always_plain).divergence is not None


def test_a_version_that_is_not_known_yet_is_named(first_tape, second):
    content = first_tape.read_bytes().replace(b'"rules_version":1', b'"rules_version":3', 1)
    first_tape.write_bytes(summed_all(content))
    with pytest.raises(TapeError, match="rules_version 3 is newer than 2"):
        replay(first_tape)


def spoken_otherwise(line):
    """Return a line as an older format would have it: no checksum, another kind, other names of fields."""
    fields = json.loads(line)
    del fields["crc"]
    if fields["kind"] == "header":
        fields["format_version"] = 1
    if fields["kind"] == "push_received":
        fields["kind"] = "push_came"
        fields["bytes"] = fields.pop("payload_bytes")
    elif fields["kind"] == "session_resumed":
        del fields["finish_target"]
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def present(fields):
    """Turn a line of that older format into the present one."""
    if fields["kind"] == "push_came":
        return {**{k: v for k, v in fields.items() if k != "bytes"},
                "kind": "push_received", "payload_bytes": fields["bytes"]}  # fmt: skip
    if fields["kind"] == "session_resumed":
        return {**fields, "finish_target": None}
    return fields


def test_a_tape_of_an_older_format_is_read_as_the_present_one(first_tape, monkeypatch):
    (header, *expected), state = read(first_tape), replay(first_tape).state
    old = first_tape.with_name("old.jsonl")
    old.write_bytes(b"".join(map(spoken_otherwise, first_tape.read_bytes().splitlines())))
    with pytest.raises(TapeError, match='field kind: "push_came"'):
        replay(old)
    monkeypatch.setitem(UPCASTS, 1, present)
    old_header, *rest = read(old)
    assert rest == expected
    assert old_header.body == attrs.evolve(header.body, format_version=1)
    result = replay(old)
    assert (result.divergence, result.state) == (None, state)
    # Restarts are found by a pass that does not decode every line.
    assert [restart.step for restart in find_restarts(old)] == [2]
    summary = Summary(find_restarts(old))
    for entry in read(old):
        summary.feed(entry)
    assert summary.superseded == 2


def test_a_present_tape_is_not_turned(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    record(path)
    expected = list(read(path))
    monkeypatch.setitem(UPCASTS, 1, present)
    assert list(read(path)) == expected


def in_format_1(line):
    """Return a line of ours as format 1 has it."""
    return line[:-19].replace(b'"format_version":3', b'"format_version":1') + b"}\n"


def test_a_tape_of_format_1_has_no_checksums_and_is_read_the_quick_way(first_tape, monkeypatch):
    (header, *expected), state = read(first_tape), replay(first_tape).state
    old = first_tape.with_name("old.jsonl")
    old.write_bytes(b"".join(map(in_format_1, first_tape.read_bytes().splitlines(keepends=True))))
    decode, thoroughly = Decoder._decode, []
    monkeypatch.setattr(Decoder, "_decode", lambda *words: thoroughly.append(words) or decode(*words))
    old_header, *rest = read(old)
    assert len(thoroughly) == 1  # the header
    assert rest == expected
    assert old_header.body == attrs.evolve(header.body, format_version=1)
    result = replay(old)
    assert (result.divergence, result.state) == (None, state)
    assert find_restarts(old) == find_restarts(first_tape)


OTHERS = {
    "format 1": (
        "format 1 and rules 1",
        lambda content: b"".join(map(in_format_1, content.splitlines(True))),
    ),
    "newer rules": (
        "format 3 and rules 2",
        lambda content: summed_all(content.replace(b'"rules_version":1', b'"rules_version":2', 1)),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_appended_to_a_tape_of_another_version(first_tape, second, name):
    has, turn = OTHERS[name]
    original = first_tape.read_bytes()
    first_tape.write_bytes(content := turn(original))
    with pytest.raises(
        TapeError,
        match=rf"has {has}, this Yeto writes format 3 by rules 1; name a new tape.*--event-tape",
    ):
        TapeWriter.resume(first_tape)
    assert first_tape.read_bytes() == content
    # Its lock was given back.
    first_tape.write_bytes(original)
    writer, tail = TapeWriter.resume(first_tape)
    writer.close()
    assert isinstance(tail.header, Header)
