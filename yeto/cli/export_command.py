"""The command that exports a checkpoint, whatever the task: its flags, and what it does before and with them.

Annotations are values here, not text: cyclopts reads them where the task has put its own words in.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import App, Parameter

from yeto import __version__
from yeto.cli.common import run_app, sigterm_unwinds
from yeto.cli.help import house_app
from yeto.cli.quiet import silence_libraries


@attrs.frozen(kw_only=True)
class TaskExport:
    """What is peculiar to the exports of one kind of task."""

    name: str
    """The command's name; without ``yeto-`` it is that of its table in a file of settings."""
    page: str
    """What its help begins with."""
    tuning: str
    """Help of that flag, as the next two."""
    merged: str
    dtype: str
    load: Callable[[], Callable[..., Any]]
    """Returns the task's export, once it is known that its libraries are there."""

    def build(self) -> App:
        """Return the app of this one command."""
        app = house_app(self.name, help=self.page, version=__version__)
        app.default(_command(self))
        return app

    def main(self) -> None:
        """Entry point of the command's script; exits with its code."""
        sys.exit(run_app(self.build, sys.argv[1:], table=self.name.removeprefix("yeto-")))


def _command(task: TaskExport) -> Callable[..., int]:
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
        tuning: Annotated[str | None, Parameter(help=task.tuning)] = None,
        lora_r: Annotated[int | None, Parameter(help="Adapter rank, if not stated.")] = None,
        lora_alpha: Annotated[int | None, Parameter(help="Adapter alpha, if not stated.")] = None,
        lora_targets: Annotated[
            str | None, Parameter(help="As given to the learners, if not stated.")
        ] = None,
        merged: Annotated[bool, Parameter(negative="", help=task.merged)] = False,
        verify: Annotated[bool, Parameter(help="Load the result back and compare it with the base.")] = True,
        overwrite: Annotated[
            bool, Parameter(negative="", help="Replace an existing --output-dir at the very end.")
        ] = False,
        dtype: Annotated[str, Parameter(help=task.dtype)] = "auto",
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
        silence_libraries()
        _look_first(checkpoint, output_dir, model, lookahead, overwrite=overwrite)
        export = task.load()
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
                # Progress is for people.
                say=lambda line: print(line, file=sys.stderr, flush=True),
            )
        if json_:
            print(json.dumps(attrs.asdict(report), default=str))
        return 0

    return export_command


def _look_first(
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
