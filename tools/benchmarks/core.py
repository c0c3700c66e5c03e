"""The coordinator: events a second, and whether a large fleet costs more for each member.

The stream is an ordinary run of 8 learners, with heartbeats, joins, leaves and a checkpoint for every commit.
The peer is the least that any program in this language must do with such a stream: make each event's object
from its fields, and remember it in a dictionary.

A round of M members tells 2 M facts (offered, received) and seals once. If every fact cost a look at every
member, the seconds for each member would grow with M: eightfold from 250 to 2,000.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import attrs

from benchmarks.figures import Figure, Report, Target, figure_of
from benchmarks.fleet import Fleet
from benchmarks.timing import cpu_clock, rates, take_turns
from yeto.core import CoreConfig, State, initial_state, step
from yeto.core.decisions import AttemptOpened
from yeto.core.events import Event

LEARNERS = 8
FRAGMENTS = 8
MEMBERS = (250, 500, 1000, 2000)
EVENTS_PER_SECOND = Target(sense="at least", number=50_000, of="value")
GROWTH = Target(sense="at most", number=2.0, of="ratio")
"""Linear is 1; what may be logarithmic is 1.4 from 250 to 2,000; quadratic is 8."""


def ordinary_run() -> Fleet:
    """Return a run of 8 learners that goes on for longer than anybody listens."""
    config = CoreConfig(num_learners=LEARNERS, total_steps=10**9, quorum=5, wait_for=LEARNERS)
    return Fleet(config, num_fragments=FRAGMENTS, lives_seconds=3600.0)


def fold(state: State, events: Sequence[Event]) -> State:
    """Feed events to the coordinator; return its last state."""
    for event in events:
        state, _ = step(state, event)
    return state


def remember(parts: Sequence[tuple[type[Event], dict[str, Any]]]) -> dict[object, Event]:
    """Make each event from its fields and keep the last of each kind and learner."""
    last: dict[object, Event] = {}
    for kind, fields in parts:
        event = kind(**fields)
        last[kind, fields.get("learner")] = event
    return last


def one_attempt(members: int) -> tuple[State, list[Event]]:
    """Return the state in which a round of so many members is open, and all events up to the next opening."""
    config = CoreConfig(
        num_learners=members,
        total_steps=10**9,
        quorum=members,
        wait_for=members,
        pipeline=1,
        sync_interval_steps=0.0,
    )
    start: State | None = None
    events: list[Event] = []
    for met, event, decisions in Fleet(config, num_fragments=2, beating=False).run():
        if start is None and met.rounds:
            start = met
        if start is not None:
            events.append(event)
            if any(isinstance(decision, AttemptOpened) for decision in decisions):
                return start, events
    raise AssertionError("the run ended before its second round")


def measure(*, repeats: int, num_events: int, members: Sequence[int] = MEMBERS) -> Report:
    """Measure the coordinator.

    Args:
        repeats: samples of each figure.
        num_events: length of the ordinary stream.
        members: sizes of the attempts, ascending.
    """
    events = [event for _, event, _ in islice(ordinary_run().run(), num_events)]
    parts = [(type(event), attrs.asdict(event, recurse=False)) for event in events]
    config = ordinary_run().config
    ours, bare = take_turns(
        repeats, partial(fold, initial_state(config), events), partial(remember, parts), clock=cpu_clock
    )
    return Report(
        benchmark="core",
        what="step() on prepared events, one thread, CPU seconds",
        settings={"events": num_events, "learners": LEARNERS, "fragments": FRAGMENTS, "repeats": repeats},
        figures=(
            figure_of(
                "events_per_second",
                f"step(), {LEARNERS} learners",
                "events/s",
                rates(num_events, ours),
                peer="make and keep the objects",
                peer_values=rates(num_events, bare),
                target=EVENTS_PER_SECOND,
            ),
            *_growth(repeats, members),
        ),
    )


def _growth(repeats: int, sizes: Sequence[int]) -> list[Figure]:
    attempts = [one_attempt(members) for members in sizes]
    seconds = take_turns(
        repeats,
        *(partial(fold, start, events) for start, events in attempts),
        clock=cpu_clock,
    )
    per_member = [
        [1e6 * value / members for value in values] for members, values in zip(sizes, seconds, strict=True)
    ]
    return [
        figure_of(
            f"microseconds_per_member_{members}",
            f"one attempt, {members:,} members",
            "µs/member",
            values,
            peer=f"with {sizes[0]} members",
            peer_values=per_member[0],
            target=GROWTH if members == sizes[-1] else None,
        )
        for members, values in zip(sizes, per_member, strict=True)
    ]
