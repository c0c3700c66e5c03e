"""The shared key of a session, and the mac that proves its possession in HELLO.

A HELLO is authenticated before one field of it is parsed, in constant time, so a stranger can neither fix a
session's terms nor measure its way to a valid mac. Later sockets of a group join by the generation that the
HELLO stated; they carry no mac of their own.

Secrets come from a file or the environment, never from the command line, where ``ps`` shows them.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from yeto.errors import ConfigError
from yeto.wire.errors import AuthenticationError
from yeto.wire.frames import BytesLike

MAC_BYTES: Final = 32

KEY_BYTES_MAX: Final = 4096
"""Longest key: generous for any key, small enough that a wrong path does not read a model into memory."""

KEY_VARIABLE: Final = "YETO_ISLAND_HMAC_KEY"
"""Environment variable that holds the key when no file is named."""

REFUSAL: Final = "HELLO authentication failed"
"""Text of the ERROR, the same for a wrong and for a missing mac."""

_DOMAIN: Final = b"yeto-hello-mac-v1\0"


def hello_mac(key: bytes, body: BytesLike) -> bytes:
    """Return HMAC-SHA256 over the body of a HELLO, under its own prefix so that it fits no other use."""
    mac = hmac.new(key, _DOMAIN, "sha256")
    mac.update(body)
    return mac.digest()


def authenticated_body(key: bytes, payload: BytesLike) -> memoryview:
    """Return the payload of a HELLO without its mac, having verified it in constant time.

    Raises:
        AuthenticationError: the mac is wrong or missing.
    """
    view = memoryview(payload)
    body, mac = view[:-MAC_BYTES], view[-MAC_BYTES:]
    if not hmac.compare_digest(hello_mac(key, body), mac):
        raise AuthenticationError(REFUSAL)
    return body


def read_key_file(path: str | os.PathLike[str]) -> bytes:
    """Return the key in a file, without one trailing newline.

    Raises:
        ConfigError: `read_secret` refuses the file, or it is empty or too long.
    """
    name = f"--auth-key-file {Path(path)}"
    data = read_secret(path, name, bytes_max=KEY_BYTES_MAX + 1, remedy="make one with 'yeto keys new'")
    return _checked_key(data, name)


def read_secret(path: str | os.PathLike[str], name: str, *, bytes_max: int, remedy: str) -> bytes:
    """Return the content of a file that only its owner may read, or its first ``bytes_max + 1`` bytes.

    The file's permissions are judged on the opened file, so it cannot be exchanged in between.

    Args:
        path: the file.
        name: what an error calls it: flag and path.
        bytes_max: more than this is too long for the caller.
        remedy: what to do when it cannot be read.

    Raises:
        ConfigError: it cannot be read, is no regular file, or is open to group or others.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{name}: not a regular file")
            if stat.S_IMODE(mode) & 0o077:
                raise ConfigError(
                    f"{name}: mode {stat.S_IMODE(mode):04o} lets others read the key; run chmod 600 on it"
                )
            return file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}; {remedy}") from error


def load_key(path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> bytes | None:
    """Return the key of the file, else of the environment, else None: the session has no authentication.

    Raises:
        ConfigError: the file or the variable is there and holds no usable key.
    """
    if path is not None:
        return read_key_file(path)
    text = environ.get(KEY_VARIABLE)
    return None if text is None else _checked_key(os.fsencode(text), KEY_VARIABLE)


def _open_without_waiting(path: str, flags: int) -> int:
    """Open so that a named pipe does not hold us before we can see that it is one."""
    return os.open(path, flags | os.O_NONBLOCK)


def _checked_key(data: bytes, name: str) -> bytes:
    key = data.removesuffix(b"\n")
    if not key:
        raise ConfigError(f"{name}: the key is empty; make one with 'yeto keys new'")
    if len(key) > KEY_BYTES_MAX:
        raise ConfigError(f"{name}: longer than {KEY_BYTES_MAX} bytes; is this the right file?")
    return key
