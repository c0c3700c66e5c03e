"""What follows from everything that happened about rounds and their pace."""

from __future__ import annotations

import math
from collections.abc import Iterable

from attrs import define, field
from oracle_history import History, People, Thing, grid, question, smooth

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.values import Member

HELD_SECONDS = 65.0
"""An upload holds the quorum deadline for a minute; the word of it may be some seconds late."""


@define
class Answered:
    """An accepted push: its header, its contents, and when it was whole."""

    head: ev.PushOffered
    body: ev.PushReceived
    at: float

    @property
    def norm(self) -> float:
        assert self.body.norm is not None
        return self.body.norm


@define
class Attempt:
    """The newest attempt of a round, read from its opening on."""

    opened: de.AttemptOpened
    at: float
    status: str = "gathering"
    """``gathering``, ``merging``, ``merged``, ``committing``, ``retry`` or ``committed``."""
    members: dict[int, Member] = field(factory=dict)
    answers: dict[int, Answered] = field(factory=dict)
    uploads: dict[int, ev.PushOffered] = field(factory=dict)
    advances: list[float] = field(factory=list)
    """When an upload began or went on."""
    second_chances: set[int] = field(factory=set)
    declined: set[int] = field(factory=set)
    gone: set[int] = field(factory=set)
    """Members whose connection ended while they owed an answer."""
    quorum_seconds: float | None = None
    grace: de.GraceOpened | None = None
    overdue: bool = False
    sealed: de.AttemptSealed | None = None
    merged: ev.MergeFinished | None = None
    commit_ordered_at: float = 0.0
    discarded: de.AttemptDiscarded | None = None
    discarded_at: float = 0.0
    retry_told: bool = False

    @property
    def step(self) -> int:
        return self.opened.step

    @property
    def owing(self) -> set[int]:
        return set(self.members) - set(self.answers) - self.declined - self.gone

    @property
    def total_weight(self) -> float:
        assert self.sealed is not None
        return sum(responder.weight for responder in self.sealed.responders)


@define
class Report:
    """The last advancing report of a connection, and the samples of its step time."""

    at: float
    local_step: int
    xi: float | None = None


@define
class Pace:
    """How fast everybody is, and what the throttle has seen."""

    reports: dict[Member, Report] = field(factory=dict)
    latencies: dict[Member, list[float]] = field(factory=dict)
    latency_then: dict[tuple[int, int, int], float] = field(factory=dict)
    """The smoothed latency of a learner with its answer to (step, attempt, learner)."""
    frozen: set[int] = field(factory=set)
    """Ids last frozen: one that came back counts with the pace of its new connection."""
    last_open: float | None = None
    blind_openings: int = 0
    blind_since: float | None = None
    blind_over: bool = False

    def slowest(self, members: Iterable[Member]) -> float | None:
        """The slowest step among these connections, as far as there are estimates."""
        known = [self.reports[member].xi for member in members if member in self.reports]
        return max((xi for xi in known if xi is not None), default=None)

    @property
    def xi_step(self) -> float | None:
        """What the throttle goes by."""
        return self.slowest(member for member in self.reports if member.learner in self.frozen)

    def look(self) -> None:
        """With an estimate there, the next loss of all of them starts afresh."""
        if self.xi_step is not None:
            self.blind_openings, self.blind_since, self.blind_over = 0, None, False


@define
class Rounds(History):
    """A timeline, asked about its rounds."""

    @question
    def attempts(self) -> dict[int, Attempt]:
        """The newest attempt of each round there was."""
        found: dict[int, Attempt] = {}
        event: Thing | None = None
        for index, at, thing, people in self.story():
            if isinstance(thing, ev.Event):
                event = thing
            step = getattr(thing, "step", None)
            if isinstance(thing, de.AttemptOpened):
                members = {member.learner: member for member in thing.members}
                found[thing.step] = Attempt(thing, at, members=members)
            elif step in found and getattr(thing, "attempt", None) == found[step].opened.attempt:
                self._read(found[step], index, at, thing, event)
            for attempt in found.values():
                if attempt.status == "gathering":
                    self._pass(attempt, at, thing, people)
        return found

    def attempt(self, step: int) -> Attempt | None:
        """The newest attempt of round ``step``; None when there was none."""
        return self.attempts().get(step)

    def _pass(self, attempt: Attempt, at: float, thing: Thing, people: People) -> None:
        """Note what passes around a gathering attempt: members that leave, a stop that takes its time."""
        if isinstance(thing, ev.StopDeadlinePassed) and at >= self.stop_deadlines()[0]:
            attempt.overdue = True
        for learner in attempt.owing:
            if people.here.get(learner) != attempt.members[learner]:
                attempt.gone.add(learner)
                attempt.uploads.pop(learner, None)

    def _read(self, found: Attempt, index: int, at: float, thing: Thing, event: Thing | None) -> None:
        """Take in one thing that is about just this attempt."""
        match thing:
            case de.PushAdmitted():
                assert isinstance(event, ev.PushOffered)
                found.uploads[thing.learner] = event
                found.advances.append(at)
            case ev.UploadProgress():
                if self.was_taken(index):
                    found.advances.append(at)
            case de.PushAccepted():
                assert isinstance(event, ev.PushReceived)
                head = found.uploads.pop(thing.learner)
                found.answers[thing.learner] = Answered(head, event, at)
                if len(found.answers) == found.opened.quorum:
                    found.quorum_seconds = at - found.at
            case de.PushRefused():
                if thing.resend:
                    found.second_chances.add(thing.learner)
                if thing.declined:
                    found.declined.add(thing.learner)
                    found.uploads.pop(thing.learner, None)
            case de.GraceOpened():
                found.grace = thing
            case ev.GraceElapsed() | ev.QuorumDeadlinePassed():
                found.overdue = found.overdue or self.was_taken(index)
            case de.AttemptSealed():
                found.sealed = thing
                found.status = "merging" if found.total_weight > 0 else "merged"
            case ev.MergeFinished(finite=True):
                if found.status == "merging" and self.was_taken(index):
                    found.merged, found.status = thing, "merged"
            case de.CommitOrdered():
                found.commit_ordered_at, found.status = at, "committing"
            case de.AttemptDiscarded():
                found.discarded, found.discarded_at, found.status = thing, at, "retry"
            case ev.RetryDue():
                found.retry_told = found.retry_told or self.was_taken(index)
            case de.RoundCommitted():
                found.status = "committed"
            case _:
                pass

    @question
    def open_attempts(self) -> list[Attempt]:
        """The newest attempts of all open rounds, in ascending step.

        A closing session retries nothing, so there a discarded round is not open any more.
        """
        found: list[Attempt] = []
        step = self.step() + 1
        while (attempt := self.attempt(step)) is not None:
            if attempt.status != "retry" or self.phase() == "running":
                found.append(attempt)
            step += 1
        return found

    def open_attempt(self, step: int) -> Attempt | None:
        return next((attempt for attempt in self.open_attempts() if attempt.step == step), None)

    def gathering(self, step: int, attempt: int) -> Attempt | None:
        found = self.open_attempt(step)
        if found is None or found.status != "gathering" or found.opened.attempt != attempt:
            return None
        return found

    def discards(self, step: int) -> int:
        return len(self.all(de.AttemptDiscarded, step=step))

    def failures(self, step: int) -> int:
        """How often the merge of this round was unusable."""
        return sum(
            discard.reason in ("not_finite", "merge_failed")
            for discard in self.all(de.AttemptDiscarded, step=step)
        )

    def deadline(self, attempt: Attempt) -> float:
        """When the quorum deadline is: an upload that goes on moves it, to four times its length at most."""
        length = self.config.quorum_timeout_seconds
        last = attempt.at + 4 * length
        held = [min(at + HELD_SECONDS, last) for at in attempt.advances]
        return grid(max([attempt.at + length, *held]))

    @question
    def missed_in_sweep(self) -> set[Member]:
        """Members that a sweep round had to miss and that have answered nothing since."""
        missed: set[Member] = set()
        for _, _, thing, _ in self.story():
            if isinstance(thing, de.AttemptSealed) and self.is_sweep(thing.step):
                (opened,) = self.all(de.AttemptOpened, step=thing.step, attempt=thing.attempt)
                missed |= {member for member in opened.members if member.learner in thing.missed}
            elif isinstance(thing, de.PushAccepted):
                missed = {member for member in missed if member.learner != thing.learner}
        return missed

    # Pace.

    @question
    def pace(self) -> Pace:
        pace = Pace()
        opened_at: dict[tuple[int, int], float] = {}
        for index, at, thing, people in self.story():
            match thing:
                case ev.PushOffered() | ev.Heartbeat():
                    member = Member(learner=thing.learner, generation=thing.generation)
                    if people.here.get(thing.learner) == member:
                        self._report(pace, member, at, thing.local_step)
                        pace.look()
                case ev.HelloReceived() | ev.LearnerLeft() | de.LearnerRefused():
                    here = people.members
                    pace.reports = {m: report for m, report in pace.reports.items() if m in here}
                    pace.latencies = {m: samples for m, samples in pace.latencies.items() if m in here}
                case de.AttemptOpened():
                    opened_at[thing.step, thing.attempt] = at
                    if thing.attempt == 1:
                        if self.is_throttled and pace.xi_step is None:
                            pace.blind_openings += 1
                            pace.blind_since = at if pace.blind_since is None else pace.blind_since
                        pace.last_open = at
                    pace.frozen = {member.learner for member in thing.members}
                    pace.look()
                case de.PushAccepted():
                    member = Member(learner=thing.learner, generation=thing.generation)
                    samples = pace.latencies.setdefault(member, [])
                    samples.append(at - opened_at[thing.step, thing.attempt])
                    latency = smooth(samples)
                    assert latency is not None
                    pace.latency_then[thing.step, thing.attempt, thing.learner] = latency
                case ev.FirstEstimateDeadlinePassed():
                    pace.blind_over = pace.blind_over or self.was_taken(index)
        return pace

    @staticmethod
    def _report(pace: Pace, member: Member, at: float, local_step: int) -> None:
        last = pace.reports.get(member)
        if last is None:
            pace.reports[member] = Report(at, local_step)
        elif local_step > last.local_step and at > last.at:
            sample = (at - last.at) / (local_step - last.local_step)
            if last.xi is not None:
                sample = (last.xi + min(sample, 4 * last.xi)) / 2
            pace.reports[member] = Report(at, local_step, sample)

    @question
    def xi_sync(self) -> float | None:
        """Seconds from a merge to the end of its outer step and, where one was due, its checkpoint."""
        samples: list[float] = []
        waiting: dict[int, float] = {}
        ordered: dict[int, float] = {}
        for _, at, thing, _ in self.story():
            if isinstance(thing, de.CommitOrdered):
                ordered[thing.step] = at
            elif isinstance(thing, de.RoundCommitted):
                seconds = thing.merge_seconds + (at - ordered[thing.step])
                if self.is_due(thing.step):
                    waiting[thing.step] = seconds
                else:
                    samples.append(seconds)
            elif isinstance(thing, ev.CheckpointWritten):
                written = [step for step in sorted(waiting) if step <= thing.step]
                samples += [waiting.pop(step) + thing.seconds for step in written]
        return smooth(samples)

    @question
    def gate(self) -> float:
        """From when on the throttle lets the next round open."""
        pace = self.pace()
        xi = pace.xi_step if self.is_throttled else None
        if self.is_throttled and xi is None and pace.blind_openings >= self.depth and not pace.blind_over:
            return math.inf
        if pace.last_open is None:
            return 0.0
        interval = self.config.min_round_interval_seconds
        if xi is not None:
            interval = max(interval, self.config.sync_interval_steps * xi / self.num_fragments)
        return grid(pace.last_open + interval)
