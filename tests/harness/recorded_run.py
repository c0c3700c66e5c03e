"""A whole run on a tape without sockets or tensors: the pump in miniature and a world that obeys it.

``Run`` tells the coordinator facts and writes both sides to a tape, as the syncer does. ``Run.play`` lets
obedient learners answer every decision until the session ends, so a test gets a real tape in a
millisecond and spoils it as it likes.
"""

from collections import deque

import attrs

from yeto.core import CoreConfig, Phase, initial_state, next_timer, step
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.values import LedgerEntry, SessionTerms
from yeto.tape import Header, TapeWriter, round_at

TERMS = SessionTerms(dtype="bf16", num_fragments=2, fingerprint="f" * 64, contract="c" * 64)
CONFIG = CoreConfig(num_learners=2, total_steps=6, quorum=2, wait_for=2)
SECONDS = 0.25
"""How long anything takes."""


def generation(learner, dial=1):
    return f"{learner:08x}{dial:08x}"


class Run:
    """One syncer process: a state, a clock and an open tape."""

    def __init__(self, path, config=CONFIG, *, resumed=None):
        self.config = config
        if resumed is None:
            self.at = 0.0
            self.state = initial_state(config)
            header = Header(
                software_version="0.1.0",
                wall_clock="2026-01-02T03:04:05+00:00",
                session_id="5e551011",
                config=config,
            )
            self.writer = TapeWriter.create(path, header)
        else:
            self.writer, tail = TapeWriter.resume(path)
            self.at = tail.last_at
            self.state = initial_state(tail.header.config)
        self.orders = deque()
        """Decisions that nobody has obeyed yet."""
        self.dials = {}
        if resumed is not None:
            self.tell(resumed)

    def tell(self, event, after=SECONDS):
        """Feed an event ``after`` seconds later; return its decisions."""
        self.at = round_at(self.at + after)
        event = attrs.evolve(event, at=self.at)
        seq = self.writer.append_event(event)
        self.state, decisions = step(self.state, event)
        self.writer.append_decisions(decisions, because=seq, at=self.at)
        self.orders.extend(decisions)
        return decisions

    def join(self, *learners):
        for learner in learners:
            self.dials[learner] = self.dials.get(learner, 0) + 1
            who = {"at": 0.0, "learner": learner, "generation": generation(learner, self.dials[learner])}
            self.tell(ev.HelloReceived(**who, address=f"10.0.0.{learner}:40000", terms=TERMS))
            self.tell(ev.LearnerJoined(**who))

    def leave(self, learner, reason="connection closed"):
        gone = generation(learner, self.dials[learner])
        self.tell(ev.LearnerLeft(at=0.0, learner=learner, generation=gone, reason=reason))

    def start(self):
        """Everybody joins and learner 0 initialises."""
        self.join(*range(self.config.num_learners))
        for fragment in range(TERMS.num_fragments):
            self.tell(
                ev.FragmentInitialised(
                    at=0.0,
                    learner=0,
                    generation=generation(0),
                    fragment=fragment,
                    digest=f"{fragment:032x}",
                    finite=True,
                )
            )

    def push(self, opened, member, **changes):
        """Answer an attempt as one of its members."""
        learner = member.learner
        of = {
            "learner": learner,
            "generation": member.generation,
            "fragment": opened.fragment,
            "step": opened.step,
            "attempt": opened.attempt,
            "payload_bytes": 64,
        }
        offer = {
            "base_version": opened.base_version,
            "local_step": 10 * opened.step,
            "c_steps": 10,
            "c_tokens": 100 * (learner + 1),
            **changes,
        }
        if any(
            isinstance(answer, de.PushAdmitted) for answer in self.tell(ev.PushOffered(at=0.0, **of, **offer))
        ):
            self.tell(
                ev.PushReceived(at=0.0, **of, digest="d" * 32, finite=True, norm=0.5, cosine_to_momentum=None)
            )

    def obey(self, order):
        """Do what a decision orders, as a healthy world would."""
        match order:
            case de.AttemptOpened(members=members):
                for member in members:
                    self.push(order, member)
            case de.MergeOrdered(step=step_, attempt=attempt):
                self.tell(
                    ev.MergeFinished(
                        at=0.0,
                        step=step_,
                        attempt=attempt,
                        finite=True,
                        gradient_norm=0.125,
                        corrected=(),
                        seconds=SECONDS,
                        delta_cosine=0.25,
                        norm_ratio=1.25,
                    )
                )
            case de.CommitOrdered(step=step_, attempt=attempt):
                self.tell(
                    ev.OuterStepApplied(
                        at=0.0,
                        step=step_,
                        attempt=attempt,
                        finite=True,
                        params_digest=f"a{step_:031x}",
                        momentum_digest=f"b{step_:031x}",
                        seconds=SECONDS,
                        offset_ratio=0.5,
                    )
                )
            case de.CheckpointOrdered(step=step_):
                self.tell(ev.CheckpointWritten(at=0.0, step=step_, written_bytes=512, seconds=SECONDS))
            case de.FinalCutOrdered(step=step_, to=members):
                for member in members:
                    self.tell(ev.FinalAckReceived(at=0.0, **attrs.asdict(member), step=step_))

    def play(self, until=None):
        """Obey, and wait where nothing was ordered, until ``until(state)`` or the session's end."""
        while not (until or (lambda state: state.phase is Phase.ENDED))(self.state):
            if self.orders:
                self.obey(self.orders.popleft())
            else:
                timer = next_timer(self.state)
                assert timer is not None, "the session waits for ever"
                self.tell(timer.event, after=max(0.0, timer.at - self.at))
        return self

    def resumption(self):
        """Return the event that a start from a checkpoint of the present state begins with."""
        return ev.SessionResumed(
            at=0.0,
            wall_clock="2026-01-02T04:00:00+00:00",
            config=self.config,
            terms=TERMS,
            step=self.state.step,
            fragments=self.state.marks,
            ledger=tuple(LedgerEntry(**attrs.asdict(entry)) for entry in self.state.ledger.values()),
            checkpoint_seq=None,
        )

    def close(self):
        self.writer.close()


def record(path, config=CONFIG, *, make=Run):
    """Record an undisturbed run from the first hello to the end; return its last state."""
    run = make(path, config)
    run.start()
    run.play()
    run.close()
    return run.state


def record_with_restart(path, *, make=Run):
    """Record a run that commits 4 rounds, falls back to step 2 and goes on to the end."""
    run = make(path)
    run.start()
    run.play(until=lambda state: state.step == 2 and state.durable == 2)
    resumption = run.resumption()
    run.play(until=lambda state: state.step == 4)
    run.close()
    run = make(path, resumed=resumption)
    run.dials = {0: 1, 1: 1}
    run.join(0, 1)
    run.play()
    run.close()
    return run.state
