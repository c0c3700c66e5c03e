"""The counters of the outer step in a manifest: there and back, absent in older ones, checked."""

import attrs
import pytest
from state_examples import COUNT, Run

from yeto.errors import CheckpointError
from yeto.state import OuterMark
from yeto.state.checkpoint import manifest_of
from yeto.state.digested import decode_digested, encode_digested
from yeto.state.manifest import decode_manifest, encode_manifest

MARKS = tuple(OuterMark(fragment=p, merges=p + 1, gain=1.0 + p / 3) for p in range(COUNT))


def manifest(marks):
    return manifest_of(Run().commit(COUNT * COUNT).checkpoint(outer_marks=marks))


@pytest.mark.parametrize("marks", [MARKS, None])
def test_they_come_back_to_the_last_bit(marks):
    assert decode_manifest(encode_manifest(manifest(marks)), "m").outer_marks == marks


def test_an_older_manifest_has_none():
    fields = attrs.asdict(manifest(MARKS))
    del fields["outer_marks"]
    assert decode_manifest(encode_digested(fields), "m").outer_marks is None


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        (MARKS[:-1], "outer_marks: not one for each fragment, in order"),
        (MARKS[::-1], "outer_marks: not one for each fragment, in order"),
        ((attrs.evolve(MARKS[0], merges=-1), *MARKS[1:]), "-1 merges"),
        ((attrs.evolve(MARKS[0], gain=-0.5), *MARKS[1:]), "a gain of -0.5 cannot be"),
        ((attrs.evolve(MARKS[0], gain=0.0), *MARKS[1:]), "1 merges with a gain of 0.0 cannot be"),
        ((attrs.evolve(MARKS[0], merges=0), *MARKS[1:]), "0 merges with a gain of 1.0 cannot be"),
        (
            (*MARKS[:-1], attrs.evolve(MARKS[-1], gain=1e308)),
            rf"outer_marks\[{COUNT - 1}\]: .* gain of 1e\+308",
        ),
        ((attrs.evolve(MARKS[0], merges=COUNT + 1), *MARKS[1:]), f"cannot be after {COUNT} commits"),
        ((attrs.evolve(MARKS[0], gain="1"), *MARKS[1:]), "expected float, found str"),
    ],
)
def test_what_cannot_be_is_refused(marks, said):
    data = encode_manifest(manifest(marks))
    assert decode_digested(data, "m", "manifest")["outer_marks"]
    with pytest.raises(CheckpointError, match=said):
        decode_manifest(data, "m")
