import hashlib
import json
import pickle
import tracemalloc

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_examples import BINDING, LAYOUT, MANIFEST, REPEATABLE

from yeto.errors import ConfigError, ProtocolError
from yeto.wire import FragmentLayout, Layout, MergeMode, TensorSpec, layout_fingerprint
from yeto.wire.contract import (
    ABSENT,
    TrainingManifest,
    canonical_json,
    first_difference,
    from_where_they_part,
    session_contract,
)
from yeto.wire.legality import MANIFEST_BYTES_MAX

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
bindings = st.dictionaries(st.text(max_size=5), json_values, max_size=4)


def layout_of(fragments):
    return Layout(
        fragments=tuple(
            FragmentLayout(
                mode=MergeMode(fragment["mode"]),
                tensors=tuple(
                    TensorSpec(name=name, shape=tuple(shape)) for name, shape in fragment["tensors"]
                ),
            )
            for fragment in fragments
        )
    )


@pytest.fixture
def hashes(fixtures):
    return json.loads((fixtures / "wire" / "hashes.json").read_text(encoding="utf-8"))


# ---------------------------------------------------------------------- fingerprint


def test_fingerprint_that_the_format_gives_as_its_example():
    assert (
        layout_fingerprint(LAYOUT).hex() == "148f54dc293d0b3327bbfa7aad66d4812996cea066179b60307978703e9d8af1"
    )


def test_recorded_fingerprints(hashes):
    assert len(hashes["fingerprints"]) == 3
    for case in hashes["fingerprints"]:
        assert layout_fingerprint(layout_of(case["fragments"])).hex() == case["sha256"]


def test_everything_about_a_layout_is_in_its_fingerprint():
    a, b = ["a", [2, 3]], ["b", [6]]
    layouts = [
        [{"mode": 1, "tensors": [a, b]}],
        [{"mode": 1, "tensors": [b, a]}],
        [{"mode": 0, "tensors": [a, b]}],
        [{"mode": 1, "tensors": [a]}, {"mode": 1, "tensors": [b]}],
        [{"mode": 1, "tensors": [b]}, {"mode": 1, "tensors": [a]}],
        [{"mode": 1, "tensors": [["a", [3, 2]], b]}],
        [{"mode": 1, "tensors": [["a", [6]], b]}],
        [{"mode": 1, "tensors": [["a", [1, 2, 3]], b]}],
        [{"mode": 1, "tensors": [["c", [2, 3]], b]}],
        [{"mode": 1, "tensors": [a, b, ["c", []]]}],
    ]
    assert len({layout_fingerprint(layout_of(layout)) for layout in layouts}) == len(layouts)


# ---------------------------------------------------------------------- contract


def test_recorded_contract(hashes):
    (case,) = hashes["contracts"]
    assert canonical_json(case["binding"]).decode() == case["canonical"]
    assert session_contract(bytes.fromhex(case["fingerprint"]), case["binding"]).hex() == case["sha256"]
    assert case["binding"] == BINDING


@REPEATABLE
@given(bindings)
def test_canonical_json_is_one_spelling(binding):
    data = canonical_json(binding)
    assert json.loads(data) == binding
    shuffled = dict(reversed(list(binding.items())))
    assert canonical_json(shuffled) == data
    assert canonical_json(json.loads(data)) == data
    assert session_contract(bytes(32), binding) == hashlib.sha256(bytes(32) + data).digest()


@pytest.mark.parametrize(
    ("binding", "reason"),
    [
        ({"alpha": 0.5}, r"binding.alpha: 0.5 is a float"),
        ({"lora": {"scale": [1, 2.0]}}, r"binding.lora.scale\[1\]: 2.0 is a float"),
        ({"x": float("nan")}, "binding.x: nan is a float"),
        ({1: "x"}, "key 1 is no string"),
        ({"x": {1, 2}}, "canonical JSON"),
        ({"x": "\ud800"}, "canonical JSON"),
    ],
)
def test_what_has_no_canonical_json(binding, reason):
    with pytest.raises(ConfigError, match=reason):
        canonical_json(binding)


@pytest.mark.parametrize(
    ("left", "right", "difference"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"seed": 0, "model": "x"}, {"seed": 1, "model": "y"}, ("model", "x", "y")),
        ({"lora": {"r": 16, "alpha": 32}}, {"lora": {"r": 8, "alpha": 32}}, ("lora.r", 16, 8)),
        ({"targets": ["q", "k"]}, {"targets": ["q"]}, ("targets", ["q", "k"], ["q"])),
        ({"a": 1}, {}, ("a", 1, ABSENT)),
        ({}, {"lora": {"r": 8}}, ("lora", ABSENT, {"r": 8})),
        ({"a": ABSENT}, {}, ("a", ABSENT, ABSENT)),
        ({"a": True}, {"a": 1}, ("a", True, 1)),
        ({"a": {"b": 1}}, {"a": 1}, ("a", {"b": 1}, 1)),
    ],
)
def test_first_difference(left, right, difference):
    assert first_difference(left, right) == difference


@REPEATABLE
@given(bindings, bindings)
def test_a_difference_is_found_exactly_when_the_contracts_differ(left, right):
    differ = session_contract(bytes(32), left) != session_contract(bytes(32), right)
    assert (first_difference(left, right) is not None) == differ


# ---------------------------------------------------------------------- manifest


@REPEATABLE
@given(
    bindings,
    st.just("carry") | st.floats(0, 1, exclude_max=True),
    st.lists(
        st.fixed_dictionaries(
            {
                "mode": st.sampled_from([0, 1, 2]),
                "tensors": st.lists(
                    st.tuples(st.text(max_size=8), st.lists(st.integers(1, 1000), max_size=4)),
                    min_size=1,
                    max_size=3,
                ),
            }
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_manifest_round_trip(binding, alpha, fragments):
    names = [name for fragment in fragments for name, _ in fragment["tensors"]]
    manifest = TrainingManifest(binding=binding, merge_alpha=alpha, layout=layout_of(fragments))
    if len(set(names)) < len(names):
        with pytest.raises(ProtocolError, match="two tensors have the same name"):
            TrainingManifest.decode(manifest.encode())
        return
    decoded = TrainingManifest.decode(manifest.encode())
    assert decoded == manifest
    assert decoded.contract() == session_contract(layout_fingerprint(manifest.layout), binding)
    assert TrainingManifest.from_dict(json.loads(json.dumps(manifest.to_dict()))) == manifest


def test_merge_alpha_is_shown_but_not_binding():
    carried = attrs.evolve(MANIFEST, merge_alpha="carry")
    assert carried.contract() == MANIFEST.contract()
    assert MANIFEST.first_difference(carried) is None


@pytest.mark.parametrize(
    ("left", "right", "shown"),
    [
        ("0", "7", ("0", "7")),
        ("a" * 20 + "0", "a" * 20, ("a" * 20 + "0", "a" * 20)),
        ("a" * 10**6 + "0bc", "a" * 10**6 + "7", ("..." + "a" * 20 + "0bc", "..." + "a" * 20 + "7")),
    ],
)
def test_what_is_shown_of_two_long_texts_is_where_they_part(left, right, shown):
    assert from_where_they_part(left, right) == shown


def test_difference_of_two_manifests():
    other = attrs.evolve(MANIFEST, binding={"seed": 1})
    assert MANIFEST.first_difference(other) == ("seed", 0, 1)
    wider = attrs.evolve(
        MANIFEST, layout=layout_of([{"mode": 1, "tensors": [["model.body.weight", [2, 2]], ["norm", [3]]]}])
    )
    assert MANIFEST.first_difference(wider) == (
        "tensor model.body.weight",
        "shape (4,) in fragment 0 (rda), place 0",
        "shape (2, 2) in fragment 0 (rda), place 0",
    )
    more = attrs.evolve(
        MANIFEST, layout=layout_of([{"mode": 1, "tensors": [["model.body.weight", [4]], ["norm", [3]]]}])
    )
    assert MANIFEST.first_difference(more) == (
        "tensor norm",
        ABSENT,
        "shape (3,) in fragment 0 (rda), place 1",
    )


GOOD = '{"binding":{},"merge_alpha":0.5,"fragments":[{"mode":"rda","tensors":[["w",[4]]]}]}'


def changed(old, new):
    assert old in GOOD
    return GOOD.replace(old, new).encode()


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "no strict JSON"),
        (GOOD[:-1].encode(), "no strict JSON"),
        (GOOD.encode() + b"{}", "no strict JSON"),
        (GOOD.encode("utf-16"), "no strict JSON"),
        (b"\xef\xbb\xbf" + GOOD.encode(), "no strict JSON"),
        (b"[]", "exactly binding, fragments, merge_alpha"),
        (b"{}", "exactly binding, fragments, merge_alpha"),
        (changed('"merge_alpha"', '"more":1,"merge_alpha"'), "exactly"),
        (changed('"binding":{}', '"binding":{"a":1,"a":2}'), "same key twice"),
        (changed('"binding":{}', '"binding":{},"binding":{}'), "same key twice"),
        (changed('"binding":{}', '"binding":[]'), "binding must be an object"),
        (changed('"binding":{}', '"binding":{"a":0.5}'), "binding.a: 0.5 is a float"),
        (changed('"binding":{}', '"binding":{"a":NaN}'), "NaN is no JSON number"),
        (changed('"binding":{}', '"binding":{"a":"\\ud800"}'), "surrogates not allowed"),
        (changed('"binding":{}', '"binding":{"a":' + "9" * 5000 + "}"), "no strict JSON"),
        (changed("0.5", "Infinity"), "Infinity is no JSON number"),
        (changed("0.5", "1e999"), "1e999 is too large"),
        (changed("0.5", "1"), r"merge_alpha must be a number in \[0, 1\) or carry"),
        (changed("0.5", "-0.1"), "merge_alpha"),
        (changed("0.5", "true"), "merge_alpha"),
        (changed("0.5", '"blend"'), "merge_alpha"),
        (changed('[{"mode":"rda","tensors":[["w",[4]]]}]', "[]"), "fragments must be a list"),
        (changed('[{"mode":"rda","tensors":[["w",[4]]]}]', "[1]"), r"fragments\[0\] must be an object"),
        (changed('"rda"', '"sum"'), r"fragments\[0\].mode must be one of avg, rda, iso"),
        (changed('"rda"', "[]"), "mode must be one of"),
        (changed('[["w",[4]]]', "[]"), r"fragments\[0\].tensors must be a list"),
        (changed('["w",[4]]', '["w",[0]]'), r"fragments\[0\].tensors\[0\] must be"),
        (changed('["w",[4]]', '["w",[true]]'), "positive integers"),
        (changed('["w",[4]]', '["w",[4.0]]'), "positive integers"),
        (changed('["w",[4]]', '["w",4]'), "positive integers"),
        (changed('["w",[4]]', "[7,[4]]"), "positive integers"),
        (changed('["w",[4]]', '["w",[4],1]'), "positive integers"),
        (changed('["w",[4]]', '["w",[1048576,1048577]]'), "tensor that can exist"),
        (changed('["w",[4]]', '["w",[' + ",".join(["1"] * 65) + "]]"), "tensor that can exist"),
        (changed('["w",[4]]', '["w",[4]],["w",[5]]'), "two tensors have the same name"),
        (changed("{}", '{"a":' + "[" * 9 + "]" * 9 + "}"), "nested too deeply, at most 8"),
        (b"[" * 1_000_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (bytes(MANIFEST_BYTES_MAX + 1), "at most 1048576"),
        (pickle.dumps({"binding": {}}), "no strict JSON"),
    ],
)
def test_what_is_no_manifest(payload, reason):
    with pytest.raises(ProtocolError, match=reason):
        TrainingManifest.decode(payload)


def test_the_good_one_is_good():
    assert TrainingManifest.decode(GOOD.encode()).layout.fragments[0].tensors[0].numel == 4


@REPEATABLE
@given(
    st.binary(max_size=100)
    | st.text(max_size=60).map(str.encode)
    | json_values.map(json.dumps).map(str.encode)
)
def test_random_bytes_are_a_protocol_error(payload):
    with pytest.raises(ProtocolError):
        TrainingManifest.decode(payload)


def test_memory_of_a_hostile_manifest_is_bounded():
    """Tiny lists, the worst per byte: a whole megabyte of them costs some tens of megabytes."""
    payload = b"[" + b"[]," * 20_000 + b"[]]"
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            TrainingManifest.decode(payload)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * len(payload)


def test_a_manifest_that_is_too_large_names_the_way_out():
    tensors = [[f"model.layers.{i}.self_attn.q_proj.weight", [64, 64]] for i in range(20_000)]
    manifest = attrs.evolve(MANIFEST, layout=layout_of([{"mode": 1, "tensors": tensors}]))
    with pytest.raises(ConfigError, match="--no-manifest"):
        manifest.encode()
    with pytest.raises(ConfigError, match=r"binding.lr: 0.1 is a float"):
        attrs.evolve(MANIFEST, binding={"lr": 0.1}).encode()
