"""The checkpoint as a value: everything needed to go on, or to recover the model without any learner.

What is read has been checked in itself before it is returned: format, sizes, digests, finiteness, and the
contiguous cut (after ``step`` commits, fragment f has exactly the version that round-robin order gives it).
Whether it fits *this* start of a syncer is the business of ``yeto.state.resume``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from attrs import frozen

import yeto
from yeto.errors import CheckpointError
from yeto.state.manifest import (
    FORMAT_VERSION,
    ISO_BACKENDS,
    LedgerEntry,
    Manifest,
    ManifestFragment,
    OuterMark,
    fragment_file,
    version_at,
)
from yeto.state.store import FragmentVersion
from yeto.wire.layout import Layout, MergeMode

FOLDER = "folder-v3"
"""``Checkpoint.format`` of our own; the older single files are ``file-v3``, ``file-v2``, ``file-v1``."""


@frozen(kw_only=True, eq=False)
class Checkpoint:
    """The committed state after ``step`` global steps.

    Fields that the older single-file formats do not state are None (or empty) when read from one.
    """

    step: int
    fragments: tuple[FragmentVersion, ...]
    """In order, one for each fragment of the session."""
    layout: Layout | None
    """Modes and tensor sizes; names are not needed and not kept (the training manifest has them)."""
    ledger: tuple[LedgerEntry, ...]
    settings: dict[str, Any] = attrs.field(factory=dict)
    """The coordinator's configuration as plain JSON values."""
    dtype: str | None
    """Session dtype: ``f32``, ``bf16`` or ``q4``."""
    iso_backend: str | None
    """``scalar`` or ``torch-svd``."""
    fingerprint: str | None
    """64 hex digits."""
    contract: str | None
    """64 hex digits."""
    profile: str | None = None
    training_manifest: dict[str, Any] | None = None
    """What learners stated about model and tuning, as a JSON object."""
    tape_file: str | None = None
    tape_seq: int | None = None
    """Sequence number of this checkpoint's ``checkpoint_ordered`` record."""
    finish_target: int | None = None
    """Target step of a budget finish, once one began."""
    outer_marks: tuple[OuterMark, ...] | None = None
    """What the momentum buffer of each fragment has gathered, in order; None where that was not counted."""
    software_version: str | None = yeto.__version__
    format: str = FOLDER
    digest: str | None = None
    """Of the manifest it was read from; names this checkpoint."""
    notices: tuple[str, ...] = ()
    """What the reader has to tell: which newer checkpoints were passed over and why."""

    @property
    def modes(self) -> tuple[MergeMode, ...]:
        """Merge mode of each fragment; empty when the format does not state them."""
        return () if self.layout is None else tuple(part.mode for part in self.layout.fragments)


def manifest_of(checkpoint: Checkpoint) -> Manifest:
    """Return the manifest that describes a checkpoint.

    Raises:
        CheckpointError: it lacks what a manifest must say, or is not a contiguous cut.
    """
    stated = {
        "layout": checkpoint.layout,
        "dtype": checkpoint.dtype,
        "iso_backend": checkpoint.iso_backend,
        "fingerprint": checkpoint.fingerprint,
        "contract": checkpoint.contract,
    }
    missing = [name for name, value in stated.items() if value is None]
    if missing:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} does not say its {', '.join(missing)}, "
            "so it cannot be written in this format"
        )
    layout, dtype, backend = checkpoint.layout, checkpoint.dtype, checkpoint.iso_backend
    fingerprint, contract = checkpoint.fingerprint, checkpoint.contract
    assert layout is not None
    assert dtype is not None
    assert backend is not None
    assert fingerprint is not None
    assert contract is not None
    check_cut(checkpoint.step, [(part.fragment, part.version) for part in checkpoint.fragments])
    sizes = [part.numel for part in layout.fragments]
    if [version.numel for version in checkpoint.fragments] != sizes:
        raise CheckpointError(f"the fragments of step {checkpoint.step} do not have the sizes of the layout")
    return Manifest(
        format_version=FORMAT_VERSION,
        software_version=checkpoint.software_version or yeto.__version__,
        step=checkpoint.step,
        iso_backend=ISO_BACKENDS.index(backend),
        dtype=dtype,
        layout_fingerprint=fingerprint,
        session_contract=contract,
        profile=checkpoint.profile,
        fragments=tuple(
            ManifestFragment(
                fragment=version.fragment,
                version=version.version,
                file=fragment_file(version.fragment, version.version),
                numel=version.numel,
                mode=part.mode.name.lower(),
                shapes=tuple(tensor.shape for tensor in part.tensors),
                params_digest=version.params_digest,
                momentum_digest=version.momentum_digest,
                lookahead=version.lookahead,
            )
            for version, part in zip(checkpoint.fragments, layout.fragments, strict=True)
        ),
        ledger=tuple(sorted(checkpoint.ledger, key=lambda entry: entry.learner)),
        settings=checkpoint.settings,
        tape_file=checkpoint.tape_file,
        tape_seq=checkpoint.tape_seq,
        finish_target=checkpoint.finish_target,
        training_manifest=checkpoint.training_manifest,
        outer_marks=checkpoint.outer_marks,
    )


def checkpoint_of(manifest: Manifest, fragments: tuple[FragmentVersion, ...], digest: str) -> Checkpoint:
    """Return the checkpoint that a manifest and its tensors make."""
    return Checkpoint(
        step=manifest.step,
        fragments=fragments,
        layout=manifest.layout,
        ledger=manifest.ledger,
        settings=manifest.settings,
        dtype=manifest.dtype,
        iso_backend=ISO_BACKENDS[manifest.iso_backend],
        fingerprint=manifest.layout_fingerprint,
        contract=manifest.session_contract,
        profile=manifest.profile,
        training_manifest=manifest.training_manifest,
        tape_file=manifest.tape_file,
        tape_seq=manifest.tape_seq,
        finish_target=manifest.finish_target,
        software_version=manifest.software_version,
        outer_marks=manifest.outer_marks,
        digest=digest,
    )


def check_cut(step: int, versions: Sequence[tuple[int, int]]) -> None:
    """Check that fragments are a contiguous prefix of the run.

    Args:
        step: committed global steps.
        versions: fragment and version of each, in order.

    Raises:
        CheckpointError: naming the first fragment that is not at its version.
    """
    count = len(versions)
    for place, (fragment, version) in enumerate(versions):
        expected = version_at(step, place, count)
        if fragment != place or version != expected:
            raise CheckpointError(
                f"fragment {fragment} is at version {version}, but after {step} "
                f"steps fragment {place} of {count} is at {expected}"
            )
