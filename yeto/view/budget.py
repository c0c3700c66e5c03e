"""A run by the learner-budget protocol, as its tape tells it: the cut-off, and the rounds that finish it.

First the learners train until each has taken exactly its budget of N steps; the last session of that is
*cut off* at some global step s. Then the *finish* commits rounds s+1 to s+P, one for each fragment, in each
of which every learner answers with all N steps that it took. What makes such a run comparable with others is
that this is so in every one of those rounds, so here it is looked for, and what is missing is said.

Commits that a restart took back do not count. A run that goes on from its cut-off as an ordinary one has no
cut-off any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from attrs import define, field, frozen

from yeto.core.config import CoreConfig
from yeto.core.decisions import (
    Ignored,
    LearnerRefused,
    RoundCommitted,
    SessionEnded,
    SessionEnding,
    SessionOpened,
)
from yeto.core.events import BudgetReported, SessionResumed
from yeto.tape import Header, Record, Replayer, complete_lines, open_tape, read

_KINDS: Final = frozenset(
    {
        *("header", BudgetReported.kind, SessionResumed.kind, Ignored.kind, LearnerRefused.kind),
        *(RoundCommitted.kind, SessionEnded.kind, SessionEnding.kind, SessionOpened.kind),
    }
)
"""Kinds that the fold looks at."""


@frozen(kw_only=True)
class CutOff:
    """The end of the first phase."""

    step: int
    """Committed global step."""
    reports: Mapping[int, int]
    """Steps that each learner reported, of the reports that were accepted."""


@frozen(kw_only=True)
class End:
    """How a session ended."""

    exit_code: int
    step: int
    why: str
    phase: str | None
    """``final``, ``budget`` or ``stop``; None where it ended without one."""


@define(kw_only=True)
class BudgetRun:
    """What a tape says about the two phases."""

    config: CoreConfig | None = None
    """Of the last start."""
    num_fragments: int | None = None
    cut_off: CutOff | None = None
    """The one that stands: nothing but a finish has gone on from it."""
    target: int | None = None
    """Global step that the finish ends with, once one began."""
    rounds: dict[int, RoundCommitted] = field(factory=dict)
    """Standing commits of the finish, by step."""
    end: End | None = None
    """Of the last start, if that has ended in order."""
    reports: dict[int, int] = field(factory=dict)
    """Steps that learners reported to the present session, of the reports that were accepted."""

    @property
    def finished(self) -> bool:
        """Whether the finish came to its end: all rounds are committed, and all learners hold the result."""
        return self.end is not None and self.target is not None and self._ended_well(self.end, self.target)

    def missing(self, num_learners: int, budget: int) -> Iterator[str]:
        """Yield a sentence for each way in which the run is not what a finished budget run has to be.

        Args:
            num_learners: configured learners.
            budget: steps that each was to take.
        """
        yield from self.missing_of_cut_off(num_learners, budget)
        if self.cut_off is None:
            return
        if self.target is None:
            yield f"the tape tells of no finish of the cut-off at step {self.cut_off.step}"
            return
        if self.num_fragments is None or self.target != self.cut_off.step + self.num_fragments:
            yield (
                f"the finish ends at step {self.target}, which is not one round for each of the "
                f"{self.num_fragments} fragments after step {self.cut_off.step}"
            )
        for step in range(self.cut_off.step + 1, self.target + 1):
            yield from _round_missing(step, self.rounds.get(step), num_learners, budget)
        if not self.finished:
            why = "its session has not ended" if self.end is None else self.end.why
            yield f"the finish did not end with a final cut that all learners hold: {why}"

    def missing_of_cut_off(self, num_learners: int, budget: int) -> Iterator[str]:
        """Yield a sentence for each way in which the first phase is not what it has to be; as ``missing``."""
        if self.cut_off is None:
            yield "the tape tells of no cut-off at which all learners had used up their budget"
            return
        for learner in range(num_learners):
            steps = self.cut_off.reports.get(learner)
            if steps != budget:
                said = "did not report its budget" if steps is None else f"reported {steps} steps"
                yield f"cut-off at step {self.cut_off.step}: learner {learner} {said}, the budget is {budget}"

    def _ended_well(self, end: End, target: int) -> bool:
        finish = self.config is not None and self.config.budget_finish
        return finish and (end.exit_code, end.step, end.phase) == (0, target, "final")


class BudgetFold:
    """Folds the records of a tape, in order."""

    def __init__(self) -> None:
        """Start before the first record."""
        self.run = BudgetRun()
        self._phase: str | None = None
        self._reported: tuple[int, int] | None = None
        """Record and learner of the last report: whether it was accepted is for the next record to say."""

    def feed(self, record: Record) -> None:
        """Take the next record."""
        if record.kind not in _KINDS:
            return
        run, body = self.run, record.body
        match body:
            case Header():
                run.config = body.config
            case SessionOpened():
                run.num_fragments = body.terms.num_fragments
            case SessionResumed():
                self._resumed(body)
            case BudgetReported():
                if body.learner not in run.reports:
                    self._reported = (record.seq, body.learner)
                    run.reports[body.learner] = body.local_steps
            case Ignored() | LearnerRefused():
                if self._reported is not None and self._reported[0] == record.because:
                    del run.reports[self._reported[1]]
                    self._reported = None
            case SessionEnding():
                self._phase = body.phase
            case RoundCommitted():
                if run.target is not None:
                    run.rounds[body.step] = body
            case SessionEnded():
                run.end = End(exit_code=body.exit_code, step=body.step, why=body.why, phase=self._phase)
                if (body.exit_code, self._phase) == (0, "budget"):
                    run.cut_off = CutOff(step=body.step, reports=dict(run.reports))
            case _:
                pass

    def _resumed(self, event: SessionResumed) -> None:
        run = self.run
        run.config, run.num_fragments = event.config, event.terms.num_fragments
        run.end, self._phase, self._reported = None, None, None
        run.reports = {}
        if event.config.budget_finish:
            target = event.finish_target
            run.target = event.step + event.terms.num_fragments if target is None else target
            run.rounds = {step: body for step, body in run.rounds.items() if step <= event.step}
            # The checkpoint of another cut-off, or of a moment before it.
            if run.cut_off is not None and event.step < run.cut_off.step:
                run.cut_off = None
        else:
            run.cut_off = run.target = None
            run.rounds = {}


def fold_budget(records: Iterable[Record]) -> BudgetRun:
    """Return what records say about the two phases of a run.

    Raises:
        TapeError: the tape they are read from is damaged.
    """
    fold = BudgetFold()
    for record in records:
        fold.feed(record)
    return fold.run


def read_budget(path: Path) -> BudgetRun:
    """Return what a tape says, taken at its word; an empty run when there is no tape.

    Raises:
        TapeError: it is damaged before its last record.
    """
    return fold_budget(read(path)) if path.exists() else BudgetRun()


def replay_budget(path: Path) -> tuple[BudgetRun, str | None]:
    """Return what a tape says, and where it is not what the rules of the coordinator give, if anywhere.

    Raises:
        TapeError: it is missing, or damaged before its last record.
    """
    replayer, fold = Replayer(str(path)), BudgetFold()
    with open_tape(path) as file:
        for line in complete_lines(file, str(path)):
            fold.feed(replayer.feed(line))
            if (divergence := replayer.divergence) is not None:
                return fold.run, f"line {divergence.line}: {divergence.reason}"
    return fold.run, None


def _round_missing(
    step: int, committed: RoundCommitted | None, num_learners: int, budget: int
) -> Iterator[str]:
    where = f"terminal round {step}"
    if committed is None:
        yield f"{where}: was never committed"
        return
    steps = {responder.learner: responder.c_steps for responder in committed.responders}
    if committed.quorum != num_learners:
        yield f"{where}: its quorum was {committed.quorum} of {num_learners}"
    for learner in range(num_learners):
        if learner not in steps:
            yield f"{where}: learner {learner} has no part in it"
        elif steps[learner] != budget:
            yield f"{where}: learner {learner} answered with {steps[learner]} steps, the budget is {budget}"
