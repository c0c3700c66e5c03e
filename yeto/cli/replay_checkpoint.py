"""Whether a checkpoint is what the tape says it is: by its manifest alone, without a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yeto.core import State
from yeto.core.values import LedgerEntry

if TYPE_CHECKING:
    from yeto.state import Manifest


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
    ledger = {entry.learner: (entry.merges, entry.c_steps, entry.c_tokens) for entry in manifest.ledger}
    for learner in sorted(ledger.keys() | state.ledger.keys()):
        told = state.ledger.get(learner, LedgerEntry(learner=learner, merges=0, c_steps=0, c_tokens=0))
        compare(
            f"learner {learner}, (merges, steps, tokens)",
            ledger.get(learner, (0, 0, 0)),
            (told.merges, told.c_steps, told.c_tokens),
        )
    return wrong
