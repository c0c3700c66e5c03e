"""The book's pages: what is known of each fragment, and what of that outlives a process."""

from __future__ import annotations

from attrs import define, field, frozen

from yeto.learner.exchanged import Broadcast, Pull, Residual, SentDelta, Taken, Values, came_twice


@frozen(kw_only=True, eq=False)
class SavedFragment:
    """What a learner's saved state keeps of one fragment's page."""

    anchor: Values | None = field(repr=False)
    version: int
    digest: str
    is_own_init: bool
    c_steps: int
    c_tokens: int
    pushed_step: int | None
    due: Values | None = field(repr=False)
    """Residual that every push from this anchor adds."""
    pending: tuple[int, Values | None] | None = field(repr=False)
    """Residual of the last push, and its round; not due before the broadcast of that round."""


@frozen(kw_only=True, eq=False)
class SavedBook:
    """What a learner's saved state keeps of its book; the arrays are the book's own and never written to."""

    fragments: tuple[SavedFragment, ...]
    frozen_work: tuple[int, int] | None
    """Steps and tokens at which a budget froze the weights."""


@define(kw_only=True)
class Page:
    """What the book knows of one fragment."""

    anchor: Values | None = None
    version: int = 0
    digest: str = ""
    is_own_init: bool = False
    """The anchor is what this learner itself sent as INIT; no broadcast has confirmed it yet."""
    generation: int | None = None
    """Generation on which a broadcast of this fragment was last received."""
    begun_at: tuple[int, int] = (0, 0)
    """Steps and tokens counted when the anchor was received; work since then is the difference."""
    pushed_step: int | None = None
    """Round of the last push."""
    is_unconfirmed: bool = False
    """The anchor is what an earlier process saved; this one has not received anything yet."""
    is_restored: bool = False
    """Later pushes than ``pushed_step`` may have left before the restart; none has since."""
    is_foreign: bool = False
    """The local weights may hold work that an earlier process pushed, and nobody knows what of it."""
    answered: Pull | None = None
    """Last pull answered since the last broadcast."""
    due: Residual | None = None
    pending: Residual | None = None
    sent: tuple[SentDelta, ...] = ()
    """What was pushed for round ``pushed_step`` and not taken off yet, oldest first: an attempt that was
    never encoded leaves the one before it in force."""

    def judge(self, broadcast: Broadcast) -> Taken:
        """Say what a broadcast is to this fragment, without taking it.

        Raises:
            ProtocolError: the anchor's own version came again within a generation, with other bytes.
        """
        if self.anchor is None:
            return Taken.OVERWROTE
        same = broadcast.version == self.version and broadcast.digest == self.digest
        if same:
            return Taken.UNCHANGED
        if self.is_own_init:
            return Taken.OVERWROTE
        if broadcast.version > self.version:
            return Taken.BLENDED
        if self.generation != broadcast.generation:
            return Taken.ROLLED_BACK
        if broadcast.version < self.version:
            return Taken.IGNORED
        raise came_twice(broadcast)

    def saved(self, counted: tuple[int, int]) -> SavedFragment:
        """Return what is kept of this page, when so many steps and tokens are counted."""
        return SavedFragment(
            anchor=self.anchor,
            version=self.version,
            digest=self.digest,
            is_own_init=self.is_own_init,
            c_steps=counted[0] - self.begun_at[0],
            c_tokens=counted[1] - self.begun_at[1],
            pushed_step=self.pushed_step,
            due=None if self.due is None else self.due.values(),
            pending=None if self.pending is None else (self.pending.step, self.pending.values()),
        )


def restored_page(saved: SavedFragment, counted: tuple[int, int]) -> Page:
    """Return the page that another process has saved, when so many steps and tokens are counted here."""
    page = Page(
        anchor=saved.anchor,
        version=saved.version,
        digest=saved.digest,
        is_own_init=saved.is_own_init,
        begun_at=(counted[0] - saved.c_steps, counted[1] - saved.c_tokens),
        pushed_step=saved.pushed_step,
        is_unconfirmed=True,
        is_restored=True,
    )
    if saved.due is not None:
        page.due = Residual(step=saved.version, carried=None)
        page.due.fill(saved.due)
    if saved.pending is not None:
        step, values = saved.pending
        page.pending = Residual(step=step, carried=page.due)
        if values is not None:
            page.pending.fill(values)
    return page
