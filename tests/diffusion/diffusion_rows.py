"""Pictures, latents and rows that the tests of this folder train on."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from yeto.tuning.rows import Cursor, FileSource, Row


def picture(height=16, width=16, seed=0, mode="RGB"):
    """Return a picture of noise."""
    channels = {"L": (), "RGB": (3,), "RGBA": (4,), "LA": (2,)}[mode]
    values = np.random.default_rng(seed).integers(0, 256, (height, width, *channels), dtype=np.uint8)
    return Image.fromarray(values)


def write_pictures(folder, sizes):
    """Write ``0.png``, ``1.png``, … of the sizes (height, width); return rows that name them."""
    rows = []
    for number, (height, width) in enumerate(sizes):
        picture(height, width, number).save(Path(folder) / f"{number}.png")
        rows.append({"image": f"{number}.png", "prompt": f"picture {number}"})
    return rows


def write_rows(folder, rows, name="rows.jsonl"):
    """Write rows as JSONL; return the path as text."""
    path = Path(folder) / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def cached_row(folder, number, *, latents=(4, 4, 4), tokens=5, width=8, pooled=None, mask=False):
    """Write a file with a row's tensors; return the row and the tensors."""
    generator = torch.Generator().manual_seed(number)
    tensors = {
        "latents": torch.randn(latents, generator=generator),
        "prompt_embeds": torch.randn(tokens, width, generator=generator),
    }
    if pooled is not None:
        tensors["pooled_prompt_embeds"] = torch.randn(pooled, generator=generator)
    if mask:
        tensors["prompt_mask"] = torch.arange(tokens) < 3
    save_file(tensors, Path(folder) / f"{number}.safetensors")
    return dict.fromkeys(tensors, f"{number}.safetensors"), tensors


def as_row(value, number=0):
    """Return a value as a row of a source."""
    return Row(
        index=number, value=value, origin=f"rows.jsonl line {number + 1}", after=Cursor(row=number + 1)
    )


def rows_of(path):
    """Return all rows of a file."""
    return list(FileSource(str(path)).rows(Cursor()))
