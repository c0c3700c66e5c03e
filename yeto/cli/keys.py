"""``yeto keys new``: the secret that learners and syncer authenticate each other with."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from yeto.errors import ConfigError

keys_app = App(
    name="keys",
    help="Make the key that learners authenticate with.",
    help_format="plaintext",
    help_formatter="default",
)


@keys_app.command(name="new")
def new_key(
    path: Annotated[Path, Parameter(help="Where to write the key; must not exist yet.")] = Path("yeto.key"),
) -> int:
    """Write a fresh 256-bit key (hex, mode 0600). Copy it to every machine; pass it as --auth-key-file."""
    try:
        # O_EXCL: an existing key belongs to a running fleet and must not be overwritten.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists already; name another file or remove it first") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")
    print(f"wrote {path} (mode 0600): pass it as --auth-key-file to the syncer and to every learner")
    return 0
