"""What a pipeline asks of rows, as far as its settings say it: nothing has to be loaded to know.

What they do not say (how wide the prompts of a denoiser are that calls this by a word of its own) shows with
the first row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from yeto.diffusion.asking import MASK_WORDS, POOLED_WORD, pixels_per_latent, words_of
from yeto.diffusion.pipeline import VAE, Found
from yeto.diffusion.values import RowNeeds
from yeto.errors import ConfigError

_PROMPT_WIDTHS: Final = (
    *("caption_channels", "cross_attention_dim", "joint_attention_dim", "cap_feat_dim", "text_dim"),
    "text_embed_dim",
)
"""What settings of denoisers call the width of a prompt's embeddings. Where there are captions, the width of
cross attention is that behind a projection."""
_LATENT_CHANNELS: Final = ("latent_channels", "z_dim")
"""What settings of VAEs call the channels of latents."""
_PACKED: Final = 4
"""Latents that are put together where they are packed: two by two."""
_SIZES_TOLD: Final = 6
"""Numbers about sizes that a U-Net of the XL kind is told beside the pooled prompt."""


def needs_of(found: Found, pipeline: Any) -> RowNeeds:
    """Return what rows must be.

    Args:
        found: the pipeline.
        pipeline: with whatever parts of it are loaded.

    Raises:
        ConfigError: something indispensable is not said.
    """
    denoiser = _settings(found, found.denoisers[0])
    vae = _settings(found, VAE) if VAE in found.parts else {}
    words = words_of(pipeline)
    is_packing = hasattr(pipeline, "_pack_latents")
    channels = _first(vae, _LATENT_CHANNELS)
    if channels is None and isinstance(denoiser.get("in_channels"), int):
        channels = denoiser["in_channels"] // (_PACKED if is_packing else 1)
    patch = denoiser.get("patch_size") or 1
    # That of a video begins with frames.
    patch = patch[-1] if isinstance(patch, list) else patch
    multiple = 2 if is_packing else int(patch)
    return RowNeeds(
        size_multiple=multiple * pixels_per_latent(pipeline, found.name),
        latent_multiple=multiple,
        latent_channels=channels,
        prompt_width=_first(denoiser, _PROMPT_WIDTHS),
        pooled_width=_pooled_width(found, denoiser) if POOLED_WORD in words else None,
        needs_mask=any(word in words for word in MASK_WORDS),
        model=found.identity.binding(),
    )


def _pooled_width(found: Found, denoiser: Mapping[str, Any]) -> int:
    width = _first(denoiser, ("pooled_projection_dim",))
    told = _first(denoiser, ("projection_class_embeddings_input_dim",))
    each = _first(denoiser, ("addition_time_embed_dim",))
    if width is None and told is not None and each is not None:
        width = told - _SIZES_TOLD * each
    if width is None:
        raise ConfigError(
            f"--model {found.name}: {found.kind} takes a pooled prompt, and its denoiser does not say how "
            "wide; use another pipeline"
        )
    return width


def _first(settings: Mapping[str, Any], words: tuple[str, ...]) -> int | None:
    """Return the first of some settings that is a number."""
    return next((settings[word] for word in words if isinstance(settings.get(word), int)), None)


def _settings(found: Found, part: str) -> dict[str, Any]:
    place = found.folder / part / "config.json"
    try:
        settings = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {found.name}: {part}/config.json cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--model {found.name}: {part}/config.json is no object")
    return settings
