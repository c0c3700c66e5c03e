"""A fleet made of delays: the stream of events that a healthy run tells its coordinator.

Learners train at slightly different speeds, beat, answer each pull within a step and an upload, now and then
lose their connection and come back; merges, outer steps and checkpoints take their time. Everything follows
from a seed, so two runs give the same stream. There are neither sockets nor tensors: what is left is exactly
the coordinator's share of the work.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from itertools import count
from typing import Any

from attrs import evolve

from yeto.core import CoreConfig, Phase, State, initial_state, next_timer, step
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.values import SessionTerms
from yeto.tape import round_at

HEARTBEAT_SECONDS = 5.0
TOKENS_PER_STEP = 4096
MERGE_SECONDS, OUTER_SECONDS, WRITE_SECONDS = 0.2, 0.05, 0.1
UPLOAD_SECONDS = 0.5
AWAY_SECONDS = 20.0

Told = tuple[State, ev.Event, tuple[de.Decision, ...]]
"""The state that an event met, the event, and what was decided."""


class Fleet:
    """One run, told event by event.

    Args:
        config: the coordinator's settings.
        num_fragments: P.
        step_seconds: an inner step of learner 0; the last learner is a quarter slower.
        beating: whether learners send heartbeats.
        lives_seconds: mean time until a learner other than 0 loses its connection; None for never.
    """

    def __init__(
        self,
        config: CoreConfig,
        *,
        num_fragments: int,
        step_seconds: float = 1.0,
        beating: bool = True,
        lives_seconds: float | None = None,
    ) -> None:
        self.config = config
        self._terms = SessionTerms(
            dtype="bf16", num_fragments=num_fragments, fingerprint="f" * 64, contract="c" * 64
        )
        self._step_seconds = step_seconds
        self._beating = beating
        self._lives_seconds = lives_seconds
        self._rng = random.Random(0)
        self._state = initial_state(config)
        self._dials: dict[int, int] = {}
        self._reported: dict[int, int] = {}
        """Local step that each learner last stated."""
        self._due: list[tuple[float, int, ev.Event]] = []
        self._order = count()

    def run(self) -> Iterator[Told]:
        """Yield everything the coordinator is told, until the session ends."""
        for learner in range(self.config.num_learners):
            self._dial(learner, 0.001 * learner)
        at = 0.001 * self.config.num_learners
        for fragment in range(self._terms.num_fragments):
            self._plan(
                at + 0.01 * fragment,
                ev.FragmentInitialised,
                **self._who(0),
                fragment=fragment,
                digest=f"{fragment:032x}",
                finite=True,
            )
        while self._state.phase is not Phase.ENDED:
            event = self._next()
            if self._is_gone(event):
                continue
            self._follow(event)
            if not self._is_news(event):
                continue
            met = self._state
            self._state, decisions = step(met, event)
            for decision in decisions:
                self._obey(decision)
            yield met, event, decisions

    def _next(self) -> ev.Event:
        """Take what happens first: a planned fact, or the coordinator's own deadline."""
        timer = next_timer(self._state)
        if timer is not None and (not self._due or timer.at <= self._due[0][0]):
            return evolve(timer.event, at=max(timer.at, self._state.at))
        return heapq.heappop(self._due)[2]

    def _plan(self, at: float, kind: type[ev.Event], **fields: Any) -> None:
        event = kind(at=round_at(at), **fields)
        heapq.heappush(self._due, (event.at, next(self._order), event))

    def _who(self, learner: int) -> dict[str, Any]:
        return {"learner": learner, "generation": self._generation(learner)}

    def _generation(self, learner: int) -> str:
        return f"{learner:08x}{self._dials[learner]:08x}"

    def _is_gone(self, event: ev.Event) -> bool:
        """Whether the connection that would have told this has ended by now."""
        match event:
            case ev.PushOffered() | ev.PushReceived() | ev.Heartbeat() | ev.LearnerLeft():
                return event.generation != self._generation(event.learner)
        return False

    def _is_news(self, event: ev.Event) -> bool:
        """Whether the syncer tells this: a heartbeat only when the learner's step advanced."""
        if not isinstance(event, ev.Heartbeat | ev.PushOffered):
            return True
        advanced = event.local_step > self._reported.get(event.learner, 0)
        self._reported[event.learner] = event.local_step
        return advanced or isinstance(event, ev.PushOffered)

    def _steps_done(self, learner: int, at: float) -> int:
        slowness = 1.0 + 0.25 * learner / self.config.num_learners
        return int(at / (self._step_seconds * slowness))

    def _dial(self, learner: int, at: float) -> None:
        self._dials[learner] = self._dials.get(learner, 0) + 1
        self._plan(
            at, ev.HelloReceived, **self._who(learner), address=f"10.0.0.{learner}:40000", terms=self._terms
        )
        self._plan(at + 0.0005, ev.LearnerJoined, **self._who(learner))
        if self._beating:
            self._plan_heartbeat(learner, at + HEARTBEAT_SECONDS)
        if self._lives_seconds is not None and learner != 0:
            lives = self._rng.expovariate(1.0 / self._lives_seconds)
            self._plan(
                at + lives, ev.LearnerLeft, **self._who(learner), reason="the peer closed the connection"
            )

    def _plan_heartbeat(self, learner: int, at: float) -> None:
        self._plan(at, ev.Heartbeat, **self._who(learner), local_step=self._steps_done(learner, at))

    def _follow(self, event: ev.Event) -> None:
        """Plan what a fact brings about without the coordinator's doing."""
        if isinstance(event, ev.Heartbeat):
            self._plan_heartbeat(event.learner, event.at + HEARTBEAT_SECONDS)
        elif isinstance(event, ev.LearnerLeft):
            self._dial(event.learner, event.at + AWAY_SECONDS)

    def _obey(self, order: de.Decision) -> None:
        at = self._state.at
        match order:
            case de.AttemptOpened(members=members):
                for member in members:
                    self._offer(member.learner, order)
            case de.PushAdmitted(learner=learner, step=number, attempt=attempt):
                self._plan(
                    at + UPLOAD_SECONDS,
                    ev.PushReceived,
                    **self._who(learner),
                    fragment=(number - 1) % self._terms.num_fragments,
                    step=number,
                    attempt=attempt,
                    payload_bytes=1 << 20,
                    digest=f"{number:024x}{learner:08x}",
                    finite=True,
                    norm=self._rng.uniform(0.5, 2.0),
                    cosine_to_momentum=self._rng.uniform(-0.5, 0.9),
                )
            case de.MergeOrdered(step=number, attempt=attempt):
                self._plan(
                    at + MERGE_SECONDS,
                    ev.MergeFinished,
                    step=number,
                    attempt=attempt,
                    finite=True,
                    gradient_norm=self._rng.uniform(0.5, 2.0),
                    corrected=(),
                    seconds=MERGE_SECONDS,
                )
            case de.CommitOrdered(step=number, attempt=attempt):
                self._plan(
                    at + OUTER_SECONDS,
                    ev.OuterStepApplied,
                    step=number,
                    attempt=attempt,
                    finite=True,
                    params_digest=f"a{number:031x}",
                    momentum_digest=f"b{number:031x}",
                    seconds=OUTER_SECONDS,
                )
            case de.CheckpointOrdered(step=number):
                self._plan(
                    at + WRITE_SECONDS,
                    ev.CheckpointWritten,
                    step=number,
                    written_bytes=8 << 20,
                    seconds=WRITE_SECONDS,
                )
            case de.FinalCutOrdered(step=number, to=members):
                for member in members:
                    self._plan(at + 1.0, ev.FinalAckReceived, **self._who(member.learner), step=number)

    def _offer(self, learner: int, opened: de.AttemptOpened) -> None:
        """Answer a pull at the learner's next step boundary."""
        at = self._state.at + self._rng.uniform(0.0, self._step_seconds)
        c_steps = max(1, self._steps_done(learner, at) % 32)
        self._plan(
            at,
            ev.PushOffered,
            **self._who(learner),
            fragment=opened.fragment,
            step=opened.step,
            attempt=opened.attempt,
            base_version=opened.base_version,
            local_step=max(1, self._steps_done(learner, at)),
            c_steps=c_steps,
            c_tokens=c_steps * TOKENS_PER_STEP,
            payload_bytes=1 << 20,
        )
