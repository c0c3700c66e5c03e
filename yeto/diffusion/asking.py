"""What a pipeline calls its denoiser with: its own code is run until it does.

A stand-in takes the denoiser's place. It has the denoiser's settings and none of its weights, and what it is
called with travels out of the pipeline as an exception. Nothing large is computed on the way, and nothing is
drawn from the random state that training uses.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

from yeto.diffusion.pipeline import SCHEDULER, VAE
from yeto.diffusion.values import Conditioning
from yeto.errors import ConfigError
from yeto.tuning.hub import cause_of

MASK_WORDS: Final = ("prompt_attention_mask", "prompt_embeds_mask")
"""What pipelines call the mask of a prompt's tokens."""
POOLED_WORD: Final = "pooled_prompt_embeds"
_LATENT_WORDS: Final = ("hidden_states", "sample")
_TIME_WORD: Final = "timestep"
_SETTLED: Final[Mapping[str, Any]] = {
    "num_inference_steps": 2,
    "num_frames": 1,
    # One pass for each sample; a denoiser that is told its guidance is told that of training.
    "guidance_scale": 1.0,
    "true_cfg_scale": 1.0,
    "output_type": "latent",
    # These change sizes and prompts, which are given.
    "use_resolution_binning": False,
    "clean_caption": False,
}

LatentShape = tuple[int, int, int]
"""Channels, height, width."""


class NotTaken(Exception):
    """The pipeline, or its denoiser, does not take these latents or this prompt; the text says why."""


def words_of(pipeline: Any) -> frozenset[str]:
    """Return the names of what a pipeline can be called with."""
    return frozenset(inspect.signature(type(pipeline).__call__).parameters)


def pixels_per_latent(pipeline: Any, name: str) -> int:
    """Return how many pixels of an image, along one side, become one latent.

    Raises:
        ConfigError: the pipeline, which ``name`` is ``--model`` of, does not say.
    """
    for word in ("vae_scale_factor", "vae_scale_factor_spatial"):
        factor = getattr(pipeline, word, None)
        if isinstance(factor, int):
            return factor
    raise ConfigError(
        f"--model {name}: {type(pipeline).__name__} does not say how much smaller than images latents are; "
        "use another pipeline"
    )


class Call:
    """One call of a denoiser, as the pipeline makes it."""

    def __init__(self, bound: inspect.BoundArguments) -> None:
        self._bound = bound
        words = bound.arguments
        self._word = next((word for word in _LATENT_WORDS if word in words), None)
        if self._word is None or not isinstance(words.get(_TIME_WORD), Tensor):
            raise NotTaken(f"its denoiser is called in an unknown way ({', '.join(list(words)[1:])})")

    @property
    def latents(self) -> Tensor:
        """The latents, in whatever order the denoiser takes them."""
        latents: Tensor = self._bound.arguments[str(self._word)]
        return latents

    @property
    def time(self) -> Tensor:
        """What the denoiser is told of the time."""
        time: Tensor = self._bound.arguments[_TIME_WORD]
        return time

    def made_with(self, denoiser: nn.Module, latents: Tensor, time: Tensor) -> Tensor:
        """Call a denoiser with other latents and another time; return its answer."""
        self._bound.arguments[str(self._word)] = latents.to(self.latents.dtype)
        if not self.time.is_floating_point():
            time = time.to(self.time.dtype)
        self._bound.arguments[_TIME_WORD] = time
        answer: Tensor = denoiser(*self._bound.args[1:], **self._bound.kwargs)[0]
        return answer


class _Asked(Exception):
    """Carries a call out of the pipeline."""

    def __init__(self, bound: inspect.BoundArguments) -> None:
        super().__init__("asked")
        self.bound = bound


class _Answered(Exception):
    """Carries what the scheduler was told out of the pipeline."""

    def __init__(self, answer: Any) -> None:
        super().__init__("answered")
        self.answer = answer


class _StandIn(nn.Module):
    """In the place of a denoiser, of which it has everything but the weights."""

    def __init__(self, denoiser: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        # Past the registry of modules: nobody may find, move or train the denoiser through this one.
        self.__dict__.update(denoiser=denoiser, device=device, dtype=dtype, answering=None)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["denoiser"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        denoiser, answering = self.__dict__["denoiser"], self.__dict__["answering"]
        if answering is not None:
            return answering(denoiser, *args, **kwargs)
        raise _Asked(inspect.signature(type(denoiser).forward).bind(None, *args, **kwargs))


class Asking:
    """A pipeline that is asked instead of run."""

    def __init__(
        self,
        pipeline: Any,
        denoisers: Mapping[str, nn.Module],
        scheduler: Any,
        *,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Prepare; the pipeline stays as it is.

        Args:
            pipeline: with its VAE, if that is at hand, of which only the settings are kept; without text
                encoders.
            denoisers: part name to module.
            scheduler: takes the place of the pipeline's.
            name: ``--model``, for errors.
            device: of the denoisers.
            dtype: of their weights.

        Raises:
            ConfigError: it cannot be asked.
        """
        self.kind = type(pipeline).__name__
        self.scheduler = scheduler
        # A copy with the same parts, of which some are replaced: past the pipeline's own setter, which would
        # note them as parts to be saved.
        self._pipeline = pipeline = copy.copy(pipeline)
        self._device, self._dtype = device, dtype
        self._stand_ins = {part: _StandIn(one, device, dtype) for part, one in denoisers.items()}
        for part, stand_in in self._stand_ins.items():
            object.__setattr__(pipeline, part, stand_in)
        vae = getattr(pipeline, VAE, None)
        if vae is not None:
            object.__setattr__(pipeline, VAE, SimpleNamespace(config=vae.config, dtype=dtype))
        object.__setattr__(pipeline, SCHEDULER, scheduler)
        self._words = words_of(pipeline)
        if "prompt_embeds" not in self._words:
            raise ConfigError(
                f"--model {name}: {self.kind} does not take a prompt's embeddings, so it cannot be trained; "
                "use a pipeline from text to image"
            )
        self._mask_word = next((word for word in MASK_WORDS if word in self._words), None)
        self.pixels_per_latent: int = pixels_per_latent(pipeline, name)
        """Pixels of an image, along one side, of one latent."""

    @property
    def packing(self) -> Callable[..., Tensor] | None:
        """The pipeline's own way of putting latents together for its denoiser, if it has one."""
        return getattr(self._pipeline, "_pack_latents", None)

    def setting(self, name: str) -> Any:
        """Return a setting of the pipeline itself, None if it has none of the name."""
        return self._pipeline.config.get(name)

    def call(self, shape: LatentShape, conditioning: Sequence[Conditioning]) -> Call:
        """Return what the pipeline calls its denoiser with for samples of one shape.

        Raises:
            NotTaken: it refuses them.
        """
        try:
            self._run(shape, conditioning)
        except _Asked as asked:
            return Call(asked.bound)
        raise NotTaken(f"{self.kind} came to an end without asking a denoiser")

    def told(
        self, shape: LatentShape, conditioning: Sequence[Conditioning], answering: Callable[..., Any]
    ) -> Tensor:
        """Return what the scheduler is told after a denoiser's first answer.

        Args:
            shape: of the samples.
            conditioning: of each.
            answering: gives the answer; takes a denoiser and the arguments of its call.

        Raises:
            NotTaken: the pipeline refuses the samples.
        """
        with self._answering(answering):
            try:
                self._run(shape, conditioning)
            except _Answered as answered:
                told: Tensor = answered.answer
                return told
        raise NotTaken(f"{self.kind} came to an end without telling its scheduler")

    def _run(self, shape: LatentShape, conditioning: Sequence[Conditioning]) -> None:
        embeds, mask, pooled = self._stacked(conditioning)
        words: dict[str, Any] = {
            **_SETTLED,
            "height": shape[1] * self.pixels_per_latent,
            "width": shape[2] * self.pixels_per_latent,
            # Its own chance, so that training's is not used up.
            "generator": torch.Generator().manual_seed(0),
            "prompt_embeds": embeds,
            POOLED_WORD: pooled,
        }
        words = {word: value for word, value in words.items() if word in self._words and value is not None}
        if self._mask_word is not None:
            words[self._mask_word] = mask
        try:
            self._pipeline(**words)
        except (_Asked, _Answered):
            raise
        except Exception as error:
            raise NotTaken(
                f"{self.kind} does not take latents of {' x '.join(map(str, shape))} with prompts of "
                f"{' x '.join(map(str, embeds.shape[1:]))}: {cause_of(error)}"
            ) from error

    def _stacked(self, conditioning: Sequence[Conditioning]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Put prompts together; shorter ones are filled up at their end, if a mask can say so."""
        longest = max(len(one.prompt_embeds) for one in conditioning)
        width = conditioning[0].prompt_embeds.shape[1]
        if self._mask_word is None and any(len(one.prompt_embeds) != longest for one in conditioning):
            raise NotTaken(
                "prompts of different lengths are in one batch, and this pipeline has no mask to tell them "
                "apart; use --micro-batch-size 1"
            )
        if any(one.prompt_embeds.shape[1] != width for one in conditioning):
            raise NotTaken("prompts of different widths are in one batch; cache them with one model")
        embeds = torch.zeros(len(conditioning), longest, width)
        mask = torch.zeros(len(conditioning), longest, dtype=torch.int64)
        for place, one in enumerate(conditioning):
            tokens = len(one.prompt_embeds)
            embeds[place, :tokens] = one.prompt_embeds
            mask[place, :tokens] = 1 if one.mask is None else one.mask.to(torch.int64)
        pooled = None
        if POOLED_WORD in self._words:
            vectors = [one.pooled for one in conditioning if one.pooled is not None]
            if len(vectors) != len(conditioning):
                raise NotTaken("this pipeline takes a pooled prompt, and there is none")
            pooled = torch.stack(vectors).to(self._device, self._dtype)
        return embeds.to(self._device, self._dtype), mask.to(self._device), pooled

    @contextmanager
    def _answering(self, answering: Callable[..., Any]) -> Iterator[None]:
        def step(model_output: Any, *args: Any, **kwargs: Any) -> Any:
            raise _Answered(model_output)

        self.scheduler.step = step
        for stand_in in self._stand_ins.values():
            stand_in.__dict__["answering"] = answering
        try:
            yield
        finally:
            del self.scheduler.step
            for stand_in in self._stand_ins.values():
                stand_in.__dict__["answering"] = None
