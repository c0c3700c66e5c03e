"""What a checkpoint is and whether it is sound, for people: one fragment in memory at a time.

Inspecting never refuses because of what is wrong inside; that is what it is there to show.
"""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from yeto.errors import CheckpointError
from yeto.state.fragmentfile import file_bytes, read_fragment
from yeto.state.guards import read_final_marker
from yeto.state.legacy import is_single_file, read_single_file
from yeto.state.manifest import (
    ISO_BACKENDS,
    LedgerEntry,
    Manifest,
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
    file_bytes: int
    problem: str | None
    """What is wrong with it; None if nothing is."""


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
    other_steps: tuple[int, ...]
    """Steps of the other manifests in the folder, newest first."""
    final_step: int | None
    """Step of the final marker, if there is one."""
    problems: tuple[str, ...]
    """Everything that is wrong; empty for a valid checkpoint."""

    @property
    def valid(self) -> bool:
        """Whether this checkpoint could be read."""
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
        raise CheckpointError(f"{path}: there is no checkpoint")
    if path.is_file() and is_single_file(path):
        return _inspect_single_file(path)
    folder = path if path.is_dir() else path.parent
    manifest = read_manifest(path)
    summaries = []
    for entry in manifest.fragments:
        problem = None
        try:
            read_fragment(folder, entry)
        except CheckpointError as error:
            problem = str(error)
        summaries.append(
            FragmentSummary(
                fragment=entry.fragment,
                version=entry.version,
                numel=entry.numel,
                mode=entry.mode,
                file_bytes=file_bytes(entry.numel),
                problem=problem,
            )
        )
    problems = [summary.problem for summary in summaries if summary.problem is not None]
    final_step = _final_step(folder, problems)
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
        other_steps=tuple(step for step in manifest_steps(folder) if step != manifest.step),
        final_step=final_step,
        problems=tuple(problems),
    )


def _inspect_single_file(path: Path) -> Inspection:
    checkpoint = read_single_file(path)
    problems: list[str] = []
    final_step = _final_step(path, problems)
    return Inspection(
        path=str(path),
        format=checkpoint.format,
        step=checkpoint.step,
        iso_backend=checkpoint.iso_backend,
        fingerprint=checkpoint.fingerprint,
        contract=checkpoint.contract,
        fragments=tuple(
            FragmentSummary(
                fragment=version.fragment,
                version=version.version,
                numel=version.numel,
                mode=None,
                file_bytes=16 + 8 * version.numel,
                problem=None,
            )
            for version in checkpoint.fragments
        ),
        ledger=checkpoint.ledger,
        manifest=None,
        other_steps=(),
        final_step=final_step,
        problems=tuple(problems),
    )


def _final_step(path: Path, problems: list[str]) -> int | None:
    try:
        return read_final_marker(path)
    except CheckpointError as error:
        problems.append(str(error))
        return None
