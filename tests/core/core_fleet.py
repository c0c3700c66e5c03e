"""A driver for tests: a session that is told facts, and the world that obeys its decisions.

:class:`Session` keeps a state, feeds events in time order and records every decision. Its helpers say
what learners and the shell would say, so that a test reads as the story it tells.
"""

from __future__ import annotations

from typing import Any, TypeVar

from attrs import evolve

from yeto.core import CoreConfig, State, initial_state, next_timer, step
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.resume import version_at
from yeto.core.values import FragmentMark, SessionTerms

D = TypeVar("D", bound=de.Decision)


def config(**changes: Any) -> CoreConfig:
    """Two learners, both needed, no throttle and no sweep: the plain path unless a test asks for more."""
    settings: dict[str, Any] = {
        "num_learners": 2,
        "total_steps": 100,
        "quorum": 2,
        "wait_for": 2,
        "sync_interval_steps": 0.0,
        "closing_sweep": "off",
    }
    settings.update(changes)
    if "quorum" in changes and "wait_for" not in changes:
        settings["wait_for"] = max(settings["quorum"], min(2, settings["num_learners"]))
    return CoreConfig(**settings)


def terms(num_fragments: int = 2, **changes: Any) -> SessionTerms:
    return evolve(
        SessionTerms(dtype="bf16", num_fragments=num_fragments, fingerprint="f" * 64, contract="c" * 64),
        **changes,
    )


def generation(learner: int, dial: int = 1) -> str:
    return f"{learner:08x}{dial:08x}"


class Session:
    """A state with a clock, a tape and words for what happens."""

    def __init__(self, settings: CoreConfig | None = None, *, num_fragments: int = 2) -> None:
        self.config = settings or config()
        self.state: State = initial_state(self.config)
        self.terms = terms(num_fragments)
        self.at = 0.0
        self.events: list[ev.Event] = []
        self.decisions: list[de.Decision] = []
        self.last: tuple[de.Decision, ...] = ()
        self.dials: dict[int, int] = {}
        self.local_steps: dict[int, int] = {}

    # Telling and asking.

    def tell(self, kind: type[ev.Event], **fields: Any) -> tuple[de.Decision, ...]:
        return self.feed(kind(at=self.at, **fields))

    def feed(self, event: ev.Event) -> tuple[de.Decision, ...]:
        self.state, self.last = step(self.state, event)
        self.events.append(event)
        self.decisions.extend(self.last)
        return self.last

    def pick(self, kind: type[D]) -> list[D]:
        """Decisions of this kind that the last event caused."""
        return [decision for decision in self.last if isinstance(decision, kind)]

    def only(self, kind: type[D]) -> D:
        (found,) = self.pick(kind)
        return found

    def all(self, kind: type[D]) -> list[D]:
        return [decision for decision in self.decisions if isinstance(decision, kind)]

    def wait(self, seconds: float) -> None:
        self.at = round(self.at + seconds, 6)

    def fire(self) -> tuple[de.Decision, ...]:
        """Sleep until the next deadline and feed its event."""
        timer = next_timer(self.state)
        assert timer is not None, "no deadline is armed"
        self.at = max(self.at, timer.at)
        return self.feed(evolve(timer.event, at=self.at))

    # Learners.

    def gen(self, learner: int) -> str:
        return generation(learner, self.dials.get(learner, 0))

    def hello(self, learner: int, **changes: Any) -> tuple[de.Decision, ...]:
        self.dials[learner] = self.dials.get(learner, 0) + 1
        return self.tell(
            ev.HelloReceived,
            learner=learner,
            generation=self.gen(learner),
            address=f"10.0.0.{learner}:5000",
            terms=evolve(self.terms, **changes),
        )

    def join(self, learner: int) -> tuple[de.Decision, ...]:
        self.hello(learner)
        return self.tell(ev.LearnerJoined, learner=learner, generation=self.gen(learner))

    def leave(self, learner: int) -> tuple[de.Decision, ...]:
        return self.tell(ev.LearnerLeft, learner=learner, generation=self.gen(learner), reason="EOF")

    def initialise(self, fragments: int | None = None) -> None:
        for fragment in range(self.terms.num_fragments if fragments is None else fragments):
            self.tell(
                ev.FragmentInitialised,
                learner=0,
                generation=self.gen(0),
                fragment=fragment,
                digest=f"{fragment:032x}",
                finite=True,
            )

    def written(self, step_: int, seconds: float = 0.0) -> tuple[de.Decision, ...]:
        return self.tell(ev.CheckpointWritten, step=step_, written_bytes=100, seconds=seconds)

    def start(self, learners: int | None = None) -> None:
        """Everybody joins, learner 0 initialises, step 0 is durable."""
        for learner in range(self.config.num_learners if learners is None else learners):
            self.join(learner)
        self.initialise()
        self.written(0)

    # Rounds.

    def offer(self, learner: int, step_: int, attempt: int = 1, **changes: Any) -> tuple[de.Decision, ...]:
        round_ = self.state.find(step_)
        self.local_steps[learner] = self.local_steps.get(learner, 0) + 1
        fields: dict[str, Any] = {
            "learner": learner,
            "generation": self.gen(learner),
            "fragment": (step_ - 1) % self.terms.num_fragments,
            "step": step_,
            "attempt": attempt,
            "base_version": round_.base_version if round_ else 0,
            "local_step": self.local_steps[learner],
            "c_steps": 10,
            "c_tokens": 100,
            "payload_bytes": 64,
        }
        fields.update(changes)
        return self.tell(ev.PushOffered, **fields)

    def receive(self, learner: int, step_: int, attempt: int = 1, **changes: Any) -> tuple[de.Decision, ...]:
        fields: dict[str, Any] = {
            "learner": learner,
            "generation": self.gen(learner),
            "fragment": (step_ - 1) % self.terms.num_fragments,
            "step": step_,
            "attempt": attempt,
            "payload_bytes": 64,
            "digest": "d" * 32,
            "finite": True,
            "norm": 1.0,
            "cosine_to_momentum": None,
        }
        fields.update(changes)
        return self.tell(ev.PushReceived, **fields)

    def push(self, learner: int, step_: int, attempt: int = 1, **changes: Any) -> tuple[de.Decision, ...]:
        """Offer and deliver; changes of the header only."""
        self.offer(learner, step_, attempt, **changes)
        return self.receive(learner, step_, attempt)

    def merged(self, step_: int, attempt: int = 1, **changes: Any) -> tuple[de.Decision, ...]:
        fields: dict[str, Any] = {"finite": True, "gradient_norm": 0.5, "corrected": (), "seconds": 0.0}
        fields.update(changes)
        return self.tell(ev.MergeFinished, step=step_, attempt=attempt, **fields)

    def applied(
        self, step_: int, attempt: int = 1, *, finite: bool = True, offset_ratio: float | None = None
    ) -> tuple[de.Decision, ...]:
        return self.tell(
            ev.OuterStepApplied,
            step=step_,
            attempt=attempt,
            finite=finite,
            params_digest=f"{step_:032x}" if finite else None,
            momentum_digest=f"{step_:032x}" if finite else None,
            seconds=0.0,
            offset_ratio=offset_ratio,
        )

    def commit(self, step_: int, learners: tuple[int, ...] | None = None, *, write: bool = True) -> None:
        """A whole round: pushes, merge, outer step, checkpoint."""
        for learner in range(self.config.num_learners) if learners is None else learners:
            self.push(learner, step_)
        self.finish(step_, write=write)

    def finish(self, step_: int, attempt: int = 1, *, write: bool = True) -> None:
        """From the seal to the durable checkpoint."""
        self.merged(step_, attempt)
        self.applied(step_, attempt)
        if write and self.state.writing is not None:
            self.written(self.state.writing)

    def ack(self, learner: int) -> tuple[de.Decision, ...]:
        return self.tell(
            ev.FinalAckReceived, learner=learner, generation=self.gen(learner), step=self.state.step
        )


def resumed(session: Session, step_: int, **changes: Any) -> ev.SessionResumed:
    """A resume of ``session``'s terms at ``step_``."""
    num_fragments = session.terms.num_fragments
    fields: dict[str, Any] = {
        "at": session.at,
        "wall_clock": "2030-01-01T00:00:00Z",
        "config": session.config,
        "terms": session.terms,
        "step": step_,
        "fragments": tuple(
            FragmentMark(
                fragment=p,
                version=version_at(step_, p, num_fragments),
                params_digest=f"{p:032x}",
                momentum_digest=f"{p:032x}",
            )
            for p in range(num_fragments)
        ),
        "ledger": (),
        "checkpoint_seq": None,
    }
    fields.update(changes)
    return ev.SessionResumed(**fields)
