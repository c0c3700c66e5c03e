"""The causal-LM task: rows, masks, packing, model loading, LoRA, export.

Names are imported when they are first used, because settings are wanted by a command line that must not wait
for torch and transformers to load.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yeto.text.config import TextConfig
    from yeto.text.evaluate import heldout_loss
    from yeto.text.export import export
    from yeto.text.task import TextTask, build_task

_HOME = {
    "TextConfig": "config",
    "TextTask": "task",
    "build_task": "task",
    "export": "export",
    "heldout_loss": "evaluate",
}

__all__ = ["TextConfig", "TextTask", "build_task", "export", "heldout_loss"]


def __getattr__(name: str) -> Any:
    """Import the module that has ``name``, on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"yeto.text.{_HOME[name]}"), name)
