"""How others make M pushes the next version of a fragment: peers of the merge.

Neither corrects, guards or digests anything, and both take the plain mean. They get the same bf16 pushes,
parameters and momentum, and end as the merge does: with new parameters, new momentum, and the parameters in
bf16 for whoever trains on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

READY_SECONDS = 100.0
"""Longest time for the processes to import torch and to find each other."""


class _Outer:
    """The outer optimizer of DiLoCo implementations: torch's SGD with Nesterov momentum."""

    def __init__(self, params: torch.Tensor, momentum: torch.Tensor, lr: float, mu: float) -> None:
        self._params = torch.nn.Parameter(params.clone())
        self._optimizer = torch.optim.SGD([self._params], lr=lr, momentum=mu, nesterov=True)
        self._optimizer.state[self._params]["momentum_buffer"] = momentum.clone()

    def step(self, mean: torch.Tensor) -> torch.Tensor:
        """Step with the mean delta in f32; return the parameters in bf16."""
        self._params.grad = mean.neg_()
        self._optimizer.step()
        return self._params.detach().bfloat16()


class StackAndMean:
    """All pushes decoded side by side, their mean, one step."""

    def __init__(
        self, params: torch.Tensor, momentum: torch.Tensor, payloads: Sequence[Any], *, lr: float, mu: float
    ) -> None:
        self._pushes = [_as_bf16(payload) for payload in payloads]
        self._outer = _Outer(params, momentum, lr, mu)

    def __call__(self) -> None:
        """Do it once."""
        self._outer.step(torch.stack([push.float() for push in self._pushes]).mean(dim=0))


class AllReduce:
    """One process a push: gloo all-reduce over loopback, then each makes the same step."""

    def __init__(
        self, params: torch.Tensor, momentum: torch.Tensor, payloads: Sequence[Any], *, lr: float, mu: float
    ) -> None:
        """Start the processes; a context manager, which ends them."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])  # imported once for all of them
        self._stack = contextlib.ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._pipes: list[Connection] = []
        for name, tensor in (("params", params), ("momentum", momentum)):
            np.save(folder / f"{name}.npy", tensor.numpy())
        for rank, payload in enumerate(payloads):
            np.save(folder / f"push-{rank}.npy", np.frombuffer(payload, dtype=np.uint8))
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, folder, rank, len(payloads), lr, mu), daemon=True
            )
            process.start()
            theirs.close()
            self._stack.callback(process.join)
            self._pipes.append(ours)

    def __enter__(self) -> AllReduce:
        for pipe in self._pipes:
            if not pipe.poll(READY_SECONDS):
                raise TimeoutError("the processes of the all-reduce did not find each other")
            pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        self._stack.close()

    def __call__(self) -> None:
        """Do it once, in all processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for pipe in self._pipes:
            pipe.recv()


def _serve(pipe: Connection, folder: Path, rank: int, world: int, lr: float, mu: float) -> None:
    """Be one process of the all-reduce, until the pipe is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)  # there are as many processes as pushes
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    push = _as_bf16(np.load(folder / f"push-{rank}.npy"))
    params, momentum = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("params", "momentum"))
    outer = _Outer(params, momentum, lr, mu)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            total = push.clone()
            dist.all_reduce(total)
            outer.step(total.float().div_(world))
            pipe.send(None)
    dist.destroy_process_group()


def _as_bf16(payload: Any) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy()).view(torch.bfloat16)
