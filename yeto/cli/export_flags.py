"""The flags that every export has, whatever the task.

Annotations are values here, not text: the commands that take them are in other modules.
"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

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
