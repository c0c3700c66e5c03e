"""The denoiser is called as the pipeline calls it: proved by letting real pipelines sample and comparing."""

import functools
import warnings

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, DiffusionPipeline, EulerDiscreteScheduler, UNet2DModel
from tiny_families import FAMILIES, built, flux2
from tiny_pipelines import tiny_flux, tiny_sd, tiny_sd3, tiny_sdxl
from tiny_wan import tiny_wan

from yeto.diffusion.asking import Asking, NotTaken
from yeto.diffusion.calls import Denoising, Manner
from yeto.diffusion.objective import schedule_of
from yeto.diffusion.pipeline import DENOISERS
from yeto.diffusion.values import Conditioning
from yeto.errors import ConfigError

SAVED = {"sd": tiny_sd, "sdxl": tiny_sdxl, "sd3": tiny_sd3, "flux": tiny_flux, "wan": tiny_wan}
WIDTHS = {"sd": (32, None), "sdxl": (64, 32), "sd3": (64, 64), "flux": (32, 32), "wan": (32, None)}
CHANNELS = {"wan": 16}
TINY_UNET = {
    "sample_size": 8,
    "block_out_channels": (8,),
    "down_block_types": ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",),
    "norm_num_groups": 4,
    "layers_per_block": 1,
}
MANNERS = {
    "sd": Manner(latents="plain", time="steps", answer="same"),
    "sdxl": Manner(latents="plain", time="steps", answer="same"),
    "sd3": Manner(latents="plain", time="steps", answer="same"),
    "flux": Manner(latents="packed", time="fraction", answer="same"),
    "wan": Manner(latents="frame", time="steps", answer="same"),
    "pixart": Manner(latents="plain", time="steps", answer="first half"),
    "lumina2": Manner(latents="plain", time="rest", answer="negated"),
    "auraflow": Manner(latents="plain", time="fraction", answer="same"),
    "qwen-image": Manner(latents="packed", time="fraction", answer="same"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pipelines")


def loaded(name, folder):
    """Return a whole pipeline; some warn of their own settings."""
    if name in FAMILIES:
        return built(name)
    if not (folder / name).exists():
        SAVED[name](folder / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DiffusionPipeline.from_pretrained(str(folder / name))


def asked(pipeline, name="m"):
    """Return the pipeline's denoisers, to be called."""
    denoisers = {part: getattr(pipeline, part) for part in DENOISERS if getattr(pipeline, part, None)}
    schedule = schedule_of(pipeline.scheduler, name)
    place = {"name": name, "device": torch.device("cpu"), "dtype": torch.float32}
    return Denoising(Asking(pipeline, denoisers, schedule.scheduler, **place), denoisers, schedule, **place)


def prompts(name, count, tokens=8):
    width, pooled = WIDTHS.get(name, (32, None))
    generator = torch.Generator().manual_seed(5)
    return [
        Conditioning(
            prompt_embeds=torch.randn(tokens, width, generator=generator),
            mask=torch.arange(tokens) < tokens - 2 - number,
            pooled=None if pooled is None else torch.randn(pooled, generator=generator),
        )
        for number in range(count)
    ]


class Sampled:
    """What a pipeline tells its scheduler while it samples, step by step."""

    def __init__(self, pipeline, conditioning, side):
        self.steps = []
        pipeline.set_progress_bar_config(disable=True)
        step = pipeline.scheduler.step

        def recording(model_output, timestep, sample, *args, **kwargs):
            self.steps.append((model_output.clone(), float(timestep), sample.clone()))
            return step(model_output, timestep, sample, *args, **kwargs)

        pipeline.scheduler.step = recording
        words = {
            "prompt_embeds": torch.stack([one.prompt_embeds for one in conditioning]),
            "guidance_scale": 1.0,
            "num_inference_steps": 3,
            "height": side,
            "width": side,
            "output_type": "latent",
            "generator": torch.Generator().manual_seed(11),
        }
        if conditioning[0].pooled is not None:
            words["pooled_prompt_embeds"] = torch.stack([one.pooled for one in conditioning])
        mask = torch.stack([one.mask for one in conditioning]).long()
        special = {
            "PixArtSigmaPipeline": {"prompt_attention_mask": mask, "use_resolution_binning": False},
            "Lumina2Pipeline": {"prompt_attention_mask": mask},
            "AuraFlowPipeline": {"prompt_attention_mask": mask},
            "QwenImagePipeline": {"prompt_embeds_mask": mask},
            "WanPipeline": {"num_frames": 1},
        }
        pipeline(**words, **special.get(type(pipeline).__name__, {}))
        del pipeline.scheduler.step


@pytest.mark.parametrize("name", sorted(MANNERS))
def test_a_prediction_is_what_the_sampling_pipeline_computes(name, folder):
    pipeline = loaded(name, folder)
    denoising = asked(pipeline)
    channels = CHANNELS.get(name, 4)
    conditioning = prompts(name, 2)
    width = conditioning[0].prompt_embeds.shape[1]
    pooled = conditioning[0].pooled
    manner = denoising.rehearse(channels, width, None if pooled is None else len(pooled))
    assert manner == MANNERS[name]

    latent_side = 8
    sampled = Sampled(pipeline, conditioning, latent_side * denoising.asking.pixels_per_latent)
    assert len(sampled.steps) == 3
    parts = []
    for told, timestep, sample in sampled.steps:
        latents, wanted = sample, told
        if manner.latents == "frame":
            latents, wanted = sample.squeeze(2), told.squeeze(2)
        elif manner.latents == "packed":
            latents, wanted = (unpacked(pipeline, one, latent_side) for one in (sample, told))
        part = denoising.part_at(timestep)
        parts.append(part)
        with torch.no_grad():
            said = denoising.predict(part, latents, torch.tensor([timestep] * 2), conditioning)
        assert said.shape == latents.shape == (2, channels, latent_side, latent_side)
        assert torch.allclose(said, wanted, atol=1e-5), float((said - wanted).abs().max())
        assert float(said.std()) > 1e-3
    assert set(parts) == set(pipeline.components) & set(DENOISERS)


def test_a_shift_that_depends_on_the_size_is_one_of_sampling(folder):
    pipeline = loaded("flux", folder)
    pipeline.scheduler = type(pipeline.scheduler).from_config(
        pipeline.scheduler.config, use_dynamic_shifting=True
    )
    denoising = asked(pipeline)
    assert denoising.rehearse(4, 32, 32) == MANNERS["flux"]
    # Training draws from all steps alike.
    assert torch.allclose(denoising.schedule.noise, torch.arange(1000, 0, -1) / 1000)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_solver_with_inputs_of_its_own_scale_is_the_same_denoiser(folder):
    """Sampling by sigmas divides its inputs so that they are those of training again."""
    pipeline = loaded("sd", folder)
    pipeline.scheduler = EulerDiscreteScheduler.from_config(pipeline.scheduler.config)
    conditioning = prompts("sd", 2)
    sampled = Sampled(pipeline, conditioning, 16)
    kept = asked(pipeline).schedule.signal
    for told, timestep, sample in sampled.steps:
        level = round(timestep)
        noisy = sample * kept[level]
        with torch.no_grad():
            said = asked(pipeline).predict("unet", noisy, torch.tensor([timestep] * 2), conditioning)
        assert torch.allclose(said, told, atol=2e-3), float((said - told).abs().max())


def unpacked(pipeline, packed, side):
    """Put packed latents back by the pipeline's own way."""
    factor = pipeline.vae_scale_factor
    latents = pipeline._unpack_latents(packed, side * factor, side * factor, factor)
    return latents.squeeze(2) if latents.ndim == 5 else latents


def test_nothing_is_drawn_from_the_chance_of_training(folder):
    denoising = asked(loaded("sd3", folder))
    before = torch.random.get_rng_state()
    denoising.rehearse(4, 64, 64)
    denoising.predict("transformer", torch.zeros(1, 4, 8, 8), torch.tensor([500.0]), prompts("sd3", 1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_nothing_is_drawn_where_dropout_is_on(folder):
    pipeline = loaded("sd3", folder)
    for module in pipeline.transformer.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    before = torch.random.get_rng_state()
    asked(pipeline).rehearse(4, 64, 64)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_pipeline_stays_as_it_was(folder):
    pipeline = loaded("sd3", folder)
    transformer, vae, scheduler = pipeline.transformer, pipeline.vae, pipeline.scheduler
    asked(pipeline).rehearse(4, 64, 64)
    assert (pipeline.transformer, pipeline.vae, pipeline.scheduler) == (transformer, vae, scheduler)


def test_gradients_reach_the_denoiser(folder):
    pipeline = loaded("flux", folder)
    denoising = asked(pipeline)
    said = denoising.predict("transformer", torch.randn(1, 4, 8, 4), torch.tensor([3.0]), prompts("flux", 1))
    said.square().sum().backward()
    assert all(float(one.grad.abs().sum()) > 0 for one in pipeline.transformer.x_embedder.parameters())


def test_prompts_of_other_lengths_go_together_where_a_mask_can_tell(folder):
    denoising = asked(built("pixart"))
    short, long = prompts("pixart", 1, tokens=5)[0], prompts("pixart", 1, tokens=9)[0]
    latents, time = torch.randn(2, 4, 8, 8), torch.tensor([700.0, 20.0])
    with torch.no_grad():
        together = denoising.predict("transformer", latents, time, [short, long])
        for place, one in enumerate((short, long)):
            alone = denoising.predict(
                "transformer", latents[place : place + 1], time[place : place + 1], [one]
            )
            assert torch.allclose(together[place], alone[0], atol=1e-5)
    with pytest.raises(NotTaken, match=r"different lengths are in one batch.*--micro-batch-size 1"):
        asked(loaded("sd", folder)).predict(
            "unet", latents, time, [prompts("sd", 1, tokens=5)[0], prompts("sd", 1, tokens=9)[0]]
        )


@pytest.mark.parametrize(
    ("shape", "change", "message"),
    [
        ((4, 8, 8), {"pooled": None}, "takes a pooled prompt, and there is none"),
        ((4, 7, 8), {}, "does not take latents of 4 x 7 x 8|reach its denoiser as"),
        ((3, 8, 8), {}, "latents of 1 x 3 x 8 x 8 reach its denoiser as"),
    ],
)
def test_what_the_pipeline_does_not_take_is_said(folder, shape, change, message):
    prompt = prompts("flux", 1)[0]
    words = {"prompt_embeds": prompt.prompt_embeds, "pooled": prompt.pooled, **change}
    with pytest.raises(NotTaken, match=message):
        asked(loaded("flux", folder)).predict(
            "transformer", torch.zeros(1, *shape), torch.tensor([1.0]), [Conditioning(**words)]
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestep": lambda told: told**2}, "its denoiser is told 1e\\+06 at time 1000, by a rule"),
        ({"hidden_states": lambda latents: latents.flatten(1)}, "in an order that is not known"),
    ],
)
def test_a_rule_that_is_not_known_is_refused(folder, change, message):
    pipeline = loaded("sd3", folder)

    class Odd(type(pipeline)):
        """Calls its denoiser with something else than others do."""

        @functools.wraps(type(pipeline).__call__)
        def __call__(self, *args, **kwargs):
            stand_in = self.transformer
            usual = type(stand_in).forward
            stand_in.forward = lambda **words: usual(
                stand_in,
                **{word: change.get(word, lambda same: same)(value) for word, value in words.items()},
            )
            return super().__call__(*args, **kwargs)

    pipeline.__class__ = Odd
    with pytest.raises(ConfigError, match=f"--model m: cannot be trained: .*{message}"):
        asked(pipeline).rehearse(4, 64, 64)


def test_an_answer_that_is_changed_in_an_unknown_way_is_refused(folder):
    pipeline = loaded("sd3", folder)

    class Odd(type(pipeline)):
        """Halves what its denoiser says."""

        @functools.wraps(type(pipeline).__call__)
        def __call__(self, *args, **kwargs):
            stand_in = self.transformer
            usual = type(stand_in).forward
            stand_in.forward = lambda **words: (usual(stand_in, **words)[0] / 2,)
            return super().__call__(*args, **kwargs)

    pipeline.__class__ = Odd
    with pytest.raises(ConfigError, match="reaches the scheduler changed in a way that is not known"):
        asked(pipeline).rehearse(4, 64, 64)


def test_latents_with_a_scale_of_their_own_are_refused():
    with pytest.raises(ConfigError, match=r"--model m: cannot be trained: .*an order that is not known"):
        asked(flux2()).rehearse(4, 32, None)


def test_a_pipeline_without_prompts_is_refused():
    pipeline = DDPMPipeline(unet=UNet2DModel(**TINY_UNET), scheduler=DDPMScheduler())
    with pytest.raises(ConfigError, match="DDPMPipeline does not take a prompt's embeddings"):
        asked(pipeline)
