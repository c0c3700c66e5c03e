import pytest

from yeto.errors import ConfigError
from yeto.layout import check_wrapped_names, is_embedding, layer_index, strip_wrappers


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("model.layers.0.q_proj.weight", "model.layers.0.q_proj.weight"),
        ("module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.module.model.norm.weight", "model.norm.weight"),
        ("_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.w", "model.layers.0.w"),
        ("model.layers.0._checkpoint_wrapped_module.mlp.weight", "model.layers.0.mlp.weight"),
        ("model.layers.0._orig_mod.mlp.weight", "model.layers.0.mlp.weight"),
        # Whole pieces only, and a parameter keeps its own name.
        ("model.submodule.weight", "model.submodule.weight"),
        ("model.modules_to_save.default.weight", "model.modules_to_save.default.weight"),
        ("model.module", "model.module"),
        ("weight", "weight"),
    ],
)
def test_strip_wrappers(wrapped, plain):
    assert strip_wrappers(wrapped) == plain
    assert strip_wrappers(plain) == plain


def test_wrapped_names_that_agree():
    check_wrapped_names(["a.weight", "b.weight"], ["module.b.weight", "module._orig_mod.a.weight"])


def test_wrapped_names_that_differ_are_refused_with_examples():
    plain = [f"layers.{i}.weight" for i in range(5)]
    wrapped = ["module.layers.0.weight", "module.inner.layers.1.weight"]
    with pytest.raises(ConfigError) as refusal:
        check_wrapped_names(plain, wrapped)
    text = str(refusal.value)
    assert "4 missing (layers.1.weight, layers.2.weight, layers.3.weight, …)" in text
    assert "1 unknown (module.inner.layers.1.weight)" in text
    with pytest.raises(ConfigError, match=r"0 missing, 1 unknown \(b\.weight\)"):
        check_wrapped_names(["a.weight"], ["a.weight", "b.weight"])


@pytest.mark.parametrize(
    ("name", "embedding"),
    [
        ("model.embed_tokens.weight", True),
        ("base_model.model.model.embed_tokens.lora_embedding_A.default", True),
        ("transformer.wte.weight", True),
        ("transformer.wpe.weight", True),
        ("lm_head.weight", True),
        ("lm_head.lora_B.default.weight", True),
        ("shared.weight", True),
        ("bert.embeddings.LayerNorm.bias", True),
        ("model.word_embeddings.weight", True),  # ends with one
        ("vit.patch_embed.proj.weight", True),
        ("unembed.weight", True),
        ("Model.Embed_Tokens.weight", True),  # case does not matter
        ("wte", True),  # a name of one piece is its own path
        ("model.embedder_proj.weight", False),  # starts with one
        ("model.layers.0.mlp.shared_expert.up_proj.weight", False),
        ("model.layers.0.mlp.reshaped.weight", False),
        ("model.layers.0.self_attn.q_proj.lora_embedding_A", False),
        ("model.layers.0.attn.rel_embed", False),  # the parameter's own name is no module
        ("model.norm.weight", False),
        ("weight", False),
    ],
)
def test_is_embedding(name, embedding):
    assert is_embedding(name) == embedding


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.17.q_proj.weight", 17),
        ("transformer.h.3.attn.weight", 3),
        ("encoder.block.0.layer.1.weight", 0),
        ("blocks.2.weight", 2),  # also at the start of a name
        ("h.0.weight", 0),
        ("layers.5", 5),
        ("model.layers.norm.weight", None),
        ("model.layers.x1.weight", None),
        ("model.layers.²", None),
        ("model.hh.1.weight", None),
        ("model.norm.weight", None),
        ("layers", None),
        ("model.layers.4.experts.blocks.9.weight", 4),  # the outermost counts
    ],
)
def test_layer_index(name, layer):
    assert layer_index(name) == layer
