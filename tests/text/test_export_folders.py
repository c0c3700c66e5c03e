import json
import shutil

import pytest
import torch
from attrs import evolve
from peft import PeftModel
from safetensors.torch import load_file, save_file
from text_checkpoints import NUM_FRAGMENTS, make_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from yeto.errors import CheckpointError, ConfigError
from yeto.text import export as export_module
from yeto.text import export_plan as plan_module
from yeto.text import model as model_module
from yeto.text.export import export
from yeto.text.legacy import LEGACY_TEMPLATE
from yeto.text.lora import quiet, save_adapter
from yeto.text.model import load_model
from yeto.text.task import build_task
from yeto.tuning.identity import ModelIdentity

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(10, 26).unsqueeze(0)).logits.float()


def test_an_adapter_has_the_keys_and_values_of_pefts_own_save(config, checkpoint, out, tmp_path):
    tensors = make_checkpoint(checkpoint, config)
    lines = []
    report = export(checkpoint, config.model, out, say=lines.append)
    assert (report.kind, report.step, report.warnings) == ("adapter", 4, ())
    assert report.verified.logits_moved > 0
    task = build_task(config)
    with torch.no_grad():
        for name, parameter in task.trainable_parameters().items():
            parameter.copy_(tensors[name])
    with quiet():
        task._model.module.save_pretrained(tmp_path / "pefts")
    mine = load_file(out / "adapter_model.safetensors")
    pefts = load_file(tmp_path / "pefts" / "adapter_model.safetensors")
    assert mine.keys() == pefts.keys() == tensors.keys()
    assert all(torch.equal(mine[name], pefts[name]) for name in mine)
    assert [line.split()[0] for line in lines] == [
        "reading",
        "step",
        "look-ahead:",
        "writing",
        "verifying:",
        "verified:",
        "done:",
    ]
    settings = json.loads((out / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (
        4,
        8,
        config.model,
    )


@pytest.mark.parametrize("merged", [False, True])
def test_a_template_that_was_trained_with_is_saved_without_a_word_of_the_caller(
    config, checkpoint, out, merged
):
    legacy = evolve(config, assistant_mask_mode="legacy")
    make_checkpoint(checkpoint, legacy)
    export(checkpoint, config.model, out, verify=False, merged=merged)
    assert AutoTokenizer.from_pretrained(out).chat_template == LEGACY_TEMPLATE


def test_a_template_that_is_no_text_is_refused(config, checkpoint, out):
    make_checkpoint(checkpoint, config, binding={"chat_template": 7})
    with pytest.raises(CheckpointError, match="its chat template is no text"):
        export(checkpoint, config.model, out)
    assert not out.exists()


def test_an_adapter_loads_with_plain_peft_and_a_tokenizer_is_there(config, checkpoint, out):
    make_checkpoint(checkpoint, config)
    export(checkpoint, config.model, out, verify=False)
    base = AutoModelForCausalLM.from_pretrained(config.model)
    before = logits_of(base)
    assert not torch.equal(before, logits_of(PeftModel.from_pretrained(base, str(out))))
    assert AutoTokenizer.from_pretrained(out).chat_template is not None


def test_an_adapter_says_which_commit_of_its_base_it_is_for(config, checkpoint, out, tmp_path, monkeypatch):
    """Whoever wrote it, a learner or an export: the base's branch may point elsewhere when it is loaded."""
    base = ModelIdentity(hub_id="owner/base", commit="0123456789abcdef0123456789abcdef01234567")
    for module in (model_module, plan_module):
        monkeypatch.setattr(module, "identify", lambda *args, **options: base)
    make_checkpoint(checkpoint, config)
    export(checkpoint, config.model, out, verify=False)
    save_adapter(load_model(config).module, str(tmp_path / "learners"))
    for folder in (out, tmp_path / "learners"):
        assert json.loads((folder / "adapter_config.json").read_text())["revision"] == base.commit


def test_the_facts_of_an_export(config, checkpoint, out):
    make_checkpoint(checkpoint, config)
    export(checkpoint, config.model, out)
    text = (out / "yeto-export.json").read_text()
    facts = json.loads(text)
    assert facts["checkpoint"]["step"] == 4
    assert len(facts["checkpoint"]["versions"]) == NUM_FRAGMENTS
    assert facts["checkpoint"]["digest"]
    assert facts["ledger"] == [{"learner": 0, "merges": 4, "c_steps": 40, "c_tokens": 4000}]
    assert facts["settings"] == {"quorum": 2}
    assert facts["lookahead"] == {"outcome": "unknown", "momentum_times": [None] * NUM_FRAGMENTS}
    assert facts["lora"]["alpha"] == 8
    assert facts["verified"]["tensors"] == 56
    assert str(checkpoint) not in text


def test_merging_gives_the_adapters_model(config, checkpoint, out, tmp_path):
    make_checkpoint(checkpoint, config)
    export(checkpoint, config.model, out, verify=False)
    report = export(checkpoint, config.model, tmp_path / "merged", merged=True, dtype="f32")
    assert report.kind == "merged"
    base = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    adapted = logits_of(PeftModel.from_pretrained(base, str(out)))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.float32
    assert torch.allclose(logits_of(merged), adapted, atol=1e-4)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", ["auto", "f32"])
def test_full_tuning_of_a_tied_model(config, checkpoint, out, dtype):
    config = evolve(config, tuning="full")
    tensors = make_checkpoint(checkpoint, config)
    report = export(checkpoint, config.model, out, dtype=dtype)
    assert report.kind == "model"
    assert report.verified.logits_moved > 0
    saved = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in saved
    wanted = torch.float32 if dtype == "f32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == wanted
    assert model.lm_head.weight is model.model.embed_tokens.weight
    named = dict(model.named_parameters())
    assert named.keys() == tensors.keys()
    assert all(torch.equal(named[name], tensors[name].to(wanted)) for name in tensors)


def test_full_tuning_of_a_model_with_a_head_of_its_own(config, checkpoint, out, tmp_path):
    torch.manual_seed(0)
    untied = LlamaConfig(
        vocab_size=698,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(untied).save_pretrained(tmp_path / "untied")
    AutoTokenizer.from_pretrained(config.model).save_pretrained(tmp_path / "untied")
    config = evolve(config, model=str(tmp_path / "untied"), tuning="full")
    tensors = make_checkpoint(checkpoint, config)
    export(checkpoint, config.model, out)
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], tensors["lm_head.weight"])


# Flags and the manifest.


def test_a_checkpoint_without_a_manifest_needs_the_flags_and_proves_them(config, checkpoint, out):
    tensors = make_checkpoint(checkpoint, config, manifest=False, pattern="strided", merge="iso")
    with pytest.raises(ConfigError, match="say --tuning lora or --tuning full"):
        export(checkpoint, config.model, out)
    with pytest.raises(ConfigError, match="give --lora-alpha, --lora-targets"):
        export(checkpoint, config.model, out, tuning="lora", lora_r=4)
    with pytest.raises(CheckpointError, match="check --model, --tuning and the --lora flags"):
        export(checkpoint, config.model, out, tuning="lora", lora_r=8, lora_alpha=8, lora_targets="auto")
    with pytest.raises(CheckpointError, match="check --model, --tuning"):
        export(checkpoint, config.model, out, tuning="full")
    assert not out.exists()
    export(checkpoint, config.model, out, tuning="lora", lora_r=4, lora_alpha=8, lora_targets="auto")
    saved = load_file(out / "adapter_model.safetensors")
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"lora_alpha": 16}, "--lora-alpha 16 contradicts the checkpoint, which states 8"),
        ({"lora_r": 8}, "--lora-r 8 contradicts the checkpoint, which states 4"),
        ({"tuning": "full"}, "--tuning full contradicts the checkpoint, which states lora"),
        ({"lora_targets": "attention"}, "--lora-targets attention contradicts the checkpoint"),
        ({"dtype": "f16"}, "--dtype f16: must be one of"),
    ],
)
def test_flags_that_contradict_the_checkpoint_are_refused(config, checkpoint, out, flags, problem):
    make_checkpoint(checkpoint, config)
    with pytest.raises(ConfigError, match=problem):
        export(checkpoint, config.model, out, **flags)
    assert not out.exists()


def test_flags_that_agree_are_no_error(config, checkpoint, out):
    make_checkpoint(checkpoint, config)
    flags = {"tuning": "lora", "lora_r": 4, "lora_alpha": 8, "lora_targets": "all-linear"}
    assert export(checkpoint, config.model, out, verify=False, **flags).kind == "adapter"


def test_another_base_model_is_refused(config, checkpoint, out, tmp_path):
    make_checkpoint(checkpoint, config)
    shutil.copytree(config.model, tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] += 1
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="is not the model that was trained: it is digest"):
        export(checkpoint, str(tmp_path / "other"), out)
    with pytest.raises(ConfigError, match=r"--model is missing: .* from a local folder, .*; name the folder"):
        export(checkpoint, None, out)


def test_a_missing_checkpoint_and_a_damaged_manifest(config, checkpoint, out):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        export(checkpoint, config.model, out)


def test_merging_what_has_no_adapter_is_refused(config, checkpoint, out):
    config = evolve(config, tuning="full")
    make_checkpoint(checkpoint, config)
    with pytest.raises(ConfigError, match="--merged: this checkpoint is of full tuning"):
        export(checkpoint, config.model, out, merged=True)


# Output folder and verification.


def test_an_existing_folder_is_kept_unless_overwriting_succeeds(config, checkpoint, out, monkeypatch):
    make_checkpoint(checkpoint, config)
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists; name another one, or replace it with --overwrite"):
        export(checkpoint, config.model, out)

    def broken(*args, **options):
        raise CheckpointError("verification failed")

    with monkeypatch.context() as patched:
        patched.setattr(export_module, "verify_adapter", broken)
        with pytest.raises(CheckpointError, match="verification failed"):
            export(checkpoint, config.model, out, overwrite=True)
    assert [path.name for path in out.iterdir()] == ["precious.txt"]
    export(checkpoint, config.model, out, overwrite=True, verify=False)
    assert not (out / "precious.txt").exists()
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "yeto-state.ckpt"]


def test_an_adapter_of_zeros_is_a_warning(config, checkpoint, out, tmp_path):
    make_checkpoint(checkpoint, config, noise=0.0)
    report = export(checkpoint, config.model, out)
    assert report.warnings == ("after 4 committed rounds every B matrix is zero: nothing was learned",)
    assert report.verified.empty
    report = export(checkpoint, config.model, tmp_path / "merged", merged=True)
    assert report.warnings == ("after 4 committed rounds every B matrix is zero: nothing was learned",)


def test_a_checkpoint_of_step_zero_is_a_warning(config, checkpoint, out):
    make_checkpoint(checkpoint, config, step=0, noise=0.0)
    (warning,) = export(checkpoint, config.model, out).warnings
    assert "no round was committed yet" in warning


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: w.pop(next(iter(w))), "missing base_model"),
        (
            lambda w: w.update({"base_model.model.extra.lora_A.weight": torch.ones(1)}),
            "unexpected base_model",
        ),
        (
            lambda w: w.update({name: 0 * tensor for name, tensor in w.items() if ".lora_A." in name}),
            "the adapter loads but does not change the model's logits",
        ),
        (lambda w: w.update({next(iter(w)): torch.ones(3)}), "does not load: .*size mismatch"),
    ],
)
def test_a_dead_adapter_does_not_pass(config, checkpoint, out, monkeypatch, change, problem):
    """Keys that do not fit are what a wrapper's prefix or a renamed layer leaves behind."""
    make_checkpoint(checkpoint, config)
    save = export_module.save_adapter

    def spoiled(model, folder):
        save(model, folder)
        path = f"{folder}/adapter_model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path, metadata={"format": "pt"})

    monkeypatch.setattr(export_module, "save_adapter", spoiled)
    with (
        pytest.warns(UserWarning, match="Found missing adapter keys")
        if "missing" in problem
        else pytest.MonkeyPatch.context(),
        pytest.raises(CheckpointError, match=problem),
    ):
        export(checkpoint, config.model, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: w.pop("model.norm.weight"), "missing keys: model.norm.weight"),
        (lambda w: w.update(extra=torch.ones(1)), "unexpected keys: extra"),
        (lambda w: w.update({"model.norm.weight": torch.ones(3)}), "mismatched keys: .*model.norm.weight"),
        (lambda w: w["model.norm.weight"].fill_(torch.inf), "the exported model's logits are not finite"),
        (
            lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}),
            "embedding and output head are tied in only one of base and export",
        ),
    ],
    ids=["missing", "unexpected", "shape", "infinite", "untied"],
)
def test_a_broken_model_folder_does_not_pass(config, checkpoint, out, monkeypatch, change, problem):
    config = evolve(config, tuning="full")
    make_checkpoint(checkpoint, config)
    write = export_module._write

    def spoiled(module, kind, plan, folder):
        write(module, kind, plan, folder)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        settings = json.loads((folder / "config.json").read_text())
        settings["tie_word_embeddings"] = "lm_head.weight" not in weights
        (folder / "config.json").write_text(json.dumps(settings))

    monkeypatch.setattr(export_module, "_write", spoiled)
    with pytest.raises(CheckpointError, match=problem):
        export(checkpoint, config.model, out)
    assert not out.exists()


@pytest.mark.parametrize("dtype", ["auto", "f32"])
def test_a_model_folder_that_equals_its_base_does_not_pass(config, checkpoint, out, dtype):
    config = evolve(config, tuning="full")
    make_checkpoint(checkpoint, config, noise=0.0)
    with pytest.raises(CheckpointError, match=r"gives the base model's logits; .* --dtype f32 keeps it"):
        export(checkpoint, config.model, out, dtype=dtype)


@pytest.mark.parametrize("where", ["checkpoint", "around", "model", "here"])
def test_overwrite_never_takes_away_what_the_export_stands_on(
    config, checkpoint, tmp_path, monkeypatch, where
):
    make_checkpoint(checkpoint, config)
    model = tmp_path / "model"
    shutil.copytree(config.model, model)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    before = sorted(path for path in tmp_path.rglob("*"))
    out = {"checkpoint": checkpoint, "around": tmp_path, "model": model, "here": here / "."}[where]
    with pytest.raises(ConfigError, match=r"--output-dir .*; name another folder"):
        export(checkpoint, str(model), out, overwrite=True)
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_where_a_link_leads_to_is_replaced_and_the_link_stays(config, checkpoint, tmp_path):
    make_checkpoint(checkpoint, config)
    far, link = tmp_path / "disk" / "far", tmp_path / "out"
    far.mkdir(parents=True)
    (far / "old.txt").write_text("old")
    link.symlink_to(far)
    export(checkpoint, config.model, link, overwrite=True, verify=False)
    assert link.is_symlink()
    assert (far / "adapter_model.safetensors").exists()
    assert not (far / "old.txt").exists()
    assert [path.name for path in far.parent.iterdir()] == ["far"]


def test_what_came_to_the_place_meanwhile_is_kept(config, checkpoint, out, monkeypatch):
    make_checkpoint(checkpoint, config)

    def come_first(*args):
        out.mkdir()
        (out / "theirs.txt").write_text("theirs")

    monkeypatch.setattr(export_module, "_write_facts", come_first)
    with pytest.raises(CheckpointError, match=f"--output-dir {out}: cannot write: .*somebody else made it"):
        export(checkpoint, config.model, out, verify=False)
    assert [path.name for path in out.iterdir()] == ["theirs.txt"]
    assert sorted(path.name for path in out.parent.iterdir()) == [out.name, checkpoint.name]


def test_what_is_left_of_another_folder_is_not_cleared_up(config, checkpoint, tmp_path):
    make_checkpoint(checkpoint, config)
    other = tmp_path / ".a.old-1"
    other.mkdir()
    export(checkpoint, config.model, tmp_path / "[ab]", verify=False)
    assert other.is_dir()
