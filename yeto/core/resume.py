"""Resume: the state is rebuilt from one event, and from nothing else.

``session_resumed`` carries all that a checkpoint holds. Whatever the tape says after that checkpoint is
superseded: deadlines, gates, estimates, open attempts and generations are gone, attempts count from 1, and
the next round is the first uncommitted one. Resuming twice therefore equals resuming once.
"""

from __future__ import annotations

from immutables import Map

from yeto.core.events import SessionResumed
from yeto.core.outer import commits_at, derived, impossible
from yeto.core.parts import Phase
from yeto.core.state import State, moment
from yeto.errors import ConfigError, CoordinatorError


def version_at(step: int, fragment: int, num_fragments: int) -> int:
    """Version of ``fragment`` after ``step`` commits: the largest t <= step with (t-1) mod P = fragment."""
    first = fragment + 1
    return 0 if step < first else first + (step - first) // num_fragments * num_fragments


def resumed_state(event: SessionResumed) -> State:
    """The state that a checkpoint stands for.

    Raises:
        ConfigError: The settings are impossible, or the run is already past ``--total-steps``.
        CoordinatorError: The event is no contiguous prefix of a run, or has counters that it cannot
            have.
    """
    config = event.config.validated()
    num_fragments = event.terms.num_fragments
    marks = tuple(sorted(event.fragments, key=lambda mark: mark.fragment))
    expected = [(p, version_at(event.step, p, num_fragments)) for p in range(num_fragments)]
    if event.step < 0 or [(mark.fragment, mark.version) for mark in marks] != expected:
        raise CoordinatorError(f"session_resumed: fragment versions are not those after {event.step} commits")
    versions = tuple(mark.version for mark in marks)
    outer_marks = derived(config, versions) if event.outer_marks is None else event.outer_marks
    if [mark.fragment for mark in outer_marks] != list(range(num_fragments)):
        raise CoordinatorError(
            "session_resumed: the counters of the outer step are not those of its fragments"
        )
    for counted, version in zip(outer_marks, versions, strict=True):
        commits = commits_at(version, counted.fragment, num_fragments)
        if impossible(counted, commits):
            raise CoordinatorError(
                f"session_resumed: outer_marks[{counted.fragment}]: {counted.merges} merges with a gain of "
                f"{counted.gain} cannot be after {commits} commits"
            )
    if config.num_fragments is not None and config.num_fragments != num_fragments:
        raise ConfigError(
            f"the checkpoint has {num_fragments} fragments, the configuration {config.num_fragments}"
        )
    if config.budget_finish:
        target = event.step + num_fragments if event.finish_target is None else event.finish_target
        if target < event.step:
            raise CoordinatorError(f"session_resumed: finish target {target} lies before step {event.step}")
    else:
        target = config.total_steps
        if target < event.step:
            raise ConfigError(
                f"--total-steps {target}: the checkpoint is at step {event.step} already; give at least that"
            )
    ends = event.step == target
    timeout = moment(event.at + config.start_timeout_seconds)
    return State(
        config=config,
        at=event.at,
        phase=Phase.WAITING,
        started_at=event.at,
        resumed=True,
        terms=event.terms,
        start_deadline=None if config.budget_finish else timeout,
        budget_deadline=timeout if config.budget_finish else None,
        step=event.step,
        target=target,
        marks=marks,
        versions=versions,
        broadcast=versions,
        outer_marks=outer_marks,
        ledger=Map({entry.learner: entry for entry in event.ledger}),
        durable=event.step,
        awaited=Map(dict.fromkeys(event.awaited, False) if ends else {}),
        acked=Map(dict.fromkeys(event.acked, True) if ends else {}),
    )
