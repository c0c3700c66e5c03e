"""Whether a checkpoint is what the tape says it is: read from its manifest alone, without a tensor."""

from __future__ import annotations

import json
from pathlib import Path

from attrs import frozen

from yeto.core import State
from yeto.core.values import FragmentMark, LedgerEntry
from yeto.errors import CheckpointError


@frozen(kw_only=True)
class Manifest:
    """What a checkpoint's manifest states about the run."""

    step: int
    marks: dict[int, FragmentMark]
    ledger: dict[int, LedgerEntry]


def read_manifest(path: Path) -> Manifest:
    """Return what the manifest of a checkpoint states.

    Args:
        path: the checkpoint's folder (its newest manifest is read) or one manifest in it.

    Raises:
        CheckpointError: there is no manifest, or it lacks something.
    """
    file = path / "manifest.json" if path.is_dir() else path
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
        return Manifest(
            step=stated["step"],
            marks={
                entry["fragment"]: FragmentMark(
                    fragment=entry["fragment"],
                    version=entry["version"],
                    params_digest=entry["params_digest"],
                    momentum_digest=entry["momentum_digest"],
                )
                for entry in stated["fragments"]
            },
            ledger={entry["learner"]: LedgerEntry(**entry) for entry in stated["ledger"]},
        )
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except KeyError as error:
        raise CheckpointError(f"{file}: not a checkpoint's manifest: it has no {error}") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: not a checkpoint's manifest: {error}") from error


def manifest_differences(manifest: Manifest, state: State) -> list[str]:
    """Return one sentence for each way in which a manifest differs from the state at its step."""
    wrong = []
    marks = {mark.fragment: mark for mark in state.marks}
    for fragment in sorted(marks.keys() | manifest.marks.keys()):
        ours, theirs = marks.get(fragment), manifest.marks.get(fragment)
        if ours is None or theirs is None:
            owner = "tape" if theirs is None else "checkpoint"
            wrong.append(f"fragment {fragment}: only the {owner} knows it")
            continue
        for name in ("version", "params_digest", "momentum_digest"):
            mine, stored = getattr(ours, name), getattr(theirs, name)
            # Before its first commit a fragment's momentum is zero and the tape states no digest for it.
            if mine not in (stored, ""):
                wrong.append(f"fragment {fragment}: {name} {stored} in the checkpoint, {mine} on the tape")
    for learner in sorted(state.ledger.keys() | manifest.ledger.keys()):
        nothing = LedgerEntry(learner=learner, merges=0, c_steps=0, c_tokens=0)
        credited, stored = state.ledger.get(learner, nothing), manifest.ledger.get(learner, nothing)
        if credited != stored:
            wrong.append(
                f"learner {learner}: {_ledger_text(stored)} in the checkpoint, "
                f"{_ledger_text(credited)} on the tape"
            )
    return wrong


def _ledger_text(entry: LedgerEntry) -> str:
    return f"{entry.merges} merges, {entry.c_steps} steps, {entry.c_tokens} tokens"
