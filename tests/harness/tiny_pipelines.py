"""Diffusers pipelines of a few thousand parameters, built from settings: real parts, only small.

Each builder saves a pipeline as a folder that ``--model`` takes. ``tiny_sd`` is a U-Net that learned noise by
the DDPM rule, ``tiny_sd3`` and ``tiny_flux`` are transformers with flow matching; the latter packs its
latents and is told the time as a fraction. ``tiny_sdxl`` hands its U-Net sizes and a pooled prompt beside the
rest. Images are 16 x 16, latents 8 x 8.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
)

IMAGE = 16
LATENT = 8
WORDS = 12
"""Tokens of a prompt."""
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def tiny_sd(folder: Path, *, prediction_type: str = "epsilon", seed: int = 0) -> Path:
    """Save a pipeline like Stable Diffusion's."""
    torch.manual_seed(seed)
    return _saved(
        folder,
        StableDiffusionPipeline(
            vae=tiny_vae(4),
            text_encoder=CLIPTextModel(_text(32)),
            tokenizer=_tokenizer(),
            unet=_unet(),
            scheduler=DDPMScheduler(prediction_type=prediction_type, clip_sample=False, steps_offset=1),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ),
    )


def tiny_sdxl(folder: Path, *, seed: int = 0) -> Path:
    """Save a pipeline like Stable Diffusion XL's, with both its text encoders."""
    torch.manual_seed(seed)
    unet = _unet(
        cross_attention_dim=64,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=32 + 6 * 8,
    )
    return _saved(
        folder,
        StableDiffusionXLPipeline(
            vae=tiny_vae(4),
            text_encoder=CLIPTextModel(_text(32)),
            text_encoder_2=CLIPTextModelWithProjection(_text(32)),
            tokenizer=_tokenizer(),
            tokenizer_2=_tokenizer(),
            unet=unet,
            scheduler=DDPMScheduler(clip_sample=False, steps_offset=1),
            add_watermarker=False,
        ),
    )


def tiny_sd3(folder: Path, *, seed: int = 0) -> Path:
    """Save a pipeline like Stable Diffusion 3's, with all three text encoders."""
    torch.manual_seed(seed)
    transformer = SD3Transformer2DModel(
        sample_size=LATENT,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=16,
    )
    return _saved(
        folder,
        StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=tiny_vae(4, shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False),
            text_encoder=CLIPTextModelWithProjection(_text(32)),
            tokenizer=_tokenizer(),
            text_encoder_2=CLIPTextModelWithProjection(_text(32)),
            tokenizer_2=_tokenizer(),
            text_encoder_3=_t5(64),
            tokenizer_3=_tokenizer(),
        ),
    )


def tiny_flux(folder: Path, *, guidance: bool = True, seed: int = 0) -> Path:
    """Save a pipeline like Flux's; its second text encoder is a small one of the other kind."""
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 6, 6),
    )
    return _saved(
        folder,
        FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=tiny_vae(4, shift_factor=0.06, use_quant_conv=False, use_post_quant_conv=False),
            text_encoder=CLIPTextModel(_text(32)),
            tokenizer=_tokenizer(),
            text_encoder_2=_t5(32),
            tokenizer_2=_tokenizer(),
            transformer=transformer,
        ),
    )


def _saved(folder: Path, pipeline) -> Path:
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def tiny_vae(channels: int, **settings) -> AutoencoderKL:
    """Build an encoder of images that halves them; its weights are what chance gives."""
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=2,
        sample_size=IMAGE,
        **{"scaling_factor": 0.5, **settings},
    )


def _unet(**settings) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        **{
            "sample_size": LATENT,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 4,
            "norm_num_groups": 4,
            **settings,
        }
    )


def _text(width: int) -> CLIPTextConfig:
    words = len(_vocabulary())
    return CLIPTextConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=WORDS,
        projection_dim=width,
        bos_token_id=words - 2,
        eos_token_id=words - 1,
        pad_token_id=words - 1,
    )


def _t5(width: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(_vocabulary()),
            d_model=width,
            d_kv=8,
            d_ff=37,
            num_layers=1,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


def _vocabulary() -> dict[str, int]:
    pieces = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return {piece: number for number, piece in enumerate(pieces)}


def _tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(vocab=_vocabulary(), merges=[], model_max_length=WORDS)
