"""Two mailboxes between training thread and network: neither side ever waits for the other.

On the one side is the step boundary (`yeto.learner.boundary`), on the other `yeto.learner.connection`.

Both are bounded by what they are, not by a number: one waiting broadcast, one pull and one answer per
fragment, of which the newest wins, and one final cut. Worst memory of a learner beside its model, in units of
its float32 trainables: 1 of anchors, 1 of waiting broadcasts, 1 of snapshots on their way out, 1 of a final
cut; with error feedback at most 2 of residuals, where work is carried 1 of what was pushed, and more only as
long as a round is retried; and a buffer for each message that is being received.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from attrs import field, frozen

from yeto.learner.exchanged import Answer, Broadcast, Pull, Values, newest
from yeto.learner.fragments import Snapshot


@frozen(kw_only=True, eq=False)
class FinalCut:
    """The global result: every fragment as exact float32."""

    step: int
    versions: tuple[int, ...]
    digests: tuple[str, ...]
    values: tuple[Values, ...] = field(repr=False)

    def is_same(self, other: FinalCut | None) -> bool:
        """Whether both are one and the same cut, perhaps received twice."""
        return other is not None and (self.step, self.versions, self.digests) == (
            other.step,
            other.versions,
            other.digests,
        )


@frozen(kw_only=True)
class Stop:
    """Why training ends at the next opportunity, and with which exit code if there is no final cut."""

    exit_code: int
    reason: str


@frozen(kw_only=True)
class Mail:
    """Everything that waited for the training thread."""

    generation: int | None
    """The connection that pulls are answered on; None without one."""
    final: FinalCut | None
    broadcasts: tuple[Broadcast, ...]
    pulls: tuple[Pull, ...]


class Arrivals:
    """From the network to the training thread. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._generation: int | None = None
        self._broadcasts: dict[int, Broadcast] = {}
        self._pulls: dict[int, Pull] = {}
        self._final: FinalCut | None = None
        self._stop: Stop | None = None
        self._stop_is_news = False
        self._released = False

    # -- the network's side ---------------------------------------------------------------------------

    def begin_generation(self, generation: int) -> None:
        """A new connection: pulls of the one before die with it, broadcasts that came over it stay."""
        with self._changed:
            self._generation = generation
            self._pulls.clear()

    def put_broadcast(self, broadcast: Broadcast) -> None:
        """Leave a broadcast; one of the same fragment that still waits gives way.

        Raises:
            ProtocolError: one version came twice on this connection, with different bytes.
        """
        with self._changed:
            if newest(self._broadcasts.get(broadcast.fragment), broadcast) is broadcast:
                # Removed first, so that the order is that of the newest arrivals.
                self._broadcasts.pop(broadcast.fragment, None)
                self._broadcasts[broadcast.fragment] = broadcast
                self._changed.notify_all()

    def put_pull(self, pull: Pull) -> None:
        """Leave a pull; an older one of the same fragment gives way."""
        with self._changed:
            if pull.generation == self._generation:
                self._pulls[pull.fragment] = pull
                self._changed.notify_all()

    def put_final(self, cut: FinalCut) -> None:
        """Leave a complete final cut."""
        with self._changed:
            self._final = cut
            self._changed.notify_all()

    def stop(self, stop: Stop) -> None:
        """Ask the training thread to end; the first reason stays."""
        with self._changed:
            if self._stop is None:
                self._stop = stop
                self._stop_is_news = True
            self._changed.notify_all()

    def release(self) -> None:
        """Say that nothing more comes: a saved final cut needs no further attention."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    # -- the training thread's side -------------------------------------------------------------------

    def take(self) -> Mail:
        """Take everything out, without waiting."""
        with self._changed:
            mail = Mail(
                generation=self._generation,
                final=self._final,
                broadcasts=tuple(self._broadcasts.values()),
                pulls=tuple(self._pulls.values()),
            )
            self._final = None
            self._broadcasts.clear()
            self._pulls.clear()
        return mail

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until there is something new: mail, a reason to stop, or the release.

        A reason to stop counts once, so that whoever stays on after it can still wait for the rest.

        Args:
            seconds: give up then; None waits for as long as it takes.

        Returns:
            Whether there is something new.
        """
        with self._changed:
            news = self._changed.wait_for(
                lambda: (
                    self._stop_is_news or self._released or self._final or self._broadcasts or self._pulls
                ),
                seconds,
            )
            self._stop_is_news = False
        return bool(news)

    @property
    def stopping(self) -> Stop | None:
        """Why to end, if so; cheap enough to be asked between micro batches."""
        return self._stop

    @property
    def released(self) -> bool:
        """Whether nothing more comes."""
        return self._released

    @property
    def has_final(self) -> bool:
        """Whether a final cut waits to be taken."""
        return self._final is not None


@frozen(kw_only=True, eq=False)
class Push:
    """An answer with its snapshot: all that is needed to encode and send, beside training."""

    answer: Answer
    snapshot: Snapshot


class Departures:
    """From the training thread to the network. Every method may be called from any thread."""

    EARLY_STEPS = 2
    """Steps of each connection that are reported at once: the syncer soon knows how long one takes."""

    def __init__(self, *, ring_pushes: Callable[[], None], ring_news: Callable[[], None]) -> None:
        """Take the two bells that wake the network's tasks; they must not block.

        Args:
            ring_pushes: rung when there is a push to encode and send.
            ring_news: rung when there is a step, a used-up budget or a saved cut to report.
        """
        self._lock = threading.Lock()
        self._ring_pushes = ring_pushes
        self._ring_news = ring_news
        self._pushes: dict[int, Push] = {}
        self._early_steps = 0
        self.local_step = 0
        """Optimizer steps done; what heartbeats report."""
        self.budget_steps: int | None = None
        """Steps at which the weights were frozen; None while training."""
        self.saved: FinalCut | None = None
        """The final cut that is on disk and may be acknowledged."""

    # -- the training thread's side -------------------------------------------------------------------

    def push(self, push: Push) -> None:
        """Leave a push; one of the same fragment that nobody has begun to encode gives way."""
        with self._lock:
            self._pushes[push.answer.pull.fragment] = push
        self._ring_pushes()

    def stepped(self, local_step: int) -> None:
        """Report an optimizer step; the network is woken for the first ones of a connection only."""
        with self._lock:
            self.local_step = local_step
            report = self._early_steps > 0
            self._early_steps = max(0, self._early_steps - 1)
        if report:
            self._ring_news()

    def budget_used(self, steps: int) -> None:
        """Report that the weights are frozen after ``steps`` steps."""
        self.budget_steps = steps
        self._ring_news()

    def cut_saved(self, cut: FinalCut) -> None:
        """Report that a final cut is on disk."""
        self.saved = cut
        self._ring_news()

    # -- the network's side ---------------------------------------------------------------------------

    def begin_generation(self) -> None:
        """A new connection: what was to be pushed over the one before is dropped."""
        with self._lock:
            self._pushes.clear()
            self._early_steps = self.EARLY_STEPS

    def take_push(self) -> Push | None:
        """Take the longest waiting push, if any."""
        with self._lock:
            for fragment in self._pushes:
                return self._pushes.pop(fragment)
        return None
