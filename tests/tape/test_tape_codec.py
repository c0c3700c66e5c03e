"""Lines: exact bytes, there and back for every kind, and everything that is refused.

``PUSH`` and ``OPENED`` are without checksum, as on a tape of format 1.
"""

import re
import typing
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from tape_lines import summed
from tape_values import CLASSES, bodies

from yeto.core.config import CoreConfig
from yeto.core.decisions import AttemptOpened, Decision
from yeto.core.events import Heartbeat, LearnerLeft, MergeFinished, PushReceived, StopRequested
from yeto.core.later import later_fields
from yeto.core.values import Member
from yeto.errors import TapeError
from yeto.tape import FORMAT_VERSION, RULES_VERSION, Decoder, Header, Record, encode, round_at
from yeto.tape.rules import UPCASTS

CONFIG = CoreConfig(num_learners=2, total_steps=4, quorum=2, wait_for=2)
HEADER = encode(
    seq=0,
    at=0.0,
    body=Header(
        software_version="0.1.0",
        wall_clock="2026-01-02T03:04:05+00:00",
        session_id="5e551011",
        config=CONFIG,
    ),
)
PUSH = (
    b'{"seq":1,"at":2.5,"kind":"push_received","learner":1,"generation":"00000000000000b1","fragment":0,'
    b'"step":1,"attempt":1,"payload_bytes":64,"digest":"d1","finite":true,"norm":0.25,'
    b'"cosine_to_momentum":null}\n'
)
OPENED = (
    b'{"seq":2,"at":2.5,"kind":"attempt_opened","because":1,"why":"round 1 may open","step":1,"fragment":0,'
    b'"attempt":1,"members":[{"learner":0,"generation":"a0"},{"learner":1,"generation":"b1"}],"quorum":2,'
    b'"base_version":0,"deadline":902.5,"sweep":false}\n'
)


def without_sum(line):
    """Return a line of ours as format 1 has it."""
    return line[:-19].replace(b'"format_version":3', b'"format_version":1') + b"}\n"


def decode_all(*lines):
    decoder = Decoder("run.jsonl")
    return [decoder.decode(line) for line in lines]


def test_lines_are_flat_ascii_json_with_keys_in_class_order():
    push = PushReceived(
        at=2.5,
        learner=1,
        generation="00000000000000b1",
        fragment=0,
        step=1,
        attempt=1,
        payload_bytes=64,
        digest="d1",
        finite=True,
        norm=0.25,
        cosine_to_momentum=None,
    )
    opened = AttemptOpened(
        why="round 1 may open",
        step=1,
        fragment=0,
        attempt=1,
        members=(Member(learner=0, generation="a0"), Member(learner=1, generation="b1")),
        quorum=2,
        base_version=0,
        deadline=902.5,
        sweep=False,
    )
    # The checksums were computed by another program: gzip.
    lines = (PUSH[:-2] + b',"crc":"85a0eb75"}\n', OPENED[:-2] + b',"crc":"078173b6"}\n')
    assert encode(seq=1, at=2.5, body=push) == lines[0]
    assert encode(seq=2, at=2.5, body=opened, because=1) == lines[1]
    records = [
        Record(seq=1, at=2.5, kind="push_received", because=None, body=push),
        Record(seq=2, at=2.5, kind="attempt_opened", because=1, body=opened),
    ]
    assert decode_all(HEADER, *lines)[1:] == records
    assert decode_all(without_sum(HEADER), PUSH, OPENED)[1:] == records


def test_the_header_is_line_one_and_holds_every_setting():
    assert HEADER.startswith(b'{"seq":0,"at":0.0,"kind":"header","format_version":3,"rules_version":1,')
    (record,) = decode_all(HEADER)
    assert record.body.config == CONFIG


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind != "header"])
def test_every_kind_comes_back_as_it_went(kind):
    @settings(max_examples=12, derandomize=True, database=None, deadline=None)
    @given(bodies(CLASSES[kind]))
    def there_and_back(body):
        if isinstance(body, Decision):
            lines = [encode(seq=1, at=1.5, body=StopRequested(at=1.5, signal="SIGTERM"))]
            lines.append(encode(seq=2, at=1.5, body=body, because=1))
        else:
            body = attrs.evolve(body, at=abs(body.at))
            lines = [encode(seq=1, at=body.at, body=body)]
        record = decode_all(HEADER, *lines)[-1]
        assert record.body == body
        assert record.kind == kind
        # Nothing is lost or bent by a second round either.
        again = encode(seq=record.seq, at=record.at, body=record.body, because=record.because)
        assert decode_all(HEADER, *lines[:-1], again)[-1] == record

    there_and_back()


def test_real_numbers_are_floats_after_reading():
    record = decode_all(HEADER, summed(PUSH.replace(b'"norm":0.25', b'"norm":3')))[-1]
    assert record.body.norm == 3.0
    assert type(record.body.norm) is float


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c", "é😀", 'a"b\\c\n\r\t\x00'])
def test_only_lf_ends_a_record(text):
    event = LearnerLeft(at=1.0, learner=0, generation="a0", reason=f"<{text}>")
    line = encode(seq=1, at=1.0, body=event)
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert decode_all(HEADER, line)[-1].body == event


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\x85", "é😀"])
def test_characters_may_also_stand_there_raw(text):
    line = f'{{"seq":1,"at":1.0,"kind":"stop_requested","signal":"{text}"}}\n'.encode()
    assert decode_all(HEADER, summed(line))[-1].body == StopRequested(at=1.0, signal=text)


REFUSED = {
    "a key is missing": (b'"attempt":1,', b"", "missing key attempt"),
    "a key with a default is missing": (b',"cosine_to_momentum":null', b"", "missing key cosine_to_momentum"),
    "an unknown key": (b'"step":1', b'"step":1,"steps":1', 'unknown key "steps"'),
    "a doubled key": (b'"step":1', b'"step":1,"step":1', 'key "step" stands there twice'),
    "a string for a count": (b'"step":1', b'"step":"1"', 'field step: expected a whole number, found "1"'),
    "a real for a count": (b'"step":1', b'"step":1.0', "field step: expected a whole number, found 1.0"),
    "a bool for a count": (b'"step":1', b'"step":true', "field step: expected a whole number, found true"),
    "null for a count": (b'"step":1', b'"step":null', "field step: expected a whole number, found null"),
    "a string for a real": (b"0.25", b'"0.25"', 'field norm: expected a finite number, found "0.25"'),
    "a bool for a real": (b"0.25", b"false", "field norm: expected a finite number, found false"),
    "a whole number that is no float": (
        b"0.25",
        b"9007199254740993",
        "field norm: the whole number 9007199254740993 does not fit a float exactly",
    ),
    "a number for a string": (b'"d1"', b"1", "field digest: expected a string, found 1"),
    "a number for a bool": (b'"finite":true', b'"finite":1', "field finite: expected true or false, found 1"),
    "a list for a scalar": (b'"step":1', b'"step":[1]', "field step: expected a whole number, found [1]"),
    "NaN": (b"0.25", b"NaN", "NaN is not a number that JSON knows"),
    "Infinity": (b"0.25", b"Infinity", "Infinity is not a number that JSON knows"),
    "-Infinity": (b"0.25", b"-Infinity", "-Infinity is not a number that JSON knows"),
    "a real beyond floats": (b"0.25", b"1e999", "field norm: expected a finite number, found Infinity"),
    "a whole number beyond floats": (b"0.25", b"1" + b"0" * 400, "does not fit a float exactly"),
    "an endless number": (b"0.25", b"1" * 5000, "not a JSON record"),
    "an endless list": (b"0.25", b"[" * 100_000, "not a JSON record"),
    "an unknown kind": (b"push_received", b"push_imagined", 'field kind: "push_imagined" is not a kind'),
    "a kind that is no string": (b'"push_received"', b"7", "field kind: 7 is not a kind"),
    "a second header": (b"push_received", b"header", "the header belongs on line 1"),
    "a number that is left out": (
        b'"seq":1',
        b'"seq":2',
        "is missing or doubled; look at the disk, bring the tape back",
    ),
    "a number that is no number": (b'"seq":1', b'"seq":"1"', "field seq: expected a whole number"),
    "a time before the last": (b'"at":2.5', b'"at":-1.0', "field at: -1.0 lies before 0.0"),
    "a time that is none": (b'"at":2.5', b'"at":"2.5"', "field at: expected a finite number"),
    "an event with a cause": (b'"learner":1', b'"because":0,"learner":1', 'unknown key "because"'),
    "bytes that are no UTF-8": (b'"d1"', b'"\xff"', "not a JSON record"),
    "two records on a line": (b"}\n", b"}{}\n", 'data after the record: "{}"'),
    "half a record": (b"}\n", b"\n", "not a JSON record"),
    "no record": (PUSH, b"\n", "not a JSON record"),
    "no object": (PUSH, b'["seq",1]\n', "expected an object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_file_line_and_field(case):
    old, new, message = REFUSED[case]
    assert old in PUSH
    plain = PUSH.replace(old, new, 1)
    line = summed(plain)
    # No checksum can be put behind what does not end like an object.
    in_sum = message if line != plain else "the checksum does not fit"
    for version, tried, push, told in ((1, plain, PUSH, message), (2, line, summed(PUSH), in_sum)):
        decoder = Decoder("run.jsonl")
        decoder.decode(HEADER if version == 2 else without_sum(HEADER))
        with pytest.raises(TapeError) as caught:
            decoder.decode(tried)
        assert str(caught.value).startswith("run.jsonl: line 2: ")
        assert told in str(caught.value)
        # A refused line leaves the decoder where it was.
        assert decoder.decode(push).seq == 1


NESTED = {
    "wrong scalar": (b'"b1"', b"1", "field members[1].generation: expected a string, found 1"),
    "unknown key": (b'"b1"', b'"b1","x":0', 'field members[1]: unknown key "x"'),
    "missing key": (b'"learner":1,', b"", "field members[1]: missing key learner"),
    "doubled key": (b'"b1"', b'"b1","learner":1', 'key "learner" stands there twice'),
    "no object": (b'{"learner":1,"generation":"b1"}', b"1", "field members[1]: expected an object, found 1"),
    "an object for a list": (
        b'[{"learner":0,"generation":"a0"},{"learner":1,"generation":"b1"}]',
        b"{}",
        "field members: expected a list, found {}",
    ),
    "a string for a list": (
        b'[{"learner":0,"generation":"a0"},{"learner":1,"generation":"b1"}]',
        b'"ab"',
        'field members: expected a list, found "ab"',
    ),
    "not behind its event": (b'"because":1', b'"because":0', "field because: a decision belongs directly"),
    "not at its event's time": (b'"at":2.5', b'"at":2.6', "field because: a decision belongs directly"),
    "no cause": (b'"because":1,', b"", "missing key because"),
}


@pytest.mark.parametrize("case", NESTED)
def test_refused_within_a_decision(case):
    old, new, message = NESTED[case]
    assert old in OPENED
    with pytest.raises(TapeError) as caught:
        decode_all(HEADER, summed(PUSH), summed(OPENED.replace(old, new, 1)))
    assert str(caught.value).startswith("run.jsonl: line 3: ")
    assert message in str(caught.value)


def test_a_decision_needs_an_event():
    line = OPENED.replace(b'"seq":2,"at":2.5', b'"seq":1,"at":0.0').replace(b'"because":1', b'"because":0')
    with pytest.raises(TapeError, match="line 2: field because"):
        decode_all(HEADER, summed(line))


def test_the_tape_begins_with_its_header():
    with pytest.raises(TapeError, match="line 1: the header belongs on line 1"):
        decode_all(PUSH)
    with pytest.raises(TapeError, match="line 1: the header belongs on line 1"):
        decode_all(summed(PUSH))


def test_the_checksum_is_looked_at_before_anything_else():
    for line in (
        PUSH,  # none at all
        summed(PUSH)[:-1],
        summed(PUSH)[:-1] + b"\r\n",
        summed(PUSH).replace(b"}\n", b" }\n"),
        PUSH[:-2] + b',"crc":"00000000"}\n',
        b"\n",
        b"",
    ):
        with pytest.raises(
            TapeError, match=r"line 2: the checksum does not fit: this line was changed.*disk"
        ):
            decode_all(HEADER, line)
    upper = summed(PUSH)[:-11] + summed(PUSH)[-11:].upper()
    assert upper != summed(PUSH)
    with pytest.raises(TapeError, match="line 2: the checksum does not fit"):
        decode_all(HEADER, upper)


def test_whether_there_are_checksums_is_said_by_the_header():
    """So that a damaged header does not turn them off, it has one itself."""
    for header in (
        HEADER.replace(b'"format_version":3', b'"format_version":1'),
        HEADER.replace(b'"format_version":3', b'"format_version":2'),
        HEADER.replace(b"5e551011", b"5e551012"),
        HEADER[:-19] + b"}\n",
        HEADER.replace(b',"crc":"', b',"crd":"'),
    ):
        with pytest.raises(TapeError, match="line 1: the checksum does not fit"):
            decode_all(header)
    forged = summed(HEADER.replace(b'"format_version":3', b'"format_version":1'))
    with pytest.raises(TapeError, match='line 1: unknown key "crc"'):
        decode_all(forged)
    with pytest.raises(TapeError, match='line 2: unknown key "crc"'):
        decode_all(without_sum(HEADER), summed(PUSH))


@pytest.mark.parametrize("name", ["format_version", "rules_version"])
def test_a_newer_tape_is_refused_with_the_remedy(name):
    # Whatever else is new in it must not be what the error is about.
    known = {"format_version": FORMAT_VERSION, "rules_version": RULES_VERSION}[name]
    newer = HEADER.replace(f'"{name}":{known}'.encode(), f'"{name}":{known + 1},"colour":"red"'.encode())
    told = f"line 1: {name} {known + 1} is newer than {known}.* read the tape with Yeto 0.1.0"
    with pytest.raises(TapeError, match=told):
        decode_all(summed(newer))
    # A newer format need not have checksums like ours.
    if name == "format_version":
        with pytest.raises(TapeError, match=told):
            decode_all(newer[:-2] + b',"sum":"blue"}\n')
    forged = newer.replace(b'"software_version":"', b'"software_version":"\\u001b[31m' + b"z" * 5000)
    with pytest.raises(TapeError) as refused:
        decode_all(summed(forged))
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("version", [b"0", b"true", b'"1"', b"1.0"])
def test_a_version_is_a_whole_number_from_one(version):
    with pytest.raises(TapeError, match="line 1: field format_version: expected a version from 1"):
        decode_all(summed(HEADER.replace(b'"format_version":3', b'"format_version":' + version)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_lacks_is_never_written(value):
    with pytest.raises(TapeError, match=r"record 7 \(push_received\) cannot be written"):
        encode(seq=7, at=0.0, body=attrs.evolve(decode_all(HEADER, summed(PUSH))[-1].body, norm=value))


def test_numbers_of_other_libraries_are_never_written():
    import numpy as np

    beat = Heartbeat(at=0.0, learner=np.int64(1), generation="a0", local_step=1)
    with pytest.raises(TapeError, match=r"record 1 \(heartbeat\) cannot be written"):
        encode(seq=1, at=0.0, body=beat)


def test_at_is_rounded_to_a_microsecond():
    assert round_at(1.23456789) == 1.234568
    assert round_at(0.1 + 0.2) == 0.3


def shape(cls):
    """Return a class as text: its fields in order with their types, nested classes named."""
    hints, later = typing.get_type_hints(cls), later_fields(cls)
    parts = []
    for field in attrs.fields(cls):
        hint = hints[field.name]
        text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
        default = f" = {later[field.name]!r}" if field.name in later else ""
        parts.append(f"{field.name}: {text.replace('yeto.core.values.', '')}{default}")
    return ", ".join(parts)


def values_reached():
    """Return the classes that records hold, by name."""
    found, waiting = {}, list(CLASSES.values())
    while waiting:
        parts = list(typing.get_type_hints(waiting.pop()).values())
        while parts:
            part = parts.pop()
            parts += typing.get_args(part)
            if isinstance(part, type) and attrs.has(part) and part.__name__ not in found:
                found[part.__name__] = part
                waiting.append(part)
    return found


def test_kinds_and_fields_are_frozen():
    """What a tape of today holds must open for ever: a change here needs a new format version."""
    lines = [f"{kind}({shape(cls)})" for kind, cls in CLASSES.items()]
    lines += [f"{name}({shape(cls)})" for name, cls in sorted(values_reached().items())]
    recorded = Path(__file__).with_name(f"format_{FORMAT_VERSION}.txt").read_text(encoding="ascii")
    assert "\n".join(lines) + "\n" == recorded


def test_format_2_is_format_1_with_checksums():
    first, second = (Path(__file__).with_name(f"format_{version}.txt").read_bytes() for version in (1, 2))
    assert first == second
    assert UPCASTS[1] is UPCASTS[2] is None


def test_a_field_that_joined_later_is_absent_where_it_says_nothing():
    known = {"step": 1, "attempt": 1, "finite": True, "gradient_norm": 0.5, "corrected": (), "seconds": 0.25}
    silent, told = MergeFinished(at=2.5, **known), MergeFinished(at=2.5, **known, delta_cosine=-0.5)
    line, longer = (encode(seq=1, at=2.5, body=body) for body in (silent, told))
    assert b"delta_cosine" not in line
    assert without_sum(longer) == without_sum(line)[:-2] + b',"delta_cosine":-0.5}\n'
    assert [decode_all(HEADER, each)[-1].body for each in (line, longer)] == [silent, told]
    # Its default may stand there all the same; what is no number may not.
    null = summed(without_sum(line)[:-2] + b',"norm_ratio":null}\n')
    assert decode_all(HEADER, null)[-1].body == silent
    with pytest.raises(TapeError, match="line 2: field norm_ratio: expected a finite number, found true"):
        decode_all(HEADER, summed(without_sum(line)[:-2] + b',"norm_ratio":true}\n'))


def test_fields_that_joined_later_stand_behind_all_others():
    for cls in [*CLASSES.values(), *values_reached().values()]:
        names = [field.name for field in attrs.fields(cls)]
        later = list(later_fields(cls))
        assert names[len(names) - len(later) :] == later


def test_lines_of_formats_1_and_2_have_no_fields_that_joined_later():
    second, third = (Path(__file__).with_name(f"format_{version}.txt").read_text() for version in (2, 3))
    # A type's own commas stand in brackets.
    third = re.sub(r", \w+: (?:[^][,()=]|\[[^]]*\])+ = [^,()]+", "", third)
    # Counters are in a later field only; the numbers of the outer step may be those of its kind.
    third = re.sub(r"^OuterMark.*\n", "", third, flags=re.MULTILINE)
    third = third.replace(
        "outer_lr: float | None, outer_momentum: float | None", "outer_lr: float, outer_momentum: float"
    )
    assert third == second
    assert UPCASTS[2] is UPCASTS[3] is None
