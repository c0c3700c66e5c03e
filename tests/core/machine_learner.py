"""A learner as the coordinator's shell meets it: the real bookkeeping of anchors, no model, no socket.

What a push says (base version, steps since the anchor) comes from the learner's own
:class:`~yeto.learner.anchors.FragmentBook`, and every local step has a number of its own, so a test can tell
which steps each push is made of and that none of them is merged twice. Messages of one connection wait in an
inbox; broadcasts keep their order, pulls may overtake them, because they travel on another stream.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field, frozen
from core_fleet import generation

from yeto.core.values import Member, SessionTerms
from yeto.learner.anchors import FragmentBook, SavedBook
from yeto.learner.exchanged import Answer, Broadcast, Pull, Verdict

VALUES = np.zeros(1, dtype=np.float32)
TOKENS = 100
"""Tokens of one local step."""


@frozen(kw_only=True)
class Work:
    """The local steps that a push holds."""

    learner: int
    fragment: int
    steps: frozenset[int]

    def meets(self, other: Work) -> bool:
        same = (self.learner, self.fragment) == (other.learner, other.fragment)
        return same and not self.steps.isdisjoint(other.steps)


@frozen(kw_only=True, eq=False)
class SavedLearner:
    """What a learner's state folder holds."""

    book: SavedBook
    steps: tuple[int, ...]
    is_frozen: bool


@define(eq=False)
class Learner:
    """One learner id: the process that runs under it now, and its connection."""

    number: int
    num_fragments: int
    dial: int = 0
    """Counts connections; the generation is drawn from it."""
    terms: SessionTerms | None = None
    """What its HELLO states."""
    is_dialled: bool = False
    is_joined: bool = False
    book: FragmentBook = field(init=False)
    steps: list[int] = field(factory=list)
    """The numbers of the local steps its weights are made of."""
    steps_made: int = 0
    is_frozen: bool = False
    saved: SavedLearner | None = None
    inbox: list[Broadcast | Pull] = field(factory=list)
    pulls: dict[int, Pull] = field(factory=dict)
    """The newest pull of each fragment."""
    owes_ack: bool = False
    was_refused: bool = False
    """Its process has ended: it was told not to come back."""

    def __attrs_post_init__(self) -> None:
        self.book = FragmentBook(num_fragments=self.num_fragments, alpha=0.5)

    @property
    def generation(self) -> str:
        return generation(self.number, self.dial)

    @property
    def local_step(self) -> int:
        return len(self.steps)

    def is_member(self, member: Member) -> bool:
        """Whether this is its present connection."""
        return self.is_joined and member.generation == self.generation

    # Processes and connections.

    def save(self) -> None:
        self.saved = SavedLearner(book=self.book.saved(), steps=tuple(self.steps), is_frozen=self.is_frozen)

    def relaunch(self) -> None:
        """Another process takes over this id, from what was saved last."""
        self.hang_up()
        self.was_refused = False
        self.book = FragmentBook(num_fragments=self.num_fragments, alpha=0.5)
        self.steps, self.is_frozen = [], False
        if self.saved is not None:
            self.book.restore(self.saved.book)
            self.steps, self.is_frozen = list(self.saved.steps), self.saved.is_frozen

    def redial(self, terms: SessionTerms) -> None:
        """Draw a new generation; what the old one still had to say or to hear is lost."""
        self.hang_up()
        self.was_refused = False
        self.dial += 1
        self.terms = terms
        self.is_dialled = True

    def hang_up(self) -> None:
        self.is_dialled = self.is_joined = self.owes_ack = False
        self.inbox.clear()
        self.pulls.clear()

    # What it hears.

    def send(self, fragment: int, version: int, digest: str) -> None:
        """Put a broadcast into its inbox."""
        self.inbox.append(
            Broadcast(generation=self.dial, fragment=fragment, version=version, digest=digest, values=VALUES)
        )

    def pull(self, fragment: int, step: int, attempt: int) -> None:
        self.inbox.append(Pull(generation=self.dial, fragment=fragment, step=step, attempt=attempt))

    def hear(self, *, overtake: bool = False) -> None:
        """Take one message: the first, or with ``overtake`` the last pull."""
        pulls = [message for message in self.inbox if isinstance(message, Pull)]
        message = pulls[-1] if overtake and pulls else self.inbox[0]
        self.inbox.remove(message)
        if isinstance(message, Broadcast):
            self.book.receive(message)
        else:
            self.pulls[message.fragment] = message

    # What it does and says.

    def initialise(self, fragment: int, digest: str) -> None:
        """Take its own initial value for an anchor, while it has no other."""
        if self.book.saved().fragments[fragment].anchor is None:
            self.book.adopt_init(fragment, VALUES, digest)

    def train(self, steps: int, budget: int | None) -> None:
        """Take local steps, to the budget at most."""
        for _ in range(steps):
            if budget is not None and self.local_step >= budget:
                break
            self.book.count_step(TOKENS)
            self.steps_made += 1
            self.steps.append(self.steps_made)
        if budget is not None and self.local_step >= budget and not self.is_frozen:
            self.is_frozen = True
            self.book.freeze(budget, budget * TOKENS)

    def answerable(self) -> list[Pull]:
        """Pulls that this learner answers now; those it will never answer are forgotten."""
        for fragment, pull in list(self.pulls.items()):
            if self.book.verdict(pull) is Verdict.DROP:
                del self.pulls[fragment]
        return [pull for pull in self.pulls.values() if self.book.verdict(pull) is Verdict.ANSWER]

    def answer(self, pull: Pull) -> tuple[Answer, Work]:
        answer = self.book.answer(pull, self.local_step)
        mine = self.steps[self.local_step - answer.c_steps :]
        return answer, Work(learner=self.number, fragment=pull.fragment, steps=frozenset(mine))
