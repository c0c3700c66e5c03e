"""Synthetic checkpoints of real models: what a syncer would write after some rounds."""

import torch
from made_checkpoints import NUM_FRAGMENTS, write_made

from yeto.text.model import load_model
from yeto.text.task import TextTask
from yeto.text.tokenizer import load_tokenizer

__all__ = ["NUM_FRAGMENTS", "make_checkpoint"]


def make_checkpoint(folder, config, *, noise=0.05, binding=None, **made):
    """Write a checkpoint whose tensors are the model's own plus noise; return those tensors by name."""
    task = TextTask(config, load_model(config), load_tokenizer(config))
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: p.detach() + noise * torch.randn(p.shape, generator=generator)
        for name, p in task.trainable_parameters().items()
    }
    write_made(folder, tensors, task.binding() | (binding or {}), generator=generator, **made)
    return tensors
