"""The anchors: what this learner believes the global fragments to be, and what follows from it.

A learner never sends weights. It sends ``d = local - anchor``, where the *raw anchor* of a fragment is the
last global value it received, before blending. Everything here keeps that difference honest:

* **Receipt.** The first broadcast in a process without an anchor overwrites, because a relaunched island
  must not keep half of its initial weights. A later, higher version is blended, ``local <- alpha * local +
  (1 - alpha) * global``, which keeps the steps taken while the merge was in flight.
  Versions are comparable within one connection generation only: on a new one, the anchor's own version with
  the anchor's own bytes changes nothing, and anything that is not newer is a *roll-back*: the syncer went
  back to an older checkpoint, so work counted against the lost timeline is counted no more.
* **Counting.** ``c_steps`` and ``c_tokens`` say how much work the difference contains. They start anew on
  receipt and never on a push: a push that missed its merge is lost whole, the local weights keep it.
* **Holding.** A pull can overtake the broadcast of an earlier round on the same fragment. Answered at once,
  it would carry the work already pushed for that round, and the work would be merged twice. So a pull for
  round t is held while this learner has pushed the fragment for a round r < t and its anchor is below r.
  That cannot deadlock: round t exists only after the broadcast of a version >= r was ordered.
* **Error feedback.** What 4-bit quantisation takes from a push is added to a later one; see ``Residual``.

Pure bookkeeping on numpy arrays: no model, no network, no clock, one thread (the training thread).
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from yeto.errors import ProtocolError

Values: TypeAlias = NDArray[np.float32]
"""A whole fragment: 1-D float32, tensors flattened and concatenated in layout order."""


@frozen(kw_only=True, eq=False)
class Broadcast:
    """One received global fragment, decoded."""

    generation: int
    fragment: int
    version: int
    """Global step whose merge made these values; 0 for the initial ones."""
    digest: str
    """Digest of the bytes as received; equal digests mean equal values."""
    values: Values = field(repr=False)


@frozen(kw_only=True)
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
    ROLLED_BACK = "rolled_back"
    UNCHANGED = "unchanged"
    IGNORED = "ignored"


@frozen(kw_only=True)
class Receipt:
    """The effect of one broadcast on this learner."""

    taken: Taken
    alpha: float
    """Share the local weights keep: 0 overwrites, 1 leaves them as they are."""
    previous_version: int | None
    """Version of the anchor before; None when there was none."""


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


@frozen(kw_only=True, eq=False)
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


@define(kw_only=True)
class _Fragment:
    """The book's page for one fragment."""

    anchor: Values | None = None
    version: int = 0
    digest: str = ""
    is_own_init: bool = False
    """The anchor is what this learner itself sent as INIT; no broadcast has confirmed it yet."""
    generation: int | None = None
    """Generation on which a broadcast of this fragment was last received."""
    c_steps: int = 0
    c_tokens: int = 0
    pushed_step: int | None = None
    """Round of the last push."""
    answered: Pull | None = None
    """Last pull answered since the last broadcast."""
    due: Residual | None = None
    pending: Residual | None = None


@define(kw_only=True)
class FragmentBook:
    """Anchors, counters, holding and residuals of all fragments."""

    num_fragments: int
    alpha: float
    """Share of the local weights that survives a broadcast, in [0, 1)."""
    error_feedback: bool = False
    """Whether pushes are quantised and their errors fed back."""
    _pages: list[_Fragment] = field(init=False)
    _frozen_work: tuple[int, int] | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._pages = [_Fragment() for _ in range(self.num_fragments)]

    # -- what this learner did ------------------------------------------------------------------------

    def adopt_init(self, fragment: int, values: Values, digest: str) -> None:
        """Take this learner's own initial values, as the wire carries them, for the anchor of version 0.

        They count until the syncer's first broadcast: the echo changes nothing, anything else overwrites.
        """
        page = self._pages[fragment]
        page.anchor, page.version, page.digest, page.is_own_init = values, 0, digest, True

    def count_step(self, tokens: int) -> None:
        """Record one optimizer step on ``tokens`` raw tokens of the whole island."""
        for page in self._pages:
            page.c_steps += 1
            page.c_tokens += tokens

    def freeze(self, steps: int, tokens: int) -> None:
        """Stop training for good, at a budget: every later push states all ``steps`` and ``tokens``.

        From now on a broadcast moves the anchor only, so that a retry repeats the same answer.
        """
        self._frozen_work = (steps, tokens)

    def finish(self) -> None:
        """Forget what is owed to later pushes: the final cut is the last word."""
        for page in self._pages:
            page.due = page.pending = None

    # -- what the syncer sent -------------------------------------------------------------------------

    def receive(self, broadcast: Broadcast) -> Receipt:
        """Take a broadcast for the anchor, as its version and generation ask, and say what to do locally.

        Raises:
            ProtocolError: the anchor's own version came again within a generation, with other bytes.
        """
        page = self._pages[broadcast.fragment]
        page.answered = None
        taken = self._judge(page, broadcast)
        page.generation = broadcast.generation
        previous = page.version if page.anchor is not None else None
        if taken is Taken.IGNORED:
            return Receipt(taken=taken, alpha=1.0, previous_version=previous)
        page.is_own_init = False
        if taken is Taken.UNCHANGED:
            return Receipt(taken=taken, alpha=1.0, previous_version=previous)
        page.anchor, page.version, page.digest = broadcast.values, broadcast.version, broadcast.digest
        page.c_steps = page.c_tokens = 0
        if taken is Taken.BLENDED:
            if page.pending is not None and page.version >= page.pending.step:
                page.due, page.pending = page.pending, None
        else:
            page.pushed_step = page.due = page.pending = None
        alpha = 0.0 if taken is Taken.OVERWROTE else self.alpha
        if self._frozen_work is not None:
            alpha = 1.0
        return Receipt(taken=taken, alpha=alpha, previous_version=previous)

    @staticmethod
    def _judge(page: _Fragment, broadcast: Broadcast) -> Taken:
        if page.anchor is None:
            return Taken.OVERWROTE
        same = broadcast.version == page.version and broadcast.digest == page.digest
        if same:
            return Taken.UNCHANGED
        if page.is_own_init:
            return Taken.OVERWROTE
        if broadcast.version > page.version:
            return Taken.BLENDED
        if page.generation != broadcast.generation:
            return Taken.ROLLED_BACK
        if broadcast.version < page.version:
            return Taken.IGNORED
        raise ProtocolError(
            f"fragment {broadcast.fragment}: version {broadcast.version} came twice with different bytes; "
            "two syncers answer at this address, or the syncer is broken"
        )

    # -- what the syncer asks for ---------------------------------------------------------------------

    def verdict(self, pull: Pull) -> Verdict:
        """Say whether a pull is answered now, held for a later boundary, or dropped for good."""
        page = self._pages[pull.fragment]
        if page.anchor is None or page.generation != pull.generation:
            # Versions of another generation say nothing about this one's.
            return Verdict.HOLD
        if pull.step <= page.version:
            return Verdict.DROP
        overtook = (
            page.pushed_step is not None and page.pushed_step < pull.step and page.version < page.pushed_step
        )
        if overtook or page.answered == pull or self._work(page)[0] < 1:
            return Verdict.HOLD
        return Verdict.ANSWER

    def answer(self, pull: Pull, local_step: int) -> Answer:
        """Answer a pull whose verdict is ANSWER, and remember that it was answered."""
        page = self._pages[pull.fragment]
        assert page.anchor is not None, "only a pull with verdict ANSWER is answered"
        leaves = None
        if self.error_feedback and self._frozen_work is None:
            # Frozen weights keep the whole rest themselves, so there is nothing to make up for.
            leaves = page.pending = Residual(step=pull.step, carried=page.due)
        page.pushed_step = pull.step
        page.answered = pull
        c_steps, c_tokens = self._work(page)
        return Answer(
            pull=pull,
            base_version=page.version,
            anchor=page.anchor,
            local_step=local_step,
            c_steps=c_steps,
            c_tokens=c_tokens,
            staleness=max(0, pull.step - self.num_fragments - page.version),
            carried=page.due,
            leaves=leaves,
            residual_scale=1.0 - self.alpha,
        )

    def _work(self, page: _Fragment) -> tuple[int, int]:
        return self._frozen_work if self._frozen_work is not None else (page.c_steps, page.c_tokens)

    # -- what others ask ------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether the syncer has sent every fragment, so that training may start."""
        return all(page.anchor is not None and not page.is_own_init for page in self._pages)

    @property
    def global_step(self) -> int:
        """Newest version among the anchors."""
        return max((page.version for page in self._pages), default=0)

    def version(self, fragment: int) -> int | None:
        """Version of a fragment's anchor; None without one."""
        page = self._pages[fragment]
        return None if page.anchor is None else page.version

    def anchor(self, fragment: int) -> Values | None:
        """Raw anchor of a fragment; None without one. Not to be written to."""
        return self._pages[fragment].anchor


def newest(held: Broadcast | None, arrived: Broadcast) -> Broadcast | None:
    """Return which of two broadcasts of a fragment waits for the boundary; None leaves things as they are.

    A learner in a long step receives many; only the newest matters, which bounds what waits to one fragment
    each. Across generations the later arrival wins, whatever its version: see the module's text.

    Raises:
        ProtocolError: one version came twice within a generation, with different bytes.
    """
    if held is None or held.generation != arrived.generation or arrived.version > held.version:
        return arrived
    if arrived.version == held.version and arrived.digest != held.digest:
        raise ProtocolError(
            f"fragment {arrived.fragment}: version {arrived.version} came twice with different bytes; "
            "two syncers answer at this address, or the syncer is broken"
        )
    return None
