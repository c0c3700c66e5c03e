"""One gradient of a whole island: the token mean over all rows of all its ranks.

Every rank divides its summed loss by the number of targets of the *whole* group, so that the sum of the
ranks' gradients is the gradient of the token mean, however unevenly the targets lie. A rank that holds the
whole model adds its gradients up with the others' once, behind the last micro batch. With a model in parts
FSDP does that in every backward pass, and takes the mean over the ranks: that is undone in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from yeto.learner.island import Island
from yeto.learner.sharded import is_sharded, whole


class Gradients:
    """The gradients of an island's trained parameters."""

    def __init__(self, island: Island, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take this rank's parameters, by name in an order that is the same on every rank."""
        self._island = island
        self._parameters = parameters
        self.is_sharded = is_sharded(parameters.values())
        """Whether a pass through the model takes all ranks, so that none may be left out."""

    def divisor(self, targets: int) -> float:
        """Return what a summed loss is divided by, for a group with so many targets on all ranks."""
        return targets / self._island.size if self.is_sharded else targets

    def add_up(self, loss: torch.Tensor) -> None:
        """Make the gradients, and the summed loss of the group, those of all ranks together."""
        if self._island.size == 1:
            return
        self._island.add([loss])
        if self.is_sharded:
            return
        missing = self.missing()
        gradients = []
        for name, parameter in self._parameters.items():
            if name in missing:
                continue
            if parameter.grad is None:
                # There was nothing to learn from on this rank.
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self._island.add(gradients)

    def missing(self) -> set[str]:
        """Return the names of the parameters that have a gradient on no rank."""
        here = [parameter.grad is not None for parameter in self._parameters.values()]
        if self.is_sharded or self._island.sum(here.count(False)) == (0,):
            counts: tuple[int, ...] = tuple(map(int, here))
        else:
            counts = self._island.sum(*map(int, here))
        return {name for name, count in zip(self._parameters, counts, strict=True) if count == 0}

    def clip(self, norm_max: float) -> torch.Tensor:
        """Scale the gradient down to a norm of ``norm_max`` (0: not at all); return its norm before that."""
        parameters, limit = list(self._parameters.values()), norm_max or math.inf
        if not self.is_sharded:
            return nn.utils.clip_grad_norm_(parameters, limit)
        norm = whole(nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None]))
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm
