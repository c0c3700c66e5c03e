"""Small JSON files that prove themselves: the last line is the digest of all the bytes before it.

So a changed byte cannot pass for another setting, and a file that was cut short is told from one that was
changed. One key a line, because people read these files too.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from yeto.errors import CheckpointError
from yeto.state.strict import NotStrict, parse_json
from yeto.wire.digest import digest

_DIGEST_LINE: Final = re.compile(rb'  "digest": "([0-9a-f]{32})"\n}\n\Z')
_DIGEST_KEY: Final = b'  "digest": "'
_DIGEST_LINE_BYTES: Final = len(_DIGEST_KEY) + 36


class IncompleteCheckpoint(CheckpointError):
    """A file of the checkpoint is missing or too short; an earlier checkpoint may be taken instead."""


def encode_digested(fields: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file: one key a line, the digest last.

    Raises:
        ValueError: a value is NaN or infinite.
        TypeError: a value is nothing that JSON has.
    """
    lines = [f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in fields.items()]
    body = ("{\n" + ",\n".join(lines) + ",\n").encode("ascii")
    return body + _DIGEST_KEY + f'{digest(body)}"\n}}\n'.encode("ascii")


def decode_digested(data: bytes, name: str, what: str) -> Any:
    """Return the JSON value of a file whose digest is right, without the digest.

    Args:
        data: the whole file.
        name: what to call it in messages, usually its path.
        what: what kind of file it is, in messages.

    Raises:
        IncompleteCheckpoint: the file ends too early.
        CheckpointError: it was changed after it was written, or is no strict JSON.
    """
    # Either end of the last line tells that the file was not cut short, even if the other is damaged.
    if not (data.endswith(b"\n}\n") or data[-_DIGEST_LINE_BYTES:].startswith(_DIGEST_KEY)):
        raise IncompleteCheckpoint(f"{name}: the {what} ends too early ({len(data)} bytes)")
    tail = _DIGEST_LINE.search(data)
    if tail is None or digest(data[: tail.start()]) != tail[1].decode():
        raise CheckpointError(f"{name}: the {what} was changed after it was written: its digest is wrong")
    try:
        value = parse_json(data)
    except NotStrict as error:
        raise CheckpointError(f"{name}: {error}") from error
    if type(value) is dict:
        value.pop("digest", None)
    return value


def stated_digest(data: bytes) -> str:
    """Return the digest in the last line of a file that ``decode_digested`` has accepted."""
    return data[-36:-4].decode("ascii")


def open_file(path: Path) -> BufferedReader:
    """Open a file to read, without waiting for what is none: a pipe would hold up a reader for ever.

    Raises:
        CheckpointError: it is a pipe or a device.
        OSError: it cannot be opened.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    kind = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(kind):
        file.close()
        raise CheckpointError(f"{path}: cannot be read: not a file")
    return file


def read_bounded(path: Path, bytes_max: int) -> bytes:
    """Read a small file.

    Raises:
        IncompleteCheckpoint: there is none.
        CheckpointError: it is larger than ``bytes_max``, or the system refuses.
    """
    try:
        with open_file(path) as file:
            data = file.read(bytes_max + 1)
    except FileNotFoundError as error:
        raise IncompleteCheckpoint(f"{path}: the file is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > bytes_max:
        raise CheckpointError(f"{path}: larger than {bytes_max} bytes, which no such file is")
    return data
