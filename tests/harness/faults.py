"""Faults of a network: each is declared before it happens, is used once, and is counted.

A fault has a place: so many bytes into the n-th frame of a kind, or into a stream. When the bytes before that
place have passed, it happens. A fault that never found its place fails the test that declared it: the test
did not try what it says.
"""

import trio
from attrs import define, field

from yeto.wire.frames import MessageType

UP = "up"
"""From the learner to the syncer."""
DOWN = "down"


@define(eq=False, kw_only=True)
class Fault:
    """Where something happens; the subclasses say what."""

    frame: MessageType | None = None
    """Kind of frame, slices under the kind of the message that they begin; None counts bytes of a stream."""
    nth: int = 1
    """Which one of the frames that fit, from the declaration on, over all streams and connections."""
    at: int = 0
    """Bytes of it that pass before; -1: all but the last byte; None: all of the frame."""
    direction: str = UP
    learner: int | None = None
    """Whose connections; None: anybody's."""
    stream: int | None = None
    """0 control, 1 to S data; None: any."""

    happened: trio.Event = field(factory=trio.Event, init=False)
    _seen: int = field(default=0, init=False)
    _chosen: object = field(default=None, init=False)

    def see(self, pipe, direction, frame):
        """Take note of a frame that begins."""
        if self._chosen is None and frame.kind is self.frame and self._fits(pipe, direction):
            self._seen += 1
            if self._seen == self.nth:
                self._chosen = frame

    def index(self, pipe, direction, piece, start):
        """Return where in a piece, from ``start`` on, it happens; None when it does not."""
        if self.happened.is_set():
            return None
        if self.frame is None:
            index = self.at - piece.position
            here = self._fits(pipe, direction) and start <= index < len(piece.data)
            return index if here else None
        if piece.frame is None or piece.frame is not self._chosen:
            return None
        size = piece.frame.size
        at = size if self.at is None else self.at if self.at >= 0 else size + self.at
        index = at - piece.offset
        ends = at == size == piece.offset + len(piece.data)
        return index if start <= index < len(piece.data) or ends else None

    def _fits(self, pipe, direction):
        return (
            direction == self.direction
            and self.learner in (None, pipe.learner)
            and self.stream in (None, pipe.stream)
        )


@define(eq=False, kw_only=True)
class Lose(Fault):
    """Every connection of the learner is reset, as when its machine or its network is lost."""


@define(eq=False, kw_only=True)
class Cut(Fault):
    """This connection ends in order on both sides; those beside it go on."""


@define(eq=False, kw_only=True)
class HalfOpen(Fault):
    """Nothing passes any more on any connection of the learner, and no end is told to those who are deaf.

    The deaf can go on sending: what they say is taken and thrown away. The other side is reset.
    """

    deaf: tuple[str, ...] = ("syncer",)
    """``syncer``, ``learner``, or both."""


@define(eq=False, kw_only=True)
class Corrupt(Fault):
    """One byte arrives as another."""

    mask: int = 0xFF
    """Bits that are turned over."""


@define(eq=False, kw_only=True)
class Delay(Fault):
    """From here on, what this stream carries in this direction arrives so much later."""

    seconds: float


@define(eq=False, kw_only=True)
class Rate(Fault):
    """From here on, this stream carries so much in this direction and no more."""

    bytes_per_second: float


@define(eq=False, kw_only=True)
class Freeze(Fault):
    """Nothing passes on any connection of the learner, either way, until ``thaw`` or for a time."""

    seconds: float | None = None
    thawed: trio.Event = field(factory=trio.Event, init=False)

    def thaw(self):
        self.thawed.set()


@define(eq=False, kw_only=True)
class Hold(Freeze):
    """Nothing passes on this stream in this direction; the learner's other streams overtake it.

    It goes on with the first frame, on whichever stream, of which ``until`` is true.
    """

    until: object = None
    """(direction, frame) -> bool; None: until ``thaw`` or for a time."""
