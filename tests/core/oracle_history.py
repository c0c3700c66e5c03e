"""Everything that happened on a timeline, and what follows from it about the session and its commits.

The coordinator keeps counters and ordered maps so that a fact costs a logarithm. This keeps nothing but the
facts and decisions of the present timeline, in order, as on a tape, and answers each question by reading them
again from the start, in the words of the rules: who is here, what is committed, which checkpoint is being
written. Slow and obvious; that is all it is for. (An answer is remembered until something new happens, which
changes how long a test takes and nothing else.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from typing import Any, TypeVar

from attrs import define, field

from yeto.core import CoreConfig
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.values import LedgerEntry, Member, OuterMark, SessionTerms

Thing = ev.Event | de.Decision
T = TypeVar("T", bound=Thing)
A = TypeVar("A")

BLIND_SECONDS = 10.0
HELD_SECONDS = 65.0
"""An upload holds the quorum deadline for a minute; the word of it may be some seconds late."""
REMEMBERED_GENERATIONS = 1024


def grid(at: float) -> float:
    """A deadline on the clock's microseconds, early by a thousandth of one at most."""
    return math.ceil(at * 1e6 - 0.001) / 1e6


def smooth(samples: list[float]) -> float | None:
    """The moving average of samples: the first seeds it, each further one counts half."""
    average: float | None = None
    for sample in samples:
        average = sample if average is None else (average + sample) / 2
    return average


def question(method: Callable[..., A]) -> Callable[..., A]:
    """Read the past once for a question, until something new happens."""

    @wraps(method)
    def ask(self: History, *args: Any) -> A:
        if self.answered_at != len(self.things):
            self.answers.clear()
            self.answered_at = len(self.things)
        key = (method.__name__, *args)
        if key not in self.answers:
            self.answers[key] = method(self, *args)
        return self.answers[key]

    return ask


@define
class People:
    """Who dialled, who is here and who was."""

    newest: dict[int, ev.HelloReceived] = field(factory=dict)
    here: dict[int, Member] = field(factory=dict)
    left_at: dict[int, float] = field(factory=dict)
    turned_away: set[int] = field(factory=set)
    """Refused for good, and not heard of since."""
    used: dict[int, list[str]] = field(factory=dict)

    def drop(self, at: float, learner: int, generation: str) -> bool:
        """A connection is gone; False when it was not the newest of its id."""
        if learner not in self.newest or self.newest[learner].generation != generation:
            return False
        del self.newest[learner]
        if learner in self.here:
            del self.here[learner]
            self.left_at[learner] = at
        return True

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self.here[learner] for learner in sorted(self.here))


@define
class History:
    """One timeline: from the beginning of a session or from a resume."""

    config: CoreConfig
    resumed: ev.SessionResumed | None = None
    things: list[tuple[float, Thing]] = field(factory=list)
    kinds: dict[type, list[tuple[int, float, Thing]]] = field(factory=dict)
    """The same, sorted by kind: where, when and what."""
    answers: dict[Any, Any] = field(factory=dict)
    answered_at: int = -1

    def add(self, at: float, *things: Thing) -> None:
        for thing in things:
            self.kinds.setdefault(type(thing), []).append((len(self.things), at, thing))
            self.things.append((at, thing))

    def put_last(self, at: float, *things: Thing) -> None:
        """Put things in place of as many that were added last."""
        for _ in things:
            _, thing = self.things.pop()
            self.kinds[type(thing)].pop()
        self.add(at, *things)
        self.answered_at = -1

    # Looking through it.

    def all(self, kind: type[T], **fields: object) -> list[T]:
        """Everything of a kind that has these values."""
        return [thing for _, thing in self.times(kind, **fields)]

    def times(self, kind: type[T], **fields: object) -> list[tuple[float, T]]:
        return [(at, thing) for _, at, thing in self._places(kind, fields)]

    def taken(self, kind: type[T], **fields: object) -> list[tuple[float, T]]:
        """The facts of a kind that were taken."""
        return [(at, thing) for place, at, thing in self._places(kind, fields) if self.was_taken(place)]

    def _places(self, kind: type[T], fields: dict[str, object]) -> list[tuple[int, float, T]]:
        found: Any = self.kinds.get(kind, [])
        if not fields:
            return found
        return [one for one in found if all(getattr(one[2], name) == fields[name] for name in fields)]

    def was_taken(self, index: int) -> bool:
        """Whether the fact at ``index`` was neither ignored nor the cause of a refusal of who told it."""
        event = self.things[index][1]
        for _, thing in islice(self.things, index + 1, None):
            if isinstance(thing, ev.Event):
                break
            if isinstance(thing, de.Ignored | de.PushRefused):
                return False
            if isinstance(thing, de.LearnerRefused) and thing.reason != "superseded":
                mine = (thing.learner, thing.generation)
                if mine == (getattr(event, "learner", None), getattr(event, "generation", None)):
                    return False
        return True

    def story(self) -> Iterator[tuple[int, float, Thing, People]]:
        """Everything in order, each with who was there after it."""
        people = People()
        for index, (at, thing) in enumerate(self.things):
            if isinstance(thing, ev.HelloReceived) and self.was_taken(index):
                learner = thing.learner
                if learner in people.newest:
                    people.drop(at, learner, people.newest[learner].generation)
                people.newest[learner] = thing
                people.used.setdefault(learner, []).append(thing.generation)
                people.turned_away.discard(learner)
            elif isinstance(thing, ev.LearnerJoined) and self.was_taken(index):
                member = Member(learner=thing.learner, generation=thing.generation)
                people.here[thing.learner] = member
            elif isinstance(thing, ev.LearnerLeft):
                people.drop(at, thing.learner, thing.generation)
            elif isinstance(thing, de.LearnerRefused) and thing.reason not in (
                "superseded",
                "generation_reused",
            ):
                gone = people.drop(at, thing.learner, thing.generation)
                if gone and thing.permanent:
                    people.turned_away.add(thing.learner)
            yield index, at, thing, people

    # The session.

    @question
    def people(self) -> People:
        people = People()
        for _, _, _, people in self.story():  # noqa: B007
            pass
        return people

    @question
    def opening(self) -> int | None:
        """Where the decision stands that fixed the terms, unless it was taken back."""
        opened, released = self._last(de.SessionOpened), self._last(de.SessionReleased)
        return opened if opened is not None and opened > (-1 if released is None else released) else None

    def _last(self, kind: type[Thing]) -> int | None:
        found = self.kinds.get(kind)
        return found[-1][0] if found else None

    @question
    def terms(self) -> SessionTerms | None:
        if self.resumed is not None:
            return self.resumed.terms
        index = self.opening()
        if index is None:
            return None
        opened = self.things[index][1]
        assert isinstance(opened, de.SessionOpened)
        return opened.terms

    @property
    def num_fragments(self) -> int:
        terms = self.terms()
        return 0 if terms is None else terms.num_fragments

    @question
    def opener(self) -> str | None:
        """The generation of learner 0 whose HELLO fixed a session that is still provisional."""
        index = self.opening()
        if index is None or self.resumed is not None or self.is_initialised():
            return None
        return next(
            thing.generation
            for _, thing in reversed(self.things[:index])
            if isinstance(thing, ev.HelloReceived)
        )

    @question
    def initial(self) -> dict[int, str]:
        """The initial values of the present opening."""
        begin = self.opening()
        if begin is None:
            return {}
        return {
            thing.fragment: thing.digest
            for place, _, thing in self._places(ev.FragmentInitialised, {})
            if place > begin and self.was_taken(place)
        }

    @question
    def is_initialised(self) -> bool:
        if self.resumed is not None:
            return True
        return 0 < self.num_fragments == len(self.initial())

    @question
    def phase(self) -> str:
        if self.all(de.SessionEnded):
            return "ended"
        if self.all(de.FinalCutOrdered):
            return "finalising"
        endings = self.all(de.SessionEnding)
        if endings:
            return {"final": "draining", "budget": "budget", "stop": "stopping"}[endings[-1].phase]
        if self.all(de.RoundsStarted):
            return "running"
        return "waiting" if self.is_initialised() else "provisional"

    @property
    def quorum(self) -> int:
        return self.config.num_learners if self.config.budget_finish else self.config.quorum

    @property
    def depth(self) -> int:
        return min(max(self.config.pipeline, 1), self.num_fragments)

    @property
    def target(self) -> int:
        if not self.config.budget_finish:
            return self.config.total_steps
        assert self.resumed is not None
        recorded = self.resumed.finish_target
        return self.resumed.step + self.num_fragments if recorded is None else recorded

    def is_sweep(self, step: int) -> bool:
        if self.config.budget_finish:
            return True
        long_enough = self.target >= 2 * self.num_fragments
        return (
            self.config.closing_sweep == "plain" and long_enough and step > self.target - self.num_fragments
        )

    # What is committed.

    @question
    def step(self) -> int:
        commits = self.all(de.RoundCommitted)
        if commits:
            return commits[-1].step
        return 0 if self.resumed is None else self.resumed.step

    def fragment_of(self, step: int) -> int:
        return (step - 1) % self.num_fragments

    @question
    def versions(self) -> tuple[int, ...]:
        """Of each fragment, the last committed round on it."""
        return tuple(
            max((t for t in range(1, self.step() + 1) if self.fragment_of(t) == p), default=0)
            for p in range(self.num_fragments)
        )

    # The outer step.

    @question
    def outer_kind(self) -> str:
        """The kind in force: what was asked for, or what auto stands for."""
        config = self.config
        if config.outer != "auto":
            return config.outer
        merges = self.target // self.num_fragments
        if config.learner_budget_steps is not None and config.sync_interval_steps > 0:
            merges = min(merges, math.floor(config.learner_budget_steps / config.sync_interval_steps))
        rare = config.num_learners > 1 and config.sync_interval_steps >= 16 and merges >= 4
        return "normalised" if rare else "direct"

    @question
    def outer_numbers(self) -> tuple[float, float]:
        """Learning rate and greatest momentum."""
        lr, momentum = {"stock": (0.7, 0.9), "direct": (1.0, 0.0), "normalised": (1.0, 0.9)}[
            self.outer_kind()
        ]
        config = self.config
        return (
            lr if config.outer_lr is None else config.outer_lr,
            momentum if config.outer_momentum is None else config.outer_momentum,
        )

    @question
    def outer_marks(self) -> tuple[OuterMark, ...]:
        """Merges and gain of each fragment: the checkpoint's, and each commit since that moved the buffer."""
        config = self.config
        merges, gains = [0] * self.num_fragments, [0.0] * self.num_fragments
        if self.resumed is not None and self.resumed.outer_marks is not None:
            merges = [mark.merges for mark in self.resumed.outer_marks]
            gains = [mark.gain for mark in self.resumed.outer_marks]
        elif self.resumed is not None:
            momentum = 0.9 if config.outer_momentum is None else config.outer_momentum
            for step in range(1, self.resumed.step + 1):
                p = self.fragment_of(step)
                merges[p], gains[p] = merges[p] + 1, gains[p] * momentum + 1
        for merge in self.all(de.RoundCommitted):
            if not merge.no_op and not self.is_sweep(merge.step):
                (order,) = self.all(de.CommitOrdered, step=merge.step, attempt=merge.attempt)
                p = merge.fragment
                merges[p], gains[p] = merges[p] + 1, gains[p] * order.momentum + 1
        return tuple(
            OuterMark(fragment=p, merges=merges[p], gain=gains[p]) for p in range(self.num_fragments)
        )

    def coefficients(self, step: int) -> tuple[float, float]:
        """Learning rate and momentum of the commit of a round."""
        if self.is_sweep(step):
            return 1.0, 0.0
        lr, momentum = self.outer_numbers()
        if self.outer_kind() != "normalised":
            return lr, momentum
        mark = self.outer_marks()[self.fragment_of(step)]
        momentum = min(momentum, mark.merges / (mark.merges + 1))
        # What a buffer that took the gradient 1 each time would be moved by.
        return lr / (1 + momentum * (momentum * mark.gain + 1)), momentum

    def is_plain(self, step: int) -> bool:
        return self.is_sweep(step) or self.outer_kind() == "direct"

    def momentum_scale(self, step: int) -> float | None:
        if self.is_plain(step) or self.outer_kind() == "stock":
            return None
        gain = self.outer_marks()[self.fragment_of(step)].gain
        return 1 / gain if gain else 1.0

    def stated_kind(self) -> str | None:
        """What the tape says the kind is; a configuration of old is not spoken of."""
        config = self.config
        old = config.outer == "stock" and config.outer_lr is not None and config.outer_momentum is not None
        return None if old else self.outer_kind()

    @question
    def ledger(self) -> dict[int, LedgerEntry]:
        """Who contributed what: the checkpoint's ledger and every commit since."""
        rows: dict[int, list[int]] = {}
        for entry in () if self.resumed is None else self.resumed.ledger:
            rows[entry.learner] = [entry.merges, entry.c_steps, entry.c_tokens]
        for merge in self.all(de.RoundCommitted):
            for one in merge.responders:
                row = rows.setdefault(one.learner, [0, 0, 0])
                row[0] += 1
                row[1] += one.c_steps
                row[2] += one.c_tokens
        return {
            learner: LedgerEntry(learner=learner, merges=row[0], c_steps=row[1], c_tokens=row[2])
            for learner, row in sorted(rows.items())
        }

    @question
    def durable(self) -> int:
        first = -1 if self.resumed is None else self.resumed.step
        return max([first, *(written.step for written in self.all(ev.CheckpointWritten))])

    @question
    def ordered_checkpoint(self) -> int:
        """The newest step a checkpoint was ordered or resumed of."""
        first = -1 if self.resumed is None else self.resumed.step
        return max([first, *(order.step for order in self.all(de.CheckpointOrdered))])

    @question
    def writing(self) -> int | None:
        """The checkpoint that is being written."""
        ordered, ended = self.all(de.CheckpointOrdered), self.all(ev.CheckpointWritten)
        done = len(ended) + len(self.all(ev.CheckpointFailed))
        return ordered[-1].step if len(ordered) > done else None

    def is_due(self, step: int) -> bool:
        """Whether the commit of ``step`` calls for a checkpoint."""
        every = self.config.checkpoint_every
        return (every > 0 and step % every == 0) or step == self.target

    @question
    def sent(self) -> tuple[int, ...]:
        """Of each fragment the last version whose broadcast was ordered; empty before the first."""
        sent: dict[int, int] = {}
        if self.resumed is not None:
            sent = {mark.fragment: mark.version for mark in self.resumed.fragments}
        for order in self.all(de.BroadcastOrdered):
            for ref in order.fragments:
                sent[ref.fragment] = ref.version
        return tuple(sent[p] for p in sorted(sent))

    @property
    def is_throttled(self) -> bool:
        """Frozen learners of a budget finish take no steps, so there is nothing to wait for."""
        return self.config.sync_interval_steps > 0 and not self.config.budget_finish

    @question
    def stop_deadlines(self) -> tuple[float, float]:
        """After a signal: until when rounds may gather, and until when they may merge."""
        stops = self.taken(ev.StopRequested)
        if not stops or self.phase() != "stopping":
            return math.inf, math.inf
        at, budget = stops[0][0], self.config.stop_budget_seconds
        return grid(at + min(self.config.grace_cap_seconds, budget)), grid(at + budget)
