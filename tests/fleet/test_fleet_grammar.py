"""The words for islands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yeto.errors import ConfigError
from yeto.fleet.gpus import GPUS, gpu_of
from yeto.fleet.grammar import CLOUDS, Island, join_islands, parse_islands


def test_entries_are_read_in_any_case():
    first, second, third = parse_islands("aws:8xa100@us-east-2, RunPod:8xH100@CA,aws:4x8xA100-80gb@us-east-2")
    assert (first.cloud, first.nodes, first.count, first.gpu.name, first.region) == (
        *("aws", 1, 8, "A100"),
        "us-east-2",
    )
    assert (second.cloud, second.gpu.name, second.region) == ("runpod", "H100", "CA")
    assert (third.nodes, third.count, third.ranks) == (4, 8, 32)


def test_local_is_processes():
    (island,) = parse_islands("local:2xcpu")
    assert island.is_local
    assert island.ranks == 2


islands = st.builds(
    Island,
    cloud=st.sampled_from(CLOUDS),
    nodes=st.integers(1, 64),
    count=st.integers(1, 64),
    gpu=st.sampled_from(GPUS),
    region=st.none() | st.from_regex(r"[a-zA-Z0-9_.-]{1,12}", fullmatch=True),
)


@given(st.lists(islands, min_size=1, max_size=5))
def test_what_is_written_is_read_as_it_was(fleet):
    assert parse_islands(join_islands(fleet)) == tuple(fleet)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the form is cloud:"),
        ("aws", "the form is cloud:"),
        ("aws:8", "GPUs are t4, v100"),
        ("aws:8xa100,", "the form is cloud:"),
        ("aws:8xa100@", "the form is cloud:"),
        ("aws:\uff18xa100", "the form is cloud:"),
        ("aws:8xa100@u\u017f-east", "the form is cloud:"),
        ("moon:8xa100", "no known cloud; known are aws"),
        ("aws:8xz900", "no known accelerator; known are t4"),
        ("aws:0xa100", "0 accelerators of a node; possible are 1 to 64"),
        ("aws:900x8xa100", "900 nodes"),
        ("aws:1xcpu", "cpu goes with local: alone"),
        ("local:1xa100", "cpu goes with local: alone"),
        ("local:2x2xcpu", "write local:4xcpu"),
        (",".join(["aws:8xa100"] * 257), "at most 256"),
    ],
)
def test_another_form_is_refused_with_the_form(text, words):
    with pytest.raises(ConfigError, match="--gpu") as caught:
        parse_islands(text)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_every_accelerator_is_found_by_its_name():
    assert [gpu_of(gpu.name.lower()) for gpu in GPUS] == list(GPUS)
