"""Synthetic checkpoints of diffusion adapters, with the names that diffusers and PEFT give by themselves."""

import torch
from diffusers import DiffusionPipeline
from made_checkpoints import write_made
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model

from yeto.diffusion.pipeline import find_pipeline

TARGETS = ("to_k", "to_out.0", "to_q", "to_v")
R, ALPHA = 4, 8


def make_diffusion_checkpoint(
    folder, model, parts, *, noise=0.05, targets=TARGETS, scale=(R, ALPHA), binding=None, **made
):
    """Write a checkpoint of adapters whose values are fresh ones plus noise; return the tensors by name."""
    r, alpha = scale
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for part in parts:
        module = getattr(loaded(model), part)
        torch.manual_seed(3)
        settings = LoraConfig(r=r, lora_alpha=alpha, target_modules=list(targets))
        inject_adapter_in_model(settings, module)
        for name, tensor in get_peft_model_state_dict(module).items():
            change = noise * torch.randn(tensor.shape, generator=generator)
            tensors[f"{part}.{name}"] = tensor.detach() + change
    stated = {
        "task": "diffusion",
        "model": find_pipeline(str(model)).identity.binding(),
        "tuning": "lora",
        "seed": 0,
        "num_learners": 2,
        "lora": {"r": r, "alpha": alpha, "targets": {part: list(targets) for part in parts}},
    }
    write_made(folder, tensors, stated | (binding or {}), generator=generator, **made)
    return tensors


def loaded(model):
    """Return a pipeline as its users load it."""
    pipeline = DiffusionPipeline.from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sampled(pipeline):
    """Return an image in two steps from a fixed start; float32 values."""
    generator = torch.Generator().manual_seed(0)
    image = pipeline(
        "a cat", height=16, width=16, num_inference_steps=2, generator=generator, output_type="pt"
    ).images
    return image.float()
