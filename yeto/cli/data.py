"""``yeto data cache-latents``: what training would compute of every row, computed once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from yeto.cli.common import sigterm_unwinds
from yeto.cli.quiet import silence_libraries

data_app = App(name="data", help="Prepare rows for training.")


@data_app.command(name="cache-latents")
def cache_latents(
    *,
    model: Annotated[
        str, Parameter(help="Folder or Hugging Face id of the diffusers pipeline to be trained.")
    ],
    data: Annotated[
        str,
        Parameter(
            help="Rows with image and prompt: a jsonl, json or parquet file, a folder of them, or a Hugging "
            "Face data set id. Paths of images are relative to the rows."
        ),
    ],
    output: Annotated[
        Path, Parameter(help="Folder to write; pass its rows.jsonl to yeto run --task diffusion as --data.")
    ],
    model_revision: Annotated[str | None, Parameter(help="Branch, tag or commit of the model.")] = None,
    trust_remote_code: Annotated[
        bool,
        Parameter(negative="", help="Run Python code that comes with the model. Only for models you trust."),
    ] = False,
    data_revision: Annotated[str | None, Parameter(help="Branch, tag or commit of the data set.")] = None,
    height: Annotated[
        int | None, Parameter(help="Height of every image, with --width; else the row's or the image's own.")
    ] = None,
    width: Annotated[int | None, Parameter(help="Width of every image.")] = None,
    resize_mode: Annotated[
        Literal["center-crop", "stretch"],
        Parameter(help="center-crop cuts off what is too much, stretch changes the ratio of the sides."),
    ] = "center-crop",
    base_dtype: Annotated[
        Literal["auto", "f32", "bf16"],
        Parameter(help="Precision of the encoders: auto is bf16 on accelerators and f32 on a CPU."),
    ] = "auto",
    device: Annotated[
        str, Parameter(help="cpu, cuda, cuda:1, …; auto takes an accelerator when there is one.")
    ] = "auto",
) -> int:
    r"""Encode images and prompts once; training then loads no encoders.

    Writes shards of tensors, and rows.jsonl, which points at them:

        yeto data cache-latents --model MODEL --data rows.jsonl --output cache
        yeto run --role learner --task diffusion --model MODEL \
            --data cache/rows.jsonl ...

    The same command goes on after an interruption, and adds what was added to the rows: shards whose rows
    and files did not change are kept.
    """
    silence_libraries()
    from yeto.diffusion.extra import require_diffusers

    require_diffusers()
    from yeto.diffusion.cache import cache_rows
    from yeto.diffusion.config import DiffusionConfig

    config = DiffusionConfig(
        model=model,
        model_revision=model_revision,
        trust_remote_code=trust_remote_code,
        data=data,
        data_revision=data_revision,
        height=height,
        width=width,
        resize_mode=resize_mode,
        base_dtype=base_dtype,
        device=device,
    )
    from yeto.diffusion.model import load_encoders

    with sigterm_unwinds():
        report = cache_rows(config, output, load_encoders, say=_say)
    shards = "1 shard" if report.shards == 1 else f"{report.shards} shards"
    kept = f", {report.kept} of them were there already" if report.kept else ""
    print(f"{report.rows_file}: {report.rows} rows in {shards}{kept}")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
