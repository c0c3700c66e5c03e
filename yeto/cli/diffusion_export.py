"""``yeto-diffusion-export``: adapters of a diffusers pipeline out of a syncer's checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from yeto import __version__
from yeto.cli.common import run_app
from yeto.cli.export_flags import (
    CheckpointFlag,
    JsonFlag,
    LookaheadFlag,
    LoraAlphaFlag,
    LoraRFlag,
    LoraTargetsFlag,
    ModelFlag,
    ModelRevisionFlag,
    OutputDirFlag,
    OverwriteFlag,
    TrustRemoteCodeFlag,
    VerifyFlag,
    look_first,
    run_export,
)
from yeto.cli.help import house_app
from yeto.cli.quiet import silence_libraries

HELP = """Write the adapters that a checkpoint of --task diffusion holds, one folder for each denoiser.

The folder of a transformer or a U-Net is what diffusers loads:

    pipeline.load_lora_weights("OUTPUT_DIR/transformer")

and that of a second transformer with load_into_transformer_2=True beside it; --merged writes a whole
pipeline instead. Checkpoints of learners that sent their training manifest (the default) need no flags about
the adapters, and --model only when the pipeline was a local folder.
"""


def export_command(
    *,
    checkpoint: CheckpointFlag = Path("yeto-state.ckpt"),
    output_dir: OutputDirFlag,
    model: ModelFlag = None,
    model_revision: ModelRevisionFlag = None,
    trust_remote_code: TrustRemoteCodeFlag = False,
    tuning: Annotated[str | None, Parameter(help="lora, which is all there is for diffusion.")] = None,
    lora_r: LoraRFlag = None,
    lora_alpha: LoraAlphaFlag = None,
    lora_targets: LoraTargetsFlag = None,
    merged: Annotated[
        bool,
        Parameter(negative="", help="Fold the adapters into the pipeline; write the whole pipeline."),
    ] = False,
    verify: VerifyFlag = True,
    overwrite: OverwriteFlag = False,
    dtype: Annotated[
        str, Parameter(help="Weights of merged denoisers: auto (the base's), f32 or bf16.")
    ] = "auto",
    lookahead: LookaheadFlag = "remove",
    json_: JsonFlag = False,
) -> int:
    """Write the adapters that a checkpoint holds."""
    silence_libraries()
    look_first(checkpoint, output_dir, model, lookahead, overwrite=overwrite)
    from yeto.diffusion.extra import require_diffusers

    require_diffusers()
    from yeto.diffusion.export import export

    return run_export(
        export,
        as_json=json_,
        checkpoint=checkpoint,
        model=model,
        output_dir=output_dir,
        model_revision=model_revision,
        trust_remote_code=trust_remote_code,
        tuning=tuning,
        lora_r=lora_r,
        lora_alpha=lora_alpha,
        lora_targets=lora_targets,
        merged=merged,
        verify=verify,
        overwrite=overwrite,
        dtype=dtype,
        lookahead=lookahead,
    )


def build() -> App:
    """Return the app of this one command."""
    app = house_app("yeto-diffusion-export", help=HELP, version=__version__)
    app.default(export_command)
    return app


def main() -> None:
    """Entry point of the ``yeto-diffusion-export`` script; exits with the command's code."""
    sys.exit(run_app(build, sys.argv[1:], table="diffusion-export"))


if __name__ == "__main__":
    main()
