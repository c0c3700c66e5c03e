"""Writing a checkpoint: one new file for each fragment that changed, then the manifest, then the tidying.

The order is the whole point. (1) Manifests of an abandoned continuation of the run go first, so that none of
them can name a file that is about to be replaced. (2) Fragment files are written aside, fsynced and renamed,
and their folder is fsynced. (3) The manifest likewise: with its rename durable, the checkpoint exists. (4)
Only then go manifests that are not kept, and after them the fragment files that no kept manifest names.

So at every instant the newest manifest on disk is complete: the one before this write until the rename of
step 3, this one from then on. With a commit a checkpoint that is one fragment and one small file.

A fragment file is taken over without writing only if an earlier manifest names it with the same digests and
it has the right size; its bytes were fsynced before that manifest was.
"""

from __future__ import annotations

import logging
from pathlib import Path

from yeto.errors import CheckpointError
from yeto.state.checkpoint import Checkpoint, manifest_of
from yeto.state.files import Disk, remove_asides, write_aside, writing
from yeto.state.fragmentfile import file_bytes, file_parts
from yeto.state.manifest import (
    FRAGMENTS_FOLDER,
    Manifest,
    ManifestFragment,
    encode_manifest,
    manifest_file,
    manifest_steps,
    parse_fragment_file,
    read_manifest,
    version_at,
)
from yeto.state.store import FragmentVersion

log = logging.getLogger("yeto.state")

KEPT = 2
"""Newest manifests that stay, whatever ``keep_every``: one may turn out broken."""


def write_checkpoint(
    folder: Path | str, checkpoint: Checkpoint, keep_every: int = 0, *, disk: Disk | None = None
) -> int:
    """Make a checkpoint durable; when this returns, it is.

    Args:
        folder: the checkpoint folder; made if there is none. The caller holds its lock.
        checkpoint: what to write. Its tensors are read and not copied.
        keep_every: keep manifests of every step divisible by this, besides the newest two; 0 keeps no others.
        disk: the system calls; tests give their own.

    Returns:
        Bytes written.

    Raises:
        CheckpointError: the disk is full or refuses. The checkpoint before this one is intact.
    """
    folder, disk = Path(folder), disk or Disk()
    manifest = manifest_of(checkpoint)
    data = encode_manifest(manifest)
    with writing(folder, _intact(folder, manifest.step)):
        _prepare(disk, folder)
        known = _supersede(disk, folder, manifest)
        written = _write_fragments(disk, folder, checkpoint.fragments, manifest, known)
        written += write_aside(disk, folder / manifest_file(manifest.step), [data])
        disk.sync_folder(folder)
    try:
        # For people; everything else goes by the numbered ones, so this copy need not be durable.
        written += write_aside(disk, folder / "manifest.json", [data], durable=False)
        _tidy(disk, folder, manifest, keep_every)
    except OSError as error:
        # The checkpoint is durable: files that stay behind cost space, a stopped run would cost more.
        log.warning("%s: could not tidy up after step %d: %s", folder, manifest.step, error)
    return written


def remove_superseded(folder: Path | str, step: int, *, disk: Disk | None = None) -> None:
    """Forget all checkpoints above ``step``; to be called when a run is resumed from there.

    Without it, checkpoints of the abandoned continuation could be mistaken for those of the new one. What a
    crash left half written goes, too: a run that was at its end already writes no further checkpoint, which
    would see to it.

    Raises:
        CheckpointError: the system refuses.
    """
    folder, disk = Path(folder), disk or Disk()
    with writing(folder, f"the checkpoint of step {step} is intact"):
        remove_asides(disk, folder)
        remove_asides(disk, folder / FRAGMENTS_FOLDER)
    later = [other for other in manifest_steps(folder) if other > step]
    if later:
        with writing(folder, f"the checkpoint of step {step} is intact"):
            _remove_manifests(disk, folder, later)


def _intact(folder: Path, step: int) -> str:
    earlier = [other for other in manifest_steps(folder) if other < step]
    if not earlier:
        return "there is no earlier checkpoint"
    return f"the checkpoint of step {earlier[0]} is intact"


def _prepare(disk: Disk, folder: Path) -> None:
    """Make the folders, and remove what an earlier crash left half written."""
    fragments = folder / FRAGMENTS_FOLDER
    if not fragments.is_dir():
        disk.make_folder(fragments)
        disk.sync_folder(folder)
        disk.sync_folder(folder.absolute().parent)
    remove_asides(disk, folder)
    remove_asides(disk, fragments)


def _supersede(disk: Disk, folder: Path, manifest: Manifest) -> dict[int, ManifestFragment]:
    """Remove manifests that cannot stand beside this one; return the fragments of the newest that can."""
    steps = manifest_steps(folder)
    wrong = [step for step in steps if step > manifest.step]
    known: dict[int, ManifestFragment] = {}
    for step in steps[len(wrong) :]:
        try:
            earlier = read_manifest(folder / manifest_file(step))
        except CheckpointError:
            continue  # nothing can be taken over from it; whoever reads it says what is wrong
        if _contradict(earlier, manifest):
            wrong.append(step)
            continue
        known = {entry.fragment: entry for entry in earlier.fragments}
        break
    if wrong:
        _remove_manifests(disk, folder, wrong)
    return known


def _contradict(earlier: Manifest, manifest: Manifest) -> bool:
    """Return whether two manifests name different contents for one file: they are of two timelines."""
    if len(earlier.fragments) != len(manifest.fragments):
        return True
    pairs = zip(earlier.fragments, manifest.fragments, strict=True)
    return any(old.version == new.version and old != new for old, new in pairs)


def _remove_manifests(disk: Disk, folder: Path, steps: list[int]) -> None:
    """Remove manifests durably, newest first, so that those that remain are always a prefix."""
    for step in sorted(steps, reverse=True):
        disk.remove(folder / manifest_file(step))
    disk.sync_folder(folder)


def _write_fragments(
    disk: Disk,
    folder: Path,
    versions: tuple[FragmentVersion, ...],
    manifest: Manifest,
    known: dict[int, ManifestFragment],
) -> int:
    written = 0
    for version, entry in zip(versions, manifest.fragments, strict=True):
        path = folder / entry.file
        if known.get(entry.fragment) == entry and _has_size(path, file_bytes(entry.numel)):
            continue
        parts = file_parts(version.params.detach().numpy(), version.momentum.detach().numpy())
        written += write_aside(disk, path, parts)
    if written:
        disk.sync_folder(folder / FRAGMENTS_FOLDER)
    return written


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def _tidy(disk: Disk, folder: Path, manifest: Manifest, keep_every: int) -> None:
    """Remove manifests that are not kept, then the fragment files that no kept manifest names.

    Which version of a fragment a manifest names follows from its step, so none has to be read for this.
    """
    steps = manifest_steps(folder)
    kept = [
        step
        for place, step in enumerate(steps)
        if place < KEPT or (keep_every > 0 and step % keep_every == 0)
    ]
    for step in steps:
        if step not in kept:
            disk.remove(folder / manifest_file(step))
    count = len(manifest.fragments)
    named = {(fragment, version_at(step, fragment, count)) for step in kept for fragment in range(count)}
    for path in sorted((folder / FRAGMENTS_FOLDER).iterdir()):
        parsed = parse_fragment_file(path.name)
        if parsed is not None and parsed not in named:
            disk.remove(path)
