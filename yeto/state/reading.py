"""Reading checkpoints back: the newest that is complete, and nothing that is wrong.

A folder may be read while a syncer goes on writing to it (export does). Then a file can vanish between two
looks, because a newer checkpoint has replaced it; so before anything is called incomplete, the reader looks
whether there are other manifests now than when it began, and starts over if there are.

If the newest checkpoint is incomplete and no newer one appears, the one before it is taken, and ``notices``
says so. Damage is not fallen back from: a changed byte means that something other than a crash has been at
work, and silently losing a step would hide it. The message names the file and the earlier manifests, any of
which can be given as the path instead of the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import attrs

from yeto.errors import CheckpointError
from yeto.state.checkpoint import Checkpoint, checkpoint_of
from yeto.state.fragmentfile import read_fragment
from yeto.state.legacy import is_single_file, read_single_file
from yeto.state.manifest import (
    MANIFEST_BYTES_MAX,
    IncompleteCheckpoint,
    decode_manifest,
    manifest_file,
    manifest_steps,
    read_bounded,
    stated_digest,
)
from yeto.state.store import FragmentVersion

FRESH_LOOKS_MAX: Final = 16
"""Times that a reader starts over because the folder changed under it. A writer that outruns it so often
commits faster than a checkpoint can be read, and then the older ones should be kept (``--keep-every``)."""


def has_checkpoint(path: Path) -> bool:
    """Return whether there is anything at ``path`` that a resume would read."""
    path = Path(path)
    return bool(manifest_steps(path)) if path.is_dir() else path.exists()


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read and check a checkpoint.

    Args:
        path: a checkpoint folder (its newest complete checkpoint is read), one ``manifest-<step>.json`` in
            such a folder, or a file in one of the older single-file formats.

    Raises:
        CheckpointError: there is none, or it is damaged; the message names the file and the remedy.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path}: there is no checkpoint; a syncer writes them to --checkpoint-path")
    if is_single_file(path):
        return read_single_file(path)
    if path.suffix != ".json":
        raise CheckpointError(f"{path}: neither a checkpoint folder, nor a manifest, nor an older checkpoint")
    return _read_one(path)


def _read_folder(folder: Path) -> Checkpoint:
    for _ in range(FRESH_LOOKS_MAX):
        steps = manifest_steps(folder)
        if not steps:
            raise CheckpointError(
                f"{folder}: there is no checkpoint in this folder; a syncer writes them to --checkpoint-path"
            )
        checkpoint = _newest_complete(folder, steps)
        if checkpoint is not None:
            return checkpoint
    raise CheckpointError(
        f"{folder}: checkpoints were replaced {FRESH_LOOKS_MAX} times while one was being read; "
        "keep some with --keep-every and name one of their manifests"
    )


def _newest_complete(folder: Path, steps: list[int]) -> Checkpoint | None:
    """Read the first complete checkpoint of ``steps``; None if the folder changed meanwhile."""
    notices: list[str] = []
    for step in steps:
        try:
            checkpoint = _read_one(folder / manifest_file(step))
        except IncompleteCheckpoint as error:
            if manifest_steps(folder) != steps:
                return None
            notices.append(f"the checkpoint of step {step} is incomplete and was passed over: {error}")
        except CheckpointError as error:
            earlier = [manifest_file(other) for other in steps if other < step]
            remedy = f"; to go on from an earlier one, name {' or '.join(earlier)}" if earlier else ""
            raise CheckpointError(f"{error}{remedy}") from error
        else:
            return attrs.evolve(checkpoint, notices=tuple(notices))
    raise CheckpointError(f"{folder}: no complete checkpoint: {'; '.join(notices)}")


def _read_one(path: Path) -> Checkpoint:
    data = read_bounded(path, MANIFEST_BYTES_MAX)
    manifest = decode_manifest(data, str(path))
    fragments = []
    for entry in manifest.fragments:
        arrays = read_fragment(path.parent, entry)
        fragments.append(FragmentVersion.of_arrays(entry.fragment, entry.version, arrays))
    return checkpoint_of(manifest, tuple(fragments), stated_digest(data))
