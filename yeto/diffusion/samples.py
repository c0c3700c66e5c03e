"""Rows as a denoiser takes them: what is not cached of them is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from yeto.diffusion.values import Conditioning, Encoders, Example
from yeto.errors import DataError


@frozen(kw_only=True)
class Samples:
    """Rows ready for the denoiser, on the CPU."""

    latents: Tensor = field(repr=False)
    """Float32 of shape (n, channels, height, width)."""
    conditioning: tuple[Conditioning, ...] = field(repr=False)
    origins: tuple[str, ...]
    """Where the rows stand, for messages."""


def prepared(encoders: Encoders, examples: Sequence[Example]) -> Samples:
    """Encode what is not cached of rows of one shape.

    Raises:
        DataError: latents or embeddings of a row are not finite.
    """
    latents, conditioning = [], []
    for example in examples:
        latent, heeded = example.latents, example.conditioning
        if latent is None:
            assert example.pixels is not None, "a row has an image or its latents"
            latent = encoders.latents(example.pixels.unsqueeze(0))[0]
        if heeded is None:
            assert example.prompt is not None, "a row has a prompt or its embeddings"
            heeded = encoders.conditioning([example.prompt])[0]
        made = {"latents": latent, "prompt_embeds": heeded.prompt_embeds, "pooled": heeded.pooled}
        for what, tensor in made.items():
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                raise DataError(
                    f"{example.origin}: its {what} are not finite numbers; cache the row anew or leave it out"
                )
        latents.append(latent)
        conditioning.append(heeded)
    return Samples(
        latents=torch.stack(latents),
        conditioning=tuple(conditioning),
        origins=tuple(example.origin for example in examples),
    )
