"""``yeto replay --checkpoint``: whether a checkpoint is what the tape says it is.

The manifest is held against the coordinator's state, and the files against the manifest: their values are
read, one fragment at a time, and must have the digests that stand there. Needs numpy, but no tensor library.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from yeto.cli.replay_print import print_divergence, print_json
from yeto.core import State
from yeto.core.values import LedgerEntry
from yeto.errors import CheckpointError
from yeto.tape import Record, Replayer

if TYPE_CHECKING:
    from yeto.state import Manifest


def check_checkpoint(
    path: Path, records: Iterator[Record], replayer: Replayer, checkpoint: Path, *, as_json: bool
) -> int:
    """Hold a checkpoint against a tape while that is verified; say what differs.

    Args:
        path: the tape.
        records: its records as they are verified.
        replayer: what verifies them.
        checkpoint: its folder, whose newest manifest counts, or a manifest.
        as_json: print JSON.

    Returns:
        0 when everything agrees, else 1.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest cannot be read.
    """
    # Imported here: nothing else of this command needs what a manifest is checked with.
    from yeto.state import inspect

    # Before the tape, which takes longer: while a run goes on its syncer removes what newer commits replace.
    found = inspect(checkpoint)
    manifest = found.manifest
    if manifest is None:
        raise CheckpointError(f"{checkpoint}: a checkpoint of an older format, which states too little")
    reached: State | None = None
    for _ in records:
        # The last time that the tape was at this step; the times before it are superseded.
        if replayer.state.step == manifest.step:
            reached = replayer.state
    if replayer.divergence is not None:
        return print_divergence(path, replayer, as_json=as_json)
    if reached is None:
        wrong = [f"the checkpoint is of step {manifest.step}, the tape ends at step {replayer.state.step}"]
    else:
        wrong = manifest_differences(manifest, reached)
    wrong += found.problems
    if as_json:
        print_json({"checkpoint": str(checkpoint), "step": manifest.step, "differences": wrong})
    elif wrong:
        print(f"{checkpoint}: not what the tape says")
        print("\n".join(f"  {sentence}" for sentence in wrong))
    else:
        print(f"{checkpoint}: step {manifest.step}, versions, digests and ledger are what the tape says")
        print(f"{checkpoint}: {len(manifest.fragments)} fragment files have these digests")
    return 1 if wrong else 0


def manifest_differences(manifest: Manifest, state: State) -> list[str]:
    """Return one sentence for each way in which a checkpoint differs from the tape.

    Args:
        manifest: the checkpoint's.
        state: the coordinator's, when it was last at the checkpoint's step.
    """
    wrong: list[str] = []

    def compare(what: str, stored: object, told: object) -> None:
        if stored != told:
            wrong.append(f"{what}: {stored} in the checkpoint, {told} on the tape")

    if state.terms is not None:
        compare("layout fingerprint", manifest.layout_fingerprint, state.terms.fingerprint)
        compare("session contract", manifest.session_contract, state.terms.contract)
        compare("dtype", manifest.dtype, state.terms.dtype)
    compare("fragments", len(manifest.fragments), len(state.marks))
    for stored, mark in zip(manifest.fragments, state.marks, strict=False):
        of = f"fragment {mark.fragment}, "
        compare(of + "version", stored.version, mark.version)
        compare(of + "params digest", stored.params_digest, mark.params_digest)
        # Before its first commit a fragment's momentum is zero and the tape states no digest for it.
        if mark.momentum_digest:
            compare(of + "momentum digest", stored.momentum_digest, mark.momentum_digest)
    for kept, counted in zip(manifest.outer_marks or (), state.outer_marks, strict=False):
        compare(
            f"fragment {counted.fragment}, (merges, gain) of its momentum",
            (kept.merges, kept.gain),
            (counted.merges, counted.gain),
        )
    ledger = {entry.learner: (entry.merges, entry.c_steps, entry.c_tokens) for entry in manifest.ledger}
    for learner in sorted(ledger.keys() | state.ledger.keys()):
        told = state.ledger.get(learner, LedgerEntry(learner=learner, merges=0, c_steps=0, c_tokens=0))
        compare(
            f"learner {learner}, (merges, steps, tokens)",
            ledger.get(learner, (0, 0, 0)),
            (told.merges, told.c_steps, told.c_tokens),
        )
    return wrong
