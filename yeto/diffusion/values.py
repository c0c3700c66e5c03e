"""What passes between the rows, the encoders and the objective of a diffusion task.

The rule of the latents: a latent is what the denoiser sees, shifted and scaled already, float32, without
noise. So cached ones and ones computed from an image are the same tensor, and give the same loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import field, frozen
from torch import Tensor


@frozen(kw_only=True, eq=False)
class Conditioning:
    """What the text encoders make of one prompt."""

    prompt_embeds: Tensor = field(repr=False)
    """Float32 of shape (tokens, width)."""
    mask: Tensor | None = field(default=None, repr=False)
    """Bool of shape (tokens,), where the denoiser takes one; True is a token to heed."""
    pooled: Tensor | None = field(default=None, repr=False)
    """Float32 of shape (width of the pooled vector,), where the denoiser takes one."""


@frozen(kw_only=True, eq=False)
class Example:
    """One row, checked and loaded: an image or its latents, and a prompt or what was made of it."""

    origin: str
    """File and line, for messages."""
    pixels: Tensor | None = field(default=None, repr=False)
    """Float32 of shape (3, height, width) in [-1, 1]; None where the row has latents."""
    latents: Tensor | None = field(default=None, repr=False)
    """Float32 of shape (channels, height, width) as the denoiser sees them."""
    prompt: str | None = None
    """None where the row has ``conditioning``."""
    conditioning: Conditioning | None = field(default=None, repr=False)


class Encoders(Protocol):
    """The frozen parts of a pipeline: images into latents, prompts into what the denoiser heeds."""

    def latents(self, pixels: Tensor) -> Tensor:
        """Return the latents, float32 of shape (n, channels, h, w), of images (n, 3, height, width).

        The mode of the encoder's distribution and not a draw from it, so that a row has one latent.
        """
        ...

    def conditioning(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Return what the denoiser heeds of each prompt."""
        ...


@frozen(kw_only=True)
class RowNeeds:
    """What a model asks of the rows; without arguments nothing, as long as no model is loaded."""

    size_multiple: int = 1
    """Height and width of an image are multiples of it."""
    latent_multiple: int = 1
    """Height and width of latents are multiples of it."""
    latent_channels: int | None = None
    prompt_width: int | None = None
    """Of ``Conditioning.prompt_embeds``."""
    pooled_width: int | None = None
    """Of ``Conditioning.pooled``; None where the denoiser takes none."""
    needs_mask: bool = False
    model: Mapping[str, str] | None = None
    """The model in words that mean the same on every machine, to tell the cache of another one."""
