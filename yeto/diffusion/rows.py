"""One row of a diffusion data set: what it must say, and how it becomes tensors.

A row has an ``image`` or cached ``latents``, and a ``prompt`` or cached ``prompt_embeds`` (with
``prompt_mask`` and ``pooled_prompt_embeds`` where the model takes them). Where it has both, the cached one is
used.

The rule: a row is understood in two steps. :meth:`RowReader.plan` reads the heads of its files only, which is
enough to refuse most that can be wrong and to know the shape of what will be trained on, so that rows of one
shape can be put together before anything large is in memory. :meth:`RowReader.load` reads the rest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen
from PIL import Image

from yeto.diffusion.cached import CachedTensor, cached_tensor, resolved
from yeto.diffusion.config import SIDE_MAX
from yeto.diffusion.images import ImageSource, held_bytes, image_size, load_pixels
from yeto.diffusion.values import Conditioning, Example, RowNeeds
from yeto.errors import ConfigError, DataError
from yeto.tuning.rows import Row

PROMPT_CHARS_MAX: Final = 1 << 16
"""Longest prompt: far beyond what any text encoder heeds."""
_CACHE_ANEW: Final = "cache the rows with this model (yeto data cache-latents)"


@frozen(kw_only=True)
class Shape:
    """What rows must have in common to be trained on together."""

    image: tuple[int, int, int]
    """(3, height, width) of pixels, or (channels, height, width) of latents."""
    is_latents: bool
    prompt: tuple[int, ...] | None
    """Shape of cached embeddings; None of a prompt in words."""
    has_mask: bool = False
    pooled: tuple[int, ...] | None = None

    def __str__(self) -> str:
        channels, height, width = self.image
        what = f"{channels} x {height} x {width} latents" if self.is_latents else f"{height} x {width} pixels"
        return what if self.prompt is None else f"{what} with {self.prompt[0]} tokens of prompt"


@frozen(kw_only=True)
class PlannedRow:
    """A row that is understood and not loaded yet."""

    origin: str
    shape: Shape
    image: ImageSource | None = field(repr=False)
    latents: CachedTensor | None
    prompt: str | None = field(repr=False)
    embeds: CachedTensor | None
    mask: CachedTensor | None
    pooled: CachedTensor | None

    @property
    def held_bytes(self) -> int:
        """Memory that it takes before it is loaded: what stands in the row itself."""
        tensors = (self.latents, self.embeds, self.mask, self.pooled)
        held = sum(tensor.held_bytes for tensor in tensors if tensor is not None)
        return held + (0 if self.image is None else held_bytes(self.image))


class RowReader:
    """Understands and loads rows of one source, as one model needs them."""

    def __init__(
        self,
        needs: RowNeeds,
        *,
        folder: Path | None,
        height: int | None = None,
        width: int | None = None,
        resize_mode: str = "center-crop",
    ) -> None:
        """Take the settings.

        Args:
            needs: what the model asks of rows.
            folder: of the rows' file, where relative paths begin; None if it is not on this machine.
            height: of every image, with ``width``; None leaves it to the row, and then to the image.
            width: of every image.
            resize_mode: ``stretch`` or ``center-crop``.

        Raises:
            ConfigError: the model takes no images of that size, or only one side of it is given.
        """
        if (height is None) != (width is None):
            raise ConfigError("--height and --width: give both or neither")
        for flag, side in (("--height", height), ("--width", width)):
            if side is not None and (side > SIDE_MAX or side % needs.size_multiple):
                raise ConfigError(
                    f"{flag} {side}: this model takes multiples of {needs.size_multiple} up to {SIDE_MAX}"
                )
        self._needs = needs
        self._folder = folder
        self._size = None if height is None or width is None else (height, width)
        self._resize_mode = resize_mode

    def plan(self, row: Row) -> PlannedRow:
        """Understand a row by what it says and by the heads of the files that it names.

        Raises:
            DataError: it cannot be trained on; the message has the row and the remedy.
        """
        value, origin = row.value, row.origin
        latents = self._latents(row)
        embeds, mask, pooled = self._conditioning(row)
        image = None if latents is not None else self._image(value, origin)
        prompt = None if embeds is not None else _prompt(value, origin)
        if latents is not None:
            channels, height, width = latents.shape
        else:
            assert image is not None, "a row without latents has an image"
            channels, (height, width) = 3, self._wanted_size(value, origin, image)
        return PlannedRow(
            origin=origin,
            shape=Shape(
                image=(channels, height, width),
                is_latents=latents is not None,
                prompt=None if embeds is None else embeds.shape,
                has_mask=mask is not None,
                pooled=None if pooled is None else pooled.shape,
            ),
            image=image,
            latents=latents,
            prompt=prompt,
            embeds=embeds,
            mask=mask,
            pooled=pooled,
        )

    def load(self, planned: PlannedRow) -> Example:
        """Read what a row names.

        Raises:
            DataError: it cannot be read, or is not what its head said.
        """
        pixels = conditioning = None
        if planned.image is not None:
            _, height, width = planned.shape.image
            pixels = load_pixels(
                planned.image, planned.origin, height=height, width=width, resize_mode=self._resize_mode
            )
        if planned.embeds is not None:
            mask = None if planned.mask is None else planned.mask.load()
            if mask is not None and not bool(mask.any()):
                raise DataError(f"{planned.origin}: prompt_mask heeds no token at all; make it anew")
            conditioning = Conditioning(
                prompt_embeds=planned.embeds.load(),
                mask=mask,
                pooled=None if planned.pooled is None else planned.pooled.load(),
            )
        return Example(
            origin=planned.origin,
            pixels=pixels,
            latents=None if planned.latents is None else planned.latents.load(),
            prompt=planned.prompt,
            conditioning=conditioning,
        )

    def _latents(self, row: Row) -> CachedTensor | None:
        latents = self._cached(row, "latents", dimensions=3)
        if latents is None:
            return None
        wanted, multiple = self._needs.latent_channels, self._needs.latent_multiple
        channels, height, width = latents.shape
        if wanted is not None and channels != wanted:
            raise DataError(
                f"{row.origin}: latents have {channels} channels, this model's have {wanted}; {_CACHE_ANEW}"
            )
        if height % multiple or width % multiple:
            raise DataError(
                f"{row.origin}: latents are {height} x {width}, this model takes multiples of {multiple}; "
                "cache the rows with another --height and --width"
            )
        return latents

    def _conditioning(self, row: Row) -> tuple[CachedTensor | None, CachedTensor | None, CachedTensor | None]:
        embeds = self._cached(row, "prompt_embeds", dimensions=2)
        mask = self._cached(row, "prompt_mask", dimensions=1)
        pooled = self._cached(row, "pooled_prompt_embeds", dimensions=1)
        needs, origin = self._needs, row.origin
        if embeds is None:
            for tensor in (mask, pooled):
                if tensor is not None:
                    raise DataError(f"{origin}: {tensor.column} without prompt_embeds; give both or neither")
            return None, None, None
        widths = ((embeds, needs.prompt_width), (pooled, needs.pooled_width))
        for tensor, width in widths:
            if tensor is not None and width is not None and tensor.shape[-1] != width:
                raise DataError(
                    f"{origin}: {tensor.column} have width {tensor.shape[-1]}, this model's have {width}; "
                    f"{_CACHE_ANEW}"
                )
        if mask is not None and mask.shape[0] != embeds.shape[0]:
            raise DataError(
                f"{origin}: prompt_mask is of {mask.shape[0]} tokens, prompt_embeds of {embeds.shape[0]}"
            )
        for tensor, column, needed in (
            (mask, "prompt_mask", needs.needs_mask),
            (pooled, "pooled_prompt_embeds", needs.pooled_width is not None),
        ):
            if tensor is None and needed:
                raise DataError(
                    f"{origin}: prompt_embeds without {column}, which this model takes; {_CACHE_ANEW}"
                )
        return embeds, mask, pooled

    def _cached(self, row: Row, column: str, *, dimensions: int) -> CachedTensor | None:
        value = row.value.get(column)
        if value is None:
            return None
        found = cached_tensor(value, column, row.origin, self._folder, self._needs.model)
        if len(found.shape) != dimensions:
            words = {1: "(tokens or width)", 2: "(tokens, width)", 3: "(channels, height, width)"}[dimensions]
            raise DataError(f"{row.origin}: {column} has shape {found.shape}; it must be {words}")
        return found

    def _image(self, value: Mapping[str, Any], origin: str) -> ImageSource:
        image = value.get("image")
        if image is None:
            raise DataError(
                f"{origin}: neither image nor latents, only {', '.join(sorted(map(str, value))) or 'nothing'}"
                "; add one, or remove the row"
            )
        if isinstance(image, Mapping):
            # What data sets of the hub keep in a table: the file itself, or its path.
            image = image.get("path") if image.get("bytes") is None else image["bytes"]
        if isinstance(image, bytes | Image.Image):
            return image
        if not isinstance(image, str) or not image:
            raise DataError(f"{origin}: image is no path of a file")
        return resolved(image, "image", origin, self._folder)

    def _wanted_size(self, value: Mapping[str, Any], origin: str, image: ImageSource) -> tuple[int, int]:
        """Return height and width: of the flags, else of the row, else of the image."""
        own = image_size(image, origin)
        if self._size is not None:
            return self._size
        stated = (value.get("height"), value.get("width"))
        if stated != (None, None):
            if not all(isinstance(side, int) and not isinstance(side, bool) for side in stated):
                raise DataError(f"{origin}: height and width must be whole numbers, both or neither")
            own = stated  # type: ignore[assignment]  # the line above
        multiple = self._needs.size_multiple
        if not all(0 < side <= SIDE_MAX and side % multiple == 0 for side in own):
            raise DataError(
                f"{origin}: {own[0]} x {own[1]} (height x width): this model takes multiples of {multiple} "
                f"up to {SIDE_MAX}; give --height and --width, or a height and a width in the row"
            )
        return own


def folder_of(spec: str) -> Path | None:
    """Return the folder in which the relative paths of a source's rows begin; None if that is not here."""
    if "://" in spec or not os.path.exists(spec):
        return None
    path = Path(os.path.abspath(spec))
    return path if path.is_dir() else path.parent


def _prompt(value: Mapping[str, Any], origin: str) -> str:
    prompt = value.get("prompt")
    if prompt is None:
        raise DataError(
            f"{origin}: neither prompt nor prompt_embeds, only {', '.join(sorted(map(str, value)))}; "
            "add one, or remove the row"
        )
    if not isinstance(prompt, str):
        raise DataError(f"{origin}: prompt is no text")
    if len(prompt) > PROMPT_CHARS_MAX:
        raise DataError(f"{origin}: prompt has {len(prompt)} characters, more than {PROMPT_CHARS_MAX}")
    return prompt
