"""What must be true of every run, checked after every fact, without the coordinator's own bookkeeping.

The checker knows the rules from the outside: it counts commits, remembers which answers were accepted by
which frozen attempt, adds up the ledger, and holds every decision and state against that. A second
coordinator is fed the tape's lines as they are written and must be in the same state after each fact; after
a crash it is fed what is left of the file, as the next process would read it. All of it is per timeline: a
resume takes the checker back to what it knew at the checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from pathlib import Path
from typing import NoReturn

from attrs import define, field

from yeto.core import CoreConfig, Phase, State
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.parts import Status
from yeto.core.values import LedgerEntry, Member
from yeto.tape import (
    Header,
    Mark,
    Replayer,
    TapeWriter,
    complete_lines,
    find_past,
    open_tape,
    read,
    state_to_json,
)

LINES_KEPT = 60
"""Lines that a failure shows."""
FACTS_PER_BYTES = 64
"""Facts between two comparisons of the states' bytes; the states themselves are compared after each."""
STILL_MAX = 2000
"""Facts at one moment after which the coordinator is taken to be running in circles."""


class InvariantError(AssertionError):
    """A rule was broken."""


@define(eq=False)
class _Attempt:
    opened: de.AttemptOpened
    accepted: dict[int, Member] = field(factory=dict)
    sealed: de.AttemptSealed | None = None
    merging: de.MergeOrdered | None = None


class Invariants:
    """Watches one run; every method raises ``InvariantError`` where a rule is broken."""

    def __init__(self, path: Path) -> None:
        """Watch the run that writes its tape to ``path``."""
        self._path = path
        self.last: deque[bytes] = deque(maxlen=LINES_KEPT)
        """The newest lines of the tape."""
        self.num_facts = 0
        self._lines: list[bytes] = []
        self._still = 0

    # -- the observer's side -------------------------------------------------------------------------

    def began(self, header: Header) -> None:
        """A new tape: nothing that was counted counts."""
        self._lines.clear()
        self._shadow = Replayer(str(self._path))
        self._config: CoreConfig = header.config
        self._at = 0.0
        self._step = 0
        self._num_fragments = 0
        self._versions: list[int] = []
        self._broadcast: list[int] = []
        self._durable = -1
        self._ledger: dict[int, LedgerEntry] = {}
        self._ledgers: dict[int, dict[int, LedgerEntry]] = {}
        """The ledger at each ordered checkpoint's record."""
        self._new_process()

    def _new_process(self) -> None:
        self._attempts: dict[tuple[int, int], _Attempt] = {}
        self._numbers: dict[int, int] = {}
        """The newest attempt of each open round."""
        self._closed = False
        self._awaited: set[int] | None = None
        """Who still owes an ACK of the final cut that this process ordered."""

    def line(self, line: bytes) -> None:
        """A line was appended."""
        self.last.append(line)
        self._lines.append(line)

    def told(self, seq: int, event: ev.Event, decisions: tuple[de.Decision, ...], after: State) -> None:
        """The coordinator was told a fact."""
        self.num_facts += 1
        self._still = self._still + 1 if event.at == self._at else 0
        if self._still > STILL_MAX:
            self._fail(f"{STILL_MAX} facts at {event.at} s: the session runs in circles")
        if event.at < self._at:
            self._fail(f"time went back from {self._at} to {event.at}")
        self._at = event.at
        self._follow(after)
        self._take_event(event, decisions, after)
        for place, decision in enumerate(decisions, seq + 1):
            self._take(decision, place, after)
        self._check_state(after)

    def acted(self, decision: de.Decision, seq: int, durable_seq: int) -> None:
        """A decision that had to be durable first is acted upon."""
        if seq > durable_seq:
            self._fail(f"{decision.kind} in record {seq} was acted upon with {durable_seq} durable")

    def stopped(self, last_seq: int) -> None:
        """The process is gone: what the real reader finds in the file is what counts."""
        copy = self._path.with_name(self._path.name + ".copy")
        shutil.copyfile(self._path, copy)
        writer, tail = TapeWriter.resume(copy)
        writer.close()
        if tail.last_seq != last_seq:
            self._fail(f"the torn tape ends with record {tail.last_seq}, not {last_seq}")
        self._left = copy
        self._shadow = Replayer(str(self._path))
        self._lines.clear()
        with open_tape(copy) as tape:
            for line in complete_lines(tape, str(copy)):
                self._shadow.feed(line)
        if self._shadow.divergence is not None:
            self._fail(f"what is left of the tape does not follow its rules: {self._shadow.divergence}")
        self._acked = self._find_acks(copy)

    def resuming(self, event: ev.SessionResumed, checkpoint: Mark) -> None:
        """A new process goes on from a checkpoint."""
        past = find_past(read(self._left), checkpoint)
        if past is None:
            self._fail(f"the tape does not know the checkpoint of step {checkpoint.step}")
        if (past.checkpoint_seq, past.awaited, past.acked) != (
            event.checkpoint_seq,
            event.awaited,
            event.acked,
        ):
            self._fail(f"resumed with {event}, the tape says {past}")
        step, acked = self._acked
        if step == event.step and not acked <= set(event.acked):
            self._fail(f"learners {sorted(acked)} acknowledged step {step}, resumed with {event.acked}")
        seq = event.checkpoint_seq
        if seq is None or self._ledgers[seq] != {entry.learner: entry for entry in event.ledger}:
            self._fail(f"the ledger of the checkpoint of step {event.step} is not that of its record")
        self._ledger = dict(self._ledgers[seq])
        self._step = self._durable = event.step
        self._config = event.config
        self._at = event.at
        self._num_fragments = event.terms.num_fragments
        self._versions = [mark.version for mark in event.fragments]
        self._broadcast = list(self._versions)
        self._new_process()

    def check_end(self) -> None:
        """The run is over: the whole tape must replay from its bytes."""
        replayer = Replayer(str(self._path))
        with open_tape(self._path) as tape:
            for line in complete_lines(tape, str(self._path)):
                replayer.feed(line)
        if replayer.divergence is not None:
            self._fail(f"the tape does not replay: {replayer.divergence}")
        if _bytes_of(replayer.state) != _bytes_of(self._shadow.state):
            self._fail("the replayed tape ends in another state than its shadow")

    # -- the shadow ----------------------------------------------------------------------------------

    def _follow(self, live: State) -> None:
        for line in self._lines:
            self._shadow.feed(line)
        self._lines.clear()
        if self._shadow.divergence is not None:
            self._fail(f"the tape does not follow its rules: {self._shadow.divergence}")
        if self._shadow.state != live:
            self._fail("the state that the tape gives is not the live one")
        if self.num_facts % FACTS_PER_BYTES == 0 and _bytes_of(self._shadow.state) != _bytes_of(live):
            self._fail("the state that the tape gives has other bytes than the live one")

    # -- facts and decisions -------------------------------------------------------------------------

    def _take_event(self, event: ev.Event, decisions: tuple[de.Decision, ...], after: State) -> None:
        if isinstance(event, ev.CheckpointWritten):
            self._durable = event.step
        elif isinstance(event, ev.FinalAckReceived):
            taken = not any(isinstance(decision, de.Ignored) for decision in decisions)
            if taken and self._awaited is not None:
                self._awaited.discard(event.learner)
        elif isinstance(event, ev.FragmentInitialised) and after.terms is not None:
            self._num_fragments = after.terms.num_fragments
            if not self._versions:
                self._versions = [0] * self._num_fragments
                self._broadcast = [-1] * self._num_fragments

    def _take(self, decision: de.Decision, seq: int, after: State) -> None:
        match decision:
            case de.AttemptOpened():
                self._opened(decision)
            case de.PushAccepted():
                attempt = self._attempt(decision.step, decision.attempt)
                member = Member(learner=decision.learner, generation=decision.generation)
                if member not in attempt.opened.members or decision.learner in attempt.accepted:
                    self._fail(f"{decision} is not of a member that owes an answer")
                attempt.accepted[decision.learner] = member
            case de.GraceOpened():
                if not 0.0 <= decision.grace_seconds <= self._config.grace_cap_seconds:
                    self._fail(f"{decision}: outside of 0 and the cap")
            case de.AttemptSealed():
                self._sealed(decision)
            case de.MergeOrdered():
                attempt = self._attempt(decision.step, decision.attempt)
                if attempt.sealed is None or attempt.sealed.responders != decision.responders:
                    self._fail(f"{decision} merges others than were sealed")
            case de.AttemptDiscarded():
                attempt = self._attempt(decision.step, decision.attempt)
                if decision.lost != tuple(sorted(attempt.accepted)):
                    self._fail(f"{decision} does not name the lost answers {sorted(attempt.accepted)}")
                del self._attempts[decision.step, decision.attempt]
            case de.RoundCommitted():
                self._committed(decision)
            case de.CheckpointOrdered():
                if decision.step != self._step:
                    self._fail(f"{decision} is not of what is committed, {self._step}")
                self._ledgers[seq] = dict(self._ledger)
            case de.BroadcastOrdered():
                self._broadcasts(decision, after.target)
            case de.SessionEnding():
                self._closed = True
            case de.FinalCutOrdered():
                if decision.step != self._step or self._step != after.target or self._durable != self._step:
                    self._fail(f"{decision}: step {self._step} of {after.target}, durable {self._durable}")
                if self._awaited is None:
                    # Later ones are for learners that joined: those are awaited while they stay.
                    self._awaited = set(decision.awaited)
            case de.SessionEnded(exit_code=0):
                if self._awaited:
                    self._fail(f"{decision} while {sorted(self._awaited)} are awaited")
                if self._durable != self._step:
                    self._fail(f"{decision} at step {self._step}, durable is {self._durable}")
            case _:
                pass

    def _opened(self, decision: de.AttemptOpened) -> None:
        step, quorum = decision.step, self._quorum()
        if self._closed:
            self._fail(f"{decision} after the session began to end")
        if decision.fragment != (step - 1) % self._num_fragments:
            self._fail(f"{decision}: fragments take turns")
        if decision.quorum != quorum or len({member.learner for member in decision.members}) < quorum:
            self._fail(f"{decision}: quorum {quorum}")
        if decision.attempt != self._numbers.get(step, 0) + 1:
            self._fail(f"{decision} does not follow attempt {self._numbers.get(step, 0)}")
        if decision.base_version != self._versions[decision.fragment]:
            self._fail(f"{decision}: the fragment is at version {self._versions[decision.fragment]}")
        if self._broadcast[decision.fragment] != self._versions[decision.fragment]:
            self._fail(f"{decision} before the broadcast of version {decision.base_version} was ordered")
        for other in self._attempts.values():
            if other.opened.fragment == decision.fragment:
                self._fail(f"{decision}: {other.opened} is open on this fragment")
        self._numbers[step] = decision.attempt
        self._attempts[step, decision.attempt] = _Attempt(decision)

    def _sealed(self, decision: de.AttemptSealed) -> None:
        attempt = self._attempt(decision.step, decision.attempt)
        if attempt.sealed is not None:
            self._fail(f"{decision}: sealed twice")
        merged = [part.learner for part in decision.responders]
        if merged != sorted(merged):
            self._fail(f"{decision}: not in the order of learners")
        if sorted(merged + list(decision.left_out)) != sorted(attempt.accepted):
            self._fail(f"{decision}: accepted were {sorted(attempt.accepted)}")
        for part in decision.responders:
            member = attempt.accepted[part.learner]
            if member.generation != part.generation:
                self._fail(f"{decision}: {part} is not {member}")
            stale = max(0, attempt.opened.base_version - part.base_version)
            lag = self._config.max_base_lag
            if part.staleness != stale or (lag is not None and stale > lag) or part.c_steps < 1:
                self._fail(f"{decision}: {part} is {stale} steps stale")
        attempt.sealed = decision

    def _committed(self, decision: de.RoundCommitted) -> None:
        attempt = self._attempt(decision.step, decision.attempt)
        sealed = attempt.sealed
        if decision.step != self._step + 1:
            self._fail(f"{decision} does not follow step {self._step}")
        if sealed is None:
            self._fail(f"{decision} was not sealed")
        responders = [(part.learner, part.generation) for part in decision.responders]
        if responders != [(part.learner, part.generation) for part in sealed.responders]:
            self._fail(f"{decision} merges others than were sealed")
        if len(dict(responders)) < self._quorum():
            self._fail(f"{decision} has fewer than {self._quorum()} learners")
        if sorted([*dict(responders), *decision.left_out]) != sorted(attempt.accepted):
            self._fail(f"{decision} loses an answer of {sorted(attempt.accepted)}")
        self._step = decision.step
        self._versions[decision.fragment] = decision.step
        for part in decision.responders:
            entry = self._ledger.get(part.learner)
            self._ledger[part.learner] = LedgerEntry(
                learner=part.learner,
                merges=(entry.merges if entry else 0) + 1,
                c_steps=(entry.c_steps if entry else 0) + part.c_steps,
                c_tokens=(entry.c_tokens if entry else 0) + part.c_tokens,
            )
        del self._attempts[decision.step, decision.attempt]
        del self._numbers[decision.step]

    def _broadcasts(self, decision: de.BroadcastOrdered, target: int) -> None:
        every = self._config.checkpoint_every
        for ref in decision.fragments:
            due = ref.version // every * every if every else 0
            if ref.version == target:
                due = target
            if self._durable < due:
                self._fail(f"{decision} while step {self._durable} is durable and {due} is due")
            if ref.version > self._versions[ref.fragment] or ref.version < self._broadcast[ref.fragment]:
                self._fail(f"{decision}: the fragment is at {self._versions[ref.fragment]}")
            self._broadcast[ref.fragment] = ref.version

    # -- the state -----------------------------------------------------------------------------------

    def _check_state(self, state: State) -> None:
        if state.phase is Phase.ENDED:
            return
        if state.step != self._step or dict(state.ledger) != self._ledger:
            self._fail(f"step {state.step} with ledger {dict(state.ledger)}, expected {self._ledger}")
        if state.versions and list(state.versions) != self._versions:
            self._fail(f"versions {state.versions}, expected {self._versions}")
        for fragment, version in enumerate(state.versions):
            expected = max(range(fragment + 1, self._step + 1, self._num_fragments), default=0)
            if version != expected:
                self._fail(f"fragment {fragment} at version {version}, expected {expected}")
        live = set()
        for place, round_ in enumerate(state.rounds, 1):
            if round_.step != self._step + place:
                self._fail(f"round {round_.step} is open in place {place} behind step {self._step}")
            if round_.status is not Status.RETRY:
                live.add((round_.step, round_.attempt))
        if live != set(self._attempts):
            self._fail(f"open attempts {sorted(live)}, expected {sorted(self._attempts)}")
        if len({round_.fragment for round_ in state.rounds}) < len(state.rounds):
            self._fail(f"two open rounds on one fragment: {state.rounds}")
        if len(state.rounds) > max(1, self._config.pipeline):
            self._fail(f"{len(state.rounds)} open rounds, --pipeline {self._config.pipeline}")

    # -- inside --------------------------------------------------------------------------------------

    def _quorum(self) -> int:
        config = self._config
        return config.num_learners if config.budget_finish else config.quorum

    def _attempt(self, step: int, attempt: int) -> _Attempt:
        found = self._attempts.get((step, attempt))
        if found is None:
            self._fail(f"round {step} attempt {attempt} is not open")
        return found

    @staticmethod
    def _find_acks(path: Path) -> tuple[int, set[int]]:
        """Return the step of the last final cut of a tape and who acknowledged it, read anew."""
        step, acked = -1, set[int]()
        waiting: ev.FinalAckReceived | None = None
        for record in read(path):
            body = record.body
            if waiting is not None:
                if not isinstance(body, de.Ignored):
                    acked.add(waiting.learner)
                waiting = None
            if isinstance(body, ev.FinalAckReceived):
                waiting = body
            elif isinstance(body, de.FinalCutOrdered):
                step = body.step
            elif isinstance(body, de.RoundCommitted) or (
                isinstance(body, ev.SessionResumed) and body.step != step
            ):
                step, acked = -1, set()
        if waiting is not None:
            acked.add(waiting.learner)
        return step, acked

    def _fail(self, what: str) -> NoReturn:
        raise InvariantError(what)


def _bytes_of(state: State) -> bytes:
    return json.dumps(state_to_json(state)).encode()
