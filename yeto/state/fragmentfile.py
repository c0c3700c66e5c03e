"""One fragment version on disk: a safetensors file with two flat f32 tensors, ``params`` and ``momentum``.

The format is public and holds no code, so any tool can open a checkpoint. This module writes one fixed form
of it (params first, header padded to 8 bytes) straight from the tensors' memory, and reads that form only:
every byte of the header is known beforehand, so a file that is too short is told from one that was changed,
and nothing is allocated by what a header claims.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Final

import numpy as np
from attrs import frozen

from yeto.errors import CheckpointError
from yeto.state.files import BytesLike
from yeto.state.manifest import IncompleteCheckpoint, ManifestFragment
from yeto.wire.digest import digest
from yeto.wire.tensorbytes import Values

_CHECKED_AT_A_TIME: Final = 1 << 16


@frozen(kw_only=True, eq=False)
class FragmentArrays:
    """The two tensors of a fragment version as arrays."""

    params: Values
    momentum: Values
    params_digest: str
    momentum_digest: str


def file_bytes(numel: int) -> int:
    """Return the size of the file of a fragment."""
    return len(_header(numel)) + 8 * numel


def file_parts(params: Values, momentum: Values) -> list[BytesLike]:
    """Return the contents of a fragment's file; large parts are views of the arrays, not copies."""
    return [_header(params.size), _bytes(params), _bytes(momentum)]


def read_fragment_file(path: Path, numel: int) -> FragmentArrays:
    """Read a fragment's file.

    Args:
        path: the file.
        numel: elements that it must hold of each tensor.

    Raises:
        IncompleteCheckpoint: it is missing or too short.
        CheckpointError: it has another form, or a value is not finite.
    """
    header = _header(numel)
    expected = file_bytes(numel)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < expected:
                raise IncompleteCheckpoint(f"{path}: ends after {size} of {expected} bytes")
            if size > expected:
                raise CheckpointError(f"{path}: {size - expected} bytes too many after byte {expected}")
            if file.read(len(header)) != header:
                raise CheckpointError(f"{path}: the header is not that of a fragment of {numel} elements")
            params, momentum = (np.empty(numel, dtype="<f4") for _ in range(2))
            for array in (params, momentum):
                if file.readinto(_bytes(array)) != 4 * numel:
                    raise IncompleteCheckpoint(f"{path}: was cut short while it was read")
    except FileNotFoundError as error:
        raise IncompleteCheckpoint(f"{path}: the file is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return examined(params, momentum, str(path))


def read_fragment(folder: Path, entry: ManifestFragment) -> FragmentArrays:
    """Read one fragment of a checkpoint and hold it against its manifest.

    Raises:
        IncompleteCheckpoint: its file is missing or too short.
        CheckpointError: its file is damaged; the message names it.
    """
    path = folder / entry.file
    arrays = read_fragment_file(path, entry.numel)
    for name, found, stated in (
        ("params", arrays.params_digest, entry.params_digest),
        ("momentum", arrays.momentum_digest, entry.momentum_digest),
    ):
        if found != stated:
            raise CheckpointError(f"{path}: digest of {name} is {found}, the manifest says {stated}")
    return arrays


def examined(params: Values, momentum: Values, name: str) -> FragmentArrays:
    """Return two arrays with their digests.

    Raises:
        CheckpointError: a value is not finite.
    """
    for kind, array in (("params", params), ("momentum", momentum)):
        for start in range(0, array.size, _CHECKED_AT_A_TIME):
            if not np.isfinite(array[start : start + _CHECKED_AT_A_TIME]).all():
                raise CheckpointError(f"{name}: {kind} holds a value that is not finite")
    return FragmentArrays(
        params=params,
        momentum=momentum,
        params_digest=digest(params),
        momentum_digest=digest(momentum),
    )


def _header(numel: int) -> bytes:
    size = 4 * numel
    text = json.dumps(
        {
            "params": {"dtype": "F32", "shape": [numel], "data_offsets": [0, size]},
            "momentum": {"dtype": "F32", "shape": [numel], "data_offsets": [size, 2 * size]},
        },
        separators=(",", ":"),
    ).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(array: Values) -> memoryview:
    return array.astype("<f4", copy=False).view(np.uint8).data
