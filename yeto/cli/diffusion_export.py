"""``yeto-diffusion-export``: adapters of a diffusers pipeline out of a syncer's checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import App, Parameter

from yeto import __version__
from yeto.cli.common import run_app, sigterm_unwinds
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
)
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
    from yeto.tuning.export_lookahead import require_choice
    from yeto.tuning.export_place import free_place, require_checkpoint

    # Before the libraries are loaded, which takes many seconds on a slow disk.
    require_choice(lookahead)
    free_place(output_dir, checkpoint, model, overwrite=overwrite)
    require_checkpoint(checkpoint)
    from yeto.diffusion.extra import require_diffusers

    require_diffusers()
    from yeto.diffusion.export import export

    with sigterm_unwinds():
        report = export(
            checkpoint,
            model,
            output_dir,
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
            say=_say,
        )
    if json_:
        print(json.dumps(attrs.asdict(report), default=str))
    return 0


def _say(line: str) -> None:
    # Progress is for people; stdout is kept for --json.
    print(line, file=sys.stderr, flush=True)


def build() -> App:
    """Return the app of this one command."""
    app = App(name="yeto-diffusion-export", help=HELP, version=__version__, help_format="plaintext")
    app.default(export_command)
    return app


def main() -> None:
    """Entry point of the ``yeto-diffusion-export`` script; exits with the command's code."""
    sys.exit(run_app(build, sys.argv[1:], table="diffusion-export"))


if __name__ == "__main__":
    main()
