"""What low-rank adapters of every kind of model have in common: the names.

The canonical name of an adapter tensor is the key PEFT itself gives it in a saved adapter. Then a
checkpoint's tensors *are* an adapter file, and nothing can be lost in translation. A live parameter differs
from it by the pieces wrappers add and by the adapter's own name, ``default``.
"""

from __future__ import annotations

from yeto.layout import strip_wrappers

ADAPTER = "default"
"""PEFT's own default: other names have been confused with parts of tensor names."""


def canonical_name(name: str) -> str:
    """Return a live parameter's canonical name: no wrapper pieces, no adapter name.

    ``base_model.model.….q_proj.lora_A.default.weight`` becomes ``….q_proj.lora_A.weight`` in full.
    """
    pieces = strip_wrappers(name).split(".")
    return ".".join(
        piece
        for before, piece in zip(["", *pieces], pieces, strict=False)
        if not (piece == ADAPTER and before.startswith("lora_"))
    )


def matches(module: str, name: str) -> bool:
    """Tell whether PEFT takes ``name`` to mean a module: by its full name, or by its last pieces."""
    return module == name or module.endswith(f".{name}")
