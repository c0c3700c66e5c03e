"""The coordinator's state as its records tell it, without stepping: a shadow.

What the coordinator decided stands on the tape, and is taken from there. What follows from its decisions
without a record of its own (whom it still waits for, which rounds are dropped, when the throttle lets the
next one open) is kept as its rules say, by its own functions where it has some. So the shadow can be turned
into as much of a state as the coordinator's sentence about what it waits for is made of; tests compare both
after every event of the recorded tapes.

Time is O(1) a record but for openings, which are linear in their members; memory is bounded by learners,
fragments and open rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from attrs import evolve
from immutables import Map

from yeto.core import CoreConfig, Phase, State
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.pacing import FIRST_ESTIMATE_SECONDS
from yeto.core.parts import Gated, Status
from yeto.core.state import moment
from yeto.core.values import Member, SessionTerms
from yeto.tape import HEADER_KIND, Header, Item
from yeto.view.open_rounds import OpenRound, OpenRounds
from yeto.view.seats import Seat, Throttle


class Shadow:
    """The fold: feed it every record in order; read its attributes at any time."""

    HANDLERS: ClassVar[Mapping[str, Callable[[Shadow, Item, Any], None]]]
    """What is done with a record of each kind that changes anything here, while the session has not ended."""

    def __init__(self) -> None:
        self.config: CoreConfig | None = None
        self.at = 0.0
        self.phase = Phase.PROVISIONAL
        self.phase_at = 0.0
        self.terms: SessionTerms | None = None
        self.step = 0
        self.target = 0
        self.start_deadline: float | None = None
        self.start_with_quorum = False
        self.strangers: dict[int, str] = {}
        """Learners turned away before the session was sure of itself, with the sentence why."""
        self.initial: set[int] = set()
        self.seats: dict[int, Seat] = {}
        self.current: dict[int, str] = {}
        """Generation of each learner that is connected."""
        self.rounds = OpenRounds()
        self.rested_at = 0.0
        """When the last open round went away."""
        self.throttle = Throttle()
        self.versions: dict[int, int] = {}
        self.broadcast: dict[int, int] = {}
        self.gated: deque[tuple[int, int, int | None]] = deque()
        """Committed rounds without a broadcast so far: step, fragment, and the checkpoint that gates it."""
        self.durable = -1
        self.writing: int | None = None
        self.pool_drained = False
        self.reports: set[int] = set()
        self.awaited: dict[int, bool] = {}
        """Learners whose final ACK is missing; True when awaited only while connected."""
        self.ack_deadline: float | None = None
        self.stop_deadline: float | None = None
        self.exit_code: int | None = None
        self.exit_why = ""
        self._undo: tuple[int, Callable[[], object]] | None = None
        """The last event that may turn out to be refused, and what takes it back."""
        self._stop_seq = -1

    def feed(self, record: Item) -> None:
        """Take the next record."""
        self.at = record.at
        handle = self.HANDLERS.get(record.kind)
        # Facts that come after the end mean nothing any more, but to the next start.
        if handle is not None and (self.phase is not Phase.ENDED or record.kind in AFTER_THE_END):
            handle(self, record, record.body)

    @property
    def num_fragments(self) -> int:
        """P; 0 before the session has terms."""
        return 0 if self.terms is None else self.terms.num_fragments

    @property
    def quorum(self) -> int:
        """K of the next attempt."""
        config = self.config
        if config is None:
            return 0
        return config.num_learners if config.budget_finish else config.quorum

    def seat(self, learner: int) -> Seat:
        """Return what is known of a learner, made on first mention."""
        seat = self.seats.get(learner)
        if seat is None:
            seat = self.seats[learner] = Seat()
        return seat

    def state(self) -> State:
        """Return as much of the coordinator's state as says what it waits for."""
        assert self.config is not None, "the header comes first"
        throttle = self.throttle
        num_fragments = range(self.num_fragments)
        return State(
            config=self.config,
            at=self.at,
            phase=self.phase,
            exit_code=self.exit_code,
            exit_why=self.exit_why,
            terms=self.terms,
            current=_members(self.current),
            strangers=Map(self.strangers),
            initial=Map(dict.fromkeys(self.initial, "")),
            start_deadline=self.start_deadline,
            start_with_quorum=self.start_with_quorum,
            step=self.step,
            target=self.target,
            versions=tuple(self.versions.get(fragment, 0) for fragment in num_fragments),
            broadcast=tuple(self.broadcast.get(fragment, -1) for fragment in num_fragments),
            durable=self.durable,
            gated=tuple(
                Gated(step=step, fragment=fragment, gate=gate, sync_seconds=0.0)
                for step, fragment, gate in self.gated
            ),
            rounds=tuple(round_.as_core() for round_ in self.rounds),
            last_open=throttle.last_open,
            slowest=throttle.slowest(self.seats),
            blind_opened=throttle.blind_opened,
            blind_until=throttle.blind_until,
            blind_over=throttle.blind_over,
            pool_drained=self.pool_drained,
            awaited=Map(self.awaited),
            ack_deadline=self.ack_deadline,
            reports=Map(dict.fromkeys(self.reports, True)),
            stop_deadline=self.stop_deadline,
        )

    def _enter(self, phase: Phase) -> None:
        self.phase, self.phase_at = phase, self.at

    def _configure(self, config: CoreConfig) -> None:
        self.config = config
        self.target = config.total_steps
        for learner in range(config.num_learners):
            self.seat(learner)

    # Who is there.

    def _header(self, record: Item, header: Header) -> None:
        self._configure(header.config)
        self.start_deadline = moment(header.config.start_timeout_seconds)

    def _hello(self, record: Item, hello: ev.HelloReceived) -> None:
        learner, why = hello.learner, self.strangers.pop(hello.learner, None)
        self._undo = None
        if why is not None:
            self._undo = record.seq, lambda: self.strangers.setdefault(learner, why)

    def _joined(self, record: Item, joined: ev.LearnerJoined) -> None:
        learner, generation = joined.learner, joined.generation
        seat = self.seat(learner)
        before, generation_before = evolve(seat), self.current.get(learner)
        if generation_before == generation:
            return
        seat.join(generation, record.at)
        self.current[learner] = generation

        def undo() -> None:
            self.seats[learner] = before
            if generation_before is None:
                self.current.pop(learner, None)
            else:
                self.current[learner] = generation_before

        self._undo = record.seq, undo

    def _left(self, record: Item, left: ev.LearnerLeft) -> None:
        if self.current.get(left.learner) == left.generation:
            self._drop(left.learner, left.generation, "away", left.reason)

    def _drop(self, learner: int, generation: str, link: str, why: str) -> None:
        del self.current[learner]
        self.seat(learner).part(link, self.at, why)
        self.throttle.see(self.seats)
        self.rounds.member_left(learner, generation)
        if self.awaited.get(learner):
            del self.awaited[learner]

    def _refused(self, record: Item, refused: de.LearnerRefused) -> None:
        learner, generation, reason = refused.learner, refused.generation, refused.reason
        if reason != "superseded":  # that one is about the group before the one that said hello
            self._take_back(record)
        if reason == "session_differs" and not refused.permanent:
            self.strangers[learner] = refused.why
        link = "refused" if refused.permanent and reason != "superseded" else "away"
        if reason == "generation_reused":
            pass
        elif self.current.get(learner) == generation:
            self._drop(learner, generation, link, refused.why)
        elif link == "refused" and learner in self.seats and learner not in self.current:
            self.seat(learner).part(link, record.at, refused.why)

    def _ignored(self, record: Item, ignored: de.Ignored) -> None:
        self._take_back(record)

    def _take_back(self, record: Item) -> None:
        """Undo what was taken of an event that this decision says means nothing."""
        undo, self._undo = self._undo, None
        if undo is not None and undo[0] == record.because:
            undo[1]()

    # The session.

    def _opened(self, record: Item, opened: de.SessionOpened) -> None:
        self.terms = opened.terms
        if self.phase is Phase.PROVISIONAL:
            self.strangers.clear()

    def _released(self, record: Item, released: de.SessionReleased) -> None:
        self.terms = None
        self.initial.clear()
        self.phase_at = record.at

    def _initialised(self, record: Item, initialised: ev.FragmentInitialised) -> None:
        fragment = initialised.fragment
        if fragment not in self.initial:
            self.initial.add(fragment)
            self._undo = record.seq, lambda: self.initial.discard(fragment)

    def _started(self, record: Item, started: de.RoundsStarted) -> None:
        self._enter(Phase.RUNNING)
        self.start_deadline = None
        self.strangers.clear()
        self.rested_at = record.at

    def _start_timeout(self, record: Item, passed: ev.StartTimeoutPassed) -> None:
        if self.start_deadline is not None and record.at >= self.start_deadline:
            self.start_deadline, self.start_with_quorum = None, True

    def _resumed(self, record: Item, resumed: ev.SessionResumed) -> None:
        """Begin anew from a checkpoint: of the start before, only who was there stays."""
        config, at, seats = resumed.config, record.at, self.seats
        vars(self).update(vars(Shadow()))
        self.at, self.seats = at, seats
        self._configure(config)
        self._enter(Phase.WAITING)
        self.terms = resumed.terms
        if config.budget_finish:
            target = resumed.finish_target
            self.target = resumed.step + resumed.terms.num_fragments if target is None else target
        else:
            self.start_deadline = moment(at + config.start_timeout_seconds)
        for seat in seats.values():
            if seat.link in ("connected", "away", "released"):
                seat.part("away", at, "the syncer was started again")
        self.step = self.durable = resumed.step
        self.versions = {mark.fragment: mark.version for mark in resumed.fragments}
        self.broadcast = dict(self.versions)
        if resumed.step == self.target:
            self.awaited = dict.fromkeys(resumed.awaited, False)

    def _ending(self, record: Item, ending: de.SessionEnding) -> None:
        phase = {"final": Phase.DRAINING, "budget": Phase.BUDGET}.get(ending.phase, Phase.STOPPING)
        self._enter(phase)
        self.pool_drained = False
        self.start_deadline = None
        if phase is Phase.BUDGET:
            self.rounds.drop_from(self.step + 1)
        elif phase is Phase.STOPPING:
            if record.because == self._stop_seq and self.config is not None:
                self.stop_deadline = moment(record.at + self.config.stop_budget_seconds)
                self.rounds.drop_from_first_retry()
            else:
                self.rounds.drop_from(self.step + 1)

    def _ended(self, record: Item, ended: de.SessionEnded) -> None:
        self._enter(Phase.ENDED)
        self.exit_code, self.exit_why = ended.exit_code, ended.why
        self.rounds.clear()

    def _learner_released(self, record: Item, released: de.LearnerReleased) -> None:
        seat = self.seat(released.learner)
        seat.link, seat.link_since, seat.link_why = "released", record.at, released.why

    def _stop_requested(self, record: Item, requested: ev.StopRequested) -> None:
        self._stop_seq = record.seq

    def _stop_deadline_passed(self, record: Item, passed: ev.StopDeadlinePassed) -> None:
        if self.stop_deadline is not None and record.at >= self.stop_deadline:
            self.stop_deadline = None
            self.rounds.drop_from(self.step + 1)

    def _drained(self, record: Item, drained: ev.SvdPoolDrained) -> None:
        if self.phase in (Phase.BUDGET, Phase.DRAINING):
            self.pool_drained = True

    def _reported(self, record: Item, reported: ev.BudgetReported) -> None:
        learner = reported.learner
        if learner not in self.reports:
            self.reports.add(learner)
            self._undo = record.seq, lambda: self.reports.discard(learner)

    def _cut(self, record: Item, cut: de.FinalCutOrdered) -> None:
        late = self.phase is Phase.FINALISING
        if not late and self.config is not None:
            self._enter(Phase.FINALISING)
            self.ack_deadline = moment(record.at + self.config.final_ack_timeout_seconds)
        before = self.awaited
        self.awaited = {learner: before.get(learner, late) for learner in cut.awaited}

    def _acked(self, record: Item, acked: ev.FinalAckReceived) -> None:
        learner, awaited = acked.learner, self.awaited.pop(acked.learner, None)
        if awaited is not None:
            self._undo = record.seq, lambda: self.awaited.setdefault(learner, awaited)

    # Pushes and rounds.

    def _report(self, learner: int, generation: str, local_step: int) -> None:
        if self.current.get(learner) == generation and self.seats[learner].report(local_step, self.at):
            self.throttle.see(self.seats)

    def _heartbeat(self, record: Item, beat: ev.Heartbeat) -> None:
        self._report(beat.learner, beat.generation, beat.local_step)

    def _offered(self, record: Item, offer: ev.PushOffered) -> None:
        learner = offer.learner
        seat = self.seats.get(learner)
        if seat is None:
            return
        seat.bytes_in += offer.payload_bytes
        if self.current.get(learner) == offer.generation:
            seat.c_steps, seat.c_tokens = offer.c_steps, offer.c_tokens
            if seat.report(offer.local_step, record.at):
                self.throttle.see(self.seats)
        round_ = self.rounds.find_gathering(offer.step, offer.attempt)
        if round_ is not None:
            self._hold(round_, record)

    def _advanced(self, record: Item, progress: ev.UploadProgress) -> None:
        round_ = self.rounds.find_gathering(progress.step, progress.attempt)
        if round_ is not None:
            self._hold(round_, record)

    def _hold(self, round_: OpenRound, record: Item) -> None:
        """Hold a quorum deadline back, unless the next record says that the upload does not count."""
        deadline, seq = round_.deadline, record.seq
        if self.config is not None and round_.hold_deadline(record.at, self.config):
            self._undo = seq, lambda: setattr(round_, "deadline", deadline)

    def _accepted(self, record: Item, accepted: de.PushAccepted) -> None:
        seat = self.seats.get(accepted.learner)
        if seat is not None:
            seat.answered_at = record.at
        round_ = self.rounds.find_gathering(accepted.step, accepted.attempt)
        if round_ is not None:
            round_.answers[accepted.learner] = record.at
            if len(round_.answers) == round_.quorum:
                round_.quorum_at = record.at

    def _push_refused(self, record: Item, refused: de.PushRefused) -> None:
        self._take_back(record)
        self.rounds.refuse(refused)

    def _attempt(self, record: Item, opened: de.AttemptOpened) -> None:
        assert self.config is not None, "the header comes first"
        throttle = self.throttle
        if opened.attempt == 1:
            throttled = self.config.sync_interval_steps > 0.0 and not self.config.budget_finish
            if throttled and throttle.slowest(self.seats) < 0.0:
                throttle.blind_opened += 1
                if throttle.blind_until is None:
                    throttle.blind_until = moment(record.at + FIRST_ESTIMATE_SECONDS)
            throttle.last_open = record.at
        self.rounds.open(opened, record.at)
        throttle.paced = tuple(self.current)
        throttle.see(self.seats)

    def _blind_over(self, record: Item, passed: ev.FirstEstimateDeadlinePassed) -> None:
        throttle = self.throttle
        if throttle.blind_until is not None and record.at >= throttle.blind_until:
            throttle.blind_over = throttle.blind_over or throttle.slowest(self.seats) < 0.0

    def _grace(self, record: Item, grace: de.GraceOpened) -> None:
        round_ = self.rounds.find_gathering(grace.step, grace.attempt)
        if round_ is not None:
            round_.grace_deadline = grace.deadline

    def _sealed(self, record: Item, sealed: de.AttemptSealed) -> None:
        round_ = self.rounds.find_gathering(sealed.step, sealed.attempt)
        if round_ is not None:
            # Without a weight there is nothing to merge, and no order to.
            round_.status = Status.MERGED
            round_.sealed_at = round_.merged_at = record.at

    def _merge_ordered(self, record: Item, ordered: de.MergeOrdered) -> None:
        round_ = self.rounds.find(ordered.step, ordered.attempt)
        if round_ is not None:
            round_.status, round_.merged_at = Status.MERGING, None

    def _merged(self, record: Item, merged: ev.MergeFinished) -> None:
        round_ = self.rounds.find(merged.step, merged.attempt)
        if round_ is not None and round_.status is Status.MERGING and merged.finite:
            round_.status, round_.merged_at = Status.MERGED, record.at

    def _ordered(self, record: Item, ordered: de.CommitOrdered) -> None:
        round_ = self.rounds.find(ordered.step, ordered.attempt)
        if round_ is not None:
            round_.status, round_.ordered_at = Status.COMMITTING, record.at

    def _discarded(self, record: Item, discarded: de.AttemptDiscarded) -> None:
        self.rounds.discard(discarded.step, discarded.attempt, record.at, discarded.retry_at)
        if self.phase in (Phase.STOPPING, Phase.BUDGET):
            self.rounds.drop_from(discarded.step)

    def _committed(self, record: Item, commit: de.RoundCommitted) -> None:
        assert self.config is not None, "the header comes first"
        step = self.step = commit.step
        every = self.config.checkpoint_every
        due = (every > 0 and step % every == 0) or step == self.target
        self.gated.append((step, commit.fragment, step if due else None))
        self.versions[commit.fragment] = step
        self.rounds.pop(step)
        if len(self.rounds) == 0:
            self.rested_at = record.at

    # Checkpoints and broadcasts.

    def _checkpoint_ordered(self, record: Item, ordered: de.CheckpointOrdered) -> None:
        self.writing = ordered.step
        if self.phase is Phase.PROVISIONAL:
            self._enter(Phase.WAITING)
            self.versions = dict.fromkeys(range(self.num_fragments), 0)

    def _checkpoint_written(self, record: Item, written: ev.CheckpointWritten) -> None:
        if self.writing == written.step:
            self.writing = None
            self.durable = written.step

    def _checkpoint_failed(self, record: Item, failed: ev.CheckpointFailed) -> None:
        self.writing = None

    def _broadcast(self, record: Item, ordered: de.BroadcastOrdered) -> None:
        fragments = ordered.fragments
        for ref in fragments:
            self.broadcast[ref.fragment] = ref.version
        # A single fragment may also go to a learner that joined: then it is a version that left before.
        if len(fragments) == 1 and self.gated and self.gated[0][0] == fragments[0].version:
            self.gated.popleft()


def _members(current: dict[int, str]) -> Map[int, Member]:
    return Map(
        {learner: Member(learner=learner, generation=generation) for learner, generation in current.items()}
    )


Shadow.HANDLERS = {
    HEADER_KIND: Shadow._header,
    ev.HelloReceived.kind: Shadow._hello,
    ev.LearnerJoined.kind: Shadow._joined,
    ev.LearnerLeft.kind: Shadow._left,
    ev.FragmentInitialised.kind: Shadow._initialised,
    ev.StartTimeoutPassed.kind: Shadow._start_timeout,
    ev.SessionResumed.kind: Shadow._resumed,
    ev.StopRequested.kind: Shadow._stop_requested,
    ev.StopDeadlinePassed.kind: Shadow._stop_deadline_passed,
    ev.SvdPoolDrained.kind: Shadow._drained,
    ev.BudgetReported.kind: Shadow._reported,
    ev.FinalAckReceived.kind: Shadow._acked,
    ev.Heartbeat.kind: Shadow._heartbeat,
    ev.PushOffered.kind: Shadow._offered,
    ev.UploadProgress.kind: Shadow._advanced,
    ev.FirstEstimateDeadlinePassed.kind: Shadow._blind_over,
    ev.MergeFinished.kind: Shadow._merged,
    ev.CheckpointWritten.kind: Shadow._checkpoint_written,
    ev.CheckpointFailed.kind: Shadow._checkpoint_failed,
    de.SessionOpened.kind: Shadow._opened,
    de.SessionReleased.kind: Shadow._released,
    de.LearnerRefused.kind: Shadow._refused,
    de.Ignored.kind: Shadow._ignored,
    de.RoundsStarted.kind: Shadow._started,
    de.SessionEnding.kind: Shadow._ending,
    de.SessionEnded.kind: Shadow._ended,
    de.LearnerReleased.kind: Shadow._learner_released,
    de.FinalCutOrdered.kind: Shadow._cut,
    de.AttemptOpened.kind: Shadow._attempt,
    de.PushAccepted.kind: Shadow._accepted,
    de.PushRefused.kind: Shadow._push_refused,
    de.GraceOpened.kind: Shadow._grace,
    de.AttemptSealed.kind: Shadow._sealed,
    de.MergeOrdered.kind: Shadow._merge_ordered,
    de.CommitOrdered.kind: Shadow._ordered,
    de.AttemptDiscarded.kind: Shadow._discarded,
    de.RoundCommitted.kind: Shadow._committed,
    de.CheckpointOrdered.kind: Shadow._checkpoint_ordered,
    de.BroadcastOrdered.kind: Shadow._broadcast,
}

AFTER_THE_END = frozenset({ev.SessionResumed.kind, de.LearnerReleased.kind})
"""Kinds that mean something behind the end of a session, too."""
