"""Diffusion fine-tuning as a task of the learner's loop: any pipeline whose denoiser can take adapters.

Names are imported when they are first used, because settings are wanted by a command line that must not wait
for torch and diffusers to load.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yeto.diffusion.config import DiffusionConfig
    from yeto.diffusion.evaluate import heldout_loss
    from yeto.diffusion.export import export
    from yeto.diffusion.task import DiffusionTask, build_task

_HOME = {
    "DiffusionConfig": "config",
    "DiffusionTask": "task",
    "build_task": "task",
    "export": "export",
    "heldout_loss": "evaluate",
}

__all__ = ["DiffusionConfig", "DiffusionTask", "build_task", "export", "heldout_loss"]


def __getattr__(name: str) -> Any:
    """Import the module that has ``name``, on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"yeto.diffusion.{_HOME[name]}"), name)
