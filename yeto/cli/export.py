"""``yeto-export``: the model out of a syncer's checkpoint, with or without any learner alive."""

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

HELP = """Write the model that a checkpoint holds: a PEFT adapter folder, or a model folder.

Checkpoints of learners that sent their training manifest (the default) need no flags about model and
tuning, except --model when the model was a local folder.
"""


def export_command(
    *,
    checkpoint: CheckpointFlag = Path("yeto-state.ckpt"),
    output_dir: OutputDirFlag,
    model: ModelFlag = None,
    model_revision: ModelRevisionFlag = None,
    trust_remote_code: TrustRemoteCodeFlag = False,
    tuning: Annotated[
        str | None, Parameter(help="lora or full, if the checkpoint does not state it.")
    ] = None,
    lora_r: LoraRFlag = None,
    lora_alpha: LoraAlphaFlag = None,
    lora_targets: LoraTargetsFlag = None,
    merged: Annotated[
        bool, Parameter(negative="", help="Fold the adapter into the base model; write the whole model.")
    ] = False,
    verify: VerifyFlag = True,
    overwrite: OverwriteFlag = False,
    dtype: Annotated[
        str, Parameter(help="Weights of a model folder: auto (the base's), f32 or bf16.")
    ] = "auto",
    lookahead: LookaheadFlag = "remove",
    json_: JsonFlag = False,
) -> int:
    """Write the model that a checkpoint holds."""
    silence_libraries()
    look_first(checkpoint, output_dir, model, lookahead, overwrite=overwrite)
    from yeto.text.export import export

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
    app = house_app("yeto-export", help=HELP, version=__version__)
    app.default(export_command)
    return app


def main() -> None:
    """Entry point of the ``yeto-export`` script; exits with the command's code."""
    sys.exit(run_app(build, sys.argv[1:], table="export"))


if __name__ == "__main__":
    main()
