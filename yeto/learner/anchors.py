"""The anchors: what this learner believes the global fragments to be, and what follows from it.

A learner never sends weights. It sends ``d = local - anchor``, where the *raw anchor* of a fragment is the
last global value it received, before blending. Everything here keeps that difference honest:

* **Receipt.** The first broadcast in a process without an anchor overwrites, because a relaunched island
  must not keep half of its initial weights. A later, higher version is blended, ``local <- alpha * local +
  (1 - alpha) * global``, which keeps the steps taken while the merge was in flight.
  Versions are comparable within one connection generation only: on a new one, the anchor's own version with
  the anchor's own bytes changes nothing, and anything that is not newer is a *roll-back*: the syncer went
  back to an older checkpoint, so work counted against the lost timeline is counted no more.
* **Carrying** (``--merge-alpha carry``) is the other way to treat a later version: ``local <- received +
  (local - anchor) - d``, where d is what the syncer got of this learner's newest push for a round that the
  version contains. What was pushed comes back merged, and what was done since the snapshot is kept whole. It
  stays counted, so every later push has all work that was not pushed before, and what quantisation took from
  a push is in the weights and goes into the next one by itself. A push that missed its merge is lost whole.
  Nobody but the learner knows what it pushed, so what a process finds saved by an earlier one is overwritten.
* **Counting.** ``c_steps`` and ``c_tokens`` say how much work the difference contains. They start anew on
  receipt and never on a push: a push that missed its merge is lost whole, the local weights keep it. When
  work is carried they go on from the snapshot of the push that was taken off, or where they were without one.
* **Holding.** A pull can overtake the broadcast of an earlier round on the same fragment. Answered at once,
  it would carry the work already pushed for that round, and the work would be merged twice. So a pull for
  round t is held while this learner has pushed the fragment for a round r < t and its anchor is below r.
  That cannot deadlock: round t exists only after the broadcast of a version >= r was ordered.
* **Restarting.** A learner that goes on from saved state does not know what it pushed after that was saved.
  Until its own first push of a fragment, a pull for round t is answered only from an anchor that contains
  every earlier round of the fragment, t - P or newer.
  Its anchors also tell one run from another: a syncer that offers initial values to a process whose saved
  anchor is a later one is at the beginning of a run, or has lost all of this one, and is refused. One that
  is further on may be of another run as well. Only an anchor that it still has, version and bytes, proves
  that it is not, and one proves it for all. So the first broadcasts after a restart wait for such a one; when
  every fragment has come without, they overwrite what was saved, lest half of another run's be mixed in. A
  frozen learner keeps its weights all the same: they are the answer that it owes.
* **Error feedback.** What 4-bit quantisation takes from a push is added to a later one; see ``Residual``.

Pure bookkeeping on numpy arrays: no model, no network, no clock, one thread (the training thread).
"""

from __future__ import annotations

from attrs import define, field

from yeto.learner.exchanged import (
    Answer,
    Broadcast,
    Carry,
    OtherRun,
    Pull,
    Receipt,
    Residual,
    SentDelta,
    Taken,
    Values,
    Verdict,
)
from yeto.learner.pages import Page, SavedBook, restored_page

__all__ = ["FragmentBook", "SavedBook"]


@define(kw_only=True)
class FragmentBook:
    """Anchors, counters, holding and residuals of all fragments."""

    num_fragments: int
    alpha: float
    """Share of the local weights that survives a broadcast, in [0, 1)."""
    error_feedback: bool = False
    """Whether pushes are quantised and their errors fed back."""
    carries: bool = False
    """Whether a later version leaves work whole that was not pushed; ``alpha`` then means nothing."""
    is_doubtful: bool = field(init=False, default=False)
    """The book was restored, and nothing has proved that it is of the syncer's run."""
    _pages: list[Page] = field(init=False)
    _waiting: dict[int, Broadcast] = field(init=False, factory=dict)
    _counted: tuple[int, int] = field(init=False, default=(0, 0))
    """All steps and tokens counted; pages remember where they began."""
    _frozen_work: tuple[int, int] | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._pages = [Page() for _ in range(self.num_fragments)]

    # -- what this learner did ------------------------------------------------------------------------

    def adopt_init(self, fragment: int, values: Values, digest: str) -> None:
        """Take this learner's own initial values, as the wire carries them, for the anchor of version 0.

        They count until the syncer's first broadcast: the echo changes nothing, anything else overwrites.
        """
        page = self._pages[fragment]
        page.anchor, page.version, page.digest, page.is_own_init = values, 0, digest, True

    def count_step(self, tokens: int, steps: int = 1) -> None:
        """Record optimizer steps on ``tokens`` raw tokens of the whole island together."""
        self._counted = (self._counted[0] + steps, self._counted[1] + tokens)

    def freeze(self, steps: int, tokens: int) -> None:
        """Stop training for good, at a budget: every later push states all ``steps`` and ``tokens``.

        From now on a broadcast moves the anchor only, so that a retry repeats the same answer.
        """
        self._frozen_work = (steps, tokens)

    def finish(self) -> None:
        """Forget what is owed to later pushes: the final cut is the last word."""
        for page in self._pages:
            page.due = page.pending = None
            page.sent = ()

    # -- what the syncer sent -------------------------------------------------------------------------

    def receive(self, broadcast: Broadcast) -> Receipt:
        """Take a broadcast for the anchor, as its version and generation ask, and say what to do locally.

        Raises:
            ProtocolError: the anchor's own version came again within a generation, with other bytes.
        """
        page = self._pages[broadcast.fragment]
        is_doubtful = page.is_foreign or (page.is_unconfirmed and self.is_doubtful)
        page.is_unconfirmed = False
        page.answered = None
        taken = page.judge(broadcast)
        page.generation = broadcast.generation
        previous = page.version if page.anchor is not None else None
        if taken is Taken.IGNORED:
            return Receipt(taken=taken, alpha=1.0, previous_version=previous)
        page.is_own_init = False
        if taken is Taken.UNCHANGED:
            return Receipt(taken=taken, alpha=1.0, previous_version=previous)
        anchor = page.anchor
        page.anchor, page.version, page.digest = broadcast.values, broadcast.version, broadcast.digest
        is_frozen = self._frozen_work is not None
        if not is_frozen and taken in (Taken.BLENDED, Taken.ROLLED_BACK):
            if is_doubtful:
                taken = Taken.OVERWROTE
            elif self.carries:
                assert anchor is not None, "only a later broadcast is blended or rolls back"
                return self._carry(page, anchor, taken, previous)
        page.begun_at = self._counted
        page.is_foreign = False
        if taken is Taken.BLENDED:
            if page.pending is not None and page.version >= page.pending.step:
                page.due, page.pending = page.pending, None
        else:
            page.pushed_step = page.due = page.pending = None
            page.sent = ()
        alpha = 0.0 if taken is Taken.OVERWROTE else self.alpha
        return Receipt(taken=taken, alpha=1.0 if is_frozen else alpha, previous_version=previous)

    def due(self, arrived: tuple[Broadcast, ...]) -> tuple[Broadcast, ...]:
        """Return the broadcasts to receive now, in the order they came.

        After a restart they wait until one is the very anchor that was saved, or every fragment has come.
        """
        if not (self.is_doubtful and any(page.is_unconfirmed for page in self._pages)):
            return arrived
        for broadcast in arrived:
            page = self._pages[broadcast.fragment]
            if broadcast.version > 0 and page.judge(broadcast) is Taken.UNCHANGED:
                self.is_doubtful = False
            self._waiting.pop(broadcast.fragment, None)
            self._waiting[broadcast.fragment] = broadcast
        if self.is_doubtful and len(self._waiting) < self.num_fragments:
            return ()
        due = tuple(self._waiting.values())
        self._waiting.clear()
        return due

    def require_run(self, broadcast: Broadcast) -> None:
        """Refuse a syncer that is at the beginning of a run when what was restored is not.

        Raises:
            OtherRun: it is.
        """
        page = self._pages[broadcast.fragment]
        if page.is_unconfirmed and page.version > 0 and broadcast.version == 0:
            raise OtherRun(self.global_step)

    @staticmethod
    def _carry(page: Page, anchor: Values, taken: Taken, previous: int | None) -> Receipt:
        """Take off what the new anchor contains, and go on counting from its snapshot."""
        pushed = None
        if taken is Taken.ROLLED_BACK:
            page.pushed_step, page.sent = None, ()
        elif page.sent and page.sent[0].step <= page.version:
            for sent in page.sent:
                if sent.values is not None:
                    pushed, page.begun_at = sent.values, sent.begun_at
            page.sent = ()
        return Receipt(
            taken=Taken.CARRIED if taken is Taken.BLENDED else taken,
            alpha=1.0,
            previous_version=previous,
            carry=Carry(anchor=anchor, pushed=pushed),
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
        # After a restart only an anchor that contains every earlier round excludes that it was pushed for.
        unknown = page.is_restored and page.version < pull.step - self.num_fragments
        if overtook or unknown or page.answered == pull or self._work(page)[0] < 1:
            return Verdict.HOLD
        return Verdict.ANSWER

    def answer(self, pull: Pull, local_step: int) -> Answer:
        """Answer a pull whose verdict is ANSWER, and remember that it was answered."""
        page = self._pages[pull.fragment]
        assert page.anchor is not None, "only a pull with verdict ANSWER is answered"
        leaves = None
        sent = None
        if self._frozen_work is None:
            # Frozen weights keep the whole rest themselves, so there is nothing to make up for.
            if self.carries:
                sent = SentDelta(step=pull.step, begun_at=self._counted)
                page.sent = (*(one for one in page.sent if one.step == pull.step), sent)
            elif self.error_feedback:
                leaves = page.pending = Residual(step=pull.step, carried=page.due)
        page.pushed_step = pull.step
        page.is_restored = False
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
            sent=sent,
        )

    def _work(self, page: Page) -> tuple[int, int]:
        if self._frozen_work is not None:
            return self._frozen_work
        steps, tokens = self._counted
        return steps - page.begun_at[0], tokens - page.begun_at[1]

    # -- what outlives the process --------------------------------------------------------------------

    def saved(self) -> SavedBook:
        """Return what a later process needs to go on; what was received on this connection is not part."""
        return SavedBook(
            fragments=tuple(page.saved(self._counted) for page in self._pages),
            frozen_work=self._frozen_work,
        )

    def restore(self, book: SavedBook) -> None:
        """Go on, in a process that has just started, from what another one saved."""
        self._pages = [restored_page(fragment, self._counted) for fragment in book.fragments]
        self.is_doubtful = True
        if self.carries:
            for page in self._pages:
                page.is_foreign, page.due, page.pending = True, None, None
        self._frozen_work = book.frozen_work

    # -- what others ask ------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether the syncer has sent every fragment, so that training may start."""
        return self.num_received == self.num_fragments

    @property
    def num_received(self) -> int:
        """How many fragments the syncer has sent, to this process or an earlier one."""
        return sum(page.anchor is not None and not page.is_own_init for page in self._pages)

    @property
    def global_step(self) -> int:
        """Newest version among the anchors."""
        return max((page.version for page in self._pages), default=0)

    def work(self, fragment: int) -> tuple[int, int]:
        """Return the steps and tokens that a push of the fragment would state."""
        return self._work(self._pages[fragment])
