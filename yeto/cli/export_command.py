"""The command that exports a checkpoint, whatever the task: its flags, and what it does before and with them.

Annotations are values here, not text: cyclopts reads them where the task has put its own words in.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

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
        model: Annotated[
            str | None,
            Parameter(
                help="Base model: Hugging Face id, or a local folder. Default: what the checkpoint states."
            ),
        ] = None,
        model_revision: Annotated[str | None, Parameter(help="Branch, tag or commit of the model.")] = None,
        trust_remote_code: Annotated[
            bool,
            Parameter(
                negative="", help="Run Python code that comes with the model. Only for models you trust."
            ),
        ] = False,
        tuning: Annotated[Literal["lora", "full"] | None, Parameter(help=task.tuning)] = None,
        lora_r: Annotated[
            int | None, Parameter(help="Rank of the adapters, if the checkpoint does not state it.")
        ] = None,
        lora_alpha: Annotated[int | None, Parameter(help="Scale of the adapters, likewise.")] = None,
        lora_targets: Annotated[str | None, Parameter(help="As given to the learners, likewise.")] = None,
        merged: Annotated[bool, Parameter(negative="", help=task.merged)] = False,
        verify: Annotated[bool, Parameter(help="Load the result back and compare it with the base.")] = True,
        overwrite: Annotated[
            bool, Parameter(negative="", help="Replace an existing --output-dir at the very end.")
        ] = False,
        dtype: Annotated[Literal["auto", "f32", "bf16"], Parameter(help=task.dtype)] = "auto",
        lookahead: Annotated[
            Literal["remove", "keep"],
            Parameter(
                help="Before its closing sweep, a run with stock momentum stores a point ahead of itself: "
                "remove that look-ahead, or keep it."
            ),
        ] = "remove",
        json_: Annotated[
            bool, Parameter(name="--json", negative="", help="Print JSON on stdout, and nothing else.")
        ] = False,
    ) -> int:
        silence_libraries()
        _look_first(checkpoint, output_dir, model, overwrite=overwrite)
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


def _look_first(checkpoint: Path, output_dir: Path, model: str | None, *, overwrite: bool) -> None:
    """Refuse what can be refused before the libraries are loaded, which takes many seconds on a slow disk.

    Raises:
        ConfigError: a flag is wrong.
        CheckpointError: there is no checkpoint.
    """
    from yeto.tuning.export_place import free_place, require_checkpoint

    free_place(output_dir, checkpoint, model, overwrite=overwrite)
    require_checkpoint(checkpoint)
