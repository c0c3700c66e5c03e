"""How a set of saved state gets onto the disk and what is there is digested: bytes and files, no meaning."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from yeto.wire.digest import RunningDigest

READ_BYTES = 1 << 22
"""Bytes digested at a time when a set is read."""

DTYPES: Final = {"float32": "F32", "float64": "F64", "int64": "I64", "uint32": "U32", "uint8": "U8"}
"""NumPy's names of what a set may hold, and those of safetensors."""

Tensors = Mapping[str, NDArray[Any]]


def write_tensors(path: Path, tensors: Tensors) -> str:
    """Write a safetensors file; return its digest."""
    hashed = RunningDigest()
    head: dict[str, Any] = {}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        dtype = DTYPES[array.dtype.name]
        head[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(head, separators=(",", ":")).encode()
    # Data begins at a multiple of 8, as the library leaves it.
    text += b" " * (-len(text) % 8)

    def write(descriptor: int) -> None:
        parts = [np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8), *tensors.values()]
        for array in parts:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            hashed.update(data)
            write_all(descriptor, data.data)

    write_file(path, write)
    return hashed.hex()


def write_file(path: Path, write: Callable[[int], None]) -> None:
    """Make a file, have ``write`` fill its descriptor, and wait until it is on the medium."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write(descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of ``data``."""
    # The system takes at most 2 GiB at a time, and less when it likes.
    while data:
        data = data[os.write(descriptor, data) :]


def digest_of(path: Path) -> str:
    """Return the digest of a file."""
    hashed = RunningDigest()
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            hashed.update(data)
    return hashed.hex()
