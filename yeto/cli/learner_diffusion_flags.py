"""The flags of a learner that say which kind of task it has, and those of diffusion.

Annotations are values here, not text: the class that goes on from this one is in another module.
"""

from typing import Annotated, Any, Literal

import attrs
from attrs import frozen
from cyclopts import Group, Parameter

from yeto.cli.learner_text_flags import MODEL, TextFlags
from yeto.errors import ConfigError

DIFFUSION = Group.create_ordered("Diffusion (--task diffusion)")

TEXT_ONLY = frozenset(
    {
        *("data_format", "columns", "train_on", "assistant_mask_mode", "chat_template", "mask_report"),
        *("seq_len", "packing", "tokenize", "stream_workers", "compile", "shard"),
    }
)
"""Fields that say something about rows of text, or that only language models have."""
DIFFUSION_ONLY = frozenset({"height", "width", "resize_mode", "diffusion_loss_weighting"})


@Parameter(name="*")
@frozen(kw_only=True)
class TaskFlags(TextFlags):
    """What is trained: the flags of both tasks."""

    task: Annotated[
        Literal["text", "diffusion"],
        Parameter(
            group=MODEL,
            help=(
                "text tunes a causal language model on chats; diffusion tunes adapters of a diffusers "
                "pipeline on images with prompts (pip install 'yeto[diffusion]'): --model is the pipeline, "
                "rows have image or latents, and prompt or prompt_embeds."
            ),
        ),
    ] = "text"
    height: Annotated[int | None, Parameter(group=DIFFUSION)] = None
    """Pixels of every image; without it a row's own height, or its image's."""
    width: Annotated[int | None, Parameter(group=DIFFUSION)] = None
    """Pixels of every image; without it a row's own width, or its image's."""
    resize_mode: Annotated[Literal["center-crop", "stretch"], Parameter(group=DIFFUSION)] = "center-crop"
    """How an image of another shape gets that size: cover it and cut what is over, or stretch."""
    diffusion_loss_weighting: Annotated[
        Literal["none", "sigma", "snr", "min-snr"],
        Parameter(
            group=DIFFUSION,
            help=(
                "What an error counts at a noise level: none (all alike), sigma (by the square of the share "
                "of noise), snr (as an error of the noise that follows from the prediction), min-snr (that, "
                "and less where the input is nearly clean; gamma 5)."
            ),
        ),
    ] = "none"

    def require_own_flags(self) -> None:
        """Refuse a flag of the other task: it would say nothing, and somebody meant it to.

        Raises:
            ConfigError: naming it.
        """
        other, fields = ("text", TEXT_ONLY) if self.task == "diffusion" else ("diffusion", DIFFUSION_ONLY)
        for field in attrs.fields(type(self)):
            value: Any = getattr(self, field.name)
            if field.name in fields and value != field.default:
                raise ConfigError(
                    f"--{field.name.replace('_', '-')} {value} is for --task {other}; leave it out, or say "
                    f"--task {other}"
                )
