"""What a parameter's dotted name tells: wrappers to strip, embeddings to set apart, the layer it is in.

Every learner must give a tensor the same name, however its model is wrapped: DDP, FSDP, activation
checkpointing and compilation each insert a piece into the path. Names are judged piece by piece, never by
substring, so ``model.reshaped.weight`` is no shared embedding.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from yeto.errors import ConfigError

WRAPPER_PIECES: Final = frozenset(
    {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module"}
)
"""Path pieces that FSDP, checkpoint wrappers, ``torch.compile`` and DDP put in."""

EMBEDDING_PIECES: Final = ("embed", "embed_tokens", "embeddings", "wte", "wpe", "lm_head", "shared")
"""A path piece that is, or ends with, one of these makes an embedding; case does not matter."""

LAYER_PIECES: Final = frozenset({"layers", "h", "blocks", "block"})
"""The piece after one of these is the number of a transformer layer."""

_EXAMPLES: Final = 3


def strip_wrappers(name: str) -> str:
    """Return a parameter's name without the pieces that wrappers put into its path.

    The last piece, the parameter's own name, always stays.
    """
    *path, own = name.split(".")
    return ".".join([*(piece for piece in path if piece not in WRAPPER_PIECES), own])


def check_wrapped_names(plain: Iterable[str], wrapped: Iterable[str]) -> None:
    """Check that a wrapped model has the parameters of the plain one once wrapper pieces are stripped.

    Args:
        plain: names before wrapping.
        wrapped: names after wrapping, not stripped.

    Raises:
        ConfigError: the two sets differ; names up to three examples.
    """
    expected = set(plain)
    found = {strip_wrappers(name): name for name in wrapped}
    missing = sorted(expected - found.keys())
    strange = sorted(found[name] for name in found.keys() - expected)
    if missing or strange:
        raise ConfigError(
            f"the wrapped model has other parameter names than the plain one: {len(missing)} missing"
            f"{_examples(missing)}, {len(strange)} unknown{_examples(strange)}; "
            "wrap the model without renaming parameters"
        )


def is_embedding(name: str) -> bool:
    """Tell whether a tensor's module path says that it is an embedding or an output head.

    The module path is the name without its last piece; a name of one piece is its own path.
    """
    *path, own = name.lower().split(".")
    return any(piece.endswith(EMBEDDING_PIECES) for piece in path or [own])


def layer_index(name: str) -> int | None:
    """Return the number of the transformer layer that a tensor is in; None outside of the layers."""
    pieces = name.split(".")
    for piece, following in pairwise(pieces):
        if piece in LAYER_PIECES and following.isascii() and following.isdigit():
            return int(following)
    return None


def _examples(names: list[str]) -> str:
    shown = ", ".join(names[:_EXAMPLES])
    return f" ({shown}{', …' if len(names) > _EXAMPLES else ''})" if names else ""
