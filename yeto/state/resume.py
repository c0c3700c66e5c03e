"""Whether a checkpoint fits this start of the syncer; asked before anything changes.

A checkpoint that is sound in itself may still belong to another run. What says *whose* tensors these are
must be equal: fingerprint (equal sizes can belong to other tensors), contract, dtype, number of learners and
fragments, and the iso backend, whose results differ in their last bits. Policy may change between two starts
(quorum, grace, total steps, outer learning rate, ...); the changes are listed, because nothing else on
the screen would tell that a run goes on under other rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypedDict, Unpack

from attrs import frozen

from yeto.errors import CheckpointError, ConfigError, YetoError
from yeto.state.checkpoint import FOLDER, Checkpoint
from yeto.wire.layout import Layout

FIXED_SETTINGS: Final = {"num_learners": "--learners", "num_fragments": "--fragments"}
"""Settings that may not change, with the flag that states each."""

_REMEDY: Final = "it can be inspected (yeto checkpoint inspect) and exported (yeto-export)"

OLDER: Final = {"outer": "stock"}
"""Settings that older checkpoints do not have, with what all of them had."""

ABSENT: Final = "(absent)"
"""Stands for a setting that one side does not have."""


@frozen(kw_only=True)
class SettingChange:
    """One setting that differs from the stored one, and may."""

    name: str
    stored: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.stored} in the checkpoint, {self.now} now"


class Terms(TypedDict, total=False):
    """What learners state of a session."""

    fingerprint: str | None
    """64 hex digits."""
    contract: str | None
    dtype: str | None
    layout: Layout | None


def validate_resume(
    checkpoint: Checkpoint,
    *,
    settings: Mapping[str, Any],
    iso_backend: str,
    **terms: Unpack[Terms],
) -> tuple[SettingChange, ...]:
    """Check that a run with these settings may go on from a checkpoint.

    Args:
        checkpoint: as read.
        settings: the coordinator's configuration now, as plain values.
        iso_backend: the configured backend.
        terms: what the learners' HELLO states, when it is known; the older single-file formats cannot be
            resumed without the layout.

    Returns:
        The settings that changed and may, by name.

    Raises:
        ConfigError: a flag has another value than it may have; the message has both.
        CheckpointError: the learners' side differs, or the checkpoint does not say enough to be resumed.
    """
    if checkpoint.format != FOLDER:
        _require_resumable_file(checkpoint, terms.get("fingerprint"), terms.get("layout"))
    return _compared(checkpoint, settings=settings, iso_backend=iso_backend, **terms)


def validate_single_file(checkpoint: Checkpoint, *, settings: Mapping[str, Any], iso_backend: str) -> None:
    """Check what can be told of an older single file before a learner has stated its tensors.

    Whether they are the file's is for ``validate_resume`` to say, once they are known.

    Raises:
        ConfigError: a flag has another value than it may have.
        CheckpointError: a file of this version is never resumed.
    """
    _require_version(checkpoint)
    _compared(checkpoint, settings=settings, iso_backend=iso_backend)


def _compared(
    checkpoint: Checkpoint,
    *,
    settings: Mapping[str, Any],
    iso_backend: str,
    **terms: Unpack[Terms],
) -> tuple[SettingChange, ...]:
    """Compare what the checkpoint states with what is known now; ``validate_resume`` has the rules."""
    for flag, stored, now in (
        ("--iso-backend", checkpoint.iso_backend, iso_backend),
        ("layout fingerprint", checkpoint.fingerprint, terms.get("fingerprint")),
        ("session contract", checkpoint.contract, terms.get("contract")),
        ("--wire-dtype", checkpoint.dtype, terms.get("dtype")),
    ):
        if stored is not None and now is not None and stored != now:
            raise _differs(flag, stored, now)
    if (layout := terms.get("layout")) is not None:
        sizes = [part.numel for part in layout.fragments]
        if sizes != [version.numel for version in checkpoint.fragments]:
            raise CheckpointError(
                "the checkpoint's fragments have other sizes than the learners' layout; "
                "it belongs to another run"
            )
    fragments = settings.get("num_fragments")
    if fragments is not None and fragments != len(checkpoint.fragments):
        raise _differs("--fragments", len(checkpoint.fragments), fragments)
    changes = []
    for name in sorted(checkpoint.settings.keys() | settings.keys() if checkpoint.settings else ()):
        if name == "num_fragments":
            continue  # None and P mean the same thing here; compared above
        stored, now = (side.get(name, OLDER.get(name, ABSENT)) for side in (checkpoint.settings, settings))
        if stored == now:
            continue
        if name in FIXED_SETTINGS:
            raise _differs(FIXED_SETTINGS[name], stored, now)
        changes.append(SettingChange(name=name, stored=stored, now=now))
    learners = settings.get("num_learners")
    greatest = max((entry.learner for entry in checkpoint.ledger), default=-1)
    if learners is not None and greatest >= learners:
        # Only the older files get here: they have a ledger and no settings.
        raise ConfigError(f"--learners {learners}: the checkpoint has contributions of learner {greatest}")
    return tuple(changes)


def _require_resumable_file(checkpoint: Checkpoint, fingerprint: str | None, layout: Layout | None) -> None:
    """Check that a single-file checkpoint says enough to be resumed.

    Raises:
        CheckpointError: it does not.
    """
    _require_version(checkpoint)
    if layout is None:
        raise CheckpointError(
            f"a single-file checkpoint does not state its tensors; to resume it, a learner must; {_REMEDY}"
        )
    if checkpoint.format == "file-v3" and fingerprint is None:
        raise CheckpointError(
            f"a version 3 file is resumed only against a learner's layout fingerprint; {_REMEDY}"
        )
    if checkpoint.format == "file-v2" and any(len(part.tensors) != 1 for part in layout.fragments):
        raise CheckpointError(
            "a version 2 checkpoint does not state how its tensors are grouped, and is resumed only if every "
            f"fragment has one tensor; {_REMEDY}"
        )


def _require_version(checkpoint: Checkpoint) -> None:
    """Check that a single file is of a version that is ever resumed.

    Raises:
        CheckpointError: it is not.
    """
    if checkpoint.format == "file-v1":
        raise CheckpointError(
            f"a version 1 checkpoint states neither backend nor tensors and is never resumed; {_REMEDY}"
        )


def _differs(what: str, stored: object, now: object) -> YetoError:
    """Return the error of a value that may not change: wrong usage, where it is a flag's."""
    text = f"{what}: the checkpoint has {stored}, this start has {now}; it may not change in a resumed run"
    return ConfigError(text) if what.startswith("--") else CheckpointError(text)
