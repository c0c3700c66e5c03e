"""From a checkpoint's fragments to named tensors, one fragment in memory at a time.

A checkpoint holds eight bytes a parameter, so its fragments are read one after the other, straight into the
tensors. A syncer may go on writing to the folder: when a file has gone, the newest checkpoint is filled in
instead, from its first fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from yeto.errors import CheckpointError
from yeto.state import StoredCheckpoint, open_checkpoint
from yeto.state.digested import IncompleteCheckpoint
from yeto.state.manifest import FRESH_LOOKS_MAX
from yeto.tuning.export_lookahead import removed
from yeto.wire import FragmentLayout, Layout


def fill(
    checkpoint: Path,
    stored: StoredCheckpoint,
    tensors: Mapping[str, Tensor],
    layout: Layout,
    lookahead: str,
    say: Callable[[str], None],
) -> tuple[StoredCheckpoint, bool]:
    """Copy a checkpoint's values into tensors.

    Args:
        checkpoint: where it is.
        stored: what was found there.
        tensors: canonical name to tensor, of every name in ``layout``; overwritten.
        layout: which value is whose.
        lookahead: ``remove`` or ``keep``.
        say: takes a note when a newer checkpoint is taken.

    Returns:
        The checkpoint that the tensors hold in the end, and whether a tensor that began at zero is not zero
        now. Where there is none (full tuning) that cannot be told, and the model is taken to have learned.

    Raises:
        CheckpointError: it cannot be read.
    """
    for _ in range(FRESH_LOOKS_MAX):
        try:
            return stored, _fill(tensors, layout, stored, lookahead)
        except IncompleteCheckpoint:
            newer = open_checkpoint(checkpoint)
            if newer.facts.step == stored.facts.step or newer.facts.fingerprint != stored.facts.fingerprint:
                raise
            say(f"note: step {stored.facts.step} was replaced while it was read; taking {newer.facts.step}")
            stored = newer
    raise CheckpointError(
        f"{checkpoint}: was replaced {FRESH_LOOKS_MAX} times while it was read; keep some checkpoints with "
        "--keep-every and name one of their manifests"
    )


def begins_at_zero(name: str) -> bool:
    """Tell whether an adapter's tensor is the factor that is zero until something is learned."""
    # PEFT zeroes B, but for embeddings A.
    return ".lora_B." in name or name.endswith(".lora_embedding_A")


def warnings_of(step: int, learned: bool) -> tuple[str, ...]:
    """Return what whoever exports should know about a model that is not what they hope for."""
    if step == 0:
        return ("no round was committed yet: this is the model as training began",)
    if not learned:
        return (f"after {step} committed rounds every B matrix is zero: nothing was learned",)
    return ()


def _fill(tensors: Mapping[str, Tensor], layout: Layout, stored: StoredCheckpoint, lookahead: str) -> bool:
    learned = not any(begins_at_zero(name) for name in tensors)
    with torch.no_grad():
        for fragment, part in enumerate(layout.fragments):
            ahead = removed(stored.lookaheads[fragment], lookahead)
            # Its values have no name here, so that they are gone before the next are read.
            learned |= _fill_one(tensors, part, torch.from_numpy(stored.read_params(fragment, ahead)))
    return learned


def _fill_one(tensors: Mapping[str, Tensor], part: FragmentLayout, values: Tensor) -> bool:
    learned = False
    for piece in part.slices():
        name, value = piece.tensor.name, values[piece.start : piece.stop]
        tensors[name].copy_(value.reshape(piece.tensor.shape))
        learned |= begins_at_zero(name) and bool(value.any())
    return learned
