"""Reading checkpoints back: the newest that is complete, and nothing that is wrong.

A folder may be read while a syncer goes on writing to it (export does). Then a file can vanish between two
looks, because a newer checkpoint has replaced it; so before anything is called incomplete, the reader looks
whether there are other manifests now than when it began, and starts over if there are.

If the newest checkpoint is incomplete and no newer one appears, the one before it is taken, and ``notices``
says so. Damage is not fallen back from: a changed byte means that something other than a crash has been at
work, and silently losing a step would hide it. The message names the file and the earlier manifests, any of
which can be read by its own name. A run goes on from one once the broken one is out of the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import attrs
from attrs import frozen

from yeto.errors import CheckpointError
from yeto.state.checkpoint import Checkpoint, checkpoint_of
from yeto.state.digested import IncompleteCheckpoint, stated_digest
from yeto.state.fragmentfile import read_fragment, read_params, require_size
from yeto.state.legacy import read_older_params, read_single_file, scan_single_file
from yeto.state.manifest import (
    FRAGMENTS_FOLDER,
    FRESH_LOOKS_MAX,
    is_single_file,
    manifest_at,
    manifest_file,
    manifest_steps,
    parse_fragment_file,
)
from yeto.state.store import FragmentVersion
from yeto.wire.tensorbytes import Values


class _Fragment(Protocol):
    """What is known of a fragment whose values have not been read."""

    @property
    def fragment(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def numel(self) -> int: ...

    @property
    def params_digest(self) -> str: ...


class _ReadParams(Protocol):
    def __call__(self, fragment: int, ahead: float = 0.0) -> Values:
        """Read and check one fragment; return its parameters and ``ahead`` times its momentum, added up.

        Raises:
            CheckpointError: its file is damaged.
            IncompleteCheckpoint: it has gone since, as in a folder that a syncer goes on writing to: then
                open that again.
        """


@frozen(kw_only=True, eq=False)
class StoredCheckpoint:
    """A checkpoint on disk, whose parameters are read when they are wanted."""

    facts: Checkpoint
    """Everything but the fragments, of which it has none."""
    fragments: Sequence[_Fragment]
    read_params: _ReadParams
    lookaheads: tuple[float | None, ...]
    """Of each fragment; None where it is not known (see :mod:`yeto.state.lookahead`)."""
    notices: tuple[str, ...] = ()
    """As of a checkpoint that is read whole."""


Read = TypeVar("Read", Checkpoint, StoredCheckpoint)


def has_checkpoint(path: Path) -> bool:
    """Return whether there is anything at ``path`` that a resume would read."""
    path = Path(path)
    return bool(manifest_steps(path)) if path.is_dir() else path.exists()


def has_orphans(folder: Path) -> bool:
    """Return whether a folder without a manifest has fragments that were trained.

    Fragments of version 0 alone are what a crash leaves of a run's first checkpoint.
    """
    names = (path.name for path in (folder / FRAGMENTS_FOLDER).glob("*"))
    found = [parsed for parsed in map(parse_fragment_file, names) if parsed is not None]
    return not manifest_steps(folder) and any(version > 0 for _, version in found)


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read and check a checkpoint.

    Args:
        path: a checkpoint folder (its newest complete checkpoint is read), one ``manifest-<step>.json`` in
            such a folder, or a file in one of the older single-file formats.

    Raises:
        CheckpointError: there is none, or it is damaged; the message names the file and the remedy.
    """
    return _read(Path(path), _read_one, read_single_file)


def open_checkpoint(path: Path | str) -> StoredCheckpoint:
    """Look at a checkpoint without its values, which are read and checked one fragment at a time.

    Of a folder, the newest checkpoint is taken whose files are all there and long enough. An older single
    file is checked whole, one fragment after the other.

    Args:
        path: as for ``read_checkpoint``.

    Raises:
        CheckpointError: there is none, or what was read so far is damaged.
    """
    return _read(Path(path), _open_one, _open_single_file)


def _read(path: Path, read_one: Callable[[Path], Read], read_older: Callable[[Path], Read]) -> Read:
    if path.is_dir():
        return _read_folder(path, read_one)
    if not path.exists():
        raise CheckpointError(f"{path}: there is no checkpoint; a syncer writes them to --checkpoint-path")
    if is_single_file(path):
        return read_older(path)
    if path.suffix != ".json":
        raise CheckpointError(f"{path}: neither a checkpoint folder, nor a manifest, nor an older checkpoint")
    return read_one(path)


def _read_folder(folder: Path, read_one: Callable[[Path], Read]) -> Read:
    for _ in range(FRESH_LOOKS_MAX):
        steps = manifest_steps(folder)
        if not steps:
            raise CheckpointError(
                f"{folder}: there is no checkpoint in this folder; a syncer writes them to --checkpoint-path"
            )
        checkpoint = _newest_complete(folder, steps, read_one)
        if checkpoint is not None:
            return checkpoint
    raise CheckpointError(
        f"{folder}: checkpoints were replaced {FRESH_LOOKS_MAX} times while one was being read; "
        "keep some with --keep-every and name one of their manifests"
    )


def _newest_complete(folder: Path, steps: list[int], read_one: Callable[[Path], Read]) -> Read | None:
    """Read the first complete checkpoint of ``steps``; None if the folder changed meanwhile."""
    notices: list[str] = []
    for step in steps:
        try:
            checkpoint = read_one(folder / manifest_file(step))
        except IncompleteCheckpoint as error:
            if manifest_steps(folder) != steps:
                return None
            notices.append(f"the checkpoint of step {step} is incomplete and was passed over: {error}")
        except CheckpointError as error:
            earlier = [manifest_file(other) for other in steps if other < step]
            move = (
                f"; to go on from an earlier one, move {manifest_file(step)} out of the folder, which leaves "
            )
            remedy = move + " and ".join(earlier) if earlier else ""
            raise CheckpointError(f"{error}{remedy}") from error
        else:
            return attrs.evolve(checkpoint, notices=tuple(notices))
    raise CheckpointError(f"{folder}: no complete checkpoint: {'; '.join(notices)}")


def _read_one(path: Path) -> Checkpoint:
    manifest, data = manifest_at(path)
    fragments = []
    for entry, lookahead in zip(manifest.fragments, manifest.lookaheads, strict=True):
        arrays = read_fragment(path.parent, entry)
        fragments.append(FragmentVersion.of_arrays(entry.fragment, entry.version, arrays, lookahead))
    return checkpoint_of(manifest, tuple(fragments), stated_digest(data))


def _open_one(path: Path) -> StoredCheckpoint:
    manifest, data = manifest_at(path)
    for entry in manifest.fragments:
        require_size(path.parent, entry)
    return StoredCheckpoint(
        facts=checkpoint_of(manifest, (), stated_digest(data)),
        fragments=manifest.fragments,
        read_params=lambda fragment, ahead=0.0: read_params(path.parent, manifest.fragments[fragment], ahead),
        lookaheads=manifest.lookaheads,
    )


def _open_single_file(path: Path) -> StoredCheckpoint:
    facts, fragments = scan_single_file(path)
    return StoredCheckpoint(
        facts=facts,
        fragments=fragments,
        read_params=lambda fragment, ahead=0.0: read_older_params(path, fragments[fragment], ahead),
        lookaheads=(None,) * len(fragments),
    )
