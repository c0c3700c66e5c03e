"""Tensor functions of the merge; nothing here knows of learners, rounds or sockets.

A learner sends d = local - anchor. The syncer negates it once, where it is decoded: D = -d is a signed outer
gradient. From there the chain is: correct (HeLoCo) -> reduce (average, RDA, iso) -> outer step (Nesterov).

Two layers do the same arithmetic:

- one tensor at a time: ``average``, ``radial_directional_average``, ``isotropic``, ``correct_delta``,
  ``outer_step``;
- one fragment at a time, straight from wire bytes: ``examine_push`` when a push arrives, ``merge_fragment``
  after sealing, ``apply_outer_step`` at the commit.

Both work in chunks, in an order that nothing but the sizes decides, so the bits do not depend on the number
of threads (``yeto.merge.chunks`` says how).
"""

from yeto.core import learner_weight
from yeto.merge.chunks import is_finite, tensor_digest
from yeto.merge.correction import correct_delta
from yeto.merge.fragment import (
    MergedGradient,
    PushFacts,
    PushInput,
    TensorFacts,
    examine_push,
    merge_fragment,
)
from yeto.merge.isotropic import isotropic
from yeto.merge.outer import OuterResult, apply_outer_step, outer_step
from yeto.merge.reduction import average, radial_directional_average

__all__ = [
    "MergedGradient",
    "OuterResult",
    "PushFacts",
    "PushInput",
    "TensorFacts",
    "apply_outer_step",
    "average",
    "correct_delta",
    "examine_push",
    "is_finite",
    "isotropic",
    "learner_weight",
    "merge_fragment",
    "outer_step",
    "radial_directional_average",
    "tensor_digest",
]
