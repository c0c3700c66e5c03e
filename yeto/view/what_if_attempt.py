"""One attempt under another policy: the coordinator's own ``step``, in the world that the record describes.

The attempt is a branch off the record. It has a round of its own, and is stepped within the record's present
state with that round as the only open one: links, estimates and the rest are the record's, the round and the
policy are not. What other rounds of the record did to this one (in a closing sweep they excuse its members, a
learner that is turned away leaves them all) is looked up in the record after each event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import field, frozen

from yeto.core import CoreConfig, Phase, State, Timer, next_timer, step
from yeto.core.decisions import AttemptDiscarded, AttemptOpened, AttemptSealed
from yeto.core.events import (
    BudgetReported,
    BudgetWaitPassed,
    Event,
    GateOpened,
    GraceElapsed,
    HelloReceived,
    LearnerLeft,
    PushOffered,
    PushReceived,
    QuorumDeadlinePassed,
    StopDeadlinePassed,
    StopRequested,
    UploadProgress,
)
from yeto.core.parts import Round, replace
from yeto.core.state import moment
from yeto.core.values import Member
from yeto.tape import round_at
from yeto.view.what_if_uploads import Uploads

_OF_ATTEMPT = (UploadProgress, QuorumDeadlinePassed, GraceElapsed)
_OF_MEMBER = (HelloReceived, LearnerLeft)
_OF_SESSION = (StopRequested, StopDeadlinePassed, BudgetReported, BudgetWaitPassed)
_CLOSING = ("stopping", "budget")
"""Why an attempt is dropped that could have gone on: the whole session closes."""


@frozen(kw_only=True)
class Verdict:
    """How an attempt ended."""

    status: str = "open"
    """``sealed``, ``discarded``, ``open`` (the record ends before), ``not_opened`` (too few members) or
    ``not_needed`` (an earlier attempt of its round was sealed or still open)."""
    seconds: float | None = None
    """From the opening; None when it did not end."""
    weights: Mapping[int, float] = field(factory=dict)
    """Who was merged, with the weights; empty unless sealed."""
    left_out: tuple[int, ...] = ()
    """Who answered without being merged."""
    reason: str = ""
    """Why it was discarded."""


@frozen(kw_only=True)
class Outcome:
    """One attempt, as recorded and under the other policy."""

    seq: int
    """Number of its ``attempt_opened`` record."""
    at: float
    step: int
    attempt: int
    members: tuple[int, ...]
    recorded: Verdict
    other: Verdict
    estimated: tuple[int, ...]
    """Learners whose push was received only here, at an estimated time."""


def other_config(config: CoreConfig, policy: Mapping[str, Any]) -> CoreConfig:
    """Return the settings with the policy's in place of some.

    Raises:
        ConfigError: they are impossible together; the message names the flag.
    """
    changed = attrs.evolve(config, **policy)
    # How many the start waits for is of the past when an attempt opens.
    return attrs.evolve(changed, wait_for=max(changed.wait_for, changed.quorum)).validated()


class Branch:
    """One attempt under the other policy, from its opening to its end."""

    def __init__(
        self, opened: AttemptOpened, *, seq: int, state: State, policy: Mapping[str, Any], needed: bool
    ) -> None:
        recorded = state.find(opened.step)
        assert recorded is not None, "its opening has just been replayed"
        self.step, self.attempt = opened.step, opened.attempt
        self.recorded: Verdict | None = None
        self.other: Verdict | None = None
        self._seq, self._at = seq, state.at
        self._members = tuple(member.learner for member in opened.members)
        # With a pipeline of one, nothing else opens beside the attempt.
        self._config = attrs.evolve(other_config(state.config, policy), pipeline=1)
        self._recorded_config = attrs.evolve(state.config, pipeline=1)
        fleet = replace(state, config=self._config)
        self._round = replace(
            recorded,
            quorum=fleet.quorum,
            deadline=moment(state.at + self._config.quorum_timeout_seconds),
            sweep=fleet.is_sweep(self.step),
        )
        self._excuse(state)
        self._twin: Round | None = recorded
        """The attempt in the record, as long as it gathers there."""
        self._timer: Timer | None = None
        """The attempt's own next deadline, unless the record has the very same one."""
        self._offers: dict[int, PushOffered] = {}
        """Headers of the uploads under way, as recorded."""
        self._missing: dict[int, PushReceived] = {}
        """Facts that the record lacks and that come at an estimated time."""
        self._estimated: set[int] = set()
        if not needed:
            self.other = Verdict(status="not_needed")
        elif len(self._members) < self._round.quorum:
            self.other = Verdict(status="not_opened")
        else:
            self._aim(state)

    def outcome(self, ended_at: float | None = None) -> Outcome:
        """Return what is known when nothing more will be.

        Args:
            ended_at: time of the last event, when the record ends with it before the attempt does. What was
                decided upon that event may be lost; nobody has acted on it then, so it counts for nothing.
        """
        other = self.other or Verdict()
        decided_at = None if other.seconds is None else round_at(self._at + other.seconds)
        if self.recorded is None and self._twin is None and decided_at == ended_at:
            other = Verdict()
        return Outcome(
            seq=self._seq,
            at=self._at,
            step=self.step,
            attempt=self.attempt,
            members=self._members,
            recorded=self.recorded or Verdict(),
            other=other,
            estimated=tuple(sorted(self._estimated)),
        )

    def learn(self, decision: AttemptSealed | AttemptDiscarded, at: float) -> None:
        """Take note of how the attempt ended in the record."""
        verdict = self._verdict(decision, at)
        self.recorded = self.recorded or verdict
        if verdict.reason in _CLOSING and (
            self.other is None or (self.other.status, self.other.seconds) == ("discarded", verdict.seconds)
        ):
            self.other = verdict

    def advance(self, event: Event, before: State, after: State, uploads: Uploads) -> None:
        """Go on over one event of the record, which led from one of its states to another."""
        self._catch_up(event.at, before)
        if (told := self._told(event)) is not None:
            self._tell(told, before)
        if after.current is not before.current:
            for member in self._lost(after):
                left = LearnerLeft(
                    at=event.at, learner=member.learner, generation=member.generation, reason="closed"
                )
                self._tell(left, before)
        if self.other is None and self._excuse(after):
            # Another round of the sweep had to miss somebody, or somebody has answered it again.
            self._tell(GateOpened(at=event.at, step=self.step), after)
        twin, self._twin = self._twin, after.find_gathering(self.step, self.attempt)
        if self.other is None:
            self._expect(event, after, uploads)
            if twin is not self._twin:
                self._aim(after)

    def _catch_up(self, at: float, state: State) -> None:
        """Tell, in the order of their times, deadlines and missing facts that come before the next event."""
        while self.other is None:
            missing = min(self._missing.values(), key=lambda fact: fact.at, default=None)
            timer = self._timer
            if timer is not None and timer.at <= at and (missing is None or timer.at <= missing.at):
                # Late when the record had it as well, until now: there it had not passed yet.
                self._tell(attrs.evolve(timer.event, at=max(timer.at, state.at)), state)
            elif missing is not None and missing.at <= at:
                self._estimated.add(missing.learner)
                self._tell(missing, state)
            else:
                return

    def _told(self, event: Event) -> Event | None:
        """The event as this attempt is to be told of it; None when it does not concern it."""
        if isinstance(event, PushOffered | PushReceived):
            if event.step != self.step or event.attempt < self.attempt:
                return None
            if isinstance(event, PushReceived) and event.learner not in self._round.uploads:
                return None  # under this policy it was not admitted, or has been received before
            return attrs.evolve(event, attempt=self.attempt)
        if isinstance(event, _OF_ATTEMPT):
            concerned = (event.step, event.attempt) == (self.step, self.attempt)
        elif isinstance(event, _OF_MEMBER):
            concerned = event.learner in self._round.members
        else:
            concerned = isinstance(event, _OF_SESSION)
        return event if concerned else None

    def _tell(self, event: Event, around: State) -> None:
        """Step the attempt, within a state of the record."""
        if self.other is not None:
            return
        state, decisions = step(self._within(around, self._round, self._config), event)
        for decision in decisions:
            if isinstance(decision, AttemptSealed | AttemptDiscarded) and decision.step == self.step:
                self.other = self._verdict(decision, event.at)
                return
        round_ = state.find(self.step)
        assert round_ is not None, "an attempt that goes on is there"
        self._round = round_
        for learner in self._offers.keys() - set(round_.uploads):
            del self._offers[learner]
            self._missing.pop(learner, None)
        self._aim(around)

    def _within(self, around: State, round_: Round, config: CoreConfig) -> State:
        """A state of the record with this attempt as its only open round."""
        ending = around.phase in (Phase.DRAINING, Phase.FINALISING)
        return replace(
            around,
            config=config,
            phase=Phase.RUNNING if ending else around.phase,
            step=self.step - 1,
            rounds=(round_,),
        )

    def _aim(self, around: State) -> None:
        """Find the attempt's next deadline."""
        mine = self._deadline(around, self._round, self._config)
        if self._twin is not None:
            # What the record has as well passes when it passed there: a clock is never on the dot.
            mine = None if mine == self._deadline(around, self._twin, self._recorded_config) else mine
        self._timer = mine

    def _deadline(self, around: State, round_: Round, config: CoreConfig) -> Timer | None:
        """The next deadline of the attempt itself."""
        return next_timer(
            replace(
                self._within(around, round_, config),
                blind_until=None,
                budget_deadline=None,
                stop_gather_deadline=None,
                stop_deadline=None,
            )
        )

    def _lost(self, after: State) -> list[Member]:
        """Members that owe an answer here and that the record no longer has."""
        return [
            member
            for learner, member in sorted(self._round.members.items())
            if self._round.owes(learner, member.generation) and after.current.get(learner) != member
        ]

    def _excuse(self, state: State) -> bool:
        """Count the members that this round of a closing sweep does not wait for; True when that changed."""
        excused = 0
        if self._round.sweep and state.sweep_missed:
            excused = sum(
                self._round.owes(learner, member.generation)
                and state.sweep_missed.get(learner) == member.generation
                for learner, member in self._round.members.items()
            )
        if excused == self._round.excused:
            return False
        self._round = replace(self._round, excused=excused)
        return True

    def _expect(self, event: Event, after: State, uploads: Uploads) -> None:
        """See to it that every upload under way is received some day, also if the record gave it up."""
        if isinstance(event, PushOffered) and self._told(event) and event.learner in self._round.uploads:
            self._offers.setdefault(event.learner, event)
        for learner, offer in self._offers.items():
            twin = after.find_gathering(offer.step, offer.attempt)
            if learner not in self._missing and (twin is None or learner not in twin.uploads):
                received = uploads.received(offer, event.at)
                self._missing[learner] = attrs.evolve(received, attempt=self.attempt)

    def _verdict(self, decision: AttemptSealed | AttemptDiscarded, at: float) -> Verdict:
        seconds = round_at(at - self._at)
        if isinstance(decision, AttemptDiscarded):
            return Verdict(status="discarded", seconds=seconds, reason=decision.reason)
        return Verdict(
            status="sealed",
            seconds=seconds,
            weights={part.learner: part.weight for part in decision.responders},
            left_out=decision.left_out,
        )
