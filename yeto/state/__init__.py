"""The syncer's tensors: immutable fragment versions, and the checkpoint that makes them durable.

The checkpoint is the one durable source of truth: the model can be recovered from it when every learner is
gone. docs/CHECKPOINT.md describes the files.

Names are imported when they are first used, because some users (``yeto replay --checkpoint``) want what a
manifest says and must not wait for a tensor library to load.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yeto.state.checkpoint import Checkpoint
    from yeto.state.files import require_space
    from yeto.state.fragmentfile import read_fragment
    from yeto.state.guards import (
        checkpoint_lock,
        final_marker_path,
        read_final_marker,
        remove_final_marker,
        write_final_marker,
    )
    from yeto.state.inspection import Inspection, inspect
    from yeto.state.manifest import LedgerEntry, Manifest, OuterMark, read_manifest
    from yeto.state.reading import (
        StoredCheckpoint,
        has_checkpoint,
        has_orphans,
        open_checkpoint,
        read_checkpoint,
    )
    from yeto.state.resume import SettingChange, validate_resume, validate_single_file
    from yeto.state.store import FragmentStore, FragmentVersion
    from yeto.state.takeover import checkpoint_at, kept_single_file, take_over
    from yeto.state.writing import remove_superseded, write_checkpoint

_HOME = {
    "Checkpoint": "checkpoint",
    "FragmentStore": "store",
    "FragmentVersion": "store",
    "Inspection": "inspection",
    "LedgerEntry": "manifest",
    "Manifest": "manifest",
    "OuterMark": "manifest",
    "SettingChange": "resume",
    "StoredCheckpoint": "reading",
    "checkpoint_at": "takeover",
    "checkpoint_lock": "guards",
    "final_marker_path": "guards",
    "has_checkpoint": "reading",
    "has_orphans": "reading",
    "inspect": "inspection",
    "kept_single_file": "takeover",
    "open_checkpoint": "reading",
    "read_checkpoint": "reading",
    "read_final_marker": "guards",
    "read_fragment": "fragmentfile",
    "read_manifest": "manifest",
    "remove_final_marker": "guards",
    "remove_superseded": "writing",
    "require_space": "files",
    "take_over": "takeover",
    "validate_resume": "resume",
    "validate_single_file": "resume",
    "write_checkpoint": "writing",
    "write_final_marker": "guards",
}

__all__ = [
    "Checkpoint",
    "FragmentStore",
    "FragmentVersion",
    "Inspection",
    "LedgerEntry",
    "Manifest",
    "OuterMark",
    "SettingChange",
    "StoredCheckpoint",
    "checkpoint_at",
    "checkpoint_lock",
    "final_marker_path",
    "has_checkpoint",
    "has_orphans",
    "inspect",
    "kept_single_file",
    "open_checkpoint",
    "read_checkpoint",
    "read_final_marker",
    "read_fragment",
    "read_manifest",
    "remove_final_marker",
    "remove_superseded",
    "require_space",
    "take_over",
    "validate_resume",
    "validate_single_file",
    "write_checkpoint",
    "write_final_marker",
]


def __getattr__(name: str) -> Any:
    """Import the module that has ``name``, on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"yeto.state.{_HOME[name]}"), name)
