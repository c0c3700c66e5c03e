"""``yeto-export``: the model out of a syncer's checkpoint, with or without any learner alive."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import App, Parameter

from yeto import __version__
from yeto.cli.common import run_app, sigterm_unwinds
from yeto.cli.quiet import silence_libraries

HELP = """Write the model that a checkpoint holds: a PEFT adapter folder, or a model folder.

Checkpoints of learners that sent their training manifest (the default) need no flags about model and
tuning, except --model when the model was a local folder.
"""


def export_command(
    *,
    checkpoint: Annotated[
        Path, Parameter(help="Checkpoint folder, one of its manifests, or an older single file.")
    ] = Path("yeto-state.ckpt"),
    output_dir: Annotated[Path, Parameter(help="Folder to write; must not exist without --overwrite.")],
    model: Annotated[str | None, Parameter(help="Base model: folder or Hugging Face id.")] = None,
    model_revision: Annotated[str | None, Parameter(help="Commit, tag or branch of the id.")] = None,
    trust_remote_code: Annotated[
        bool, Parameter(negative="", help="Run code that comes with the model.")
    ] = False,
    tuning: Annotated[
        str | None, Parameter(help="lora or full, if the checkpoint does not state it.")
    ] = None,
    lora_r: Annotated[int | None, Parameter(help="Adapter rank, if not stated.")] = None,
    lora_alpha: Annotated[int | None, Parameter(help="Adapter alpha, if not stated.")] = None,
    lora_targets: Annotated[str | None, Parameter(help="As given to the learners, if not stated.")] = None,
    merged: Annotated[
        bool, Parameter(negative="", help="Fold the adapter into the base model; write the whole model.")
    ] = False,
    verify: Annotated[bool, Parameter(help="Load the result back and compare it with the base.")] = True,
    overwrite: Annotated[
        bool, Parameter(negative="", help="Replace an existing --output-dir at the very end.")
    ] = False,
    dtype: Annotated[
        str, Parameter(help="Weights of a model folder: auto (the base's), f32 or bf16.")
    ] = "auto",
    lookahead: Annotated[
        str,
        Parameter(
            help="Before its closing sweep, a run with stock momentum stores a point ahead of itself: "
            "remove that look-ahead, or keep it."
        ),
    ] = "remove",
    json_: Annotated[
        bool, Parameter(name="--json", negative="", help="Print the outcome as JSON on stdout.")
    ] = False,
) -> int:
    """Write the model that a checkpoint holds."""
    silence_libraries()
    from yeto.tuning.export_lookahead import require_choice
    from yeto.tuning.export_place import free_place, require_checkpoint

    # Before the libraries are loaded, which takes many seconds on a slow disk.
    require_choice(lookahead)
    free_place(output_dir, checkpoint, model, overwrite=overwrite)
    require_checkpoint(checkpoint)
    from yeto.text.export import export

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
    app = App(name="yeto-export", help=HELP, version=__version__, help_format="plaintext")
    app.default(export_command)
    return app


def main() -> None:
    """Entry point of the ``yeto-export`` script; exits with the command's code."""
    sys.exit(run_app(build, sys.argv[1:], table="export"))


if __name__ == "__main__":
    main()
