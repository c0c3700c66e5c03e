"""More families of pipelines, in memory and without text encoders: each calls its denoiser in its own way."""

from __future__ import annotations

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    DDPMScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tiny_pipelines import tiny_vae

WIDTH = 32
"""Of a prompt's embeddings."""


def pixart():
    """The answer has a variance behind the noise; the prompt has a mask."""
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        cross_attention_dim=16,
        sample_size=8,
        caption_channels=WIDTH,
        use_additional_conditions=False,
    )
    return PixArtSigmaPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=tiny_vae(4),
        transformer=transformer,
        scheduler=DDPMScheduler(clip_sample=False),
    )


def lumina2():
    """Time goes the other way round, and so does the answer."""
    transformer = Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(64, 32, 32),
        cap_feat_dim=WIDTH,
    )
    return Lumina2Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=tiny_vae(4),
        text_encoder=None,
        tokenizer=None,
    )


def auraflow():
    """Time is told as a fraction."""
    transformer = AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        caption_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=256,
    )
    return AuraFlowPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=tiny_vae(4),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def qwen_image():
    """Latents of a video of one frame are packed; the prompt has a mask."""
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )


def flux2():
    """Its VAE has a scale of latents among its weights, so it is refused."""
    transformer = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        timestep_guidance_channels=8,
        axes_dims_rope=(4, 4, 4, 4),
    )
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=2,
    )
    return Flux2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )


FAMILIES = {"pixart": pixart, "lumina2": lumina2, "auraflow": auraflow, "qwen-image": qwen_image}


def built(name: str):
    """Build one of them from a seed of its own."""
    torch.manual_seed(7)
    return FAMILIES[name]()
