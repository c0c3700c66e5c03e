"""Latents and embeddings are those that the sampling pipeline itself decodes and hands to its denoiser."""

import copy
import warnings

import pytest
import torch
from diffusers import DiffusionPipeline, PixArtSigmaPipeline
from tiny_families import built
from tiny_pipelines import _t5, _tokenizer, tiny_flux, tiny_sd, tiny_sd3, tiny_sdxl
from tiny_wan import tiny_wan

from yeto.diffusion import encode
from yeto.diffusion.encode import PipelineEncoders
from yeto.diffusion.pipeline import DENOISERS, find_pipeline

PROMPTS = ["a red cat", "b"]


def tiny_pixart(folder):
    """Save a pipeline whose prompts have a mask, with its text encoder."""
    torch.manual_seed(2)
    parts = built("pixart").components | {"tokenizer": _tokenizer(), "text_encoder": _t5(32)}
    PixArtSigmaPipeline(**parts).save_pretrained(folder)
    return folder


BUILDERS = {
    "sd": tiny_sd,
    "sdxl": tiny_sdxl,
    "sd3": tiny_sd3,
    "flux": tiny_flux,
    "wan": tiny_wan,
    "pixart": tiny_pixart,
}
WORDS = {"wan": {"num_frames": 1}, "pixart": {"use_resolution_binning": False, "clean_caption": False}}


class Stop(Exception):
    """Ends a pipeline where the test has seen enough."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pipelines")


def opened(kind, folder):
    """Return a whole pipeline and our encoders of it."""
    if not (folder / kind).exists():
        BUILDERS[kind](folder / kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = DiffusionPipeline.from_pretrained(str(folder / kind))
    pipeline.set_progress_bar_config(disable=True)
    found = find_pipeline(str(folder / kind))
    return pipeline, PipelineEncoders(found, device=torch.device("cpu"), dtype=torch.float32)


def handed(pipeline, kind, prompts):
    """Return the tensors that the denoiser is called with when the pipeline samples."""
    denoiser = next(getattr(pipeline, part) for part in DENOISERS if getattr(pipeline, part, None))
    seen = {}

    def record(module, args, kwargs):
        seen.update(kwargs)
        raise Stop

    hook = denoiser.register_forward_pre_hook(record, with_kwargs=True)
    side = 8 * getattr(pipeline, "vae_scale_factor", None) if kind != "wan" else 64
    words = {"height": side, "width": side, "num_inference_steps": 2, "guidance_scale": 1.0}
    with pytest.raises(Stop):
        pipeline(prompt=prompts, **words, **WORDS.get(kind, {}))
    hook.remove()
    return seen


@pytest.mark.parametrize("kind", sorted(BUILDERS))
def test_conditioning_is_what_the_denoiser_gets(kind, folder):
    pipeline, encoders = opened(kind, folder)
    ours = encoders.conditioning(PROMPTS)
    seen = handed(pipeline, kind, PROMPTS)
    embeds = torch.stack([one.prompt_embeds for one in ours])
    assert embeds.dtype == torch.float32
    # Ours are made one at a time, theirs together: the last bits may differ.
    assert torch.allclose(embeds, seen["encoder_hidden_states"], atol=1e-5)
    assert not torch.allclose(embeds[0], embeds[1], atol=1e-3)
    pooled = seen.get("pooled_projections", (seen.get("added_cond_kwargs") or {}).get("text_embeds"))
    assert (pooled is None) == (ours[0].pooled is None)
    if pooled is not None:
        assert torch.allclose(torch.stack([one.pooled for one in ours]), pooled, atol=1e-5)
    mask = seen.get("encoder_attention_mask")
    assert (mask is None) == (ours[0].mask is None)
    if mask is not None:
        assert torch.equal(torch.stack([one.mask for one in ours]), mask.bool())
        assert 0 < int(mask.sum()) < mask.numel()


@pytest.mark.parametrize("kind", ["sd", "sdxl", "sd3", "flux", "wan", "pixart"])
def test_latents_are_what_the_pipeline_decodes(kind, folder):
    pipeline, encoders = opened(kind, folder)
    factor = getattr(pipeline, "vae_scale_factor", None) or pipeline.vae_scale_factor_spatial
    side = 8 * factor if kind != "pixart" else 16
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(2, 3, side, side, generator=generator) * 2 - 1
    latents = encoders.latents(pixels)
    assert latents.dtype == torch.float32
    with torch.no_grad():
        images = pixels.unsqueeze(2) if kind == "wan" else pixels
        wanted = torch.cat(
            [pipeline.vae.encode(images[row : row + 1]).latent_dist.mode() for row in range(2)]
        )
    assert latents.shape == (wanted.squeeze(2) if kind == "wan" else wanted).shape

    decoded = {}

    def record(latent, *args, **kwargs):
        decoded["latent"] = latent
        raise Stop

    ended = latents.unsqueeze(2) if kind == "wan" else latents
    if kind == "flux":
        ended = pipeline._pack_latents(latents, *latents.shape)
    pipeline.scheduler.step = lambda *args, **kwargs: (ended,)
    pipeline.vae.decode = record
    pixels_side = latents.shape[2] * factor
    words = {"height": pixels_side, "width": pixels_side, "num_inference_steps": 1, "guidance_scale": 1.0}
    with pytest.raises(Stop):
        pipeline(prompt=PROMPTS, **words, **WORDS.get(kind, {}))
    assert torch.allclose(decoded["latent"], wanted, atol=1e-5)


def test_an_image_has_one_latent_whoever_is_beside_it(folder):
    _, encoders = opened("sd3", folder)
    pixels = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(4)) * 2 - 1
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    together = encoders.latents(pixels)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(together[1:2], encoders.latents(pixels[1:2]))
    prompts = encoders.conditioning(["one", "two"])
    assert torch.equal(prompts[1].prompt_embeds, encoders.conditioning(["two"])[0].prompt_embeds)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_part_is_loaded_when_it_is_needed(folder, monkeypatch):
    _, encoders = opened("sd", folder)
    loads = []
    load = encode.load_parts

    def counted(found, wanted, dtype):
        loads.append(sorted(wanted))
        return load(found, wanted, dtype)

    monkeypatch.setattr(encode, "load_parts", counted)
    assert loads == []
    encoders.latents(torch.zeros(1, 3, 16, 16))
    encoders.latents(torch.zeros(1, 3, 16, 16))
    assert loads == [["scheduler", "vae"]]
    encoders.conditioning(["a"])
    encoders.conditioning(["b"])
    assert loads[1:] == [["scheduler", "text_encoder", "tokenizer"]]


def test_frozen_parts_have_no_gradients(folder):
    _, encoders = opened("sd", folder)
    latents = encoders.latents(torch.zeros(1, 3, 16, 16))
    (prompt,) = encoders.conditioning(["a"])
    assert not latents.requires_grad
    assert not prompt.prompt_embeds.requires_grad
    assert copy.copy(latents).device.type == "cpu"
