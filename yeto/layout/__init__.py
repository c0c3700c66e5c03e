"""Named parameters to fragments: names and shapes only, no tensors and no torch."""

from yeto.layout.build import build_layout, embedding_advice
from yeto.layout.names import check_wrapped_names, is_embedding, layer_index, strip_wrappers

__all__ = [
    "build_layout",
    "check_wrapped_names",
    "embedding_advice",
    "is_embedding",
    "layer_index",
    "strip_wrappers",
]
