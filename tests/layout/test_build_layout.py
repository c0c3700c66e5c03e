import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yeto.errors import ConfigError
from yeto.layout import build_layout, embedding_advice, is_embedding, layer_index
from yeto.wire import HelloLayout, MergeMode, layout_fingerprint

REPEATABLE = settings(derandomize=True, deadline=None, max_examples=60)

MODEL = {
    "model.embed_tokens.weight": (100, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (100, 8),
    **{f"model.layers.{i}.self_attn.q_proj.weight": (8, 8) for i in range(5)},
    **{f"model.layers.{i}.mlp.up_proj.weight": (16, 8) for i in range(5)},
    **{f"model.layers.{i}.input_layernorm.weight": (8,) for i in range(5)},
}

pieces = st.sampled_from(
    ["model", "layers", "h", "block", "0", "1", "2", "11", "embed_tokens", "q_proj", "norm", "lm_head", "Wte"]
)
names = st.lists(pieces, min_size=1, max_size=4).map(lambda path: ".".join([*path, "weight"]))
shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
models = st.dictionaries(names, shapes, min_size=1, max_size=25)
settings_of_a_layout = st.fixed_dictionaries(
    {
        "fragments": st.integers(1, 12),
        "pattern": st.sampled_from(["binpack", "strided"]),
        "matrix_merge": st.sampled_from(["rda", "iso"]),
    }
)


def names_of(layout):
    return [[tensor.name for tensor in fragment.tensors] for fragment in layout.fragments]


def shape_map(*sizes):
    return {name: (size,) for name, size in zip("abcdefghij", sizes, strict=False)}


# ---------------------------------------------------------------------- binpack


def test_binpack_fills_the_least_filled_bin_largest_first():
    layout = build_layout(shape_map(5, 9, 1, 5, 4, 3), fragments=3)
    #   b 9 -> 0;  a 5 -> 1;  d 5 -> 2;  e 4 -> 1;  f 3 -> 2;  c 1 -> 2
    assert names_of(layout) == [["b"], ["a", "e"], ["d", "f", "c"]]
    assert [fragment.numel for fragment in layout.fragments] == [9, 9, 9]
    assert {fragment.mode for fragment in layout.fragments} == {MergeMode.RDA}


def test_ties_go_by_name_and_to_the_lowest_bin():
    layout = build_layout(dict.fromkeys("dcba", (2,)), fragments=2)
    assert names_of(layout) == [["a", "c"], ["b", "d"]]


def test_embeddings_are_fragment_0_and_averaged():
    layout = build_layout(MODEL, fragments=4)
    assert names_of(layout)[0] == ["lm_head.weight", "model.embed_tokens.weight"]
    assert [fragment.mode.name for fragment in layout.fragments] == ["AVG", "RDA", "RDA", "RDA"]
    assert {tensor.shape for tensor in layout.fragments[0].tensors} == {(100, 8)}


def test_default_is_eight_bin_packed_rda_fragments():
    layout = build_layout(MODEL)
    assert layout == build_layout(MODEL, fragments=8, pattern="binpack", matrix_merge="rda")
    assert len(layout.fragments) == 8


def test_iso_sends_everything_that_is_no_matrix_to_the_embeddings():
    layout = build_layout(MODEL | {"conv.weight": (4, 4, 3), "scale": ()}, fragments=4, matrix_merge="iso")
    first, *others = layout.fragments
    assert first.mode is MergeMode.AVG
    assert [tensor.name for tensor in first.tensors] == [
        "conv.weight",
        "lm_head.weight",
        "model.embed_tokens.weight",
        *(f"model.layers.{i}.input_layernorm.weight" for i in range(5)),
        "model.norm.weight",
        "scale",
    ]
    assert {fragment.mode for fragment in others} == {MergeMode.ISO}
    assert all(len(tensor.shape) == 2 for fragment in others for tensor in fragment.tensors)
    HelloLayout.of(layout)


@pytest.mark.parametrize(
    ("shapes", "fragments", "expected"),
    [
        (shape_map(1, 1, 1), 8, 3),  # no more bins than tensors
        (shape_map(1, 1, 1), 1, 1),
        ({"embed.weight": (2,)} | shape_map(1, 1, 1), 3, 3),  # the embeddings count
        ({"embed.weight": (2,)} | shape_map(1, 1, 1), 1, 2),  # but the rest has at least one
        ({"embed.weight": (2,)}, 8, 1),  # and no fragment is empty
    ],
)
@pytest.mark.parametrize("pattern", ["binpack", "strided"])
def test_number_of_fragments(shapes, fragments, expected, pattern):
    assert len(build_layout(shapes, fragments=fragments, pattern=pattern).fragments) == expected


# ---------------------------------------------------------------------- strided


def test_strided_deals_layers_out_in_turn():
    shapes = {f"model.layers.{i}.{part}.weight": (4, 4) for i in (0, 1, 2, 10, 11) for part in ("v", "k")}
    layout = build_layout(shapes, fragments=2, pattern="strided")
    # The third distinct layer is 2, the fourth is 10: numbers, not text, order them.
    assert names_of(layout) == [
        [f"model.layers.{i}.{part}.weight" for i in (0, 2, 11) for part in ("k", "v")],
        [f"model.layers.{i}.{part}.weight" for i in (1, 10) for part in ("k", "v")],
    ]


def test_strided_packs_what_is_in_no_layer_onto_the_bins():
    shapes = {
        "h.0.weight": (10,),
        "h.1.weight": (5,),
        "norm.weight": (3,),
        "proj.weight": (4,),
        "embed.weight": (7,),
    }
    layout = build_layout(shapes, fragments=3, pattern="strided")
    assert names_of(layout) == [
        ["embed.weight"],
        ["h.0.weight"],
        ["h.1.weight", "proj.weight", "norm.weight"],
    ]


def test_strided_drops_empty_bins():
    shapes = {f"blocks.0.w{i}.weight": (2, 2) for i in range(6)}
    assert len(build_layout(shapes, fragments=4, pattern="strided").fragments) == 1
    assert len(build_layout(shapes, fragments=4, pattern="binpack").fragments) == 4


# ---------------------------------------------------------------------- what always holds


@REPEATABLE
@given(models, settings_of_a_layout, st.randoms(use_true_random=False))
def test_every_tensor_is_in_one_fragment_whatever_the_order(shapes, chosen, rng):
    layout = build_layout(shapes, **chosen)
    placed = [tensor for fragment in layout.fragments for tensor in fragment.tensors]
    assert {tensor.name: tensor.shape for tensor in placed} == shapes
    assert len(placed) == len(shapes)
    assert all(fragment.tensors for fragment in layout.fragments)

    shuffled = list(shapes.items())
    rng.shuffle(shuffled)
    assert build_layout(dict(shuffled), **chosen) == layout

    for index, fragment in enumerate(layout.fragments):
        for tensor in fragment.tensors:
            apart = is_embedding(tensor.name) or (chosen["matrix_merge"] == "iso" and len(tensor.shape) != 2)
            assert (fragment.mode is MergeMode.AVG) == apart
        if fragment.mode is MergeMode.AVG:
            assert index == 0
    embedded = layout.fragments[0].mode is MergeMode.AVG
    assert len(layout.fragments) <= max(chosen["fragments"], 1 + embedded)
    HelloLayout.of(layout)


@REPEATABLE
@given(models, st.integers(1, 12))
def test_strided_keeps_a_layer_together(shapes, fragments):
    layout = build_layout(shapes, fragments=fragments, pattern="strided")
    home = {}
    for index, fragment in enumerate(layout.fragments):
        if fragment.mode is MergeMode.AVG:
            continue
        for tensor in fragment.tensors:
            layer = layer_index(tensor.name)
            if layer is not None:
                assert home.setdefault(layer, index) == index


@REPEATABLE
@given(models, st.integers(2, 12))
def test_binpack_is_even_up_to_the_largest_tensor(shapes, fragments):
    rest = [f for f in build_layout(shapes, fragments=fragments).fragments if f.mode is not MergeMode.AVG]
    if rest:
        largest = max(tensor.numel for fragment in rest for tensor in fragment.tensors)
        filled = [fragment.numel for fragment in rest]
        assert max(filled) - min(filled) <= largest


@REPEATABLE
@given(models)
def test_wrappers_change_nothing(shapes):
    def wrapped(name):
        *path, own = name.split(".")
        inner = [piece for part in path for piece in (part, "_checkpoint_wrapped_module")]
        return ".".join(["module", "_orig_mod", *inner, "_fsdp_wrapped_module", own])

    plain, ddp = build_layout(shapes), build_layout({wrapped(n): s for n, s in shapes.items()})
    assert ddp == plain
    assert layout_fingerprint(ddp) == layout_fingerprint(plain)


def test_a_large_model_is_laid_out_at_once():
    shapes = {f"model.layers.{i}.mlp.experts.{e}.up.weight": (64, 8) for i in range(40) for e in range(128)}
    items = list(shapes.items())
    random.Random(0).shuffle(items)
    layout = build_layout(dict(items), fragments=64)
    assert sum(fragment.numel for fragment in layout.fragments) == 40 * 128 * 512


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("shapes", "chosen", "reason"),
    [
        ({"a": (1,)}, {"fragments": 0}, "--fragments 0: need at least 1"),
        ({"a": (1,)}, {"pattern": "random"}, "--fragment-pattern random: must be one of binpack, strided"),
        ({"a": (1,)}, {"matrix_merge": "mean"}, "--matrix-merge mean: must be one of rda, iso"),
        ({}, {}, "no trainable tensors"),
        ({"a": (3, 0)}, {}, r"tensor a of shape \(3, 0\) has no elements"),
        (
            {"module.a.weight": (1,), "_orig_mod.a.weight": (1,)},
            {},
            "module.a.weight and _orig_mod.a.weight are both a.weight",
        ),
    ],
)
def test_what_has_no_layout(shapes, chosen, reason):
    with pytest.raises(ConfigError, match=reason):
        build_layout(shapes, **chosen)


# ---------------------------------------------------------------------- advice


def test_a_large_embedding_fragment_is_worth_a_word():
    rest = {f"layers.{i}.weight": (10, 10) for i in range(7)}
    assert embedding_advice(build_layout(rest | {"embed.weight": (40, 10)})) is None  # exactly 4 times
    advice = embedding_advice(build_layout(rest | {"embed.weight": (41, 10)}))
    assert "fragment 0 (embeddings) has 410 elements, 4.1 times the mean of the others" in advice
    assert "--fragments 7 brings the rounds closer together" in advice
    assert "\n" not in advice


def test_the_advice_does_not_propose_what_is_already_so():
    advice = embedding_advice(build_layout({"embed.weight": (900,), "a.weight": (10,)}))
    assert "90.0 times" in advice
    assert "--fragments" not in advice
    assert "LoRA" in advice


def test_no_advice_without_embeddings_or_without_others():
    assert embedding_advice(build_layout({"a.weight": (900,), "b.weight": (1,)})) is None
    assert embedding_advice(build_layout({"embed.weight": (900,)})) is None


# ---------------------------------------------------------------------- slices


@REPEATABLE
@given(models, settings_of_a_layout)
def test_slices_cover_a_fragment_once_in_order(shapes, chosen):
    for fragment in build_layout(shapes, **chosen).fragments:
        slices = fragment.slices()
        assert [piece.tensor for piece in slices] == list(fragment.tensors)
        assert [piece.start for piece in slices] == [0, *(piece.stop for piece in slices[:-1])]
        assert slices[-1].stop == fragment.numel
        assert all(piece.stop - piece.start == math.prod(piece.tensor.shape) for piece in slices)
