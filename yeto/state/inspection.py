"""What a checkpoint is and whether it is sound, for people: one fragment in memory at a time.

Inspecting never refuses because of what is wrong inside; that is what it is there to show. Only what cannot
be read at all (no checkpoint, a manifest that is damaged, an older file that is cut short) is an error.

A folder may be written to meanwhile. A fragment whose file has gone is then no fault, if the manifest that
named it has gone, too: the whole look begins anew, with the newest.
"""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from yeto.errors import CheckpointError
from yeto.state.digested import IncompleteCheckpoint
from yeto.state.files import ASIDE
from yeto.state.fragmentfile import file_bytes, read_params, require_size
from yeto.state.guards import read_final_marker
from yeto.state.manifest import (
    FRAGMENTS_FOLDER,
    FRESH_LOOKS_MAX,
    ISO_BACKENDS,
    LedgerEntry,
    Manifest,
    is_single_file,
    manifest_file,
    manifest_steps,
    read_manifest,
)


@frozen(kw_only=True)
class FragmentSummary:
    """One fragment of an inspected checkpoint."""

    fragment: int
    version: int
    numel: int
    mode: str | None
    file: str
    """Path inside the folder; where the values begin, in an older file."""
    file_bytes: int
    problem: str | None
    """What is wrong with it; None if nothing is."""
    lookahead: float | None = None
    """So many times the momentum it is ahead of the run (see :mod:`yeto.state.lookahead`); None where that is
    not known."""


@frozen(kw_only=True)
class KeptManifest:
    """Another checkpoint of the same folder."""

    step: int
    problem: str | None
    """Why it could not be gone on from, as far as its manifest and the sizes of its files tell."""


@frozen(kw_only=True)
class Inspection:
    """What ``inspect`` found."""

    path: str
    """The manifest or file that was inspected."""
    format: str
    step: int
    iso_backend: str | None
    fingerprint: str | None
    contract: str | None
    fragments: tuple[FragmentSummary, ...]
    ledger: tuple[LedgerEntry, ...]
    manifest: Manifest | None
    """Everything else that a folder's manifest says."""
    kept: tuple[KeptManifest, ...]
    """The other checkpoints in the folder, newest first."""
    folder_bytes: int
    """All files of the folder, or the file."""
    leftovers: tuple[str, ...]
    """Files of a write that did not end, or is going on; the next write removes them."""
    final_step: int | None
    """Step of the final marker, if there is one."""
    problems: tuple[str, ...]
    """Everything that is wrong; empty for a valid checkpoint."""

    @property
    def valid(self) -> bool:
        """Whether this checkpoint, and everything it is kept with, could be read."""
        return not self.problems


def inspect(path: Path | str) -> Inspection:
    """Summarise a checkpoint and check all of it.

    Args:
        path: a checkpoint folder (its newest manifest is inspected, complete or not), one manifest, or an
            older single file.

    Raises:
        CheckpointError: there is no checkpoint, its manifest is unreadable, or an older file is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(
            f"{path}: there is no checkpoint; a syncer writes yeto-state.ckpt in the folder it is started "
            "in, yeto run --role local in its --run-dir"
        )
    if path.is_file() and is_single_file(path):
        return _inspect_single_file(path)
    if path.is_file() and path.suffix != ".json":
        raise CheckpointError(f"{path}: neither a checkpoint folder, nor a manifest, nor an older checkpoint")
    for _ in range(FRESH_LOOKS_MAX):
        found = _inspect_folder(path)
        if found.valid or Path(found.path).exists():
            return found
    return found


def _inspect_folder(path: Path) -> Inspection:
    folder = path if path.is_dir() else path.parent
    manifest = _manifest(path)
    summaries = []
    for entry, lookahead in zip(manifest.fragments, manifest.lookaheads, strict=True):
        problem = None
        try:
            read_params(folder, entry)
        except CheckpointError as error:
            problem = str(error)
        summaries.append(
            FragmentSummary(
                fragment=entry.fragment,
                version=entry.version,
                numel=entry.numel,
                mode=entry.mode,
                file=entry.file,
                file_bytes=file_bytes(entry.numel),
                problem=problem,
                lookahead=lookahead,
            )
        )
    kept = _kept(folder, manifest)
    faults = [part.problem for part in summaries] + [part.problem for part in kept]
    # Several checkpoints name the same file.
    problems = list(dict.fromkeys(fault for fault in faults if fault is not None))
    final_step = _final_step(folder, problems)
    files = [path for path in (*folder.glob("*"), *folder.glob(f"{FRAGMENTS_FOLDER}/*")) if path.is_file()]
    return Inspection(
        path=str(folder / manifest_file(manifest.step)),
        format="folder-v3",
        step=manifest.step,
        iso_backend=ISO_BACKENDS[manifest.iso_backend],
        fingerprint=manifest.layout_fingerprint,
        contract=manifest.session_contract,
        fragments=tuple(summaries),
        ledger=manifest.ledger,
        manifest=manifest,
        kept=kept,
        folder_bytes=sum(map(_size, files)),
        leftovers=tuple(sorted(str(file.relative_to(folder)) for file in files if file.suffix == ASIDE)),
        final_step=final_step,
        problems=tuple(problems),
    )


def _manifest(path: Path) -> Manifest:
    """Read a manifest; of a folder the newest, which may be gone when it is opened."""
    for _ in range(FRESH_LOOKS_MAX):
        steps = manifest_steps(path)
        try:
            return read_manifest(path)
        except IncompleteCheckpoint:
            if manifest_steps(path) == steps:
                raise
    raise CheckpointError(f"{path}: manifests are replaced faster than they can be read")


def _kept(folder: Path, inspected: Manifest) -> tuple[KeptManifest, ...]:
    """Look at the other manifests and at the sizes of their files."""
    kept = []
    for step in manifest_steps(folder):
        path, problem = folder / manifest_file(step), None
        if step == inspected.step:
            continue
        try:
            for entry in read_manifest(path).fragments:
                require_size(folder, entry)
        except CheckpointError as error:
            if not path.exists():
                continue  # it was replaced meanwhile
            problem = str(error)
        kept.append(KeptManifest(step=step, problem=problem))
    return tuple(kept)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _inspect_single_file(path: Path) -> Inspection:
    # Here, because it loads a tensor library, which nothing else of an inspection needs.
    from yeto.state.legacy import scan_single_file

    facts, fragments = scan_single_file(path)
    problems: list[str] = []
    final_step = _final_step(path, problems)
    return Inspection(
        path=str(path),
        format=facts.format,
        step=facts.step,
        iso_backend=facts.iso_backend,
        fingerprint=facts.fingerprint,
        contract=facts.contract,
        fragments=tuple(
            FragmentSummary(
                fragment=part.fragment,
                version=part.version,
                numel=part.numel,
                mode=None,
                file=f"offset {part.offset}",
                file_bytes=8 * part.numel,
                problem=None,
            )
            for part in fragments
        ),
        ledger=facts.ledger,
        manifest=None,
        kept=(),
        folder_bytes=_size(path),
        leftovers=(),
        final_step=final_step,
        problems=tuple(problems),
    )


def _final_step(path: Path, problems: list[str]) -> int | None:
    try:
        return read_final_marker(path)
    except CheckpointError as error:
        problems.append(str(error))
        return None
