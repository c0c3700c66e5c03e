"""A shell and a fleet around the coordinator, with everything checked after every single fact.

:class:`Shell` keeps the tape as bytes and does with each fact what the pump does: append it, step, append the
decisions, act. What a decision orders is put where the test can let it happen, late, broken or never;
durable decisions are acted upon only when their record is on the disk, and a crash cuts the tape at any byte
behind that.

After every fact:

* the decisions are those that the oracle finds due, and so are the armed deadlines;
* the old state is what it was, and the new one is the state of a shadow that read the very lines of the
  tape, byte for byte;
* the promises of :mod:`machine_promises` hold.
"""

from __future__ import annotations

import io
import json
import math
from typing import Any

from attrs import evolve, frozen
from core_fleet import terms
from machine_learner import Learner, Work
from machine_promises import Promises
from oracle import Oracle
from oracle_history import Thing

from yeto.core import CoreConfig, State, initial_state, next_timer, step, waiting_for
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.timers import next_deadline
from yeto.core.values import FragmentMark, LedgerEntry, OuterMark, SessionTerms
from yeto.tape import Header, Record, Replayer, complete_lines, encode, state_to_json
from yeto.tape.past import Mark, find_past


@frozen(kw_only=True)
class Saved:
    """A checkpoint: what the shell put into it when it was ordered."""

    step: int
    terms: SessionTerms
    marks: tuple[FragmentMark, ...]
    ledger: tuple[LedgerEntry, ...]
    outer_marks: tuple[OuterMark, ...] | None
    finish_target: int | None
    seq: int


@frozen(kw_only=True)
class Upload:
    """An admitted push on its way."""

    learner: int
    generation: str
    fragment: int
    step: int
    attempt: int


class Shell:
    """One run: processes of a syncer that come and go around one tape and one checkpoint folder."""

    def __init__(self, config: CoreConfig, num_fragments: int) -> None:
        self.config = config
        self.terms = terms(num_fragments)
        self.at = 0.0
        self.learners = [Learner(number, num_fragments) for number in range(config.num_learners)]
        self.is_whole = True
        """False once a fact was not worked in as it should be."""
        self.begin_tape()

    def begin_tape(self) -> None:
        """A fresh start: no checkpoint, a tape with nothing but its header."""
        self.at = 0.0
        self.state: State = initial_state(self.config)
        self.oracle = Oracle(self.config)
        self.promises = Promises()
        self.lines: list[bytes] = []
        self.records: list[Record] = []
        self.replayer = Replayer("events.jsonl")
        self.saved: dict[int, Saved] = {}
        header = Header(
            software_version="0", wall_clock="2030-01-01T00:00:00+00:00", session_id="0", config=self.config
        )
        self._append(header, None)
        self.durable = 1
        """Records that are on the disk."""
        self.forget_orders()

    def forget_orders(self) -> None:
        """A new process: nothing is under way."""
        self.uploads: list[Upload] = []
        self.merges: list[de.MergeOrdered] = []
        self.old_merges: list[de.MergeOrdered] = []
        self.outers: list[tuple[int, de.CommitOrdered]] = []
        self.writing: Saved | None = None
        self.outgoing: list[tuple[int, de.Decision]] = []
        self.lefts: list[tuple[int, str]] = []
        self.inits: list[tuple[str, int]] = []
        self.works: dict[tuple[int, int, int], Work] = {}
        self.digests: dict[tuple[int, int], str] = {}
        for learner in self.learners:
            learner.hang_up()

    # Telling.

    def wait(self, seconds: float) -> None:
        self.at = round(self.at + seconds, 6)

    def tell(self, kind: type[ev.Event], **fields: Any) -> tuple[de.Decision, ...]:
        return self.feed(kind(at=self.at, **fields))

    def feed(self, event: ev.Event) -> tuple[de.Decision, ...]:
        """Append, step, append, check everything, act."""
        self.is_whole = False
        before, shadow = self.state, self.replayer.state
        seq = len(self.lines)
        self._append(event, None)
        self.state, decisions = step(before, event)
        assert before == shadow, "an old state stays as it was"
        self.oracle.judge(event, decisions)
        for decision in decisions:
            self._append(decision, seq)
        assert self.replayer.divergence is None
        assert self.replayer.due == 0
        self._check_shadow(before, shadow)
        self._check_deadlines()
        self.promises.check(event, decisions, self.state, self.config)
        line = waiting_for(self.state, self.at)
        assert "\n" not in line
        for place, decision in enumerate(decisions, start=1):
            self._obey(seq + place, decision)
        self.is_whole = True
        return decisions

    def _append(self, body: Thing | Header, because: int | None) -> None:
        line = encode(seq=len(self.lines), at=self.at, body=body, because=because)
        self.lines.append(line)
        self.records.append(self.replayer.feed(line))

    def _check_shadow(self, before: State, shadow: State) -> None:
        """The shadow's state is the coordinator's, byte for byte.

        A field that is the very object that it was before, on both sides, was compared before.
        """
        mine, theirs = vars(self.state), vars(self.replayer.state)
        was_mine, was_theirs = vars(before), vars(shadow)
        names = [
            name for name in mine if mine[name] is not was_mine[name] or theirs[name] is not was_theirs[name]
        ]
        assert mine.keys() == theirs.keys()
        assert as_json(mine, names) == as_json(theirs, names), "the tape tells this very state"

    def _check_deadlines(self) -> None:
        """The next timer is the earliest deadline that the oracle knows of.

        Only the look at absent learners may come sooner than it must: it is armed when somebody leaves, and
        whether that learner came back is found when it fires.
        """
        timer = next_timer(self.state)
        armed = self.oracle.deadlines()
        assert timer is None or math.isfinite(timer.at)
        assert next_deadline(self.state) == (math.inf if timer is None else timer.at)
        if timer is not None and isinstance(timer.event, ev.BudgetWaitPassed):
            armed.append(timer.event)
        if timer is None:
            assert not armed, f"no timer is set for {armed}"
            return
        earliest = min((event.at for event in armed), default=math.inf)
        assert abs(timer.at - earliest) < 2e-6, f"{timer} is set; the rules arm {armed}"
        there = [evolve(event, at=timer.at) for event in armed if event.at - earliest < 2e-6]
        assert evolve(timer.event, at=timer.at) in there, f"{timer} is set; the rules arm {armed}"

    # Obeying.

    def _obey(self, seq: int, decision: de.Decision) -> None:
        match decision:
            case de.AttemptOpened():
                for member in decision.members:
                    self.learners[member.learner].pull(decision.fragment, decision.step, decision.attempt)
            case de.PushRefused(resend=True):
                self._repeat(decision)
            case de.PushAdmitted():
                self.uploads.append(
                    Upload(
                        learner=decision.learner,
                        generation=decision.generation,
                        fragment=self.oracle.past.fragment_of(decision.step),
                        step=decision.step,
                        attempt=decision.attempt,
                    )
                )
            case de.MergeOrdered():
                self.merges.append(decision)
            case de.AttemptDiscarded():
                self.old_merges += [order for order in self.merges if order.step == decision.step]
                self.merges = [order for order in self.merges if order.step != decision.step]
            case de.CommitOrdered():
                self.outers.append((seq, decision))
            case de.RoundCommitted():
                self.digests[decision.fragment, decision.version] = decision.params_digest
            case de.CheckpointOrdered():
                for mark in self.state.marks:
                    self.digests[mark.fragment, mark.version] = mark.params_digest
                assert self.state.terms is not None
                self.writing = Saved(
                    step=decision.step,
                    terms=self.state.terms,
                    marks=self.state.marks,
                    ledger=tuple(self.oracle.past.ledger().values()),
                    # Some are by a Yeto that did not count these yet.
                    outer_marks=None if decision.step % 4 == 3 else self.oracle.past.outer_marks(),
                    finish_target=decision.finish_target,
                    seq=seq,
                )
            case de.BroadcastOrdered() | de.FinalCutOrdered():
                self.outgoing.append((seq, decision))
            case de.LearnerRefused():
                self._cut_off(decision)
            case _:
                pass

    def _repeat(self, refusal: de.PushRefused) -> None:
        learner = self.learners[refusal.learner]
        if learner.is_joined and learner.generation == refusal.generation:
            version = self.state.broadcast[refusal.fragment]
            learner.send(refusal.fragment, version, self.digest(refusal.fragment, version))
            learner.pull(refusal.fragment, refusal.step, refusal.attempt)

    def _cut_off(self, refusal: de.LearnerRefused) -> None:
        """The shell closes the group; that it is gone is told later, as of any other."""
        if refusal.reason == "generation_reused" or refusal.learner >= len(self.learners):
            return
        self.lefts.append((refusal.learner, refusal.generation))
        learner = self.learners[refusal.learner]
        if learner.generation == refusal.generation:
            learner.hang_up()
            learner.was_refused = refusal.permanent

    def digest(self, fragment: int, version: int) -> str:
        """The digest of a fragment at a version of this timeline."""
        return self.digests[fragment, version]

    def sync_to(self, seq: int) -> None:
        """The writer thread has come to record ``seq``."""
        self.durable = max(self.durable, seq + 1)

    def put_on_disk(self, saved: Saved) -> None:
        """A checkpoint is there; it is written when the record that ordered it is durable."""
        self.sync_to(saved.seq)
        self.saved[saved.step] = saved

    # Dying and starting again.

    def crash(self, cut: int, *, checkpoint_survives: bool) -> None:
        """The process dies: of what was not durable, any part is left, and the last record may be torn.

        Args:
            cut: how many bytes behind the durable prefix are left (of those there are).
            checkpoint_survives: whether a checkpoint that was being written is on the disk.
        """
        if self.writing is not None and checkpoint_survives:
            self.put_on_disk(self.writing)
        whole = b"".join(self.lines)
        kept = len(b"".join(self.lines[: self.durable]))
        kept += cut % (len(whole) - kept + 1)
        self.lines = list(complete_lines(io.BytesIO(whole[:kept]), "events.jsonl"))
        self.durable = len(self.lines)
        self.replayer = Replayer("events.jsonl")
        self.records = [self.replayer.feed(line) for line in self.lines]
        assert self.replayer.divergence is None
        self.state, self.at = self.replayer.state, self.records[-1].at
        self.forget_orders()

    def start_again(self, fall_back: int, **changes: Any) -> None:
        """Start from the newest checkpoint, or from the one before; without any, start afresh."""
        steps = sorted(self.saved)
        if not steps:
            self.begin_tape()
            return
        saved = self.saved[steps[-1 - min(fall_back, len(steps) - 1)]]
        self.saved = {step_: kept for step_, kept in self.saved.items() if step_ <= saved.step}
        quorum = min(changes.pop("quorum", self.config.quorum), self.config.num_learners)
        config = evolve(self.config, quorum=quorum, wait_for=quorum, **changes)
        if not config.budget_finish:
            config = evolve(config, total_steps=max(config.total_steps, saved.step))
        self.config = config
        self.promises.resume(saved.step)
        self.digests = {(mark.fragment, mark.version): mark.params_digest for mark in saved.marks}
        self.feed(self.resumed(saved, config))

    def resumed(self, saved: Saved, config: CoreConfig) -> ev.SessionResumed:
        digests = {mark.fragment: mark.params_digest for mark in saved.marks}
        past = find_past(self.records, Mark(step=saved.step, digests=digests, seq=saved.seq))
        assert past is not None, "it is the tape of this checkpoint"
        return ev.SessionResumed(
            at=self.at,
            wall_clock="2030-01-02T00:00:00+00:00",
            config=config,
            terms=saved.terms,
            step=saved.step,
            fragments=saved.marks,
            ledger=saved.ledger,
            outer_marks=saved.outer_marks,
            checkpoint_seq=past.checkpoint_seq,
            awaited=past.awaited,
            acked=past.acked,
            finish_target=saved.finish_target,
        )


@frozen
class Fields:
    """Some fields of a state."""

    fields: dict[str, Any]


def as_json(fields: dict[str, Any], names: list[str]) -> str:
    return json.dumps(state_to_json(Fields({name: fields[name] for name in names})))
