"""The flags that every export has, whatever the task, and what it does before and with them.

Annotations are values here, not text: the commands that take them are in other modules.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import Parameter

from yeto.cli.common import sigterm_unwinds

CheckpointFlag = Annotated[
    Path, Parameter(help="Checkpoint folder, one of its manifests, or an older single file.")
]
OutputDirFlag = Annotated[Path, Parameter(help="Folder to write; must not exist without --overwrite.")]
ModelFlag = Annotated[str | None, Parameter(help="Base model: folder or Hugging Face id.")]
ModelRevisionFlag = Annotated[str | None, Parameter(help="Commit, tag or branch of the id.")]
TrustRemoteCodeFlag = Annotated[bool, Parameter(negative="", help="Run code that comes with the model.")]
LoraRFlag = Annotated[int | None, Parameter(help="Adapter rank, if not stated.")]
LoraAlphaFlag = Annotated[int | None, Parameter(help="Adapter alpha, if not stated.")]
LoraTargetsFlag = Annotated[str | None, Parameter(help="As given to the learners, if not stated.")]
VerifyFlag = Annotated[bool, Parameter(help="Load the result back and compare it with the base.")]
OverwriteFlag = Annotated[
    bool, Parameter(negative="", help="Replace an existing --output-dir at the very end.")
]
LookaheadFlag = Annotated[
    str,
    Parameter(
        help="Before its closing sweep, a run with stock momentum stores a point ahead of itself: "
        "remove that look-ahead, or keep it."
    ),
]
JsonFlag = Annotated[bool, Parameter(name="--json", negative="", help="Print the outcome as JSON on stdout.")]


def look_first(
    checkpoint: Path, output_dir: Path, model: str | None, lookahead: str, *, overwrite: bool
) -> None:
    """Refuse what can be refused before the libraries are loaded, which takes many seconds on a slow disk.

    Raises:
        ConfigError: a flag is wrong.
        CheckpointError: there is no checkpoint.
    """
    from yeto.tuning.export_lookahead import CHOICES
    from yeto.tuning.export_place import free_place, require_checkpoint
    from yeto.tuning.settings import require_choice

    require_choice("--lookahead", lookahead, CHOICES)
    free_place(output_dir, checkpoint, model, overwrite=overwrite)
    require_checkpoint(checkpoint)


def run_export(export: Callable[..., Any], *, as_json: bool, **settings: Any) -> int:
    """Call a task's export, with progress for people on stderr; return the exit code.

    Args:
        export: returns an attrs object.
        as_json: print that on stdout.
        settings: of the export.
    """
    with sigterm_unwinds():
        report = export(**settings, say=lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(attrs.asdict(report), default=str))
    return 0
