"""The sentence for people, in every phase; and small corners of timers and facts."""

import pytest
from attrs import evolve
from core_fleet import Session, config, resumed

from yeto.core import Phase, initial_state, step, waiting_for
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.errors import ConfigError, CoordinatorError


def line(session):
    return waiting_for(session.state, session.at)


def test_the_line_before_and_while_initialising():
    session = Session()
    assert line(session) == "waiting for learner 0, which decides the session, at most 3600 s"
    session.join(0)
    session.initialise(1)
    assert line(session) == "waiting for learner 0's initial fragments: 1 of 2 are here, at most 3600 s"
    session.initialise()
    assert line(session) == "waiting for the checkpoint of step 0"


def test_the_line_through_a_round():
    session = Session(config(pipeline=1))
    session.start()
    session.push(0, 1)
    assert line(session) == "round 1 attempt 1: waiting for 1 of 2: learner 1, at most 900 s"
    session.push(1, 1)
    assert line(session) == "round 1 attempt 1: merging"
    session.merged(1)
    assert line(session) == "round 1 attempt 1: waiting for the outer step"
    session.applied(1)
    assert line(session).startswith("round 2 attempt 1: waiting for 2 of 2")
    session.offer(0, 2, c_steps=0)
    assert line(session) == "round 2 attempt 1: discarded, next attempt in 2 s"


def test_the_line_between_rounds():
    session = Session(config(pipeline=1, min_round_interval_seconds=4.0), num_fragments=1)
    session.start()
    session.commit(1, write=False)
    assert line(session) == "waiting for the checkpoint of step 1"
    session.written(1)
    session.wait(1.0)
    assert line(session) == "round 2 opens in 3.0 s (sync interval)"
    session.leave(0)
    assert line(session) == "waiting for a quorum: 1 of 2 learners are connected, without learner 0"


def test_the_line_at_the_end():
    session = Session(config(total_steps=1, svd_pool=True))
    session.start()
    session.commit(1, write=False)
    assert line(session) == "all rounds are committed; waiting for the SVD pool to drain"
    session.tell(ev.SvdPoolDrained)
    assert line(session) == "all rounds are committed; waiting for the checkpoint of step 1"
    session.written(1)
    assert line(session) == "waiting for the final ACK of learners 0, 1, at most 900 s"
    session.tell(ev.FinalAckTimeoutPassed)
    assert session.only(de.Ignored).reason == "early"
    session.fire()
    assert line(session).startswith("ended with exit code 3: no final ACK from learners 0, 1")


def test_the_line_of_a_budget_cut_off():
    session = Session(config(learner_budget_steps=5, checkpoint_every=0, pipeline=1))
    session.start()
    session.commit(1)
    for learner in (0, 1):
        assert session.state.phase is not Phase.ENDED
        session.tell(ev.BudgetReported, learner=learner, generation=session.gen(learner), local_steps=5)
        if learner == 0:
            assert line(session) == "waiting for the budget report of learner 1"
    assert line(session) == "all budgets are used up; waiting for the last checkpoint"


def test_the_line_while_stopping():
    session = Session(config(pipeline=1))
    session.start()
    session.push(0, 1)
    session.push(1, 1)
    session.tell(ev.StopRequested, signal="SIGTERM")
    assert line(session) == "stopping; round 1 attempt 1: merging, at most 20 s"
    session.tell(ev.StopDeadlinePassed)
    assert session.only(de.Ignored).reason == "early"
    session.merged(1)
    session.applied(1)
    assert line(session) == "stopping; waiting for the checkpoint of step 1"
    session.written(1)
    assert line(session).startswith("ended with exit code 4: stopped by SIGTERM before the final cut")


def test_a_quorum_deadline_in_a_grace_is_late():
    session = Session(config(num_learners=3, quorum=2, wait_for=3, grace_cap_seconds=10.0, pipeline=1))
    session.start()
    session.push(0, 1)
    session.wait(830.0)
    session.offer(1, 1)
    session.wait(65.0)
    session.receive(1, 1)
    session.wait(5.0)
    session.tell(ev.QuorumDeadlinePassed, step=1, attempt=1)
    assert session.only(de.Ignored).reason == "late"


def test_a_start_timeout_is_late_once_it_has_passed():
    session = Session()
    session.feed(resumed(session, 1))
    session.fire()
    session.tell(ev.StartTimeoutPassed)
    assert session.only(de.Ignored).reason == "late"


def test_a_session_needs_a_fragment():
    session = Session()
    session.hello(0, num_fragments=0)
    assert session.only(de.LearnerRefused).field == "num_fragments"


def test_a_finite_outer_step_has_digests():
    session = Session(config(pipeline=1))
    session.start()
    session.push(0, 1)
    session.push(1, 1)
    session.merged(1)
    event = ev.OuterStepApplied(
        at=0.0, step=1, attempt=1, finite=True, params_digest=None, momentum_digest=None, seconds=0.0
    )
    with pytest.raises(CoordinatorError, match="digests"):
        session.feed(event)


def test_resumes_that_cannot_be():
    session = Session()
    event = resumed(session, 3)
    with pytest.raises(ConfigError, match="fragments"):
        step(session.state, evolve(event, config=config(num_fragments=5)))
    finish = config(learner_budget_steps=5, budget_finish=True)
    with pytest.raises(CoordinatorError, match="finish target"):
        step(initial_state(finish), evolve(event, config=finish, finish_target=2))
