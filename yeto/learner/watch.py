"""The ranks of an island watch each other: one that ends takes the others with it, and they say why.

A collective operation is no watchman. On an accelerator it never returns when a rank is gone, a rank that
waits for the head's next word has nothing running, and what an operation raises names an address. So every
rank but the head exchanges a small beat with the head, in a process group of the two (one that fails is torn
down with all its connections) and in threads of its own:

* a process that is killed closes its connections, which the others see at once;
* a machine that vanishes, or a process that is stopped, is silent, which is seen after a minute;
* a process that leaves says so first: with the reason when it failed, and the others repeat it;
* a rank that lives and does not come (its thread hangs, or waits for something of its own) is known by how
  many operations it has come to: every beat says that, and who waits in one for longer than
  ``--rank-timeout`` names those that have come to fewer.

The head tells the others what happened to one of them as it leaves itself. Nobody tries to go on without a
rank: its rows, and with sharding its part of the model, are gone.
"""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from attrs import frozen

BEAT_SECONDS = 5.0
"""A silence is twelve of them: one that comes late ends nothing."""

SILENCE_SECONDS = 60.0
"""Beats missing for so long end the island. Far more than any call that keeps a thread from running."""

FAREWELL_SECONDS = 5.0
"""How long the others' last words are waited for; whoever is gone by then says nothing more."""

LATE_SECONDS = 60.0
"""How much longer than ``--rank-timeout`` an operation itself waits: whoever can name a rank speaks first."""

MESSAGE_BYTES = 512
"""Of every message: who receives has to know the size before. Long enough for a reason in a line."""

BEAT, BYE, FAILED = 0, 1, 2
HEAD = 0


@frozen(kw_only=True)
class Loss:
    """Why an island cannot go on."""

    reason: str
    is_told: bool
    """Whether the head has told people already."""


class Watch:
    """This rank's part in the watching; threads run from construction to ``close``."""

    def __init__(self, rank: int, size: int, on_lost: Callable[[Loss], None], limit_seconds: float) -> None:
        """Begin; every rank does so at the same point, after the process group is there.

        Args:
            rank: this process's.
            size: of the island.
            on_lost: called once, from a thread of the watch, when the island cannot go on.
            limit_seconds: how long a rank may keep this one waiting in an operation of the island.
        """
        self._on_lost = on_lost
        self._limit_seconds = limit_seconds
        self._came_to = 0
        self._entered_at: float | None = None
        self._name = f"process {os.getpid()} on {socket.gethostname()}"
        self._groups: dict[int, dist.ProcessGroup] = {}
        for other in range(1, size):
            # All ranks make all groups, also those they are not in.
            group = dist.new_group(
                [HEAD, other], backend="gloo", timeout=datetime.timedelta(seconds=SILENCE_SECONDS)
            )
            if rank in (HEAD, other):
                self._groups[other if rank == HEAD else HEAD] = group
        self.peers = dict.fromkeys(self._groups, (0, ""))
        """By rank, how many operations it has come to, and which process it is."""
        self._lock = threading.Lock()
        self._lost = threading.Event()
        self._loss: Loss | None = None
        self._closing = threading.Event()
        self._farewell = _message(BYE, "")
        self._threads = [
            threading.Thread(target=self._listen, args=(peer,), name=f"watch-{peer}", daemon=True)
            for peer in self._groups
        ]
        self._threads.append(threading.Thread(target=self._beat, name="watch-beat", daemon=True))
        for thread in self._threads:
            thread.start()

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Surround an operation that all ranks come to, each the same ones in the same order."""
        self._came_to += 1
        self._entered_at = time.monotonic()
        try:
            yield
        finally:
            self._entered_at = None

    @property
    def processes(self) -> str:
        """The processes that this rank hears of, for a sentence; empty when it has heard of none."""
        return ", ".join(f"rank {peer} is {name}" for peer, (_, name) in sorted(self.peers.items()) if name)

    def loss(self, seconds: float) -> Loss | None:
        """Wait so long for news of a lost rank, and return it; None when all are well."""
        self._lost.wait(seconds)
        return self._loss

    def close(self, reason: str | None) -> bool:
        """Say goodbye and end the threads.

        Args:
            reason: why this rank failed; None when the run is over.

        Returns:
            Whether everybody said goodbye in time, so that nothing of the watch is left running.
        """
        if reason is not None:
            self._farewell = _message(FAILED, reason)
        self._closing.set()
        deadline = time.monotonic() + FAREWELL_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _beat(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(BEAT_SECONDS)
            message = self._farewell if closing else _message(BEAT, f"{self._came_to} {self._name}")
            for peer, group in self._groups.items():
                try:
                    dist.send(message, peer, group=group)
                except RuntimeError:
                    # Whoever listens to that peer hears the same, and says it.
                    continue
            self._look_for_late()

    def _look_for_late(self) -> None:
        """Lose the ranks for which this one has waited for too long."""
        entered_at, came_to = self._entered_at, self._came_to
        if entered_at is None or time.monotonic() - entered_at < self._limit_seconds:
            return
        late = [(peer, name) for peer, (number, name) in sorted(self.peers.items()) if number < came_to]
        if late:
            who = ", ".join(f"{peer} ({name})" if name else str(peer) for peer, name in late)
            self._decide(
                f"rank {who} of this island has kept the others waiting for {self._limit_seconds:.0f} s "
                "(--rank-timeout): it hangs, or does alone what takes longer; py-spy dump --pid shows where "
                "a process is",
                None,
            )

    def _listen(self, peer: int) -> None:
        message = _message(BEAT, "")
        while True:
            began = time.monotonic()
            try:
                dist.recv(message, peer, group=self._groups[peer])
            except RuntimeError:
                self._lose(peer, time.monotonic() - began)
                return
            kind, text = _read(message)
            if kind == BEAT:
                number, _, name = text.partition(" ")
                self.peers[peer] = (int(number), name)
            if kind == BYE:
                return
            if kind == FAILED:
                self._decide(text if peer == HEAD else f"rank {peer} of this island failed: {text}", peer)
                return

    def _lose(self, peer: int, seconds: float) -> None:
        """A connection ended without a word, after ``seconds`` of silence."""
        if seconds > SILENCE_SECONDS - BEAT_SECONDS:
            what = f"was silent for {SILENCE_SECONDS:.0f} s: it is stopped, or its machine is gone"
        else:
            what = "ended without a word: it was killed, or it crashed"
        self._decide(f"rank {peer} of this island {what}", None)

    def _decide(self, reason: str, teller: int | None) -> None:
        with self._lock:
            if self._loss is not None or self._closing.is_set():
                return
            self._loss = Loss(reason=reason, is_told=teller == HEAD)
        self._lost.set()
        self._on_lost(self._loss)


def _message(kind: int, text: str) -> torch.Tensor:
    body = text.encode()[: MESSAGE_BYTES - 1]
    return torch.frombuffer(
        bytearray([kind, *body, *bytes(MESSAGE_BYTES - 1 - len(body))]), dtype=torch.uint8
    )


def _read(message: torch.Tensor) -> tuple[int, str]:
    kind, *body = message.tolist()
    return kind, bytes(body).rstrip(b"\0").decode(errors="ignore")
