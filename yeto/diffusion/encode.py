"""From images to latents and from prompts to what a denoiser heeds, by the pipeline's own frozen parts.

The rule: a row has one latent and one conditioning, on every machine of a kind and at any time. Latents are
the mode of the VAE's distribution, computed in float32 one image at a time, so that neither chance nor who
else is in a batch changes them; prompts go through the pipeline's own ``encode_prompt``. So cached tensors
and computed ones are the same.

A part is loaded when it is first needed. With rows that are cached whole, no text encoder is ever in memory.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from yeto.diffusion.asking import MASK_WORDS, POOLED_WORD
from yeto.diffusion.pipeline import DENOISERS, SCHEDULER, VAE, Found, load_parts
from yeto.diffusion.pipeline_files import UNUSED
from yeto.diffusion.values import Conditioning
from yeto.errors import ConfigError
from yeto.tuning.hub import cause_of

logger = logging.getLogger(__name__)

_NOT_FOR_PROMPTS: Final = UNUSED | {*DENOISERS, VAE}
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class PipelineEncoders:
    """The frozen parts of a pipeline; satisfies :class:`yeto.diffusion.values.Encoders`."""

    def __init__(self, found: Found, *, device: torch.device, dtype: torch.dtype, vae: Any = None) -> None:
        """Prepare; nothing is loaded before it is needed.

        Args:
            found: the pipeline.
            device: to compute on.
            dtype: of the text encoders; the VAE is float32 always.
            vae: the pipeline's in float32, if it is loaded already.
        """
        self._found = found
        self._device, self._dtype = device, dtype
        self._vae: Any = vae
        self._vae_is_settled = False
        self._prompts: Any = None

    def latents(self, pixels: Tensor) -> Tensor:
        """Return the latents of images; see :class:`yeto.diffusion.values.Encoders`.

        Args:
            pixels: float32 of shape (n, 3, height, width) in [-1, 1].

        Returns:
            Float32 of shape (n, channels, h, w), on the CPU.

        Raises:
            ConfigError: the pipeline has no VAE that is known.
        """
        if self._vae is None:
            if VAE not in self._found.parts:
                raise ConfigError(
                    f"--model {self._found.name}: it has no {VAE}, so latents cannot be computed; give rows "
                    "with cached latents"
                )
            self._vae = load_parts(self._found, (VAE, SCHEDULER), torch.float32).vae
        if not self._vae_is_settled:
            # Not before: with cached rows it need not be on the accelerator.
            self._vae = self._settled(self._vae)
            self._vae_is_settled = True
        return torch.cat([self._latent(pixels[place : place + 1]) for place in range(len(pixels))])

    def conditioning(self, prompts: Sequence[str]) -> list[Conditioning]:
        """Return what the denoiser heeds of each prompt, tensors on the CPU.

        Raises:
            ConfigError: the pipeline's encoder gives something that is not known.
        """
        if self._prompts is None:
            wanted = [part for part in self._found.parts if part not in _NOT_FOR_PROMPTS]
            logger.info("loading %s", ", ".join(part for part in wanted if part.startswith("text_encoder")))
            self._prompts = load_parts(self._found, wanted, self._dtype)
            for part in self._prompts.components.values():
                if isinstance(part, torch.nn.Module):
                    self._settled(part)
        return [self._conditioning(prompt) for prompt in prompts]

    def _conditioning(self, prompt: str) -> Conditioning:
        encode = self._prompts.encode_prompt
        known = inspect.signature(encode).parameters
        words: dict[str, Any] = {
            "prompt": [prompt],
            "device": self._device,
            "num_images_per_prompt": 1,
            "num_videos_per_prompt": 1,
            "do_classifier_free_guidance": False,
            "clean_caption": False,
        }
        sampling = inspect.signature(type(self._prompts).__call__).parameters
        for word, parameter in known.items():
            if word in words or parameter.kind not in _NAMED:
                continue
            if word in sampling and sampling[word].default is not inspect.Parameter.empty:
                # How long a prompt may be, what is put before it: as when the pipeline samples.
                words[word] = sampling[word].default
            elif parameter.default is parameter.empty:
                # A second prompt, which None makes the same as the first.
                words[word] = None
        words = {word: value for word, value in words.items() if word in known}
        try:
            with torch.no_grad():
                said = encode(**words)
        except Exception as error:
            raise ConfigError(
                f"--model {self._found.name}: {self._found.kind} cannot encode a prompt: {cause_of(error)}"
            ) from error
        tensors = [one for one in (said if isinstance(said, tuple) else (said,)) if isinstance(one, Tensor)]
        embeds = next((one for one in tensors if one.ndim == 3 and len(one) == 1), None)
        if embeds is None:
            raise ConfigError(
                f"--model {self._found.name}: {self._found.kind} gives no embeddings of (prompts, tokens, "
                "width); use another pipeline"
            )
        mask = pooled = None
        # What it takes back it has given: its own words for the parts of its answer.
        if any(word in known for word in MASK_WORDS):
            # Some leave out a mask that heeds everything.
            mask = next((one for one in tensors if one.shape == embeds.shape[:2]), None)
            mask = torch.ones(embeds.shape[:2]) if mask is None else mask
        if POOLED_WORD in known:
            pooled = next((one for one in tensors if one.ndim == 2 and one is not mask), None)
        return Conditioning(
            prompt_embeds=embeds[0].float().cpu(),
            mask=None if mask is None else mask[0].bool().cpu(),
            pooled=None if pooled is None else pooled[0].float().cpu(),
        )

    def _latent(self, pixels: Tensor) -> Tensor:
        vae = self._vae
        settings = vae.config
        # A VAE of videos says how many dimensions it takes by the kind of its layers.
        is_video = any(isinstance(module, torch.nn.Conv3d) for module in vae.modules())
        images = pixels.to(self._device, torch.float32)
        with torch.no_grad():
            encoded = vae.encode(images.unsqueeze(2) if is_video else images)
        if hasattr(encoded, "latent_dist"):
            latents = encoded.latent_dist.mode()
        elif hasattr(encoded, "latent"):
            latents = encoded.latent
        else:
            raise ConfigError(
                f"--model {self._found.name}: {type(vae).__name__} gives no latents that can be trained on; "
                "use another pipeline"
            )
        mean, std = settings.get("latents_mean"), settings.get("latents_std")
        if mean is not None and std is not None:
            place = (1, -1, *(1,) * (latents.ndim - 2))
            mean, std = (torch.tensor(one, device=latents.device).reshape(place) for one in (mean, std))
            latents = (latents - mean) / std
            # Where both are given, the factor is applied on top.
            latents = latents * (settings.get("scaling_factor") or 1.0)
        else:
            latents = (latents - (settings.get("shift_factor") or 0.0)) * (
                settings.get("scaling_factor") or 1.0
            )
        latents = latents.squeeze(2) if is_video else latents
        result: Tensor = latents.float().cpu()
        return result

    def _settled(self, module: Any) -> Any:
        module.requires_grad_(False)
        module.eval()
        return module.to(self._device)
