"""One image file as what a denoiser's encoder takes: checked before it is decoded, bounded while it is.

The rule: a file says what it is in its first bytes, and those are believed only within bounds. A picture of a
few kilobytes can unpack into gigabytes, so the size that a file states is looked at before a pixel of it is
decoded; and only formats that pictures come in are read, not the many others that the library knows.

What a picture means is kept: it is turned as its camera says, and transparent parts become white, not
whatever colour lies below them.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from yeto.errors import DataError

FORMATS: Final = ("PNG", "JPEG", "WEBP", "BMP")
PIXELS_MAX: Final = 1 << 27
"""Most pixels of a file: 134 million, above any camera's; decoded they take half a gigabyte."""
FILE_BYTES_MAX: Final = 1 << 29
_ORIENTATION: Final = 0x0112
_TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each orientation; from 5 on height and width change places."""
_MODES: Final = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Of eight bits a channel; more would be cut off without a word."""

ImageSource = Path | bytes | Image.Image
"""A file, the contents of one, or what a data set's reader has decoded already."""


def image_size(source: ImageSource, origin: str) -> tuple[int, int]:
    """Return height and width of a picture as it is meant to be seen, without decoding it.

    Args:
        source: where it is.
        origin: row, for messages.

    Raises:
        DataError: there is no such file, or it is no picture that can be used.
    """
    with _opened(source, origin) as image:
        orientation, (width, height) = _orientation(image), image.size
    return (width, height) if orientation in _TURNS and orientation >= 5 else (height, width)


def load_pixels(source: ImageSource, origin: str, *, height: int, width: int, resize_mode: str) -> Tensor:
    """Return a picture as float32 of shape (3, height, width) in [-1, 1].

    Args:
        source: where it is.
        origin: row, for messages.
        height: wanted.
        width: wanted.
        resize_mode: ``stretch`` changes the ratio of its sides, ``center-crop`` cuts off what is too much.

    Raises:
        DataError: it cannot be read.
    """
    with _opened(source, origin) as image:
        picture = _in_colour(image)
        if (turn := _TURNS.get(_orientation(image))) is not None:
            picture = picture.transpose(turn)
        if picture.size != (width, height):
            if resize_mode == "stretch":
                picture = picture.resize((width, height), Image.Resampling.LANCZOS)
            else:
                picture = ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS)
        values = np.asarray(picture, dtype=np.float32)
    return torch.from_numpy(values / 127.5 - 1.0).permute(2, 0, 1).contiguous()


def held_bytes(source: ImageSource) -> int:
    """Return about how much memory a picture takes that waits to be loaded."""
    if isinstance(source, bytes):
        return len(source)
    return 0 if isinstance(source, Path) else 4 * source.width * source.height


def require_file(path: Path, origin: str, what: str) -> None:
    """Refuse what is no plain file: a pipe would be waited for without an end.

    Raises:
        DataError: naming row and file.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(
            f"{origin}: {what} {path}: {reason}; bring it there, or correct or leave out the row"
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{origin}: {what} {path}: not a file; name one, or leave out the row")


@contextmanager
def _opened(source: ImageSource, origin: str) -> Iterator[Image.Image]:
    """Open a picture without decoding it; what the library raises, then or inside, becomes a DataError."""
    if isinstance(source, Path):
        require_file(source, origin, "image")
        size, called = source.stat().st_size, f"image {source}"
    else:
        size, called = len(source) if isinstance(source, bytes) else 0, "image"
    if size > FILE_BYTES_MAX:
        raise DataError(f"{origin}: {called} has {size} bytes, more than {FILE_BYTES_MAX}")
    try:
        # Its warning begins below our bound; the bound is what counts.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            if isinstance(source, Image.Image):
                image = source
            else:
                image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, "r", FORMATS)
            try:
                if image.width * image.height > PIXELS_MAX:
                    raise DataError(
                        f"{origin}: {called} is {image.width} x {image.height}, more than {PIXELS_MAX} pixels"
                    )
                if image.mode not in _MODES:
                    raise DataError(
                        f"{origin}: {called} is of mode {image.mode}; save it with eight bits a channel"
                    )
                yield image
            finally:
                if image is not source:
                    image.close()
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"{origin}: {called} has more than {PIXELS_MAX} pixels") from error
    except UnidentifiedImageError as error:
        raise DataError(f"{origin}: {called} is no {', '.join(FORMATS)} picture") from error
    except Exception as error:
        # Damaged files end a decoder in many ways: OSError, SyntaxError, ValueError, struct.error, …
        raise DataError(f"{origin}: {called} cannot be read: {' '.join(str(error).split())}") from error


def _orientation(image: Image.Image) -> int:
    """Return how the camera was held, from the head of the file; the library would decode all of it."""
    exif = Image.Exif()
    exif.load(image.info.get("exif") or b"")
    value = exif.get(_ORIENTATION, 1)
    return value if isinstance(value, int) else 1


def _in_colour(image: Image.Image) -> Image.Image:
    """Return three channels; transparent parts over white."""
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    return image.convert("RGB")
