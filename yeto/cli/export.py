"""``yeto-export``: the model out of a syncer's checkpoint, with or without any learner alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from yeto.cli.export_command import TaskExport


def _load() -> Callable[..., Any]:
    from yeto.text.export import export

    return export


_EXPORT = TaskExport(
    name="yeto-export",
    page="""Write the model that a checkpoint holds: a PEFT adapter folder, or a model folder.

Checkpoints of learners that sent their training manifest (the default) need no flags about model and
tuning, except --model when the model was a local folder.
""",
    tuning="What was trained, if the checkpoint does not state it.",
    merged="Fold the adapter into the base model; write the whole model.",
    dtype="Precision of the weights of a model folder; auto is the base's.",
    load=_load,
)

build, main = _EXPORT.build, _EXPORT.main

if __name__ == "__main__":
    main()
