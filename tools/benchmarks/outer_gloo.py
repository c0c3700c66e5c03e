"""Synchronous DiLoCo by ``torch.distributed`` as a party of ``peers``.

One process a learner, gloo over loopback. Each makes its delta in f32 or bf16, all-reduces it in one tensor,
and makes the same outer step as all others: torch's SGD with Nesterov momentum (DiLoCo, arXiv 2311.08105).
All have to be there in each round; nothing is corrected, recorded or kept.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from benchmarks.outer_party import Told
from benchmarks.tcp_bytes import tcp_bytes

LR: Final = 0.7
MU: Final = 0.9
DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16}


class Gloo:
    """A process group; a context manager. It is a party once for each dtype (``in_dtype``)."""

    def __init__(self, *, learners: int, elements: int) -> None:
        """Start it.

        Args:
            learners: its world size.
            elements: of the whole model.
        """
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._ranks = Told(_serve, [(folder, rank, learners, elements) for rank in range(learners)])

    def __enter__(self) -> Gloo:
        self._stack.enter_context(self._ranks)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def in_dtype(self, dtype: str) -> GlooParty:
        """Return the party that exchanges deltas in ``f32`` or ``bf16``."""
        return GlooParty(self._ranks, dtype)


class GlooParty:
    """The group, with deltas of one dtype."""

    def __init__(self, ranks: Told, dtype: str) -> None:
        self._ranks = ranks
        self._dtype = dtype

    def round(self) -> int | None:
        """All-reduce all deltas and step."""
        moved: int | None = self._ranks.tell(self._dtype)[0]
        return moved


def _serve(pipe: Connection, folder: str, rank: int, world: int, elements: int) -> None:
    """Be one rank; each order is the dtype of a round, the answer its bytes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)  # there are as many processes as learners
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=world
    )
    generator = torch.Generator().manual_seed(rank)
    delta = 0.01 * torch.randn(elements, generator=generator)
    params = torch.nn.Parameter(torch.zeros(elements))
    optimizer = torch.optim.SGD([params], lr=LR, momentum=MU, nesterov=True)
    pipe.send(None)
    while True:
        dtype = DTYPES[pipe.recv()]
        before = tcp_bytes()
        total = delta.to(dtype, copy=True)
        dist.all_reduce(total)
        params.grad = total.float().div_(-world)
        optimizer.step()
        after = tcp_bytes()
        pipe.send(None if before is None or after is None else after - before)
