"""What passes between the book of anchors, the boundary and the network: values of no behaviour.

In come broadcasts and pulls; a receipt says what a broadcast did, an answer is everything that a push needs.
What a push leaves behind (``Residual``, ``SentDelta``) is filled in when it is encoded, beside training.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from attrs import field, frozen

from yeto.errors import ProtocolError, YetoError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The book looks at none of them: a simulation, which has none, does without numpy.
Values: TypeAlias = "NDArray[np.float32]"
"""A whole fragment: 1-D float32, tensors flattened and concatenated in layout order."""


# Without slots, like the others that come and go with every round: frozen ones are made in half the time.
@frozen(kw_only=True, slots=False, eq=False)
class Broadcast:
    """One received global fragment, decoded."""

    generation: int
    fragment: int
    version: int
    """Global step whose merge made these values; 0 for the initial ones."""
    digest: str
    """Digest of the bytes as received; equal digests mean equal values."""
    values: Values = field(repr=False)


@frozen(kw_only=True, slots=False)
class Pull:
    """A request for this learner's delta of one fragment, for one attempt of one round."""

    generation: int
    fragment: int
    step: int
    attempt: int


class Taken(Enum):
    """What a received broadcast did."""

    OVERWROTE = "overwrote"
    BLENDED = "blended"
    CARRIED = "carried"
    ROLLED_BACK = "rolled_back"
    UNCHANGED = "unchanged"
    IGNORED = "ignored"


@frozen(kw_only=True, slots=False, eq=False)
class Carry:
    """What tells the work that goes on from what is replaced: ``received + (local - anchor - pushed)``."""

    anchor: Values = field(repr=False)
    """The anchor before."""
    pushed: Values | None = field(repr=False)
    """The difference that was pushed, as the syncer decodes it; None for nothing."""


@frozen(kw_only=True, slots=False)
class Receipt:
    """The effect of one broadcast on this learner."""

    taken: Taken
    alpha: float
    """Share the local weights keep: 0 overwrites, 1 leaves them as they are. Means nothing with ``carry``."""
    previous_version: int | None
    """Version of the anchor before; None when there was none."""
    carry: Carry | None = None
    """How local work is carried over, if it is."""


class OtherRun(YetoError):
    """What an earlier process saved is of another run than the syncer's."""

    def __init__(self, global_step: int) -> None:
        """Say it of state that has come to ``global_step``."""
        super().__init__(f"the saved state is of global step {global_step}, the syncer is at the beginning")
        self.global_step = global_step


class Verdict(Enum):
    """What to do with a pull now."""

    ANSWER = "answer"
    HOLD = "hold"
    DROP = "drop"


class Residual:
    """What quantisation took from one push, known once that push is encoded.

    After a push of ``d`` that was sent as ``q(d)``, a share ``alpha`` of the rest survives in the blended
    local weights, so ``(1 - alpha) * (d - q(d))`` is what has to be made up for. It becomes *due* with the
    first broadcast that can contain the push, and every push from that anchor on adds it; a repeated push of
    the same round leaves a new residual in place of the old one, so nothing is summed twice.

    Encoding happens beside training, so the value comes later than the object. Until then, and for ever when
    the push was dropped before it was encoded, the residual that push would have carried stands in for it.
    """

    def __init__(self, *, step: int, carried: Residual | None) -> None:
        """Make the residual of the push for round ``step``, which itself adds ``carried``."""
        self.step = step
        self._carried = carried
        self._values: Values | None = None

    def fill(self, values: Values) -> None:
        """Set the residual of the push, now that it is encoded."""
        self._values = values
        self._carried = None

    def values(self) -> Values | None:
        """Return what to add to the next push, or None for nothing."""
        if self._values is None and self._carried is not None:
            return self._carried.values()
        return self._values


class SentDelta:
    """What one push tells the syncer, known once it is encoded; until then nothing was sent."""

    def __init__(self, *, step: int, begun_at: tuple[int, int]) -> None:
        """Make that of a push for round ``step``; ``begun_at`` counts steps and tokens at its snapshot."""
        self.step = step
        self.begun_at = begun_at
        self.values: Values | None = None

    def fill(self, values: Values) -> None:
        """Set what the bytes decode to, before they are sent."""
        self.values = values


@frozen(kw_only=True, slots=False, eq=False)
class Answer:
    """Everything a push needs beside the local weights; immutable, so any thread may encode it."""

    pull: Pull
    base_version: int
    anchor: Values = field(repr=False)
    local_step: int
    c_steps: int
    c_tokens: int
    staleness: int
    """Global steps the anchor is behind the version that round ``pull.step`` is based on."""
    carried: Residual | None
    """Residual to add before encoding."""
    leaves: Residual | None
    """Residual to fill after encoding; None without error feedback."""
    residual_scale: float
    """``1 - alpha``, the share of the quantisation error that the local weights lose."""
    sent: SentDelta | None = None
    """What to fill with the decoded push; None unless work is carried."""


def newest(held: Broadcast | None, arrived: Broadcast) -> Broadcast | None:
    """Return which of two broadcasts of a fragment waits for the boundary; None leaves things as they are.

    A learner in a long step receives many; only the newest matters, which bounds what waits to one fragment
    each. Across generations the later arrival wins, whatever its version: see :mod:`yeto.learner.anchors`.

    Raises:
        ProtocolError: one version came twice within a generation, with different bytes.
    """
    if held is None or held.generation != arrived.generation or arrived.version > held.version:
        return arrived
    if arrived.version == held.version and arrived.digest != held.digest:
        raise came_twice(arrived)
    return None


def came_twice(broadcast: Broadcast) -> ProtocolError:
    """Return the error of a version that is another one than it was before, within a generation."""
    return ProtocolError(
        f"fragment {broadcast.fragment}: version {broadcast.version} came twice with different bytes; "
        "two syncers answer at this address, or the syncer is broken"
    )
