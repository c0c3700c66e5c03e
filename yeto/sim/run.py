"""One simulation from its configuration to its result."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from pathlib import Path

from yeto.learner.anchors import FragmentBook
from yeto.sim.account import Account, Fate
from yeto.sim.agenda import INFINITY, NOTHING, Agenda
from yeto.sim.config import LearnerResult, SimConfig, SimResult
from yeto.sim.learner import Learner
from yeto.sim.measures import Measures
from yeto.sim.syncer import Syncer
from yeto.sim.tape import SimTape
from yeto.sim.world import Observer, World

PROGRESS_DEEDS = 1024
"""How often ``progress`` is told, in things that happened."""


class Simulation:
    """A run that can be watched."""

    def __init__(
        self,
        config: SimConfig,
        *,
        tape: Path | None = None,
        observer: Observer | None = None,
        make_book: Callable[[], FragmentBook] | None = None,
    ) -> None:
        """Build the world of a configuration.

        Args:
            config: what to simulate.
            tape: where to write the tape; must not exist.
            observer: watches the syncer.
            make_book: makes each learner's book.

        Raises:
            ConfigError: the configuration is out of range.
            TapeError: the tape exists, or cannot be written.
        """
        config.validated()

        def book() -> FragmentBook:
            return FragmentBook(
                num_fragments=config.num_fragments, alpha=config.merge_alpha, carries=config.carries
            )

        num_learners = config.core.num_learners
        self.world = World(
            config=config,
            agenda=Agenda(),
            account=Account(
                num_learners,
                config.num_fragments,
                can_go_back=config.syncer.mean_up_seconds is not None or bool(config.operator.restarts_after),
            ),
            measures=Measures(num_learners, config.core.quorum),
            observer=observer,
            make_book=make_book or book,
        )
        self.tape = SimTape(
            tape,
            fsync_seconds=config.syncer.fsync_seconds,
            can_crash=config.syncer.mean_up_seconds is not None,
            on_line=None if observer is None else observer.line,
        )
        self.syncer = self.world.syncer = Syncer(self.world, self.tape)
        self.world.learners = [
            Learner(self.world, number, spec) for number, spec in enumerate(config.learners)
        ]

    def run(self, progress: Callable[[float], None] | None = None) -> SimResult:
        """Let it happen, to the end of the session or of the time that is looked at."""
        with _rare_collections():
            return self._run(progress)

    def _run(self, progress: Callable[[float], None] | None) -> SimResult:
        world, agenda, syncer = self.world, self.world.agenda, self.syncer
        until = world.config.until_seconds or INFINITY
        syncer.start()
        for learner in world.learners:
            learner.begin()
        while self._go_on(until):
            if progress is not None:
                progress(self._share_done(until))
        if not world.is_over and until < INFINITY:
            agenda.now = until
        if progress is not None:
            progress(1.0)
        self.tape.flush()
        return self._result()

    def _go_on(self, until: float) -> bool:
        """Let the next ``PROGRESS_DEEDS`` things happen; return whether there may be more."""
        world, agenda, syncer = self.world, self.world.agenda, self.syncer
        heap, take = agenda.heap, heappop
        for _ in range(PROGRESS_DEEDS):
            if world.is_over:
                return False
            # What happens nearly always is planned, and taken off at once.
            planned = take(heap) if heap else NOTHING
            when, _, deed, details = planned
            wake = syncer.wake
            if wake <= when:
                # As in the pump, a timer that is due goes before what is queued.
                heappush(heap, planned)
                if wake > until or wake == INFINITY:
                    return False
                agenda.now = max(agenda.now, wake)
                syncer.fire()
            elif when > until:
                heappush(heap, planned)
                return False
            else:
                agenda.now = when
                deed(*details)
        return True

    def close(self) -> None:
        """Close the tape."""
        self.tape.close()

    def _share_done(self, until: float) -> float:
        state = self.syncer.state
        by_step = state.step / max(state.target, 1)
        return min(1.0, max(by_step, self.world.agenda.now / until))

    def _result(self) -> SimResult:
        world = self.world
        config, measures, seconds = world.config, world.measures, world.agenda.now
        for learner in world.learners:
            learner.advance()
        fates = world.account.closed(learner.work for learner in world.learners)
        learners = tuple(
            self._learner_result(learner, fates[learner.number], seconds) for learner in world.learners
        )
        possible = sum(seconds / spec.step_seconds for spec in config.learners)
        trained = sum(learner.tokens for learner in learners) * config.num_fragments
        merged = sum(learner.merged_tokens for learner in learners)
        return SimResult(
            seconds=seconds,
            step=self.syncer.state.step,
            exit_code=world.exit_code,
            events=self.tape.num_events,
            records=self.tape.num_records,
            goodput=sum(learner.steps for learner in learners) / possible if possible else 0.0,
            uptime=measures.enough_seconds(seconds) / seconds if seconds else 0.0,
            merges_per_hour=3600.0 * self.syncer.state.step / seconds if seconds else 0.0,
            participation=measures.participation.mean,
            merged_share=merged / trained if trained else 0.0,
            mean_staleness=measures.staleness.mean,
            mean_quorum_seconds=measures.quorum_seconds.mean,
            mean_grace_seconds=measures.grace_seconds.mean,
            attempts=measures.attempts,
            discarded=measures.discarded,
            learners=learners,
        )

    def _learner_result(self, learner: Learner, fates: dict[str, int], seconds: float) -> LearnerResult:
        entry = self.syncer.state.ledger.get(learner.number)
        tokens = learner.spec.tokens_per_step
        return LearnerResult(
            learner=learner.number,
            stepping_share=learner.total_stepped_seconds / seconds if seconds else 0.0,
            steps=learner.work,
            tokens=learner.work * tokens,
            merges=entry.merges if entry else 0,
            merged_tokens=fates.get(Fate.MERGED, 0) * tokens,
            lost_tokens={str(fate): units * tokens for fate, units in fates.items() if fate != Fate.MERGED},
            sent_bytes=learner.sent_bytes,
            received_bytes=learner.received_bytes,
            mean_staleness=self.world.measures.learner_staleness[learner.number].mean,
        )


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Have cycles looked for less often: there are hardly any, and the looks take a tenth of the time."""
    usual = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
