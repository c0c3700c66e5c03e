"""The step boundary: the one place where training and network meet.

The training thread never waits for the network, and the network never touches the model. Once per optimizer
step the training thread crosses the boundary, in this order:

1. a complete final cut ends the run's training: it is the last word;
2. received broadcasts are applied, in the order they came (blended, or with local work carried over);
3. pulls are answered, from the weights as they are then.

Broadcasts come before pulls because an answer must be measured from the newest anchor there is. The snapshot
is all the training thread does for an answer; subtracting and encoding (`yeto.learner.push`) and sending
(`yeto.learner.connection`) happen beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from yeto.learner.anchors import FragmentBook
from yeto.learner.exchanged import Answer, Broadcast, Carry, Pull, Receipt, Values, Verdict
from yeto.learner.fragments import Snapshot
from yeto.learner.mailbox import Arrivals, Departures, FinalCut, Push
from yeto.learner.stopwatch import Stopwatch


class Weights(Protocol):
    """The local weights, by fragment: of one process, or of all ranks of an island."""

    def snapshot(self, fragment: int) -> Snapshot:
        """Copy the local weights of a fragment to the host."""
        ...

    def blend(self, fragment: int, received: Values, alpha: float) -> None:
        """Set ``local = alpha * local + (1 - alpha) * received``, in float32."""
        ...

    def add(self, fragment: int, values: Values, scale: float) -> None:
        """Set ``local = local + scale * values``, in float32."""
        ...


class Boundary:
    """Crosses from one optimizer step to the next; owned by the training thread."""

    def __init__(
        self,
        *,
        fragments: Weights,
        book: FragmentBook,
        arrivals: Arrivals,
        departures: Departures,
        stopwatch: Stopwatch,
        on_broadcast: Callable[[Broadcast, Receipt], None],
        on_answer: Callable[[Answer], None],
    ) -> None:
        """Take the two sides, a stopwatch that is told how long each takes, and two observers.

        The observers are called on the training thread and must be quick.
        """
        self._fragments = fragments
        self._book = book
        self._arrivals = arrivals
        self._departures = departures
        self._stopwatch = stopwatch
        self._on_broadcast = on_broadcast
        self._on_answer = on_answer
        self._held: dict[int, Pull] = {}

    def cross(self, local_step: int) -> FinalCut | None:
        """Do what has arrived since the last boundary.

        Args:
            local_step: optimizer steps done so far.

        Returns:
            A complete final cut, and then nothing else was done: what else had arrived is obsolete.

        Raises:
            ProtocolError: the syncer contradicts itself, see ``FragmentBook.receive``.
            OtherRun: the syncer's run is not that of the restored state.
        """
        mail = self._arrivals.take()
        if mail.final is not None:
            self._held.clear()
            return mail.final
        for broadcast in mail.broadcasts:
            self._book.require_run(broadcast)
        for broadcast in self._book.due(mail.broadcasts):
            with self._stopwatch.section("receive"):
                receipt = self._book.receive(broadcast)
                if receipt.carry is None:
                    self._fragments.blend(broadcast.fragment, broadcast.values, receipt.alpha)
                else:
                    self._carry(broadcast, receipt.carry)
            self._on_broadcast(broadcast, receipt)
        for pull in mail.pulls:
            self._held[pull.fragment] = pull
        for pull in tuple(self._held.values()):
            self._consider(pull, mail.generation, local_step)
        return None

    def _carry(self, broadcast: Broadcast, carry: Carry) -> None:
        """Set ``local = (local - anchor - pushed) + received``.

        In this order: where nothing was done since the push, what is left in the bracket is an exact zero.
        """
        self._fragments.add(broadcast.fragment, carry.anchor, -1.0)
        if carry.pushed is not None:
            self._fragments.add(broadcast.fragment, carry.pushed, -1.0)
        self._fragments.add(broadcast.fragment, broadcast.values, 1.0)

    def _consider(self, pull: Pull, generation: int | None, local_step: int) -> None:
        """Answer, keep or forget one pull."""
        verdict = Verdict.DROP if pull.generation != generation else self._book.verdict(pull)
        if verdict is Verdict.HOLD:
            return
        del self._held[pull.fragment]
        if verdict is Verdict.ANSWER:
            with self._stopwatch.section("send"):
                answer = self._book.answer(pull, local_step)
                self._departures.push(Push(answer=answer, snapshot=self._fragments.snapshot(pull.fragment)))
            self._on_answer(answer)
