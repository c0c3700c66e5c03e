"""``yeto-diffusion-export``: adapters of a diffusers pipeline out of a syncer's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from yeto.cli.export_command import TaskExport


def _load() -> Callable[..., Any]:
    from yeto.diffusion.extra import require_diffusers

    require_diffusers()
    from yeto.diffusion.export import export

    return export


_EXPORT = TaskExport(
    name="yeto-diffusion-export",
    page="""Write the adapters that a checkpoint of --task diffusion holds, one folder for each denoiser.

The folder of a transformer or a U-Net is what diffusers loads:

    pipeline.load_lora_weights("OUTPUT_DIR/transformer")

and that of a second transformer with load_into_transformer_2=True beside it; --merged writes a whole
pipeline instead. Checkpoints of learners that sent their training manifest (the default) need no flags about
the adapters, and --model only when the pipeline was a local folder.
""",
    tuning="lora, which is all there is for diffusion.",
    merged="Fold the adapters into the pipeline; write the whole pipeline.",
    dtype="Precision of the weights of merged denoisers; auto is the base's.",
    load=_load,
)

build, main = _EXPORT.build, _EXPORT.main

if __name__ == "__main__":
    main()
