"""The cost of a fact does not grow with the fleet, nor the state with the run."""

import sys
from collections.abc import Callable

import pytest
from core_fleet import Session, config

from yeto.core import events as ev
from yeto.core import next_timer


def calls_of(act: Callable[[], object]) -> int:
    """Function calls, of Python and of C, that ``act`` makes: a cost without a clock."""
    count = 0

    def see(frame: object, what: str, arg: object) -> None:
        nonlocal count
        count += what in ("call", "c_call")

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def costs(learners: int) -> list[int]:
    """Calls for a heartbeat, a push offered, a push received, a deadline looked up, a join and a leave."""
    session = Session(
        config(
            num_learners=learners,
            quorum=learners,
            wait_for=learners,
            sync_interval_steps=24.0,
            pipeline=1,
        )
    )
    session.start()
    session.wait(1.0)
    last = learners - 1
    session.tell(ev.Heartbeat, learner=last, generation=session.gen(last), local_step=1)
    session.wait(1.0)
    beat = {"learner": last, "generation": session.gen(last), "local_step": 2}
    return [
        calls_of(lambda: session.tell(ev.Heartbeat, **beat)),
        calls_of(lambda: session.offer(last, 1, local_step=3)),
        calls_of(lambda: session.receive(last, 1)),
        calls_of(lambda: next_timer(session.state)),
        calls_of(lambda: session.leave(0)),
        calls_of(lambda: session.join(0)),
    ]


def test_a_fact_costs_a_logarithm_of_the_fleet():
    small, large = costs(20), costs(2000)
    for few, many in zip(small, large, strict=True):
        assert many <= 2.0 * few + 20, (small, large)


def test_a_round_of_two_thousand_members_is_linear():
    def whole_round(learners: int) -> int:
        session = Session(config(num_learners=learners, quorum=learners, wait_for=learners, pipeline=1))
        session.start()
        calls = calls_of(lambda: session.commit(1))
        assert session.state.step == 1
        return calls

    few, many = whole_round(200), whole_round(2000)
    assert many <= 12 * few


@pytest.mark.parametrize("checkpoint_every", [0, 1, 7])
def test_the_state_does_not_grow_with_the_run(checkpoint_every):
    session = Session(config(total_steps=1000, pipeline=1, checkpoint_every=checkpoint_every))
    session.start()
    sizes = []
    for step_ in range(1, 301):
        if step_ % 10 == 0:
            session.leave(1)
            session.join(1)
            session.fire()
        attempt = session.state.rounds[0].attempt
        for learner in (0, 1):
            session.push(learner, step_, attempt)
        session.finish(step_, attempt)
        if step_ % 100 == 0:
            seen = sum(len(generations) for generations in session.state.seen.values())
            sizes.append(len(repr(session.state)) - 20 * seen)
    assert max(sizes) - min(sizes) < 300, sizes
