"""Who takes part: provisional sessions, refusals, generations, INIT, the start of rounds."""

import pytest
from attrs import evolve
from core_fleet import Session, config, generation, resumed

from yeto.core import Phase, initial_state, next_timer, step, waiting_for
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.errors import ConfigError, CoordinatorError


def test_learner_0_decides_and_differing_learners_are_turned_away():
    session = Session(config(num_learners=3, quorum=2))
    session.hello(1, dtype="f32")
    assert session.last == ()
    session.hello(2)
    session.hello(0)
    assert session.only(de.SessionOpened).terms == session.terms
    refused = session.only(de.LearnerRefused)
    assert (refused.learner, refused.reason, refused.field) == (1, "session_differs", "dtype")
    assert "f32" in refused.why
    assert "bf16" in refused.why
    assert not refused.permanent
    assert "learner 1 states dtype f32" in waiting_for(session.state, session.at)


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "q4"), ("num_fragments", 3), ("fingerprint", "0" * 64), ("contract", "1" * 64)],
)
def test_a_refusal_names_the_field_and_both_values(field, value):
    session = Session()
    session.hello(0)
    session.hello(1, **{field: value})
    refused = session.only(de.LearnerRefused)
    assert refused.field == field
    assert str(value) in refused.why
    assert str(getattr(session.terms, field)) in refused.why


def test_a_differing_learner_gets_a_verdict_once_step_0_is_durable():
    session = Session(config(num_learners=3, quorum=2))
    session.join(0)
    session.join(1)
    session.initialise()
    session.hello(2, dtype="f32")
    assert not session.only(de.LearnerRefused).permanent
    session.written(0)
    session.hello(2, dtype="f32")
    assert session.only(de.LearnerRefused).permanent
    session.join(2)
    assert 2 in session.state.current


def test_profiles_count_when_both_state_one_or_the_operator_asks():
    session = Session()
    session.terms = evolve(session.terms, profile="a" * 64)
    session.hello(0)
    session.hello(1, profile=None)
    assert session.last == ()
    session.hello(1, profile="b" * 64)
    assert session.pick(de.LearnerRefused)[-1].field == "profile"

    strict = Session(config(require_profile="a" * 64))
    strict.hello(0)
    refused = strict.only(de.LearnerRefused)
    assert (refused.field, refused.permanent) == ("profile", True)
    assert strict.state.terms is None


def test_the_number_of_fragments_may_be_fixed_by_the_operator():
    session = Session(config(num_fragments=4))
    session.hello(0)
    assert session.only(de.LearnerRefused).field == "num_fragments"


def test_ids_out_of_range_are_refused():
    session = Session()
    for learner in (2, 99):
        session.hello(learner)
        assert session.only(de.LearnerRefused).reason == "learner_out_of_range"
    assert not session.state.newest


def test_a_provisional_session_goes_with_the_generation_that_fixed_it():
    session = Session()
    session.join(0)
    session.initialise(1)
    session.leave(0)
    assert session.only(de.SessionReleased).learner == 0
    assert session.state.terms is None
    session.hello(0, dtype="f32")
    assert session.only(de.SessionOpened).terms.dtype == "f32"
    assert not session.state.initial


def test_a_new_dial_of_learner_0_supersedes_and_decides_anew():
    session = Session()
    session.join(0)
    session.initialise(1)
    session.hello(0, dtype="f32")
    assert [type(decision) for decision in session.last] == [
        de.LearnerRefused,
        de.SessionReleased,
        de.SessionOpened,
    ]
    session.tell(
        ev.FragmentInitialised,
        learner=0,
        generation=generation(0, 1),
        fragment=1,
        digest="e" * 32,
        finite=True,
    )
    assert session.only(de.Ignored).event == "fragment_initialised"


def test_superseded_groups_are_closed_and_their_late_facts_ignored():
    session = Session()
    session.start()
    session.hello(1)
    refused = session.only(de.LearnerRefused)
    assert (refused.reason, refused.generation) == ("superseded", generation(1, 1))
    assert "connected again from 10.0.0.1:5000" in refused.why
    assert 1 not in session.state.current
    session.tell(ev.LearnerLeft, learner=1, generation=generation(1, 1), reason="closed")
    assert session.only(de.Ignored).reason == "superseded"
    session.tell(ev.Heartbeat, learner=1, generation=generation(1, 1), local_step=1)
    assert session.only(de.Ignored).reason == "superseded"
    session.tell(ev.LearnerJoined, learner=1, generation=generation(1, 1))
    assert session.only(de.Ignored).reason == "superseded"
    session.tell(ev.LearnerJoined, learner=1, generation=generation(1, 2))
    assert session.state.current[1].generation == generation(1, 2)
    session.tell(ev.LearnerJoined, learner=1, generation=generation(1, 2))
    assert session.only(de.Ignored).reason == "repeated"


def test_an_incomplete_dial_is_superseded_too():
    session = Session()
    session.start()
    session.leave(1)
    session.hello(1)
    session.hello(1)
    assert session.only(de.LearnerRefused).reason == "superseded"


def test_a_generation_is_never_used_twice_and_its_memory_is_bounded():
    session = Session()
    session.start()
    session.tell(ev.HelloReceived, learner=1, generation=generation(1, 1), address="x", terms=session.terms)
    assert session.only(de.LearnerRefused).reason == "generation_reused"
    assert 1 in session.state.current, "the group that really drew it stays"
    for _ in range(1100):
        session.hello(1)
    assert len(session.state.seen[1]) == 1024


def test_init_must_be_finite_complete_and_from_learner_0s_newest_connection():
    session = Session()
    session.join(0)
    session.join(1)
    fields = {"fragment": 0, "digest": "e" * 32, "finite": True}
    session.tell(ev.FragmentInitialised, learner=1, generation=session.gen(1), **fields)
    assert session.only(de.Ignored).reason == "not_the_source"
    session.initialise(1)
    session.tell(ev.FragmentInitialised, learner=0, generation=session.gen(0), **fields)
    assert session.only(de.Ignored).reason == "repeated"
    session.tell(
        ev.FragmentInitialised, learner=0, generation=session.gen(0), fragment=1, digest="", finite=False
    )
    refused = session.only(de.LearnerRefused)
    assert (refused.reason, refused.permanent) == ("init_not_finite", True)
    assert session.state.terms is None


def test_nothing_of_version_0_leaves_before_its_checkpoint_is_durable():
    session = Session(config(checkpoint_every=0))
    session.join(0)
    session.initialise()
    assert session.only(de.CheckpointOrdered).step == 0
    session.join(1)
    assert not session.all(de.BroadcastOrdered)
    session.written(0)
    sent = session.only(de.BroadcastOrdered)
    assert [ref.version for ref in sent.fragments] == [0, 0]
    assert [member.learner for member in sent.to] == [0, 1]
    assert session.only(de.RoundsStarted).learners == (0, 1)
    session.tell(
        ev.FragmentInitialised, learner=0, generation=session.gen(0), fragment=0, digest="", finite=True
    )
    assert session.only(de.Ignored).reason == "phase"


def test_a_new_generation_gets_every_fragment_at_the_last_ordered_version():
    session = Session(config(checkpoint_every=1))
    session.start()
    session.commit(1)
    session.commit(2, write=False)
    session.leave(1)
    session.join(1)
    sent = session.only(de.BroadcastOrdered)
    assert [ref.version for ref in sent.fragments] == [1, 0], "version 2 is not durable yet"
    session.written(2)
    assert [ref.version for ref in session.only(de.BroadcastOrdered).fragments] == [2]


def test_rounds_wait_for_the_learners_asked_for():
    session = Session(config(num_learners=3, quorum=2, wait_for=3))
    session.start(learners=2)
    assert session.state.phase is Phase.WAITING
    assert waiting_for(session.state, 10.0) == "waiting for 1 of 3: learner 2, at most 3590 s"
    session.join(2)
    assert session.only(de.RoundsStarted).step == 1


def test_after_the_start_timeout_the_quorum_is_enough():
    session = Session(config(num_learners=3, quorum=2, wait_for=3))
    session.start(learners=2)
    timer = next_timer(session.state)
    assert timer is not None
    assert timer.at == 3600.0
    session.fire()
    assert "has passed" in session.only(de.RoundsStarted).why


def test_a_fresh_start_without_a_quorum_fails_and_names_who_is_missing():
    session = Session(config(num_learners=3, quorum=2))
    session.start(learners=1)
    session.fire()
    ended = session.only(de.SessionEnded)
    assert ended.exit_code == 1
    assert "learners 1, 2" in ended.why


def test_a_start_without_initial_values_names_them():
    session = Session()
    session.join(0)
    session.join(1)
    session.initialise(1)
    session.fire()
    ended = session.only(de.SessionEnded)
    assert ended.exit_code == 1
    assert "learner 0 sent 1 of 2 initial fragments" in ended.why


def test_a_resume_goes_on_waiting_after_the_start_timeout():
    session = Session(config(num_learners=3, quorum=2, wait_for=3))
    session.feed(resumed(session, 4))
    session.join(1)
    session.fire()
    assert session.last == ()
    assert session.state.phase is Phase.WAITING
    session.join(2)
    assert session.only(de.RoundsStarted).step == 5


def test_early_and_late_timers_are_ignored():
    session = Session()
    session.tell(ev.StartTimeoutPassed)
    assert session.only(de.Ignored).reason == "early"
    session.start()
    session.tell(ev.StartTimeoutPassed)
    assert session.only(de.Ignored).reason == "phase"
    for kind, fields in (
        (ev.GraceElapsed, {"step": 1, "attempt": 1}),
        (ev.QuorumDeadlinePassed, {"step": 1, "attempt": 1}),
        (ev.QuorumDeadlinePassed, {"step": 9, "attempt": 1}),
        (ev.RetryDue, {"step": 1, "attempt": 1}),
        (ev.GateOpened, {"step": 3}),
        (ev.FirstEstimateDeadlinePassed, {}),
        (ev.FinalAckTimeoutPassed, {}),
        (ev.StopDeadlinePassed, {}),
        (ev.BudgetWaitPassed, {}),
        (ev.SvdPoolDrained, {}),
    ):
        session.tell(kind, **fields)
        assert session.only(de.Ignored).event == kind.kind


def test_impossible_facts_raise_and_change_nothing():
    session = Session()
    session.start()
    state = session.state
    impossible = [
        ev.Heartbeat(at=-1.0, learner=0, generation=session.gen(0), local_step=1),
        ev.Heartbeat(at=float("nan"), learner=0, generation=session.gen(0), local_step=1),
        ev.Heartbeat(at=float("inf"), learner=0, generation=session.gen(0), local_step=1),
        ev.MergeFinished(
            at=0.0, step=1, attempt=1, finite=True, gradient_norm=1.0, corrected=(), seconds=0.0
        ),
        ev.MergeFailed(at=0.0, step=7, attempt=1, message=""),
        ev.OuterStepApplied(
            at=0.0, step=1, attempt=1, finite=True, params_digest="", momentum_digest="", seconds=0.0
        ),
        ev.CheckpointWritten(at=0.0, step=5, written_bytes=0, seconds=0.0),
        ev.CheckpointFailed(at=0.0, step=5, message=""),
        ev.PushReceived(
            at=0.0,
            learner=0,
            generation=session.gen(0),
            fragment=0,
            step=1,
            attempt=1,
            payload_bytes=1,
            digest="",
            finite=True,
            norm=1.0,
            cosine_to_momentum=None,
        ),
        ev.Event(at=0.0),
    ]
    for event in impossible:
        with pytest.raises(CoordinatorError):
            step(state, event)
        assert session.state is state


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"num_learners": 1 << 40}, "--learners 1099511627776: can be at most 65536"),
        ({"quorum": 3}, "--quorum"),
        ({"wait_for": 1}, "--wait-for"),
        ({"grace_gamma": float("nan")}, "--grace-gamma"),
        ({"grace_tau": -1.0}, "--grace-tau"),
        ({"grace_cap_seconds": float("inf")}, "--grace-ms"),
        ({"closing_sweep": "maybe"}, "--closing-sweep"),
    ],
)
def test_settings_out_of_range_name_their_flag(changes, flag):
    with pytest.raises(ConfigError, match=flag):
        initial_state(evolve(config(), **changes))
