"""Tensors that a row names instead of an image or a prompt: where they are, and whether they can be used.

The rule: a tensor's dtype, shape and size are read from the head of its file and checked before its values
are; and the values must be finite. A cached tensor of the wrong kind would train without a complaint.

A column holds one of

* ``{"file": "shard-00000.safetensors", "tensor": "latents.17"}``: a tensor of a file that has many,
* ``"row17.safetensors"``: a file whose tensor is called like the column,
* a list of lists of numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from attrs import field, frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from yeto.diffusion.images import require_file
from yeto.errors import DataError

ELEMENTS_MAX: Final = 1 << 26
"""Most elements of one tensor of a row: 256 MiB as float32, above any latent or prompt."""
MODEL_KEY: Final = "yeto_model"
"""Entry of a file's metadata that says which model's encoders made its tensors, as JSON."""
_FLOATS: Final = ("F32", "F16", "BF16")
_FLAGS: Final = ("BOOL", "U8", "I8", "I32", "I64")


@frozen(kw_only=True)
class CachedTensor:
    """A tensor of a row, before its values are read."""

    column: str
    origin: str
    shape: tuple[int, ...]
    values: Tensor | None = field(default=None, repr=False)
    """Of a list in the row itself."""
    file: Path | None = None
    name: str = ""
    """Of the tensor in the file."""

    @property
    def held_bytes(self) -> int:
        """Memory that it takes before it is loaded."""
        return 0 if self.values is None else self.values.nbytes

    def load(self) -> Tensor:
        """Return the values: float32, or bool for a mask.

        Raises:
            DataError: they cannot be read, or are not finite.
        """
        if self.values is not None:
            return self.values
        assert self.file is not None, "a tensor has values or a file"
        try:
            with safe_open(self.file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            raise _unreadable(self.origin, self.column, self.file, error) from error
        if tuple(tensor.shape) != self.shape:
            raise DataError(f"{self.origin}: {self.column}: {self.file} was changed while it was read")
        return _checked(tensor, self.column, self.origin)


def cached_tensor(
    value: Any, column: str, origin: str, folder: Path | None, model: Mapping[str, str] | None
) -> CachedTensor:
    """Find the tensor that a column names, and look at its head.

    Args:
        value: of the column.
        column: its name; one that ends in ``mask`` holds truth values.
        origin: row, for messages.
        folder: of the rows; None where a relative path has no meaning.
        model: what :meth:`ModelIdentity.binding` says of the model in use; None asks nothing.

    Raises:
        DataError: there is no such tensor, or it is not of a usable kind.
    """
    if isinstance(value, list):
        values = _checked(_from_list(value, column, origin), column, origin)
        return CachedTensor(column=column, origin=origin, shape=tuple(values.shape), values=values)
    path, name = value, column
    if isinstance(value, Mapping):
        path, name = value.get("file"), value.get("tensor", column)
    if not isinstance(path, str) or not isinstance(name, str) or not path:
        raise DataError(
            f'{origin}: {column} is neither a list of numbers, nor a .safetensors file, nor {{"file": …, '
            '"tensor": …}'
        )
    file = resolved(path, column, origin, folder)
    require_file(file, origin, column)
    try:
        with safe_open(file, framework="pt") as opened:
            if name not in opened.keys():  # noqa: SIM118 -- no mapping, it has nothing but keys()
                raise DataError(f"{origin}: {column}: {file} has no tensor {name}")
            found = opened.get_slice(name)
            shape, dtype = tuple(found.get_shape()), found.get_dtype()
            made_by = (opened.metadata() or {}).get(MODEL_KEY)
    except (OSError, SafetensorError) as error:
        raise _unreadable(origin, column, file, error) from error
    _require_kind(dtype, shape, column, origin)
    _require_model(made_by, model, f"{origin}: {column}: {file}")
    return CachedTensor(column=column, origin=origin, shape=shape, file=file, name=name)


def resolved(path: str, column: str, origin: str, folder: Path | None) -> Path:
    """Return where a row's path leads: relative ones begin at the folder of the rows.

    Raises:
        DataError: it is an address, or relative where the rows have no folder.
    """
    if "://" in path:
        raise DataError(f"{origin}: {column} {path}: an address; download it, and name the file")
    if Path(path).is_absolute():
        return Path(path)
    if folder is None:
        raise DataError(f"{origin}: {column} {path}: these rows are in no local folder, so name it in full")
    return folder / path


def _require_kind(dtype: str, shape: tuple[int, ...], column: str, origin: str) -> None:
    wanted = (*_FLOATS, *_FLAGS) if column.endswith("mask") else _FLOATS
    if dtype not in wanted:
        raise DataError(f"{origin}: {column} is of dtype {dtype}; it must be one of {', '.join(wanted)}")
    if not 0 < np.prod(shape, dtype=object) <= ELEMENTS_MAX:
        raise DataError(
            f"{origin}: {column} has shape {shape}; it must have 1 to {ELEMENTS_MAX} elements in all"
        )


def _require_model(made_by: str | None, model: Mapping[str, str] | None, where: str) -> None:
    """Refuse a cache of another model's encoders, where both state what they are in the same words."""
    if made_by is None or model is None:
        return
    try:
        stated = json.loads(made_by)
    except ValueError:
        stated = None
    if not isinstance(stated, dict):
        raise DataError(f"{where}: does not say in JSON which model made it; cache the rows anew")
    if stated.keys() == model.keys() and stated != dict(model):
        raise DataError(
            f"{where}: was made with another model than --model is; cache the rows with this one "
            "(yeto data cache-latents)"
        )


def _from_list(value: list[Any], column: str, origin: str) -> Tensor:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{origin}: {column} has lists of different lengths") from error
    if array.dtype.kind not in ("biuf" if column.endswith("mask") else "iuf"):
        raise DataError(f"{origin}: {column} has something in it that is no number")
    if not 0 < array.size <= ELEMENTS_MAX:
        raise DataError(f"{origin}: {column} has {array.size} numbers; it must have 1 to {ELEMENTS_MAX}")
    if array.dtype.kind == "b":
        return torch.from_numpy(array)
    with np.errstate(over="ignore"):
        # Too large for float32 becomes infinite, which is refused.
        return torch.from_numpy(array.astype(np.float32))


def _checked(tensor: Tensor, column: str, origin: str) -> Tensor:
    """Return finite float32; truth values for a mask."""
    if tensor.dtype == torch.bool:
        return tensor
    tensor = tensor.float()
    if not bool(tensor.isfinite().all()):
        raise DataError(f"{origin}: {column} has NaN or infinite values; make it anew")
    if not column.endswith("mask"):
        return tensor
    if not bool(((tensor == 0) | (tensor == 1)).all()):
        raise DataError(f"{origin}: {column} has other values than 0 and 1")
    return tensor.bool()


def _unreadable(origin: str, column: str, file: Path, error: Exception) -> DataError:
    return DataError(
        f"{origin}: {column}: {file} is no readable safetensors file: {' '.join(str(error).split())}"
    )
