"""The crew: an island's ranks as one model, which the head's decisions are carried out on.

The head trains, blends and answers as if it were alone, through a crew. Before anything that needs the other
ranks, the crew tells them what it is: one small message, an *order*, and then all of them do it together. So
the boundary is crossed, the final cut taken and the run stopped in one place only, and the other ranks can
come to no other conclusion: they follow orders until the last one. Values travel when there are values: what
was received goes to every rank, and a snapshot of a sharded model takes a part from each.

A step is an order. What happens inside it that could differ between ranks (how many targets there are,
whether the head was interrupted) is agreed on by the loop itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import evolve

from yeto.learner.exchanged import Values
from yeto.learner.fragments import LiveFragments, Snapshot
from yeto.learner.island import Island
from yeto.learner.loop import InnerLoop, StepResult
from yeto.learner.mailbox import Arrivals
from yeto.learner.saved import SavedLoop
from yeto.learner.task import Evaluation, Task

IDLE_SECONDS = 30.0
"""How often a head that waits for the syncer says so: the others wait for a word, but not for ever, and
people want to know for what."""


class Crew:
    """All ranks of an island; used on the training thread."""

    def __init__(self, *, island: Island, task: Task, loop: InnerLoop, fragments: LiveFragments) -> None:
        """Take this rank's parts of everything."""
        self._island = island
        self._task = task
        self._loop = loop
        self._fragments = fragments

    # -- what the head calls --------------------------------------------------------------------------

    def step(self, interrupted: Callable[[], bool]) -> StepResult | None:
        """Take one optimizer step; see ``InnerLoop.step``."""
        self._order("step")
        return self._loop.step(interrupted)

    def snapshot(self, fragment: int) -> Snapshot:
        """Copy the local weights of a fragment to the host."""
        if self._fragments.is_sharded:
            self._order("contribute", fragment)
        return self._fragments.snapshot(fragment)

    def blend(self, fragment: int, received: Values, alpha: float) -> None:
        """Set ``local = alpha * local + (1 - alpha) * received`` on every rank."""
        if alpha == 1.0:
            return
        self._order("blend", fragment, alpha)
        self._blend(fragment, received, alpha)

    def add(self, fragment: int, values: Values, scale: float) -> None:
        """Set ``local = local + scale * values`` on every rank."""
        self._order("add", fragment, scale)
        self._add(fragment, values, scale)

    def evaluate(self) -> Evaluation | None:
        """Score the held-out rows; each rank does a part of them."""
        self._order("evaluate")
        return self._evaluate()

    def save(self, folder: Path) -> None:
        """Save the local weights; the others help only if the model is in parts."""
        if self._fragments.is_sharded:
            self._order("save", str(folder))
        self._task.save(folder)

    def saved(self) -> SavedLoop:
        """Return a copy of everything that the next step depends on, of every rank."""
        self._order("saved")
        return self._loop.saved()

    def wait(self, arrivals: Arrivals, on_idle: Callable[[], None]) -> None:
        """Wait until there is something new from the network.

        Args:
            arrivals: to look at.
            on_idle: called now and then meanwhile.
        """
        while not arrivals.wait(IDLE_SECONDS):
            self._order("idle")
            on_idle()

    def end(self) -> None:
        """Dismiss the others; the last order."""
        self._order("end")

    # -- what the others do ---------------------------------------------------------------------------

    def follow(self) -> None:
        """Do what the head says, until it says that it is over."""
        while True:
            match self._island.share(None):
                case ["step"]:
                    self._loop.step(_never)
                case ["blend", fragment, alpha]:
                    self._blend(fragment, None, alpha)
                case ["add", fragment, scale]:
                    self._add(fragment, None, scale)
                case ["contribute", fragment]:
                    self._fragments.contribute(fragment)
                case ["evaluate"]:
                    self._evaluate()
                case ["save", folder]:
                    self._task.save(Path(folder))
                case ["saved"]:
                    self._loop.contribute()
                case ["idle"]:
                    pass
                case ["end"]:
                    return
                case order:
                    raise AssertionError(f"the head gave an unknown order: {order}")

    def _evaluate(self) -> Evaluation | None:
        """Score this rank's part, and add it to the others'."""
        own = self._task.evaluate()
        if own is None:
            return None
        parts = self._island.gather([own.loss_sum, own.targets])
        return evolve(
            own,
            loss_sum=math.fsum(loss_sum for loss_sum, _ in parts),
            targets=sum(targets for _, targets in parts),
        )

    def _blend(self, fragment: int, received: Values | None, alpha: float) -> None:
        fragments = self._fragments
        numel, device = fragments.numel(fragment), fragments.device
        fragments.blend(fragment, self._island.broadcast(received, numel, device), alpha)

    def _add(self, fragment: int, values: Values | None, scale: float) -> None:
        fragments = self._fragments
        numel, device = fragments.numel(fragment), fragments.device
        fragments.add(fragment, self._island.broadcast(values, numel, device), scale)

    def _order(self, *order: Any) -> None:
        self._island.share(order)


def _never() -> bool:
    """Interrupt nothing: the head alone knows of a reason to."""
    return False
