"""Exported diffusion adapters: what diffusers loads, what the proof catches, what is refused."""

import json
import shutil
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch
from diffusion_checkpoints import ALPHA, TARGETS, R, loaded, make_diffusion_checkpoint, sampled
from made_checkpoints import NUM_FRAGMENTS, write_made
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_families import built
from tiny_pipelines import tiny_flux, tiny_sd, tiny_sd3, tiny_sdxl
from tiny_wan import tiny_wan

from yeto.cli import diffusion_export as command
from yeto.cli import export as text_command
from yeto.cli.common import run_app
from yeto.diffusion import adapter_files
from yeto.diffusion import export as export_module
from yeto.diffusion.export import export
from yeto.errors import CheckpointError, ConfigError
from yeto.state import read_checkpoint
from yeto.wire import TrainingManifest

MAKERS = {"sd": tiny_sd, "sdxl": tiny_sdxl, "sd3": tiny_sd3, "flux": tiny_flux}
PART = {"sd": "unet", "sdxl": "unet", "sd3": "transformer", "flux": "transformer"}
LORA = {"lora_r": R, "lora_alpha": ALPHA, "lora_targets": ",".join(TARGETS)}


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """Return a function from a kind of pipeline to its folder, made once."""
    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = str(MAKERS[kind](tmp_path_factory.mktemp("pipelines") / kind))
        return made[kind]

    return folder


@pytest.fixture
def sd(pipelines):
    return pipelines("sd")


@pytest.fixture
def checkpoint(tmp_path):
    return tmp_path / "yeto-state.ckpt"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def written(out, part):
    return load_file(out / part / "pytorch_lora_weights.safetensors")


def said_by(app, words):
    """Run a command in this process; return its exit code and what it said on stderr."""
    with redirect_stderr(StringIO()) as said:
        code = run_app(app, words)
    return code, said.getvalue()


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_load_lora_weights_gives_the_model_that_was_trained(pipelines, checkpoint, out, kind):
    """As against a model that was given the checkpoint's tensors by PEFT alone: the same image."""
    model, part = pipelines(kind), PART[kind]
    tensors = make_diffusion_checkpoint(checkpoint, model, [part])
    lines = []
    report = export(checkpoint, model, out, say=lines.append)
    assert (report.step, report.folders, report.warnings) == (4, (part,), ())
    assert report.verified.tensors == len(tensors)
    assert report.verified.moved[part] > 0
    assert not report.verified.empty

    base = loaded(model)
    before = sampled(base)
    base.load_lora_weights(str(out / part))
    after = sampled(base)
    assert float((after - before).abs().max()) > 1e-4, "the image has changed"

    reference = loaded(model)
    module = getattr(reference, part)
    module.add_adapter(LoraConfig(r=R, lora_alpha=ALPHA, target_modules=list(TARGETS)))
    set_peft_model_state_dict(
        module, {name.removeprefix(f"{part}."): tensor for name, tensor in tensors.items()}
    )
    assert torch.equal(sampled(reference), after)
    assert [line.split()[0] for line in lines] == [
        "reading",
        "step",
        "look-ahead:",
        "writing",
        "verifying:",
        "verified:",
        "done:",
        f'pipeline.load_lora_weights("{out / part}")',
    ]


def test_a_second_transformer_has_a_folder_of_its_own(tmp_path, checkpoint, out):
    model = str(tiny_wan(tmp_path / "wan"))
    tensors = make_diffusion_checkpoint(checkpoint, model, ["transformer", "transformer_2"])
    report = export(checkpoint, model, out)
    assert report.folders == ("transformer", "transformer_2")
    pipeline = loaded(model)
    pipeline.load_lora_weights(str(out / "transformer"))
    pipeline.load_lora_weights(str(out / "transformer_2"), load_into_transformer_2=True)
    for part in report.folders:
        module = getattr(pipeline, part)
        (name,) = module.peft_config
        found = get_peft_model_state_dict(module, adapter_name=name)
        assert {f"{part}.{key}" for key in found} == {key for key in tensors if key.startswith(f"{part}.")}
        assert all(torch.equal(tensor, tensors[f"{part}.{key}"]) for key, tensor in found.items())


def test_a_pipeline_without_load_lora_weights_gets_a_folder_of_peft(tmp_path, checkpoint, out):
    model = str(tmp_path / "pixart")
    built("pixart").save_pretrained(model)
    tensors = make_diffusion_checkpoint(checkpoint, model, ["transformer"])
    lines = []
    report = export(checkpoint, model, out, say=lines.append)
    assert report.verified.moved["transformer"] > 0
    line = (
        f'  pipeline.transformer = PeftModel.from_pretrained(pipeline.transformer, "{out / "transformer"}")'
    )
    assert lines[-1] == line
    pipeline = loaded(model)
    assert not hasattr(pipeline, "load_lora_weights")
    adapted = PeftModel.from_pretrained(pipeline.transformer, str(out / "transformer"))
    assert (adapted.peft_config["default"].r, adapted.peft_config["default"].lora_alpha) == (R, ALPHA)
    found = get_peft_model_state_dict(adapted)
    assert len(found) == len(tensors)
    for name, tensor in found.items():
        assert torch.equal(tensor, tensors[name.replace("base_model.model", "transformer")])


def test_the_facts_of_an_export(sd, checkpoint, out):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"])
    export(checkpoint, sd, out)
    assert sorted(path.name for path in out.iterdir()) == ["unet", "yeto-export.json"]
    text = (out / "yeto-export.json").read_text()
    facts = json.loads(text)
    assert facts["kind"] == "diffusion-adapters"
    assert (facts["pipeline"], facts["folders"]) == ("StableDiffusionPipeline", ["unet"])
    assert facts["lora"] == {"r": R, "alpha": ALPHA, "targets": {"unet": list(TARGETS)}}
    assert facts["checkpoint"]["step"] == 4
    assert len(facts["checkpoint"]["versions"]) == NUM_FRAGMENTS
    assert facts["verified"]["tensors"] == len(written(out, "unet"))
    assert facts["lookahead"] == {"outcome": "unknown", "momentum_times": [None] * NUM_FRAGMENTS}
    assert str(checkpoint) not in text


def test_with_a_manifest_nothing_is_loaded_without_verifying(sd, checkpoint, out, monkeypatch):
    tensors = make_diffusion_checkpoint(checkpoint, sd, ["unet"])
    monkeypatch.setattr(export_module, "adapted_shapes", lambda *args: pytest.fail("loaded"))
    monkeypatch.setattr(export_module, "verify_adapters", lambda *args: pytest.fail("loaded"))
    assert export(checkpoint, sd, out, verify=False).verified is None
    found = written(out, "unet")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_checkpoint_without_a_manifest_needs_the_flags_and_proves_them(sd, checkpoint, out):
    tensors = make_diffusion_checkpoint(checkpoint, sd, ["unet"], manifest=False, pattern="strided")
    with pytest.raises(ConfigError, match="give --lora-r, --lora-alpha, --lora-targets"):
        export(checkpoint, sd, out)
    with pytest.raises(CheckpointError, match="check --model, --tuning and the --lora flags"):
        export(checkpoint, sd, out, **(LORA | {"lora_r": 8}))
    with pytest.raises(CheckpointError, match="check --model, --tuning and the --lora flags"):
        export(checkpoint, sd, out, **(LORA | {"lora_targets": "all-linear"}))
    assert not out.exists()
    report = export(checkpoint, sd, out, **LORA)
    found = written(out, "unet")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert report.verified.tensors == len(tensors)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            {"lora_alpha": 16},
            "--lora-alpha 16 contradicts the checkpoint, which states 8; leave the",
        ),
        ({"lora_r": 8}, "--lora-r 8 contradicts the checkpoint, which states 4"),
        (
            {"lora_targets": "all-linear"},
            "--lora-targets all-linear contradicts the checkpoint, which",
        ),
        ({"dtype": "f16"}, "--dtype f16: must be one of auto, f32, bf16"),
        ({"tuning": "full"}, "--tuning full: must be one of lora"),
        ({"lookahead": "half"}, "--lookahead half: must be one of remove, keep"),
    ],
)
def test_flags_that_contradict_the_checkpoint_are_refused(sd, checkpoint, out, flags, problem):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"])
    with pytest.raises(ConfigError, match=problem):
        export(checkpoint, sd, out, **flags)
    assert not out.exists()


def test_flags_that_agree_are_no_error(sd, checkpoint, out):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"])
    assert export(checkpoint, sd, out, verify=False, **LORA).step == 4


def test_another_base_model_is_refused(sd, checkpoint, out, tmp_path):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"])
    other = str(tiny_sd(tmp_path / "other", seed=1))
    with pytest.raises(ConfigError, match="is not the model that was trained: it is digest"):
        export(checkpoint, other, out)
    with pytest.raises(ConfigError, match=r"--model is missing: .* from a local folder, .*; name the folder"):
        export(checkpoint, None, out)
    with pytest.raises(ConfigError, match="--model"):
        export(checkpoint, str(tmp_path), out)


def test_the_look_ahead_is_removed_unless_it_is_kept(sd, checkpoint, out, tmp_path):
    raw = make_diffusion_checkpoint(
        checkpoint, sd, ["unet"], momentum_noise=0.02, lookaheads=(0.63, 0.0, 0.25)
    )
    report = export(checkpoint, sd, out, verify=False)
    assert report.lookahead == "removed"
    stored = read_checkpoint(checkpoint)
    layout = TrainingManifest.from_dict(stored.training_manifest).layout
    found = written(out, "unet")
    for part, fragment, factor in zip(layout.fragments, stored.fragments, (0.63, 0.0, 0.25), strict=True):
        values = fragment.params + torch.tensor(factor, dtype=torch.float32) * fragment.momentum
        for piece in part.slices():
            expected = values[piece.start : piece.stop].reshape(piece.tensor.shape)
            assert torch.equal(found[piece.tensor.name], expected)
    assert export(checkpoint, sd, tmp_path / "kept", verify=False, lookahead="keep").lookahead == "kept"
    kept = written(tmp_path / "kept", "unet")
    assert all(torch.equal(kept[name], raw[name]) for name in raw)
    assert any(not torch.equal(kept[name], found[name]) for name in raw)


def test_adapters_of_zeros_and_of_the_beginning_are_warned_of(sd, checkpoint, out, tmp_path):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"], noise=0.0)
    report = export(checkpoint, sd, out)
    assert report.warnings == ("after 4 committed rounds every B matrix is zero: nothing was learned",)
    assert report.verified.empty
    shutil.rmtree(checkpoint)
    make_diffusion_checkpoint(checkpoint, sd, ["unet"], noise=0.0, step=0)
    (warning,) = export(checkpoint, sd, tmp_path / "zero").warnings
    assert "no round was committed yet" in warning


# Whole pipelines.


@pytest.mark.parametrize("kind", ["sd", "flux"])
def test_merging_gives_the_pipeline_with_its_adapters(pipelines, checkpoint, out, tmp_path, kind):
    model, part = pipelines(kind), PART[kind]
    make_diffusion_checkpoint(checkpoint, model, [part])
    lines = []
    report = export(checkpoint, model, out, merged=True, say=lines.append)
    assert (report.kind, report.folders) == ("diffusion-pipeline", (part,))
    assert report.verified.moved[part] > 0
    assert lines[-1] == f'  pipeline = DiffusionPipeline.from_pretrained("{out}")'
    export(checkpoint, model, tmp_path / "adapters", verify=False)
    base = loaded(model)
    before = sampled(base)
    base.load_lora_weights(str(tmp_path / "adapters" / part))
    adapted, merged = sampled(base), sampled(loaded(out))
    assert torch.allclose(merged, adapted, atol=1e-4)
    assert float((merged - before).abs().max()) > 1e-3
    for path in Path(model).rglob("*"):
        if path.is_file() and path.parent.name != part:
            assert (out / path.relative_to(model)).read_bytes() == path.read_bytes()
    facts = json.loads((out / "yeto-export.json").read_text())
    assert facts["kind"] == "diffusion-pipeline"


def test_both_transformers_are_merged_in_the_dtype_that_is_asked_for(tmp_path, checkpoint, out):
    model = str(tiny_wan(tmp_path / "wan"))
    make_diffusion_checkpoint(checkpoint, model, ["transformer", "transformer_2"], noise=0.3)
    report = export(checkpoint, model, out, merged=True, dtype="bf16")
    assert sorted(report.verified.moved) == ["transformer", "transformer_2"]
    for part in report.folders:
        (path,) = (out / part).glob("*.safetensors")
        assert torch.bfloat16 in {tensor.dtype for tensor in load_file(path).values()}


def test_a_merge_that_overflows_or_drowns_is_refused(sd, checkpoint, out):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"], noise=1e30)
    with pytest.raises(CheckpointError, match=r"--merged: unet.*weight is not finite with the adapter"):
        export(checkpoint, sd, out, merged=True)
    shutil.rmtree(checkpoint)
    make_diffusion_checkpoint(checkpoint, sd, ["unet"], noise=1e-6)
    with pytest.raises(CheckpointError, match=r"unet: the merged denoiser predicts .* --dtype f32 keeps it"):
        export(checkpoint, sd, out, merged=True, dtype="bf16")
    assert not out.exists()


def test_merging_adapters_of_zeros_is_a_warning(sd, checkpoint, out):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"], noise=0.0)
    report = export(checkpoint, sd, out, merged=True)
    assert report.warnings == ("after 4 committed rounds every B matrix is zero: nothing was learned",)
    assert report.verified.moved == {"unet": 0.0}


def test_a_merged_pipeline_with_other_tensors_does_not_pass(sd, checkpoint, out, monkeypatch):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"])
    real = export_module.write_merged

    def spoiled(folder, *args):
        real(folder, *args)
        (path,) = (folder / "unet").glob("*.safetensors")
        path.unlink()

    monkeypatch.setattr(export_module, "write_merged", spoiled)
    with pytest.raises(CheckpointError, match="does not load: --model"):
        export(checkpoint, sd, out, merged=True)
    assert not out.exists()


# Verification.


def respelled(change, settings=True):
    """Return a stand-in for the writing of a file: other keys or values, or without its settings."""

    def save(tensors, path, metadata):
        save_file(change(tensors), path, metadata=metadata if settings else {"format": "pt"})

    return save


def lose_one(tensors):
    name = next(name for name in tensors if ".lora_B." in name)
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("save", "problem"),
    [
        (respelled(lambda t: {f"model.{k}": v for k, v in t.items()}), "does not take it for its unet"),
        (respelled(lambda t: {k: v + 1 for k, v in t.items()}), "was not loaded as the checkpoint has it"),
        (
            respelled(lose_one),
            r"keys differ from those that were loaded: missing .*lora_B.weight, unex",
        ),
        (respelled(dict, settings=False), r"loaded with r 4 and alpha 4 instead of 4 and 8"),
        (respelled(lambda t: {k.replace("lora_", "x_"): v for k, v in t.items()}), "unet: does not load: "),
    ],
    ids=["prefix", "values", "lost", "scale", "names"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_dead_adapter_does_not_pass(sd, checkpoint, out, monkeypatch, save, problem):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"])
    monkeypatch.setattr(adapter_files, "save_file", save)
    with pytest.raises(CheckpointError, match=problem):
        export(checkpoint, sd, out)
    assert not out.exists()
    assert [path.name for path in out.parent.iterdir()] == [checkpoint.name]


def test_an_adapter_that_is_not_finite_does_not_pass(sd, checkpoint, out):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"], noise=1e30)
    with pytest.raises(CheckpointError, match="with the adapter the predictions are not finite"):
        export(checkpoint, sd, out)


def test_a_young_adapter_is_seen_in_float32(sd, checkpoint, out):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"], noise=2e-6)
    assert 0 < export(checkpoint, sd, out).verified.moved["unet"] < 1e-3


def test_what_was_there_stays_unless_all_is_well(sd, checkpoint, out, monkeypatch):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"])
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists; name another one, or replace it with --overwrite"):
        export(checkpoint, sd, out)

    def broken(*args):
        raise CheckpointError("verification failed")

    with monkeypatch.context() as patched:
        patched.setattr(export_module, "verify_adapters", broken)
        with pytest.raises(CheckpointError, match="verification failed"):
            export(checkpoint, sd, out, overwrite=True)
    assert [path.name for path in out.iterdir()] == ["precious.txt"]
    export(checkpoint, sd, out, overwrite=True, verify=False)
    assert sorted(path.name for path in out.iterdir()) == ["unet", "yeto-export.json"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "yeto-state.ckpt"]


# Checkpoints of something else.


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lora": {"r": R, "alpha": ALPHA, "targets": {"../unet": ["to_q"]}}}, "does not say what its adapt"),
        ({"lora": {"r": R, "alpha": ALPHA, "targets": ["to_q"]}}, "does not say what its adapters are"),
        ({"lora": {"r": 0, "alpha": ALPHA, "targets": {"unet": ["to_q"]}}}, "does not say what its adapters"),
        ({"lora": {"r": R, "alpha": ALPHA, "targets": {"unet": [3]}}}, "does not say what its adapters are"),
        ({"lora": 3}, "does not say what its adapters are"),
        ({"tuning": "full"}, "does not say what its adapters are"),
        (
            {"lora": {"r": R, "alpha": ALPHA, "targets": {"transformer": ["a"]}}},
            "has a tensor unet.* but",
        ),
    ],
)
def test_manifests_that_make_no_sense(sd, checkpoint, out, change, problem):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"], binding=change)
    with pytest.raises(CheckpointError, match=problem):
        export(checkpoint, sd, out)
    assert not out.exists()


def test_each_command_names_the_other_for_the_others_checkpoints(sd, checkpoint, out, tmp_path):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"])
    words = ["--checkpoint", str(checkpoint), "--output-dir", str(out)]
    code, said = said_by(text_command.build, [*words, "--model", sd])
    assert code == 2
    assert said.splitlines()[-1] == (
        "yeto: --checkpoint is of the diffusion task, not of the text task: export it with "
        "yeto-diffusion-export"
    )
    text = tmp_path / "text.ckpt"
    binding = {"model": {"digest": "a"}, "tuning": "lora", "lora": {"r": 4, "alpha": 8, "targets": ["q"]}}
    write_made(text, {"base_model.q.lora_A.weight": torch.ones(4, 64)}, binding)
    code, said = said_by(command.build, ["--checkpoint", str(text), "--output-dir", str(out), "--model", sd])
    assert code == 2
    assert said.splitlines()[-1].endswith("not of the diffusion task: export it with yeto-export")
    write_made(tmp_path / "new.ckpt", {"a": torch.ones(4, 64)}, binding | {"task": "audio"})
    with pytest.raises(ConfigError, match=r"is of the audio task, .*: no command here exports it"):
        export(tmp_path / "new.ckpt", sd, out)
    assert not out.exists()


def test_the_command(sd, checkpoint, out, capsys):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"])
    words = ["--checkpoint", str(checkpoint), "--model", sd, "--output-dir", str(out), "--json"]
    assert run_app(command.build, words) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert (report["step"], report["folders"], report["verified"]["empty"]) == (4, ["unet"], False)
    assert "verified: " in said.err
    assert run_app(command.build, words) == 2
    assert "exists; name another one" in capsys.readouterr().err
    words[1] = str(checkpoint.with_name("gone"))
    assert run_app(command.build, [*words, "--overwrite"]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_settings_stand_in_the_file(sd, checkpoint, out):
    make_diffusion_checkpoint(checkpoint, sd, ["unet"])
    export(checkpoint, sd, out, verify=False)
    with safe_open(out / "unet" / "pytorch_lora_weights.safetensors", framework="pt") as file:
        settings = json.loads(file.metadata()["lora_adapter_metadata"])
    assert settings == {
        "unet.r": R,
        "unet.lora_alpha": ALPHA,
        "unet.target_modules": list(TARGETS),
    }
