"""An island: the ranks that train one learner together, and how they speak to each other.

Rank 0 is the *head*. It alone has a network client, prints, logs and saves, and it alone decides; the others
do what it says (see :mod:`yeto.learner.crew`). What they need for that is here: values from the head to all,
exact sums of counts, sums of gradients, and the certainty that a rank which dies does not leave the others
waiting.

Small things travel over gloo, on the CPU, in one message each; gradients and fragments over the backend of
the device they are on. Values are JSON with arrays; nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from yeto.errors import ConfigError, YetoError
from yeto.learner.config import RANK_TIMEOUT_SECONDS
from yeto.learner.exchanged import Values
from yeto.learner.ranks import Ranks
from yeto.learner.watch import FAREWELL_SECONDS, LATE_SECONDS, Loss, Watch

SMALL_BYTES = 512
"""A shared value that fits into so many bytes takes one message; an order does."""

SUM_ELEMENTS = 1 << 25
"""Gradient elements that are summed in one go; bounds the copy at 128 MiB."""


class Island:
    """One rank alone. Every operation of an island, at no cost."""

    rank: int = 0
    size: int = 1

    @property
    def is_head(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    def device(self, wanted: str) -> str:
        """Return the device of this rank for what ``--device`` says.

        Raises:
            ConfigError: there is none for it.
        """
        return wanted

    def open(self, on_lost: Callable[[Loss], None]) -> None:
        """Meet the other ranks; on the thread that will train.

        Args:
            on_lost: called from another thread when a rank is lost.
        """

    def share(self, value: Any) -> Any:
        """Return the head's value (JSON with arrays) on every rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return everybody's value (JSON with arrays), by rank, on every rank."""
        return [value]

    def sum(self, *numbers: int) -> tuple[int, ...]:
        """Return the exact sums of integers over all ranks."""
        return numbers

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Put the sums over all ranks in the place of tensors, which are alike on every rank."""

    def broadcast(self, values: Values | None, numel: int, device: torch.device) -> torch.Tensor:
        """Return the head's values, 1-D float32, on every rank.

        Args:
            values: the head's; not looked at elsewhere.
            numel: how many there are.
            device: where they are wanted; one of this machine's memory may be returned as it is.
        """
        assert values is not None, "the head has the values"
        return torch.from_numpy(values)

    def blame(self, error: Exception) -> None:
        """Raise the loss of a rank, if that is what an error comes of; else return."""

    def close(self, reason: str | None = None) -> None:
        """Leave; ``reason`` says why this rank failed, for the others to hear."""


SOLO = Island()
"""The island of one rank."""


class RankedIsland(Island):
    """Several ranks, over torch.distributed."""

    def __init__(self, ranks: Ranks, wanted_device: str, timeout_seconds: float) -> None:
        """Prepare; ``open`` meets the others.

        Args:
            ranks: this process's place.
            wanted_device: what ``--device`` says.
            timeout_seconds: how long the ranks wait for one that is alive but late.

        Raises:
            ConfigError: this rank has no device of its own.
        """
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self.rank, self.size = ranks.rank, ranks.size
        self._device = torch.device(self.device(wanted_device))
        self._watch: Watch | None = None

    def device(self, wanted: str) -> str:
        """Return the CPU, or the accelerator whose number is this rank's on its machine."""
        if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
            return "cpu"
        own = f"cuda:{self._ranks.local_rank}"
        if wanted not in ("auto", "cuda", own):
            raise ConfigError(f"--device {wanted}: with several ranks say cuda or cpu; each takes its own")
        if self._ranks.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {self.rank} has no accelerator of its own: this machine has "
                f"{torch.cuda.device_count()}; lower torchrun's --nproc-per-node, or say --device cpu"
            )
        return own

    def open(self, on_lost: Callable[[Loss], None]) -> None:
        """Meet the other ranks, and begin to watch them."""
        backend = "gloo"
        if self._device.type == "cuda":
            # The current device is a thread's own, and events and pinned copies go by it.
            torch.cuda.set_device(self._device)
            backend = "cpu:gloo,cuda:nccl"
        if self._ranks.is_one_machine and "lo" in [name for _, name in socket.if_nameindex()]:
            # By default gloo looks its own host name up, which need not be known, and listens to the world.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            backend,
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(seconds=self._timeout_seconds + LATE_SECONDS),
        )
        self._watch = Watch(self.rank, self.size, on_lost, self._timeout_seconds)

    def _together(self) -> AbstractContextManager[None]:
        """Surround an operation of all ranks, so that it is known who has come to it."""
        assert self._watch is not None, "the island is open"
        return self._watch.operation()

    def share(self, value: Any) -> Any:
        """Return the head's value on every rank; one message if it is small."""
        with self._together():
            return self._share(value)

    def _share(self, value: Any) -> Any:
        body = _encode(value) if self.is_head else b""
        frame = torch.zeros(SMALL_BYTES, dtype=torch.uint8)
        if self.is_head:
            _fill(frame, len(body).to_bytes(8, "little") + body[: SMALL_BYTES - 8])
        dist.broadcast(frame, 0)
        if self.is_head:
            length = len(body)
        else:
            start = frame.numpy().tobytes()
            length = int.from_bytes(start[:8], "little")
            body = start[8 : 8 + length]
        if length > SMALL_BYTES - 8:
            whole = torch.zeros(length, dtype=torch.uint8)
            if self.is_head:
                _fill(whole, body)
            dist.broadcast(whole, 0)
            body = whole.numpy().tobytes()
        return value if self.is_head else _decode(body)

    def gather(self, value: Any) -> list[Any]:
        """Return everybody's value, by rank, on every rank."""
        body = _encode(value)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._together():
            dist.all_gather(lengths, torch.tensor([len(body)]))
            longest = int(max(lengths))
            mine = torch.zeros(longest, dtype=torch.uint8)
            _fill(mine, body)
            frames = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(frames, mine)
        return [
            _decode(frame[: int(length)].numpy().tobytes())
            for frame, length in zip(frames, lengths, strict=True)
        ]

    def sum(self, *numbers: int) -> tuple[int, ...]:
        """Return the exact sums of integers over all ranks, in one message."""
        totals = torch.tensor(numbers, dtype=torch.int64)
        with self._together():
            dist.all_reduce(totals)
        return tuple(totals.tolist())

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Sum tensors of one device and dtype over all ranks, in place; many small ones in one message."""
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with self._together():
                dist.all_reduce(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def broadcast(self, values: Values | None, numel: int, device: torch.device) -> torch.Tensor:
        """Return the head's values, 1-D float32, on the device of every rank."""
        if self.is_head:
            assert values is not None, "the head has the values"
            whole = torch.from_numpy(values).to(device)
        else:
            whole = torch.empty(numel, dtype=torch.float32, device=device)
        with self._together():
            dist.broadcast(whole, 0)
        return whole

    def blame(self, error: Exception) -> None:
        """Raise the loss of a rank, if that is what an error comes of; else return.

        Raises:
            YetoError: a rank is lost.
        """
        if self._watch is None:
            return
        # What an operation says of a lost rank is an address; who it was shows a moment later.
        is_own = isinstance(error, YetoError | torch.OutOfMemoryError)
        loss = self._watch.loss(0.0 if is_own else FAREWELL_SECONDS)
        if loss is not None:
            raise YetoError(loss.reason) from error
        if "timed out" in str(error).lower() and not is_own:
            # Inside a step, where the parts of a sharded model are exchanged, nobody counts.
            processes = self._watch.processes
            raise YetoError(
                f"a rank of this island has kept rank {self.rank} waiting inside a step for more than "
                f"{self._timeout_seconds:.0f} s (--rank-timeout); py-spy dump --pid shows where a process is"
                + (f" ({processes})" if processes else "")
            ) from error

    def close(self, reason: str | None = None) -> None:
        """Say goodbye, and let go of the process group unless somebody might still use it."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if watch.close(reason) and reason is None:
            dist.destroy_process_group()


def find_island(ranks: Ranks, wanted_device: str, timeout_seconds: float = RANK_TIMEOUT_SECONDS) -> Island:
    """Return the island that this process is a rank of.

    Args:
        ranks: this process's place.
        wanted_device: what ``--device`` says.
        timeout_seconds: how long the ranks wait for one that is alive but late.

    Raises:
        ConfigError: this rank has no device of its own.
    """
    return SOLO if ranks.size == 1 else RankedIsland(ranks, wanted_device, timeout_seconds)


def _encode(value: Any) -> bytes:
    return json.dumps(value, default=_array_to_json, separators=(",", ":")).encode()


def _decode(body: bytes) -> Any:
    return json.loads(body, object_hook=_array_from_json)


def _array_to_json(value: Any) -> dict[str, Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} is neither JSON nor an array")
    array = np.ascontiguousarray(value)
    return {
        "ndarray": base64.b64encode(array.tobytes()).decode(),
        "dtype": array.dtype.str,
        "shape": value.shape,
    }


def _array_from_json(value: dict[str, Any]) -> Any:
    if value.keys() != {"ndarray", "dtype", "shape"}:
        return value
    flat = np.frombuffer(base64.b64decode(value["ndarray"]), dtype=value["dtype"])
    return flat.reshape(value["shape"]).copy()


def _fill(frame: torch.Tensor, body: bytes) -> None:
    frame[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    """Cut tensors into runs of a bounded number of elements; a larger one is alone."""
    bucket: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        if bucket and filled + tensor.numel() > SUM_ELEMENTS:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.numel()
    if bucket:
        yield bucket
