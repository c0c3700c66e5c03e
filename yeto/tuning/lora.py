"""What low-rank adapters of every kind of model have in common: the names.

The canonical name of an adapter tensor is the key PEFT itself gives it in a saved adapter. Then a
checkpoint's tensors *are* an adapter file, and nothing can be lost in translation. A live parameter differs
from it by the pieces wrappers add and by the adapter's own name, ``default``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

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


def shortest_names(model: nn.Module, modules: Sequence[str]) -> tuple[str, ...]:
    """Return sorted suffixes that match exactly these modules, else their full names; PEFT takes either."""
    short = suffixes(modules)
    matched = {name for name, _ in model.named_modules() if any(matches(name, suffix) for suffix in short)}
    return tuple(sorted(short if matched == set(modules) else modules))


def matches(module: str, name: str) -> bool:
    """Tell whether PEFT takes ``name`` to mean a module: by its full name, or by its last pieces."""
    return module == name or module.endswith(f".{name}")


def suffixes(modules: Iterable[str]) -> list[str]:
    """Return the last pieces of module names, each once, sorted."""
    return sorted({name.rpartition(".")[2] for name in modules})
