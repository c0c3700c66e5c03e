"""How a denoiser is called in training: as the pipeline calls it, which is asked.

Denoisers differ in what they take beside latents, time and prompt (sizes, positions, guidance, masks), in how
latents are laid out for them, in how the time is told and in what becomes of their answer before the
scheduler sees it. No list of families says so here: all of it is written down in the pipeline's own code, so
the arguments come from there (:mod:`yeto.diffusion.asking`), with latents and time replaced by those of
training.

Three things are measured once, when a pipeline is loaded, and refused if they come out as nothing that is
known:

* the latents: as they are, as a video of one frame, or packed by the pipeline's ``_pack_latents``,
  which is a reordering and is learned by giving it numbers in order;
* the time: as the scheduler counts it, as a fraction of its steps, or as what is left of that;
* the answer: as it is, with its sign turned, or its first half (the rest being a variance).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor, nn

from yeto.diffusion.asking import Asking, Call, LatentShape, NotTaken
from yeto.diffusion.objective import Schedule
from yeto.diffusion.values import Conditioning
from yeto.errors import ConfigError
from yeto.tuning.devices import compute_in

_PACKING: Final = ["latents", "batch_size", "num_channels_latents", "height", "width"]
"""What a packing must take to be one that is known."""
_REHEARSAL_SIDE: Final = 16
"""Height and width of the latents that a pipeline is tried with."""
_REHEARSAL_TOKENS: Final = 8
_TOLERANCE: Final = 1e-2
"""Of comparisons in bfloat16."""


@frozen(kw_only=True)
class Manner:
    """What was measured of a pipeline."""

    latents: str
    """``plain``, ``frame`` or ``packed``."""
    time: str
    """``steps``, ``fraction`` or ``rest``."""
    answer: str
    """``same``, ``negated`` or ``first half``."""


class Denoising:
    """A pipeline's denoisers, called as the pipeline calls them."""

    def __init__(
        self,
        asking: Asking,
        denoisers: Mapping[str, nn.Module],
        schedule: Schedule,
        *,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Take the parts; :func:`yeto.diffusion.model.load_denoisers` makes them.

        Args:
            asking: the pipeline.
            denoisers: part name to module, on ``device``; the first one is for the noisy end.
            schedule: the pipeline's noise levels.
            name: ``--model``, for errors.
            device: of the denoisers.
            dtype: of their weights.
        """
        self.asking = asking
        self.schedule = schedule
        self._name = name
        self._denoisers = dict(denoisers)
        self._device, self._dtype = device, dtype
        self._manner: Manner | None = None
        boundary = asking.setting("boundary_ratio")
        self._boundary = None if boundary is None else float(boundary) * schedule.train_steps

    def part_at(self, timestep: float) -> str:
        """Return the name of the denoiser for a time, as the scheduler counts it."""
        parts = tuple(self._denoisers)
        if len(parts) == 1 or self._boundary is None or timestep >= self._boundary:
            return parts[0]
        return parts[1]

    def rehearse(self, channels: int, prompt_width: int, pooled_width: int | None) -> Manner:
        """Measure how the pipeline calls its denoiser, on latents and a prompt of no meaning.

        Raises:
            ConfigError: in a way that is not known, or not with these.
        """
        prompt = Conditioning(
            prompt_embeds=torch.zeros(_REHEARSAL_TOKENS, prompt_width),
            pooled=None if pooled_width is None else torch.zeros(pooled_width),
        )
        try:
            return self._measured((channels, _REHEARSAL_SIDE, _REHEARSAL_SIDE), [prompt])
        except NotTaken as error:
            raise ConfigError(
                f"--model {self._name}: cannot be trained: {error}; use another pipeline"
            ) from error

    def predict(
        self, part: str, latents: Tensor, timesteps: Tensor, conditioning: Sequence[Conditioning]
    ) -> Tensor:
        """Return what a denoiser says of noisy latents.

        Args:
            part: name of the denoiser.
            latents: float32 of shape (n, channels, height, width), on any device.
            timesteps: as the scheduler counts them, float32 of shape (n,).
            conditioning: of each sample.

        Returns:
            Float32 of the latents' shape, on the denoiser's device.

        Raises:
            NotTaken: the pipeline does not take latents or prompts of these shapes.
        """
        channels, height, width = latents.shape[1:]
        shape = (channels, height, width)
        manner = self._measured(shape, conditioning)
        call = self.asking.call(shape, conditioning)
        if self._form_of(call, shape, len(conditioning)) != manner.latents:
            raise NotTaken(f"latents of {' x '.join(map(str, shape))} are laid out like no others")
        latents = latents.to(self._device)
        if manner.latents == "frame":
            latents = latents.unsqueeze(2)
        elif manner.latents == "packed":
            latents = self._packed(latents)
        times = _told(timesteps.to(self._device), manner, self.schedule.train_steps)
        with compute_in(self._dtype, self._device):
            answer = call.made_with(self._denoisers[part], latents, times)
        return self._taken_apart(answer.float(), shape, manner)

    def _measured(self, shape: LatentShape, conditioning: Sequence[Conditioning]) -> Manner:
        if self._manner is None:
            call = self.asking.call(shape, conditioning)
            latents = self._form_of(call, shape, len(conditioning))
            time = self._time_of(float(call.time.flatten()[0]))
            self._manner = Manner(latents=latents, time=time, answer=self._answer_to(shape, conditioning))
        return self._manner

    def _form_of(self, call: Call, shape: LatentShape, samples: int) -> str:
        """Return how latents of a shape reach the denoiser; others than the pipeline's own would not fit."""
        asked = call.latents.shape
        if asked == (samples, *shape):
            return "plain"
        if asked == (samples, shape[0], 1, *shape[1:]):
            return "frame"
        packing = self.asking.packing
        known = packing is not None and list(inspect.signature(packing).parameters) == _PACKING
        # It makes images of a size near the one that was asked for, rather than refuse.
        is_whole = asked.numel() == samples * shape[0] * shape[1] * shape[2]
        if known and is_whole and asked == self._packed(torch.zeros(samples, *shape)).shape:
            return "packed"
        raise NotTaken(
            f"latents of {samples} x {' x '.join(map(str, shape))} reach its denoiser as "
            f"{' x '.join(map(str, asked))}, in an order that is not known"
        )

    def _time_of(self, told: float) -> str:
        first = float(self.asking.scheduler.timesteps[0])
        steps = self.schedule.train_steps
        for word, value in (("steps", first), ("fraction", first / steps), ("rest", 1 - first / steps)):
            # A step is worth a thousandth of a fraction.
            if abs(told - value) <= _TOLERANCE * (value if word == "steps" else 0.1):
                return word
        raise NotTaken(f"its denoiser is told {told:.6g} at time {first:.6g}, by a rule that is not known")

    def _answer_to(self, shape: LatentShape, conditioning: Sequence[Conditioning]) -> str:
        """Run a denoiser once, and see what becomes of its answer on the way to the scheduler."""
        marks: list[Tensor] = []

        def answering(denoiser: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # Dropout would use up what training draws, and a restart measures again.
            devices = [self._device] if self._device.type == "cuda" else []
            with torch.random.fork_rng(devices), compute_in(self._dtype, self._device):
                answer = denoiser(*args, **kwargs)
            like = answer[0]
            mark = torch.randn(like.shape, generator=torch.Generator().manual_seed(1))
            marks.append(mark)
            mark = mark.to(like.device, like.dtype)
            return (mark,) if isinstance(answer, tuple) else type(answer)(sample=mark)

        told = self.asking.told(shape, conditioning, answering).float().to("cpu")
        mark = marks[0]
        known = {"same": mark, "negated": -mark}
        if mark.ndim > 3 and mark.shape[1] == 2 * shape[0]:
            known["first half"] = mark.chunk(2, dim=1)[0]
        for word, value in known.items():
            if told.shape == value.shape and torch.allclose(told, value, atol=_TOLERANCE, rtol=_TOLERANCE):
                return word
        raise NotTaken("what its denoiser says reaches the scheduler changed in a way that is not known")

    def _packed(self, latents: Tensor) -> Tensor:
        packing = self.asking.packing
        assert packing is not None, "asked only where there is one"
        return packing(latents, *latents.shape)

    def _order(self, shape: LatentShape) -> Tensor:
        """Return where each number of packed latents comes from.

        Not remembered: pictures may have any number of shapes, and it costs little beside a denoiser's work.
        """
        numbers = torch.arange(shape[0] * shape[1] * shape[2], dtype=torch.float64)
        return self._packed(numbers.reshape(1, *shape)).flatten().to(torch.int64).to(self._device)

    def _taken_apart(self, answer: Tensor, shape: LatentShape, manner: Manner) -> Tensor:
        """Return an answer in the latents' shape, as the scheduler would be told it."""
        if manner.answer == "first half":
            answer = answer.chunk(2, dim=1)[0]
        if manner.latents == "packed":
            flat = answer.flatten(1)
            answer = torch.zeros_like(flat).index_copy(1, self._order(shape), flat)
        answer = answer.reshape(-1, *shape)
        return -answer if manner.answer == "negated" else answer


def _told(timesteps: Tensor, manner: Manner, steps: int) -> Tensor:
    """Return times as the denoiser is told them."""
    if manner.time == "steps":
        return timesteps
    fraction = timesteps / steps
    return fraction if manner.time == "fraction" else 1 - fraction
