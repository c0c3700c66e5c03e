"""Where an export reads and writes: what can be refused before anything large is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from yeto.errors import ConfigError
from yeto.tuning.placing import clear_up


def require_checkpoint(checkpoint: Path) -> None:
    """Refuse a path where nothing is.

    Raises:
        ConfigError: so it is.
    """
    if not checkpoint.exists():
        raise ConfigError(
            f"--checkpoint {checkpoint}: there is no checkpoint; a syncer writes them to --checkpoint-path"
        )


def free_place(output_dir: Path, checkpoint: Path, model: str | None, *, overwrite: bool) -> Path:
    """Return where a link to a place for a folder leads to: the folder is replaced, not the link.

    What killed exports left beside it is removed.

    Raises:
        ConfigError: something is there that is not to be replaced.
    """
    output_dir = Path(os.path.realpath(output_dir))
    _require_no_loss(output_dir, checkpoint, model)
    clear_up(output_dir)
    if output_dir.exists() and not (overwrite and output_dir.is_dir()):
        raise ConfigError(
            f"--output-dir {output_dir} exists; name another one, or replace it with --overwrite"
        )
    return output_dir


def _require_no_loss(output_dir: Path, checkpoint: Path, model: str | None) -> None:
    """Refuse a folder whose replacement would take away what the export, or its caller, stands on.

    Raises:
        ConfigError: naming what is in it.
    """
    needed = {"the checkpoint": checkpoint, "the current folder": Path.cwd()}
    if model is not None:
        needed["the base model"] = Path(model)
    for what, path in needed.items():
        place = Path(os.path.realpath(path))
        if path.exists() and (place == output_dir or output_dir in place.parents):
            raise ConfigError(f"--output-dir {output_dir}: {what} is there ({path}); name another folder")
