"""Tensor functions of the merge; nothing here knows of learners, rounds or sockets.

A learner sends d = local - anchor. The syncer negates it once, where it is decoded: D = -d is a signed outer
gradient. From there the chain is: correct (HeLoCo) -> reduce (average, RDA, iso) -> outer step (Nesterov).

Two layers do the same arithmetic:

- one tensor at a time: ``average``, ``radial_directional_average``, ``isotropic``, ``correct_delta``,
  ``outer_step``;
- one fragment at a time, straight from wire bytes: ``examine_push`` when a push arrives, ``merge_fragment``
  after sealing, ``commit_fragment`` at the commit (or ``apply_outer_step``, of a gradient from elsewhere).

Both run compiled loops (``yeto.merge.kernels``) over blocks (``yeto.merge.blocks``), in an order that nothing
but the sizes decides, so the bits do not depend on the number of threads, nor on the processor.

Names are imported when they are first used: a process that only decomposes matrices loads no compiler, and
one that only reads flags not even torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yeto.core import learner_weight
    from yeto.merge.agreement import Agreement, measure_agreement
    from yeto.merge.correction import correct_delta
    from yeto.merge.fragment import PushFacts, PushInput, examine_push, merge_fragment
    from yeto.merge.iso import isotropic
    from yeto.merge.outer import MergedGradient, OuterResult, apply_outer_step, commit_fragment, outer_step
    from yeto.merge.passes import TensorFacts, compile_kernels, is_finite, tensor_digest
    from yeto.merge.reduction import average, radial_directional_average

_HOME = {
    "Agreement": "yeto.merge.agreement",
    "MergedGradient": "yeto.merge.outer",
    "OuterResult": "yeto.merge.outer",
    "PushFacts": "yeto.merge.fragment",
    "PushInput": "yeto.merge.fragment",
    "TensorFacts": "yeto.merge.passes",
    "apply_outer_step": "yeto.merge.outer",
    "average": "yeto.merge.reduction",
    "commit_fragment": "yeto.merge.outer",
    "compile_kernels": "yeto.merge.passes",
    "correct_delta": "yeto.merge.correction",
    "examine_push": "yeto.merge.fragment",
    "is_finite": "yeto.merge.passes",
    "isotropic": "yeto.merge.iso",
    "learner_weight": "yeto.core",
    "measure_agreement": "yeto.merge.agreement",
    "merge_fragment": "yeto.merge.fragment",
    "outer_step": "yeto.merge.outer",
    "radial_directional_average": "yeto.merge.reduction",
    "tensor_digest": "yeto.merge.passes",
}

__all__ = [
    "Agreement",
    "MergedGradient",
    "OuterResult",
    "PushFacts",
    "PushInput",
    "TensorFacts",
    "apply_outer_step",
    "average",
    "commit_fragment",
    "compile_kernels",
    "correct_delta",
    "examine_push",
    "is_finite",
    "isotropic",
    "learner_weight",
    "measure_agreement",
    "merge_fragment",
    "outer_step",
    "radial_directional_average",
    "tensor_digest",
]


def __getattr__(name: str) -> Any:
    """Import the module that has ``name``, on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
