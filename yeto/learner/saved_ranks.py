"""The inner loop's saved part, for the ranks of an island: the head has it whole, each rank needs its own.

Weights and moments are the island's; where the rows go on and what chance comes next are each rank's own.
The head saves and reads all of it, so that a folder of state belongs to a learner, not to a rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from yeto.learner.chance import Chance
from yeto.learner.island import Island
from yeto.learner.saved import SavedLoop, SavedRank

CPU = torch.device("cpu")


def gather_ranks(island: Island, own: SavedRank) -> tuple[SavedRank, ...]:
    """Return what each rank has of its own; all ranks call this together."""
    if island.size == 1:
        return (own,)
    return tuple(_rank_from_json(one) for one in island.gather(_rank_to_json(own)))


def share_saved(island: Island, saved: SavedLoop | None) -> SavedLoop | None:
    """Return the head's saved part on every rank; all ranks call this together."""
    if island.size == 1:
        return saved
    body = None
    if saved is not None:
        body = {
            "counts": [saved.steps, saved.tokens, saved.empty_groups],
            "ranks": [_rank_to_json(rank) for rank in saved.ranks],
            "parameters": list(saved.parameters),
            "optimizer": {name: list(parts) for name, parts in saved.optimizer.items()},
        }
    body = island.share(body)
    if body is None:
        return None
    steps, tokens, empty_groups = body["counts"]
    return SavedLoop(
        steps=steps,
        tokens=tokens,
        empty_groups=empty_groups,
        ranks=tuple(_rank_from_json(rank) for rank in body["ranks"]),
        parameters={
            name: _share_array(island, None if saved is None else saved.parameters[name])
            for name in body["parameters"]
        },
        optimizer={
            name: {
                word: _share_array(island, None if saved is None else saved.optimizer[name][word])
                for word in words
            }
            for name, words in body["optimizer"].items()
        },
    )


def _share_array(island: Island, array: NDArray[Any] | None) -> NDArray[Any]:
    """Return the head's array on every rank: large ones as they are, others with their description."""
    is_large = array is not None and array.dtype == np.float32 and array.ndim > 0
    shape, small = island.share((array.shape, None) if array is not None and is_large else (None, array))
    if shape is None:
        result: NDArray[Any] = small
        return result
    flat = None if array is None else np.ascontiguousarray(array).reshape(-1)
    return island.broadcast(flat, int(np.prod(shape)), CPU).numpy().reshape(shape)


def _rank_to_json(rank: SavedRank) -> dict[str, Any]:
    chance = rank.chance
    return {
        "position": rank.position,
        "python": chance.python,
        "numpy": chance.numpy,
        "torch": chance.torch_states,
    }


def _rank_from_json(body: dict[str, Any]) -> SavedRank:
    version, words, left_over = body["python"]
    return SavedRank(
        position=body["position"],
        chance=Chance(
            python=(version, tuple(words), left_over),
            numpy=tuple(body["numpy"]),
            torch_states=tuple(body["torch"]),
        ),
    )
