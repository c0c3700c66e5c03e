"""Synthetic checkpoints: what a syncer would write after some rounds, made of tensors at hand."""

import torch

from yeto.layout import build_layout
from yeto.state import Checkpoint, FragmentVersion, LedgerEntry, write_checkpoint
from yeto.state.manifest import version_at
from yeto.wire import TrainingManifest, digest, layout_fingerprint

NUM_FRAGMENTS = 3


def write_made(
    folder,
    tensors,
    binding,
    *,
    step=4,
    manifest=True,
    pattern="binpack",
    merge="rda",
    momentum_noise=0.0,
    lookaheads=(None,) * NUM_FRAGMENTS,
    settings=None,
    generator=None,
):
    """Write a checkpoint that holds named tensors, trained by learners with a binding."""
    layout = build_layout(
        {name: tuple(t.shape) for name, t in tensors.items()},
        fragments=NUM_FRAGMENTS,
        pattern=pattern,
        matrix_merge=merge,
    )
    stated = TrainingManifest(binding=binding, merge_alpha=0.5, layout=layout)
    fragments = []
    for place, part in enumerate(layout.fragments):
        params = torch.zeros(part.numel)
        for piece in part.slices():
            params[piece.start : piece.stop] = tensors[piece.tensor.name].flatten()
        momentum = momentum_noise * torch.randn(part.numel, generator=generator)
        fragments.append(
            FragmentVersion(
                fragment=place,
                version=version_at(step, place, len(layout.fragments)),
                params=params,
                momentum=momentum,
                params_digest=digest(params.numpy()),
                momentum_digest=digest(momentum.numpy()),
                lookahead=lookaheads[place],
            )
        )
    checkpoint = Checkpoint(
        step=step,
        fragments=tuple(fragments),
        layout=layout,
        ledger=(LedgerEntry(learner=0, merges=step, c_steps=40, c_tokens=4000),),
        settings={"quorum": 2} if settings is None else settings,
        dtype="bf16",
        iso_backend="scalar",
        fingerprint=layout_fingerprint(layout).hex(),
        contract=stated.contract().hex(),
        training_manifest=stated.to_dict() if manifest else None,
    )
    write_checkpoint(folder, checkpoint)
