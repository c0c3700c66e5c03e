import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve
from peft import get_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MambaConfig, MptConfig, Qwen3MoeConfig

from yeto.errors import ConfigError
from yeto.layout import build_layout
from yeto.text import model as model_module
from yeto.text.lora import add_adapter, find_targets
from yeto.text.model import documents_leak, load_model, probe_micro_batch
from yeto.text.tokenizer import load_tokenizer
from yeto.tuning import hub
from yeto.tuning.identity import check_model, identify, require_model
from yeto.tuning.lora import canonical_name
from yeto.tuning.rows import open_source

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(**change):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**SMALL, **change}))


def moe():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(**SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    )


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return AutoModelForCausalLM.from_config(config)


ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")


@pytest.mark.parametrize(
    ("build", "wanted", "names", "count"),
    [
        (llama, "auto", (*("down_proj", "gate_proj"), *ATTENTION[:3], "up_proj", "v_proj"), 14),
        (llama, "attention", ATTENTION, 8),
        (llama, "q_proj, v_proj", ("q_proj", "v_proj"), 4),
        (llama, "model.layers.1.mlp.up_proj", ("model.layers.1.mlp.up_proj",), 1),
        (moe, "auto", ATTENTION, 8),
        (moe, "all-linear", ATTENTION, 8),
        (gpt2, "attention", ("transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"), 4),
        (gpt2, "auto", ("c_attn", "c_fc", "c_proj"), 8),
    ],
)
def test_targets(build, wanted, names, count):
    targets = find_targets(build(), wanted)
    assert len(targets.modules) == count
    assert targets.names[: len(names)] == names
    assert "lm_head" not in targets.modules


def test_experts_that_no_adapter_reaches_are_counted():
    # Two layers; gate and up together 4 x 32 x 32, down 4 x 32 x 16.
    assert find_targets(moe(), "all-linear").skipped_expert_parameters == 2 * (4 * 32 * 32 + 4 * 32 * 16)
    assert find_targets(llama(), "all-linear").skipped_expert_parameters == 0


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("nothing", "nothing: matches no module; linear layers here: down_proj, gate_proj"),
        ("q_proj,mlp", "mlp: model.layers.0.mlp is no linear layer"),
        (" , ", "is empty"),
        ("lm_head", "lm_head: this model's output head and input embedding are one tensor"),
        ("q_proj,embed_tokens", "embed_tokens: this model's output head and input embedding are one"),
    ],
)
def test_targets_that_cannot_be_are_refused(wanted, problem):
    with pytest.raises(ConfigError, match=problem):
        find_targets(llama(tie_word_embeddings=True), wanted)


def test_layers_that_pefts_adapters_do_not_go_with_are_named_beside_those_there_are():
    model = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, state_size=4)
    )
    targets = find_targets(model, "auto").names
    with pytest.raises(
        ConfigError, match=r"'out_proj' is incom.*; name layers .* from: dt_proj, in_proj, out"
    ):
        add_adapter(model, targets, r=2, alpha=4)


def test_a_head_of_its_own_may_have_an_adapter():
    assert find_targets(llama(tie_word_embeddings=False), "lm_head").modules == ("lm_head",)


@pytest.mark.parametrize("build", [llama, gpt2, moe])
@pytest.mark.parametrize("wanted", ["auto", "attention"])
def test_canonical_names_are_the_keys_of_pefts_own_save(build, wanted):
    base = build()
    adapted = add_adapter(base, find_targets(base, wanted).names, r=2, alpha=4)
    names = [canonical_name(name) for name, p in adapted.named_parameters() if p.requires_grad]
    assert set(names) == set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    assert len(names) == len(set(names))
    assert all(p.dtype == torch.float32 for p in adapted.parameters() if p.requires_grad)


def test_canonical_names_of_wrapped_models():
    plain = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for live in (
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "_orig_mod.module.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "_fsdp_wrapped_module.base_model.model.model.layers.0._checkpoint_wrapped_module.self_attn."
        "q_proj.lora_A.default.weight",
    ):
        assert canonical_name(live) == plain
    assert canonical_name("model.default.weight") == "model.default.weight"
    assert canonical_name("embed.lora_embedding_A.default") == "embed.lora_embedding_A"


def test_the_layout_of_an_adapter_has_no_embedding_fragment(config):
    names = {name: tuple(p.shape) for name, p in load_model(config).trainable_parameters().items()}
    layout = build_layout(names, fragments=4, pattern="strided")
    assert len(layout.fragments) == 4


# Loading.


def test_adapters_depend_on_the_root_seed_only(config):
    def tensors(**change):
        return load_model(evolve(config, **change)).trainable_parameters()

    first = tensors()
    again = tensors(learner_id=1, num_learners=2, rank=1, num_ranks=2)
    other = tensors(seed=1)
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_training_randomness_is_root_plus_learner_plus_rank(config):
    def draw(**change):
        load_model(evolve(config, **change))
        return torch.rand(1).item()

    assert draw(seed=5) != draw(seed=5, learner_id=1, num_learners=2)
    # Rank 1 of learner 1 of two islands is rank 3 of one group.
    assert draw(learner_id=1, num_learners=2, rank=1, num_ranks=2) == draw(rank=3, num_ranks=4)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_model_that_would_run_code_is_refused(config, fixtures, tmp_path, is_zip):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    folder = shutil.copytree(fixtures / "tiny-llama", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    weights = {"model.embed_tokens.weight": Bomb()}
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ConfigError, match="does not load as a language model"):
        load_model(evolve(config, model=str(folder)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("base_dtype", "frozen"), [("auto", torch.float32), ("bf16", torch.bfloat16)])
def test_what_is_trained_is_float32_whatever_the_base_is(config, base_dtype, frozen):
    loaded = load_model(evolve(config, base_dtype=base_dtype))
    assert all(p.dtype == torch.float32 for p in loaded.trainable_parameters().values())
    assert {p.dtype for p in loaded.module.parameters() if not p.requires_grad} == {frozen}
    assert loaded.compute_dtype == frozen


def test_full_tuning_trains_every_tensor_once(config):
    loaded = load_model(evolve(config, tuning="full", base_dtype="bf16"))
    names = loaded.trainable_parameters()
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names
    assert all(p.dtype == torch.float32 for p in names.values())
    assert loaded.describe()["trainable_percent"] == 100.0


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_every_trainable_gets_a_gradient_with_checkpointing(config, tuning):
    loaded = load_model(evolve(config, tuning=tuning, gradient_checkpointing="on"))
    base = loaded.module.get_base_model() if tuning == "lora" else loaded.module
    assert base.is_activation_checkpointing
    ids = torch.arange(3, 19).unsqueeze(0)
    loaded.module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None for p in loaded.trainable_parameters().values())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": "./missing"}, "--model ./missing"),
        (
            {"model": "someone/no-such-model"},
            "--model someone/no-such-model: no such folder, and as a Hugging",
        ),
        ({"device": "tpu9x"}, "--device 'tpu9x' is no device"),
        ({"device": "cuda:0"}, "no usable CUDA device"),
        ({"lora_targets": "nope"}, "--lora-targets nope"),
    ],
)
def test_what_does_not_load_is_refused_by_flag(config, change, problem):
    if change.get("device") == "cuda:0" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ConfigError, match=problem):
        load_model(evolve(config, **change))


@pytest.mark.parametrize("targets", ["auto", "all-linear"])
def test_skipped_experts_are_said(config, monkeypatch, caplog, targets):
    monkeypatch.setattr(model_module, "load_base", lambda *args, **options: moe())
    with caplog.at_level(logging.WARNING, logger="yeto.text.model"):
        loaded = load_model(evolve(config, lora_targets=targets))
    said = "12,288 parameters of expert weights as they are; only k_proj, o_proj, q_proj, v_proj are trained"
    assert said in caplog.text
    trained = loaded.trainable_parameters()
    assert len(trained) == 2 * 4 * 2
    assert all(".self_attn." in name for name in trained)
    ids = torch.arange(3, 19).unsqueeze(0)
    loaded.module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None for p in trained.values())


def test_an_adapter_that_may_not_serve_is_said(config, monkeypatch, caplog):
    monkeypatch.setattr(model_module, "load_base", lambda *args, **options: llama(tie_word_embeddings=False))
    with caplog.at_level(logging.WARNING, logger="yeto.text.model"):
        load_model(evolve(config, lora_targets="q_proj"))
        assert caplog.text == ""
        load_model(evolve(config, lora_targets="q_proj,lm_head"))
    assert caplog.text.count("an adapter on lm_head is saved together with that layer itself") == 1


class Leaky(nn.Module):
    """A language model that adds up all tokens so far and looks at no position."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(97, 8)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, position_ids, use_cache):
        hidden = self.embedding(input_ids).cumsum(dim=1)
        return type("Output", (), {"logits": hidden @ self.embedding.weight.T})


def test_a_model_that_lets_documents_see_each_other_is_noticed(config, monkeypatch):
    loaded = load_model(config)
    assert not documents_leak(loaded)
    assert documents_leak(evolve(loaded, module=Leaky()))
    monkeypatch.setattr(model_module, "documents_leak", lambda loaded: True)
    with pytest.raises(ConfigError, match="use --packing plain"):
        load_model(config)
    load_model(evolve(config, packing="plain"))


def mpt():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        MptConfig(vocab_size=97, d_model=32, n_heads=4, n_layers=1, max_seq_len=64)
    )


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize(
    ("build", "name"),
    [(gpt2, "GPT2LMHeadModel"), (mpt, "MptForCausalLM"), (lambda: llama(max_position_embeddings=64), None)],
    ids=["table", "bias", "computed"],
)
def test_blocks_longer_than_a_model_takes_are_refused(config, monkeypatch, build, name, tuning):
    monkeypatch.setattr(model_module, "load_base", lambda *args, **options: build())
    config = evolve(config, packing="plain", tuning=tuning)
    load_model(config)
    config = evolve(config, seq_len=65)
    if name is None:
        assert load_model(config).module.training
    else:
        with pytest.raises(ConfigError, match=f"--seq-len 65: {name} takes no more than 64 tokens; lower"):
            load_model(config)


@pytest.mark.parametrize(("fits", "expected"), [(1, 1), (5, 4), (64, 64), (1000, 64)])
def test_the_probe_takes_the_largest_power_of_two_that_fits(fits, expected):
    tried = []

    def step(size):
        tried.append(size)
        if size > fits:
            raise torch.OutOfMemoryError("no room")

    assert probe_micro_batch(step) == expected
    assert tried[-1] in (expected, 2 * expected)


def test_the_probe_says_when_nothing_fits():
    def step(size):
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(ConfigError, match="lower --seq-len"):
        probe_micro_batch(step)


# Identity.


def folder(path, config="{}", weights=b"weights"):
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / "model.safetensors").write_bytes(weights)
    (path / "tokenizer.json").write_text("{}")
    return str(path)


def test_a_folder_is_its_contents_wherever_it_is(tmp_path):
    cache = tmp_path / "cache"
    one, copy = folder(tmp_path / "one"), folder(tmp_path / "two")
    assert identify(one, cache_folder=cache) == identify(copy, cache_folder=cache)
    assert set(identify(one).binding()) == {"digest"}
    for name, change in (("a", {"config": '{"a": 1}'}), ("b", {"weights": b"weightz"})):
        assert identify(folder(tmp_path / name, **change)) != identify(one)


def test_a_digest_is_kept_until_a_file_changes(tmp_path):
    cache = tmp_path / "cache"
    one = folder(tmp_path / "one")
    first = identify(one, cache_folder=cache)
    (kept,) = cache.iterdir()
    kept.write_text("00" * 32)
    assert identify(one, cache_folder=cache).digest == "00" * 32
    (tmp_path / "one" / "model.safetensors").write_bytes(b"other weights")
    assert identify(one, cache_folder=cache).digest not in (first.digest, "00" * 32)


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path):
    (tmp_path / "cache").write_text("a file")
    one = folder(tmp_path / "one")
    assert identify(one, cache_folder=tmp_path / "cache") == identify(one)


def test_a_hub_model_is_its_id_and_commit(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    path = tmp_path / "models--org--name" / "snapshots" / commit / "config.json"
    monkeypatch.setattr("yeto.tuning.identity.cached_file", lambda *args, **options: str(path))
    assert identify("org/name").binding() == {"hub_id": "org/name", "commit": commit}
    monkeypatch.setattr(
        "yeto.tuning.identity.cached_file", lambda *args, **options: str(tmp_path / "config.json")
    )
    with pytest.raises(ConfigError, match="--model-revision"):
        identify("org/name")


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"not a model folder; it needs config.json and weight files"):
        identify(str(tmp_path))


@pytest.mark.parametrize("refuse", [identify, require_model, check_model])
def test_a_pipeline_s_folder_is_refused_with_the_task_that_takes_it(tmp_path, refuse):
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a model folder; a pipeline of diffusers is for --task diff"):
        refuse(str(tmp_path))


def test_settings_do_not_load_torch():
    code = "import sys, yeto.text; yeto.text.TextConfig(model='m'); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 1000), "does not load as a language model"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "none"}'), "none"),
        (lambda folder: (folder / "config.json").unlink(), "not a model folder"),
    ],
    ids=["cut weights", "no JSON", "unknown architecture", "no config"],
)
def test_a_damaged_model_folder_is_named_whatever_the_library_raises(config, tmp_path, damage, problem):
    folder = tmp_path / "model"
    shutil.copytree(config.model, folder)
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        load_model(evolve(config, model=str(folder)))
    assert str(caught.value).startswith(f"--model {folder}: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "needs config.json and weight files"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text('{"layers": 2}'), "no model_type"),
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "has no tokenizer"),
        (shutil.rmtree, "no such folder"),
    ],
    ids=["no weights", "cut settings", "no text", "no kind", "no tokenizer", "nothing"],
)
def test_a_model_that_cannot_load_is_refused_without_loading_it(tiny, tmp_path, damage, problem):
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    check_model(str(folder))
    damage(folder)
    with pytest.raises(ConfigError, match=problem) as caught:
        check_model(str(folder))
    assert str(caught.value).startswith(f"--model {folder}: ")


def test_looking_at_a_model_loads_no_torch():
    code = "import sys, yeto.tuning.identity; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["./none", "/none", "a/b/c", "pyproject.toml"])
def test_what_can_be_no_id_is_not_looked_for_on_the_hub(config, monkeypatch, name):
    monkeypatch.setattr(hub, "unreachable_hub", lambda *args, **kwargs: pytest.fail("asked the hub"))
    monkeypatch.chdir(Path(__file__).parent.parent.parent)
    with pytest.raises(ConfigError, match=f"--model {name}: no such folder$"):
        load_tokenizer(evolve(config, model=name))


@pytest.mark.parametrize("name", ["models/", "my model", "a/b c", "-a", "a..b"])
def test_what_the_hub_would_refuse_as_an_id_is_refused_in_our_words(config, monkeypatch, name):
    monkeypatch.setattr(hub, "unreachable_hub", lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError, match=f"--model {name}: no such folder, and no Hugging Face id$"):
        load_tokenizer(evolve(config, model=name))


def test_a_hub_that_cannot_be_reached_is_said_at_once(config, monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(hub, "getproxies", dict)
    problem = "no such folder, and as a Hugging Face id: http://127.0.0.1:1 cannot be reached"
    with pytest.raises(ConfigError, match=problem):
        load_tokenizer(evolve(config, model="owner/name"))
    with pytest.raises(ConfigError, match="as a Hugging Face data set it failed: http"):
        open_source("owner/rows")


def test_a_reachable_hub_and_a_proxy_are_left_to_the_client(monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.unreachable_hub("owner/name") is None
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://127.0.0.1:1"})
    assert hub.unreachable_hub("owner/name") is None
