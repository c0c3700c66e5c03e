"""The settings of the diffusion task beyond those of every task, as one frozen object."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from yeto.errors import ConfigError
from yeto.tuning.config import TuningConfig
from yeto.tuning.settings import require_at_least, require_choice

WEIGHTINGS = ("none", "sigma", "snr", "min-snr")
RESIZE_MODES = ("stretch", "center-crop")
SIDE_MAX = 1 << 14
"""Longest side of an image that is trained on, in pixels; longer ones are a mistake in a row or a flag."""


@frozen(kw_only=True)
class DiffusionConfig(TuningConfig):
    """What to train on, at which size, and which parts of which pipeline to adapt.

    Rows have images or latents, prompts or their embeddings; ``tuning`` can only be ``lora``.
    """

    model_folder: ClassVar[str] = "a folder of a diffusers pipeline"

    height: int | None = None
    """Pixels; None takes a row's own, or its image's."""
    width: int | None = None
    resize_mode: str = "center-crop"
    """``stretch`` an image to the size, or scale it to cover the size and cut what is over."""
    micro_batch_size: int = 1
    """Samples of one forward pass, all of one shape."""
    loss_weighting: str = "none"
    """How the error at a noise level weighs: ``none``, ``sigma``, ``snr`` or ``min-snr``."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        require_choice("--resize-mode", self.resize_mode, RESIZE_MODES)
        require_choice("--diffusion-loss-weighting", self.loss_weighting, WEIGHTINGS)
        require_at_least("--micro-batch-size", self.micro_batch_size, 1)
        for flag, pixels in (("--height", self.height), ("--width", self.width)):
            if pixels is not None and not 1 <= pixels <= SIDE_MAX:
                raise ConfigError(f"{flag} {pixels} must be from 1 to {SIDE_MAX}")
        if self.tuning == "full":
            raise ConfigError("--tuning full is for --task text; --task diffusion trains adapters: say lora")
