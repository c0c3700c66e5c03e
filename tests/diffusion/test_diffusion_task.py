"""A diffusion model as a task of the loop: what is trained, counted, drawn, scored, saved, and refused."""

import json
import random
import shutil

import pytest
import torch
from attrs import evolve
from diffusion_rows import picture, write_pictures, write_rows
from safetensors.torch import load_file, save_file
from tiny_pipelines import tiny_flux, tiny_sd, tiny_sd3, tiny_sdxl
from tiny_wan import tiny_wan

from yeto.diffusion import build_task, extra, heldout_loss
from yeto.diffusion.adapter_files import WEIGHTS
from yeto.diffusion.cache import cache_rows
from yeto.diffusion.config import DiffusionConfig
from yeto.diffusion.model import load_encoders, load_pipeline
from yeto.diffusion.pipeline import find_pipeline
from yeto.diffusion.targets import find_targets, short_names
from yeto.errors import ConfigError, DataError

BUILDERS = {"sd": tiny_sd, "sdxl": tiny_sdxl, "sd3": tiny_sd3, "flux": tiny_flux, "wan": tiny_wan}
ATTENTION = {"to_q", "to_k", "to_v", "to_out.0"}
ADDED = {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return where a tiny pipeline of a family is; each is built once."""
    folder = tmp_path_factory.mktemp("models")

    def of(kind):
        if not (folder / kind).exists():
            BUILDERS[kind](folder / kind)
        return str(folder / kind)

    return of


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path, write_pictures(tmp_path, [(16, 16)] * 6))


def config(model, data, **changes):
    settings = {"model": model, "data": data, "lora_r": 2, "lora_alpha": 4, "shuffle_buffer": 4}
    return DiffusionConfig(**(settings | changes))


def taken(task, count, start=None):
    batches = task.batches(start)
    result = [next(batches) for _ in range(count)]
    batches.close()
    return result


@pytest.mark.parametrize("kind", ["sd", "sdxl", "sd3", "flux"])
@pytest.mark.parametrize("targets", ["auto", "all-linear"])
def test_every_trained_parameter_has_a_gradient(model, data, kind, targets):
    task = build_task(config(model(kind), data, lora_targets=targets, micro_batch_size=2))
    (batch,) = taken(task, 1)
    assert (batch.targets, batch.tokens) == (2 * 4 * 8 * 8, 2)
    loss = task.loss(batch)
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    loss.backward()
    part = "unet" if kind.startswith("sd") and kind != "sd3" else "transformer"
    parameters = task.trainable_parameters()
    assert parameters
    for name, parameter in parameters.items():
        assert name.startswith(f"{part}.")
        assert name.endswith((".lora_A.weight", ".lora_B.weight"))
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None, name
    moved = {name for name, one in parameters.items() if float(one.grad.abs().sum()) > 0}
    # An adapter begins with B = 0, through which nothing reaches A.
    assert moved
    assert all(".lora_B." in name for name in moved)


def test_targets_are_the_layers_that_are_meant(model):
    pipeline = load_pipeline(config(model("sd3"), None, lora_targets="attention"))
    assert set(pipeline.targets["transformer"]) == ATTENTION | ADDED
    assert (
        set(load_pipeline(config(model("sd"), None, lora_targets="attention")).targets["unet"]) == ATTENTION
    )
    auto = load_pipeline(config(model("sd3"), None))
    trained = {name.rsplit(".lora_", 1)[0] for name in auto.trainable_parameters()}
    ends = {name.split("transformer_blocks.0.")[-1] for name in trained if "transformer_blocks.0." in name}
    assert ends == {
        *(f"attn.{layer}" for layer in ATTENTION | ADDED),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    }
    flux = load_pipeline(config(model("flux"), None)).trainable_parameters()
    single = {name.split("blocks.0.")[1].rsplit(".lora_", 1)[0] for name in flux if "single_" in name}
    assert single == {"attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out"}
    listed = load_pipeline(config(model("flux"), None, lora_targets="to_q, proj_mlp"))
    assert listed.targets == {"transformer": ("proj_mlp", "to_q")}


def test_short_names_mean_exactly_their_modules(model):
    denoiser = load_pipeline(config(model("sd3"), None, lora_targets="to_q")).denoisers.modules["transformer"]
    linear = [name for name, one in denoiser.named_modules() if isinstance(one, torch.nn.Linear)]
    generator = random.Random(1)
    for _ in range(20):
        wanted = set(generator.sample(linear, generator.randint(1, len(linear))))
        names = short_names(denoiser, wanted)
        meant = {
            module
            for module, _ in denoiser.named_modules()
            if any(module == name or module.endswith(f".{name}") for name in names)
        }
        assert meant == wanted


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("nothing", r"--lora-targets nothing: matches no module; linear layers here: .*to_q"),
        (" , ", "--lora-targets is empty"),
        ("conv_in", r"--lora-targets conv_in: unet.conv_in is no linear layer"),
    ],
)
def test_targets_that_are_not_there_are_refused(model, targets, message):
    with pytest.raises(ConfigError, match=message):
        load_pipeline(config(model("sd"), None, lora_targets=targets))


def test_a_model_without_attention_says_what_it_has():
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"no linear layer of unet goes by such a name.*from: 0"):
        find_targets({"unet": plain}, "attention")


def test_adapters_depend_on_the_seed_alone(model, data):
    base = config(model("sd"), data, num_learners=2, seed=5)
    first = build_task(base).trainable_parameters()
    torch.manual_seed(99)
    second = build_task(evolve(base, learner_id=1)).trainable_parameters()
    other = build_task(evolve(base, seed=6)).trainable_parameters()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_what_learners_must_share(model, data):
    task = build_task(config(model("sd"), data, lora_targets="attention"))
    assert json.loads(json.dumps(task.binding())) == {
        "task": "diffusion",
        "model": find_pipeline(model("sd")).identity.binding(),
        "tuning": "lora",
        "seed": 0,
        "num_learners": 1,
        "lora": {"r": 2, "alpha": 4, "targets": {"unet": sorted(ATTENTION)}},
    }
    facts = task.describe()
    assert (facts["pipeline"], facts["denoisers"]) == ("StableDiffusionPipeline", ["unet"])
    assert (facts["prediction"], facts["compute_dtype"]) == ("epsilon", "float32")


@pytest.mark.parametrize("kind", ["sd", "sdxl", "sd3", "flux"])
def test_cached_rows_give_the_very_same_loss(model, data, kind, tmp_path):
    """Bit for bit: latents and prompts are made one row at a time, whatever they are made for."""
    computed = config(model(kind), data, micro_batch_size=3, eval_data=data, eval_rows=2)
    report = cache_rows(computed, tmp_path / "cache", load_encoders)
    rows = str(report.rows_file)
    cached = evolve(computed, data=rows, eval_data=rows)
    seen = []
    for settings in (computed, cached):
        task = build_task(settings)
        evaluation = task.evaluate()
        (batch,) = taken(task, 1)
        torch.manual_seed(4)
        loss = task.loss(batch)
        loss.backward()
        gradients = {name: one.grad.clone() for name, one in task.trainable_parameters().items()}
        seen.append((evaluation, float(loss.detach()), gradients))
    (first, loss, gradients), (second, same_loss, same_gradients) = seen
    assert first == second
    assert loss == same_loss
    assert all(torch.equal(gradients[name], same_gradients[name]) for name in gradients)


def test_held_out_loss_is_the_same_for_everybody(model, data):
    base = config(model("sd3"), data, eval_data=data, eval_rows=5)
    task = build_task(base)
    before = torch.random.get_rng_state()
    whole = task.evaluate()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(module.training for module in task._model.denoisers.modules.values())
    assert task.evaluate() == whole
    assert (whole.rows, whole.targets) == (5, 5 * 8 * 4 * 8 * 8)
    parts = [build_task(evolve(base, rank=rank, num_ranks=2)).evaluate() for rank in range(2)]
    assert sum(part.targets for part in parts) == whole.targets
    assert sum(part.loss_sum for part in parts) == pytest.approx(whole.loss_sum, rel=1e-12)
    assert build_task(evolve(base, micro_batch_size=3, seed=8)).evaluate() == whole
    assert heldout_loss(model("sd3"), None, base) == whole
    assert build_task(evolve(base, eval_data=None)).evaluate() is None


def test_a_saved_adapter_scores_as_the_model_it_was_saved_from(model, data, tmp_path):
    for kind, parts in (("sd3", ["transformer"]), ("wan", ["transformer", "transformer_2"])):
        settings = config(model(kind), data, eval_data=data, eval_rows=2, lora_targets="attention")
        if kind == "wan":
            settings = evolve(settings, data=wan_data(tmp_path), eval_data=wan_data(tmp_path))
        task = build_task(settings)
        base = task.evaluate()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in task.trainable_parameters().values():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        tuned = task.evaluate()
        assert tuned.loss_sum != base.loss_sum
        out = tmp_path / f"{kind}-out"
        task.save(out)
        assert sorted(path.name for path in out.iterdir()) == parts
        for part in parts:
            tensors = load_file(out / part / WEIGHTS)
            assert all(name.startswith("transformer.") for name in tensors)
        loaded = heldout_loss(model(kind), out, settings)
        assert loaded.loss_sum == pytest.approx(tuned.loss_sum, rel=1e-5)


def wan_data(folder):
    """Rows of the size that a pipeline with larger latents takes."""
    sub = folder / "wan"
    if not sub.exists():
        sub.mkdir()
        write_rows(sub, write_pictures(sub, [(32, 32)] * 3))
    return str(sub / "rows.jsonl")


def test_two_denoisers_share_the_noise_levels(model, tmp_path):
    task = build_task(config(model("wan"), wan_data(tmp_path), lora_targets="attention"))
    parameters = task.trainable_parameters()
    assert {name.partition(".")[0] for name in parameters} == {"transformer", "transformer_2"}
    schedule, denoisers = task._model.denoisers.schedule, task._model.denoisers
    parts = [denoisers.part_at(float(timestep)) for timestep in schedule.timesteps]
    # Its boundary is 0.875 of the steps.
    assert [part == "transformer" for part in parts] == [float(t) >= 875 for t in schedule.timesteps]
    (batch,) = taken(task, 1)
    seen = set()
    for seed in range(12):
        torch.manual_seed(seed)
        task.loss(batch).backward()
        busy = {name.partition(".")[0] for name, one in parameters.items() if float(one.grad.abs().sum()) > 0}
        assert all(one.grad is not None for one in parameters.values())
        assert len(busy) == 1, "one sample is one time, which one of the two is for"
        seen |= busy
        for one in parameters.values():
            one.grad = None
    assert seen == {"transformer", "transformer_2"}


def test_a_restart_goes_on_with_the_next_rows_and_the_same_chance(model, data):
    settings = config(model("sd"), data, micro_batch_size=2)
    task = build_task(settings)
    batches = taken(task, 8)
    torch.manual_seed(3)
    [task.loss(batch) for batch in batches[:5]]
    chance = torch.random.get_rng_state()
    wanted = [float(task.loss(batch).detach()) for batch in batches[5:]]
    again = build_task(settings)
    rest = taken(again, 3, json.loads(json.dumps(batches[4].position)))
    assert [batch.inputs.origins for batch in rest] == [batch.inputs.origins for batch in batches[5:]]
    torch.random.set_rng_state(chance)
    assert [float(again.loss(batch).detach()) for batch in rest] == wanted
    with pytest.raises(ConfigError, match="--micro-batch-size 1: the saved position"):
        build_task(evolve(settings, micro_batch_size=1)).batches(batches[4].position)


def test_the_sum_does_not_depend_on_who_is_in_a_batch(model, data):
    task = build_task(config(model("sd3"), data, micro_batch_size=3))
    (batch,) = taken(task, 1)
    samples = batch.inputs
    generator = torch.Generator().manual_seed(1)
    level = torch.tensor([10, 500, 990])
    noise = torch.randn(samples.latents.shape, generator=generator)
    from yeto.diffusion.loss import summed_error

    for weighting in ("none", "sigma", "snr", "min-snr"):
        denoisers = task._model.denoisers
        together = summed_error(denoisers, samples, level, noise, weighting=weighting)
        alone = [
            summed_error(
                denoisers,
                evolve(
                    samples,
                    latents=samples.latents[place : place + 1],
                    conditioning=samples.conditioning[place : place + 1],
                    origins=samples.origins[place : place + 1],
                ),
                level[place : place + 1],
                noise[place : place + 1],
                weighting=weighting,
            )
            for place in range(3)
        ]
        assert float(together.detach()) == pytest.approx(float(sum(alone).detach()), rel=1e-5)
        by_hand = sum(
            float(denoisers.schedule.weights(level, weighting)[place]) * float(error)
            for place, error in enumerate(errors_by_hand(denoisers, samples, level, noise))
        )
        assert float(together.detach()) == pytest.approx(by_hand, rel=1e-5)


def errors_by_hand(denoisers, samples, level, noise):
    """The squared errors of a flow, in float64."""
    sigma = denoisers.schedule.noise[level].double().reshape(-1, 1, 1, 1)
    noisy = (1 - sigma) * samples.latents + sigma * noise
    with torch.no_grad():
        said = denoisers.predict(
            "transformer", noisy.float(), denoisers.schedule.timesteps[level], samples.conditioning
        )
    return (said.double() - (noise.double() - samples.latents)).square().sum(dim=(1, 2, 3))


@pytest.mark.parametrize("kind", ["sd", "sdxl", "sd3", "flux", "wan"])
def test_bfloat16_trains_float32_adapters(model, data, tmp_path, kind):
    rows = wan_data(tmp_path) if kind == "wan" else data
    task = build_task(config(model(kind), rows, base_dtype="bf16", lora_targets="all-linear"))
    (batch,) = taken(task, 1)
    torch.manual_seed(1)
    loss = task.loss(batch)
    exact = build_task(config(model(kind), rows, lora_targets="all-linear"))
    torch.manual_seed(1)
    wanted = float(exact.loss(batch).detach())
    assert float(loss.detach()) == pytest.approx(wanted, rel=0.05)
    assert loss.dtype == torch.float32
    loss.backward()
    modules = task._model.denoisers.modules.values()
    assert torch.bfloat16 in {one.dtype for module in modules for one in module.parameters()}
    assert all(one.dtype == torch.float32 for one in task.trainable_parameters().values())
    assert any(float(one.grad.abs().sum()) > 0 for one in task.trainable_parameters().values())


@pytest.mark.parametrize("kind", ["sd", "sd3"])
def test_gradient_checkpointing_changes_nothing_but_memory(model, data, kind):
    gradients = []
    for word in ("off", "on"):
        task = build_task(config(model(kind), data, gradient_checkpointing=word))
        (batch,) = taken(task, 1)
        torch.manual_seed(1)
        task.loss(batch).backward()
        gradients.append({name: one.grad.clone() for name, one in task.trainable_parameters().items()})
    off, on = gradients
    assert all(torch.allclose(off[name], on[name], atol=1e-6) for name in off)


def test_what_is_no_pipeline_is_refused_with_the_way_out(model, data, tmp_path, fixtures):
    language_model = str(fixtures / "tiny-llama")
    nothing = tmp_path / "nothing"
    shutil.copytree(model("sd"), nothing)
    index = json.loads((nothing / "model_index.json").read_text())
    del index["unet"]
    (nothing / "model_index.json").write_text(json.dumps(index))
    broken = tmp_path / "broken"
    shutil.copytree(model("sd"), broken)
    (broken / "model_index.json").write_text("{")
    hollow = tmp_path / "hollow"
    shutil.copytree(model("sd"), hollow)
    for path in (hollow / "unet").glob("*.safetensors"):
        path.unlink()
    for place, message in (
        (language_model, r"not a folder of a diffusers pipeline; a model of transformers is for --task text"),
        (str(tmp_path), r"not a folder of a diffusers pipeline; it needs a model_index.json"),
        (
            str(nothing),
            r"StableDiffusionPipeline has nothing to train: its parts are .*vae.*, none is one of",
        ),
        (str(broken), r"its model_index.json cannot be read"),
        (str(hollow), r"its part unet has no weights"),
        (str(tmp_path / "absent"), r"no such folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_task(config(place, data))


def test_a_second_transformer_without_a_boundary_is_refused(model, tmp_path):
    place = tmp_path / "two"
    shutil.copytree(model("wan"), place)
    index = json.loads((place / "model_index.json").read_text())
    index["boundary_ratio"] = None
    (place / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="no boundary_ratio that says which of them denoises when"):
        build_task(config(str(place), wan_data(tmp_path)))


def test_without_the_extra_its_name_is_said(model, data, monkeypatch):
    monkeypatch.setattr(extra, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package diffusers and pillow.*pip install 'yeto\[diff"):
        build_task(config(model("sd"), data))


def test_rows_that_cannot_be_trained_on_are_named(model, data, tmp_path):
    with pytest.raises(ConfigError, match="--data is missing"):
        build_task(config(model("sd"), None))
    (tmp_path / "odd").mkdir()
    picture(15, 16).save(tmp_path / "odd" / "0.png")
    odd = write_rows(tmp_path / "odd", [{"image": "0.png", "prompt": "a"}])
    with pytest.raises(DataError, match=r"rows.jsonl line 1"):
        taken(build_task(config(model("sd3"), odd, height=None)), 1)
    save_file(
        {"latents": torch.full((4, 8, 8), float("nan")), "prompt_embeds": torch.zeros(4, 32)},
        tmp_path / "nan.safetensors",
    )
    rows = write_rows(
        tmp_path, [{"latents": "nan.safetensors", "prompt_embeds": "nan.safetensors"}], "nan.jsonl"
    )
    with pytest.raises(DataError, match=r"nan.jsonl line 1.*finite"):
        taken(build_task(config(model("sd"), rows)), 1)


def test_an_image_that_the_encoder_cannot_hold_is_named(model, data, tmp_path):
    """A VAE whose weights overflow gives latents that would poison everybody."""
    place = tmp_path / "overflowing"
    shutil.copytree(model("sd"), place)
    weights = place / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["quant_conv.bias"] = torch.full_like(tensors["quant_conv.bias"], float("inf"))
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"rows.jsonl line \d: its latents are not finite numbers"):
        taken(build_task(config(str(place), data)), 1)
