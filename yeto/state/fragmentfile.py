"""One fragment version on disk: a safetensors file with two flat f32 tensors, ``params`` and ``momentum``.

The format is public and holds no code, so any tool can open a checkpoint. This module writes one fixed form
of it (params first, header padded to 8 bytes) straight from the tensors' memory, and reads that form only:
every byte of the header is known beforehand, so a file that is too short is told from one that was changed,
and nothing is allocated by what a header claims.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Final

import numpy as np
from attrs import frozen

from yeto.errors import CheckpointError
from yeto.state.digested import IncompleteCheckpoint, open_file
from yeto.state.files import BytesLike
from yeto.state.manifest import ManifestFragment
from yeto.wire.digest import RunningDigest, digest
from yeto.wire.tensorbytes import Values

_CHECKED_AT_A_TIME: Final = 1 << 16
"""Values; 256 KiB, which a processor's cache holds between looking at them and adding them."""


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
    with _opened(path, numel) as file:
        params, momentum = _values(file, numel, path), _values(file, numel, path)
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


def read_params(folder: Path, entry: ManifestFragment, ahead: float = 0.0) -> Values:
    """Read the parameters of one fragment; its momentum is checked likewise, and not kept in memory.

    Args:
        folder: the checkpoint's.
        entry: the fragment.
        ahead: so many times the momentum is added to the parameters, in f32; 0 changes no bit.

    Raises:
        IncompleteCheckpoint: its file is missing or too short.
        CheckpointError: its file is damaged; the message names it.
    """
    path = folder / entry.file
    with _opened(path, entry.numel) as file:
        params = _values(file, entry.numel, path)
        found = (
            exam(params, f"{path}: params"),
            exam_stream(file, entry.numel, f"{path}: momentum", params, ahead),
        )
    for name, digested, stated in (
        ("params", found[0], entry.params_digest),
        ("momentum", found[1], entry.momentum_digest),
    ):
        if digested != stated:
            raise CheckpointError(f"{path}: digest of {name} is {digested}, the manifest says {stated}")
    if ahead:
        exam(params, f"{path}: what is left of params without the look-ahead")
    return params


def require_size(folder: Path, entry: ManifestFragment) -> None:
    """Check that the file of a fragment is there and not cut short, without reading it.

    Raises:
        IncompleteCheckpoint: it is missing or too short.
        CheckpointError: it cannot be looked at.
    """
    path, expected = folder / entry.file, file_bytes(entry.numel)
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise IncompleteCheckpoint(f"{path}: the file is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    size = found.st_size
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: cannot be read: not a file")
    if size < expected:
        raise IncompleteCheckpoint(f"{path}: ends after {size} of {expected} bytes")


def examined(params: Values, momentum: Values, name: str) -> FragmentArrays:
    """Return two arrays with their digests.

    Raises:
        CheckpointError: a value is not finite.
    """
    return FragmentArrays(
        params=params,
        momentum=momentum,
        params_digest=exam(params, f"{name}: params"),
        momentum_digest=exam(momentum, f"{name}: momentum"),
    )


def exam(values: Values, name: str) -> str:
    """Return the digest of values.

    Raises:
        CheckpointError: one is not finite.
    """
    for start in range(0, values.size, _CHECKED_AT_A_TIME):
        if not np.isfinite(values[start : start + _CHECKED_AT_A_TIME]).all():
            raise CheckpointError(f"{name} holds a value that is not finite")
    return digest(values)


def exam_stream(file: BufferedReader, numel: int, name: str, target: Values, times: float) -> str:
    """Return the digest of the next values of a file, of which only a piece is in memory at a time.

    Args:
        file: where the values are next.
        numel: how many they are.
        name: what to call them in messages.
        target: of the same size; ``times`` each value is added to it, unless that is 0.
        times: the factor, rounded to f32.

    Raises:
        IncompleteCheckpoint: the file ends before.
        CheckpointError: a value is not finite.
    """
    running, left = RunningDigest(), numel
    buffer = np.empty(min(numel, _CHECKED_AT_A_TIME), dtype="<f4")
    while left:
        piece = buffer[: min(left, buffer.size)]
        if file.readinto(piece.view(np.uint8).data) != piece.nbytes:
            raise IncompleteCheckpoint(f"{name} was cut short while it was read")
        if not np.isfinite(piece).all():
            raise CheckpointError(f"{name} holds a value that is not finite")
        running.update(piece)
        if times:
            with np.errstate(over="ignore"):  # the caller looks for what is not finite
                target[numel - left : numel - left + piece.size] += np.float32(times) * piece
        left -= piece.size
    return running.hex()


@contextmanager
def _opened(path: Path, numel: int) -> Iterator[BufferedReader]:
    """Open a fragment's file behind its header, once it has the size and the header that it must have."""
    header = _header(numel)
    expected = file_bytes(numel)
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < expected:
                raise IncompleteCheckpoint(f"{path}: ends after {size} of {expected} bytes")
            if size > expected:
                raise CheckpointError(f"{path}: {size - expected} bytes too many after byte {expected}")
            if file.read(len(header)) != header:
                raise CheckpointError(f"{path}: the header is not that of a fragment of {numel} elements")
            yield file
    except FileNotFoundError as error:
        raise IncompleteCheckpoint(f"{path}: the file is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _values(file: BufferedReader, numel: int, path: Path) -> Values:
    array = np.empty(numel, dtype="<f4")
    if file.readinto(_bytes(array)) != 4 * numel:
        raise IncompleteCheckpoint(f"{path}: was cut short while it was read")
    return array


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
