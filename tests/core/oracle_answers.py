"""What a fact itself calls for: a push is admitted or refused, a learner closed, a late timer ignored."""

from __future__ import annotations

from oracle_history import REMEMBERED_GENERATIONS, Thing, grid
from oracle_rounds import Answered, Attempt
from oracle_rules import OPEN_SESSION, Due, Rules

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.values import Member, Responder, SessionTerms, Weighted

TERMS = ("dtype", "num_fragments", "fingerprint", "contract")


class Answers(Rules):
    """Answers facts; nothing has happened yet when it is asked."""

    def answer(self, event: ev.Event) -> Due:
        """What a fact itself calls for."""
        past, phase = self.past, self.past.phase()
        ignored: Due = [de.Ignored(event=event.kind, reason="", why="")]
        if phase == "ended":
            return ignored
        match event:
            case ev.HelloReceived():
                return self.hello(event)
            case ev.LearnerJoined():
                return self.joined(event) if self._is_new(event) else ignored
            case ev.LearnerLeft():
                dial = past.people().newest.get(event.learner)
                if dial is None or dial.generation != event.generation:
                    return ignored
                return self._released(event.learner, event.generation)
            case ev.FragmentInitialised():
                return ignored if phase != "provisional" else self.initialised(event, ignored)
            case ev.PushOffered():
                return self.offered(event)
            case ev.PushReceived():
                return self.received(event)
            case ev.UploadProgress():
                attempt = past.gathering(event.step, event.attempt)
                head = attempt.uploads.get(event.learner) if attempt else None
                return [] if head is not None and head.generation == event.generation else ignored
            case ev.Heartbeat():
                member = Member(learner=event.learner, generation=event.generation)
                report = past.pace().reports.get(member)
                here = past.people().here.get(event.learner) == member
                return [] if here and (report is None or event.local_step > report.local_step) else ignored
            case ev.MergeFinished() | ev.MergeFailed():
                attempt = past.open_attempt(event.step)
                merging = attempt is not None and attempt.status == "merging"
                if not merging or attempt is None or attempt.opened.attempt != event.attempt:
                    return ignored
                if isinstance(event, ev.MergeFailed):
                    return self.discard(attempt, "merge_failed")
                return [] if event.finite else self.discard(attempt, "not_finite")
            case ev.OuterStepApplied():
                attempt = past.open_attempt(event.step)
                assert attempt is not None
                return self.commit(attempt, event) if event.finite else self.discard(attempt, "not_finite")
            case ev.CheckpointWritten():
                return self.written()
            case ev.CheckpointFailed():
                return [self.ended(1)]
            case ev.FinalAckReceived():
                cut = past.cut()
                right = cut is not None and event.step == past.step() and event.learner in cut.sent
                return [] if right and cut is not None and event.learner not in cut.acked else ignored
            case ev.SvdPoolDrained():
                waits = phase in ("budget", "draining") and past.config.svd_pool and not past.is_drained()
                return [] if waits else ignored
            case ev.SvdPoolPoisoned():
                return ignored if phase in ("finalising", "stopping") else [self.ended(1)]
            case ev.BudgetReported():
                return self.reported(event, ignored)
            case ev.StopRequested():
                return self.stop(ignored)
            case _:
                return self.timer(event, ignored)

    def hello(self, event: ev.HelloReceived) -> Due:
        past, people = self.past, self.past.people()
        learner, generation, terms = event.learner, event.generation, event.terms

        def refused(reason: str, field: str | None = None, permanent: bool = True) -> Due:
            return [_refusal(learner, generation, reason, field, permanent)]

        if past.phase() == "stopping":
            return refused("ended", permanent=False)
        if not 0 <= learner < past.config.num_learners:
            return refused("learner_out_of_range")
        if generation in people.used.get(learner, [])[-REMEMBERED_GENERATIONS:]:
            return refused("generation_reused")
        if past.config.num_fragments not in (None, terms.num_fragments) or terms.num_fragments < 1:
            return refused("session_differs", "num_fragments")
        if past.config.require_profile not in (None, terms.profile):
            return refused("session_differs", "profile")
        opens = learner == 0 and past.phase() == "provisional"
        ours = past.terms()
        if ours is not None and not opens and (field := _differs(ours, terms)):
            return refused("session_differs", field, permanent=past.durable() >= 0)
        due: Due = []
        older = people.newest.get(learner)
        if older is not None:
            due.append(_refusal(learner, older.generation, "superseded"))
            due += self._released(learner, older.generation)
        if opens:
            due.append(de.SessionOpened(terms=terms, why=""))
            for other in sorted(set(people.newest) - {0}):
                dial = people.newest[other]
                if field := _differs(terms, dial.terms):
                    due.append(_refusal(other, dial.generation, "session_differs", field, False))
        return due

    def _released(self, learner: int, generation: str) -> Due:
        """A provisional session goes with the generation that fixed it."""
        if learner == 0 and self.past.opener() == generation:
            return [de.SessionReleased(learner=0, generation=generation, why="")]
        return []

    def _is_new(self, event: ev.LearnerJoined) -> bool:
        people = self.past.people()
        dial = people.newest.get(event.learner)
        return dial is not None and dial.generation == event.generation and event.learner not in people.here

    def joined(self, event: ev.LearnerJoined) -> Due:
        past, cut = self.past, self.past.cut()
        member = Member(learner=event.learner, generation=event.generation)
        if cut is not None:
            awaited = cut.awaited | ({event.learner} - cut.acked)
            return [self.final_cut((member,), awaited)]
        return [self.broadcast_of(past.sent(), (member,))] if past.sent() else []

    def initialised(self, event: ev.FragmentInitialised, ignored: Due) -> Due:
        past = self.past
        if event.learner != 0 or event.generation != past.opener():
            return ignored
        if not 0 <= event.fragment < past.num_fragments or event.fragment in past.initial():
            return ignored
        if not event.finite:
            refusal = _refusal(0, event.generation, "init_not_finite")
            return [refusal, *self._released(0, event.generation)]
        complete = len(past.initial()) + 1 == past.num_fragments
        return [self.checkpoint(0)] if complete else []

    def _refused(self, event: ev.PushOffered | ev.PushReceived) -> str | None:
        """Why a push is refused for where it comes from, header and contents alike."""
        attempt = self.past.gathering(event.step, event.attempt)
        if attempt is None or event.fragment != attempt.opened.fragment:
            return "out_of_round"
        member = Member(learner=event.learner, generation=event.generation)
        if attempt.members.get(event.learner) != member:
            return "unexpected_member"
        if event.learner in attempt.declined | attempt.gone:
            return "unexpected_member"
        return None

    def offered(self, event: ev.PushOffered) -> Due:
        config = self.past.config
        reason, declined, resend = self._refused(event), False, False
        attempt = self.past.gathering(event.step, event.attempt)
        staleness = max(attempt.opened.base_version - event.base_version, 0) if attempt else 0
        if reason is None and attempt is not None:
            busy = event.learner in attempt.answers or event.learner in attempt.uploads
            first = event.learner not in attempt.second_chances
            if not config.budget_finish and event.c_steps == config.learner_budget_steps:
                reason = "out_of_round"
            elif event.base_version > attempt.opened.base_version:
                reason, resend, declined = "future_base", first and not busy, not first and not busy
            elif config.max_base_lag is not None and staleness > config.max_base_lag:
                reason, resend, declined = "stale_base", first and not busy, not first and not busy
            elif busy:
                reason = "duplicate"
            elif event.c_steps == 0:
                reason, declined = "no_work", True
        if reason is not None:
            return [_push_refusal(event, reason, declined, resend)]
        return [
            de.PushAdmitted(
                learner=event.learner,
                generation=event.generation,
                step=event.step,
                attempt=event.attempt,
                staleness=staleness,
                why="",
            )
        ]

    def received(self, event: ev.PushReceived) -> Due:
        reason = self._refused(event)
        if reason is not None:
            return [_push_refusal(event, reason)]
        attempt = self.past.gathering(event.step, event.attempt)
        assert attempt is not None
        if event.learner in attempt.answers:
            return [_push_refusal(event, "duplicate")]
        if not event.finite or event.norm is None or not event.norm <= 1e15:
            due: Due = [_push_refusal(event, "non_finite", declined=True)]
            if self._bad_pushes_in_a_row(attempt.uploads[event.learner]) == 3:
                due.append(_refusal(event.learner, event.generation, "non_finite"))
            return due
        due = [
            de.PushAccepted(
                learner=event.learner,
                generation=event.generation,
                step=event.step,
                attempt=event.attempt,
                why="",
            )
        ]
        if len(attempt.answers) + 1 == attempt.opened.quorum:
            due.append(
                de.QuorumReached(
                    step=event.step, attempt=event.attempt, quorum_seconds=self.at - attempt.at, why=""
                )
            )
        return due

    def _bad_pushes_in_a_row(self, head: ev.PushOffered) -> int:
        """How many non-finite pushes this generation sent in a row with this one, one per local step."""
        steps: list[int] = []
        heads: dict[tuple[int, int], int] = {}
        event: Thing | None = None
        for _, thing in self.past.things:
            event = thing if isinstance(thing, ev.Event) else event
            if (getattr(thing, "learner", None), getattr(thing, "generation", None)) != (
                head.learner,
                head.generation,
            ):
                continue
            if isinstance(thing, de.PushAdmitted):
                assert isinstance(event, ev.PushOffered)
                heads[thing.step, thing.attempt] = event.local_step
            elif isinstance(thing, de.PushAccepted):
                steps.clear()
            elif isinstance(thing, de.PushRefused) and thing.reason == "non_finite":
                local_step = heads[thing.step, thing.attempt]
                if local_step not in steps[-1:]:
                    steps.append(local_step)
        return len(steps) + 1 if head.local_step not in steps[-1:] else 0

    def commit(self, attempt: Attempt, event: ev.OuterStepApplied) -> Due:
        past, step, sealed, merged = self.past, attempt.step, attempt.sealed, attempt.merged
        assert sealed is not None
        assert event.params_digest is not None
        assert event.momentum_digest is not None
        no_op = attempt.total_weight == 0
        merge_seconds = 0.0 if merged is None else merged.seconds
        due_checkpoint = past.is_due(step)
        committed = de.RoundCommitted(
            step=step,
            fragment=past.fragment_of(step),
            attempt=attempt.opened.attempt,
            base_version=attempt.opened.base_version,
            version=step,
            quorum=attempt.opened.quorum,
            members=tuple(sorted(attempt.members)),
            responders=tuple(
                self._responder(
                    one,
                    attempt.answers[one.learner],
                    0.0 if no_op else one.weight / attempt.total_weight,
                    merged is not None and one.learner in merged.corrected,
                )
                for one in sealed.responders
            ),
            missed=sealed.missed,
            left_out=sealed.left_out,
            quorum_seconds=attempt.quorum_seconds or 0.0,
            grace_seconds=None if attempt.grace is None else attempt.grace.grace_seconds,
            merge_seconds=merge_seconds,
            sync_seconds=None if due_checkpoint else merge_seconds + (self.at - attempt.commit_ordered_at),
            gradient_norm=0.0 if merged is None else merged.gradient_norm or 0.0,
            params_digest=event.params_digest,
            momentum_digest=event.momentum_digest,
            no_op=no_op,
            delta_cosine=None if merged is None else merged.delta_cosine,
            norm_ratio=None if merged is None else merged.norm_ratio,
            offset_ratio=event.offset_ratio,
            why="",
        )
        if due_checkpoint and step < past.target and past.writing() is None:
            return [committed, self.checkpoint(step)]
        return [committed]

    @staticmethod
    def _responder(one: Weighted, answered: Answered, contribution: float, corrected: bool) -> Responder:
        return Responder(
            learner=one.learner,
            generation=one.generation,
            base_version=answered.head.base_version,
            staleness=one.staleness,
            c_steps=answered.head.c_steps,
            c_tokens=answered.head.c_tokens,
            weight=one.weight,
            contribution=contribution,
            delta_norm=answered.norm,
            cosine_to_momentum=answered.body.cosine_to_momentum,
            corrected=corrected,
        )

    def written(self) -> Due:
        past, due = self.past, Due()
        if not past.sent():
            due.append(self.broadcast_of((0,) * past.num_fragments, past.people().members))
        behind = [t for t in range(past.ordered_checkpoint() + 1, past.step() + 1) if past.is_due(t)]
        if behind and past.step() < past.target:
            due.append(self.checkpoint(past.step()))
        return due

    def reported(self, event: ev.BudgetReported, ignored: Due) -> Due:
        past, config = self.past, self.past.config
        if past.phase() in ("finalising", "stopping"):
            return ignored
        if config.learner_budget_steps is None or config.budget_finish:
            return ignored
        # It may come before all sockets of its connection are there.
        dial = past.people().newest.get(event.learner)
        if dial is None or dial.generation != event.generation:
            return ignored
        if event.local_steps != config.learner_budget_steps:
            refusal = _refusal(event.learner, event.generation, "budget_differs")
            return [refusal, *self._released(event.learner, event.generation)]
        return ignored if event.learner in past.reports() else []

    def stop(self, ignored: Due) -> Due:
        phase = self.past.phase()
        if phase == "stopping":
            return ignored
        if phase == "provisional":
            return [self.ended(4)]
        return [self.ended(3)] if phase == "finalising" else [de.SessionEnding(phase="stop", why="")]

    def timer(self, event: ev.Event, ignored: Due) -> Due:
        """A deadline's event counts when its deadline is there, is this one, and has passed."""
        past, phase, at = self.past, self.past.phase(), self.at
        match event:
            case ev.QuorumDeadlinePassed() if phase in OPEN_SESSION:
                attempt = past.gathering(event.step, event.attempt)
                if attempt is None or at < past.deadline(attempt):
                    return ignored
                below = len(attempt.answers) < attempt.opened.quorum
                return [] if below or past.is_sweep(event.step) else ignored
            case ev.GraceElapsed() if phase in OPEN_SESSION:
                attempt = past.gathering(event.step, event.attempt)
                over = attempt is not None and attempt.grace is not None and at >= attempt.grace.deadline
                return [] if over else ignored
            case ev.RetryDue() if phase == "running":
                attempt = past.open_attempt(event.step)
                if attempt is None or attempt.status != "retry" or attempt.retry_told:
                    return ignored
                assert attempt.discarded is not None
                assert attempt.discarded.retry_at is not None
                mine = attempt.opened.attempt == event.attempt
                return (
                    []
                    if mine and self.waits_to_retry(attempt) and at >= attempt.discarded.retry_at
                    else ignored
                )
            case ev.GateOpened() if phase == "running":
                return (
                    []
                    if self.may_open() and event.step == self.next_round() and at >= past.gate()
                    else ignored
                )
            case ev.FirstEstimateDeadlinePassed() if phase == "running":
                blind_since = past.pace().blind_since
                waits = blind_since is not None and not past.pace().blind_over
                return [] if waits and at >= grid((blind_since or 0.0) + 10.0) else ignored
            case ev.StartTimeoutPassed():
                return self.start_timeout(ignored)
            case ev.FinalAckTimeoutPassed():
                cut = past.cut()
                if cut is None or at < grid(cut.at + past.config.final_ack_timeout_seconds):
                    return ignored
                return [self.ended(3)]
            case ev.StopDeadlinePassed() if phase == "stopping":
                gather, budget = past.stop_deadlines()
                passed = past.times(ev.StopDeadlinePassed)
                if at >= budget and not any(told >= budget for told, _ in passed):
                    return list(self.drop(past.step() + 1, "stopping"))
                return [] if at >= gather and not any(told >= gather for told, _ in passed) else ignored
            case ev.BudgetWaitPassed() if phase in ("waiting", "running", "budget"):
                limit = past.config.start_timeout_seconds
                gone = [since for since in self.awaited_back().values() if at >= grid(since + limit)]
                if not gone:
                    return ignored
                ending = de.SessionEnding(phase="stop", why="")
                return [ending, *self.drop(past.step() + 1, "stopping")]
            case _:
                return ignored

    def start_timeout(self, ignored: Due) -> Due:
        past, deadline = self.past, self.start_deadline()
        if deadline is None or self.at < deadline:
            return ignored
        few = past.phase() == "provisional" or len(past.people().here) < past.quorum
        return [self.ended(1)] if few and past.resumed is None else []


def _refusal(
    learner: int, generation: str, reason: str, field: str | None = None, permanent: bool = True
) -> de.LearnerRefused:
    return de.LearnerRefused(
        learner=learner, generation=generation, reason=reason, field=field, permanent=permanent, why=""
    )


def _push_refusal(
    event: ev.PushOffered | ev.PushReceived, reason: str, declined: bool = False, resend: bool = False
) -> de.PushRefused:
    return de.PushRefused(
        learner=event.learner,
        generation=event.generation,
        fragment=event.fragment,
        step=event.step,
        attempt=event.attempt,
        reason=reason,
        declined=declined,
        resend=resend,
        why="",
    )


def _differs(ours: SessionTerms, theirs: SessionTerms) -> str | None:
    """The first term that differs; a profile counts when both state one."""
    for name in TERMS:
        if getattr(ours, name) != getattr(theirs, name):
            return name
    both = ours.profile is not None and theirs.profile is not None
    return "profile" if both and ours.profile != theirs.profile else None
