"""A pipeline of two transformers, one for the noisy half of the way and one for the rest, of a few thousand
parameters."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tiny_pipelines import _tokenizer, _vocabulary
from transformers import UMT5Config, UMT5EncoderModel


def tiny_wan(folder: Path, *, seed: int = 0) -> Path:
    """Save a pipeline like Wan's."""
    torch.manual_seed(seed)
    pipeline = WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=len(_vocabulary()), d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
        ),
        vae=AutoencoderKLWan(
            base_dim=8,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=_transformer(),
        transformer_2=_transformer(),
        boundary_ratio=0.875,
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def _transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
