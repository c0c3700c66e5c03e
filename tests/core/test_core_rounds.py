"""Rounds: admission and its refusals, sealing, discarding, retries, grace, throttle, order."""

import pytest
from core_fleet import Session, config, generation

from yeto.core import Phase, next_timer, waiting_for
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.parts import Status
from yeto.core.pushes import held_deadline


def started(num_fragments=2, **changes):
    session = Session(config(**changes), num_fragments=num_fragments)
    session.start()
    return session


def test_an_attempt_freezes_members_quorum_and_base_version():
    session = started(num_learners=3, quorum=2, wait_for=3)
    first, second = session.all(de.AttemptOpened)
    assert [member.learner for member in first.members] == [0, 1, 2]
    assert (first.step, first.fragment, first.attempt, first.quorum, first.base_version) == (1, 0, 1, 2, 0)
    assert (second.step, second.fragment) == (2, 1)
    assert first.deadline == 900.0
    assert waiting_for(session.state, 12.0) == (
        "round 1 attempt 1: waiting for 3 of 3: learners 0, 1, 2, at most 888 s"
    )


@pytest.mark.parametrize(("pipeline", "fragments", "depth"), [(1, 4, 1), (0, 4, 1), (2, 4, 2), (9, 3, 3)])
def test_depth_is_clamped_to_the_fragments(pipeline, fragments, depth):
    session = started(num_fragments=fragments, pipeline=pipeline)
    assert len(session.state.rounds) == depth


def test_joins_count_for_later_attempts_only():
    session = started(num_learners=3, quorum=2, wait_for=2, pipeline=1)
    assert len(session.state.rounds[0].members) == 3
    session = Session(config(num_learners=3, quorum=2, wait_for=2, pipeline=1))
    session.start(learners=2)
    session.join(2)
    session.push(2, 1)
    assert session.all(de.PushRefused)[-1].reason == "unexpected_member"
    session.commit(1, learners=(0, 1))
    assert [member.learner for member in session.all(de.AttemptOpened)[-1].members] == [0, 1, 2]


# Admission.


@pytest.mark.parametrize(
    ("changes", "reason", "declined", "resend"),
    [
        ({"step": 9}, "out_of_round", False, False),
        ({"step": 0}, "out_of_round", False, False),
        ({"fragment": 1}, "out_of_round", False, False),
        ({"attempt": 2}, "out_of_round", False, False),
        ({"generation": "0" * 16}, "unexpected_member", False, False),
        ({"base_version": 5}, "future_base", False, True),
        ({"c_steps": 0}, "no_work", True, False),
    ],
)
def test_refusals_by_the_header(changes, reason, declined, resend):
    session = started(num_learners=3, quorum=2, wait_for=3)
    session.offer(0, 1, **changes)
    refused = session.only(de.PushRefused)
    assert (refused.reason, refused.declined, refused.resend) == (reason, declined, resend)


def test_stale_bases_are_refused_above_the_lag_only():
    session = started(max_base_lag=2)
    for step_ in (1, 2, 3, 4):
        session.commit(step_)
    session.offer(0, 5, base_version=1)
    assert session.only(de.PushAdmitted).staleness == 2
    session.offer(1, 5, base_version=0)
    refused = session.only(de.PushRefused)
    assert (refused.reason, refused.resend, refused.declined) == ("stale_base", True, False)
    session.offer(1, 5, base_version=0)
    refused = session.pick(de.PushRefused)[0]
    assert (refused.resend, refused.declined) == (False, True)
    assert session.only(de.AttemptDiscarded).reason == "unreachable"


def test_a_second_chance_can_be_taken():
    session = started()
    session.offer(0, 1, base_version=3)
    assert session.only(de.PushRefused).resend
    session.push(0, 1)
    assert session.only(de.PushAccepted).learner == 0


def test_one_upload_per_member_and_attempt():
    session = started()
    session.offer(0, 1)
    session.offer(0, 1)
    assert session.only(de.PushRefused).reason == "duplicate"
    session.receive(0, 1)
    session.offer(0, 1)
    assert session.only(de.PushRefused).reason == "duplicate"
    session.receive(0, 1)
    assert session.only(de.PushRefused).reason == "duplicate"
    session.offer(0, 1, base_version=9)
    refused = session.only(de.PushRefused)
    assert (refused.reason, refused.declined, refused.resend) == ("future_base", False, False)
    assert 0 in session.state.rounds[0].answers, "its answer stays"


def test_a_declined_or_gone_member_is_unexpected():
    session = started(num_learners=3, quorum=1, wait_for=3)
    session.offer(0, 1, c_steps=0)
    session.offer(0, 1)
    assert session.only(de.PushRefused).reason == "unexpected_member"
    session.offer(1, 1)
    session.leave(1)
    session.receive(1, 1)
    assert session.only(de.PushRefused).reason == "unexpected_member"


@pytest.mark.parametrize(
    "changes", [{"finite": False, "norm": None}, {"norm": 1.1e15}, {"norm": float("inf")}, {"norm": None}]
)
def test_non_finite_pushes_are_refused(changes):
    session = started(num_learners=3, quorum=1, wait_for=3)
    session.offer(0, 1)
    session.receive(0, 1, **changes)
    refused = session.only(de.PushRefused)
    assert (refused.reason, refused.declined) == ("non_finite", True)


def test_the_third_non_finite_push_in_a_row_closes_the_connection():
    session = started(num_learners=3, quorum=1, wait_for=3, num_fragments=4, pipeline=4)

    def bad(step_, local_step):
        session.offer(0, step_, local_step=local_step)
        session.receive(0, step_, finite=False, norm=None)

    bad(1, 5)
    bad(2, 5)  # the same local step counts once
    bad(3, 6)
    assert not session.pick(de.LearnerRefused)
    bad(4, 7)
    refused = session.only(de.LearnerRefused)
    assert (refused.learner, refused.reason, refused.permanent) == (0, "non_finite", True)
    assert "--inner-lr" in refused.why
    assert 0 not in session.state.current


def test_a_finite_push_ends_the_row():
    session = started(num_learners=3, quorum=3, wait_for=3, num_fragments=4, pipeline=4)
    for step_, local_step, finite in ((1, 5, False), (2, 6, False), (3, 7, True), (4, 8, False)):
        session.offer(0, step_, local_step=local_step)
        session.receive(0, step_, finite=finite, norm=1.0 if finite else None)
    assert not session.all(de.LearnerRefused)


def test_late_pushes_of_a_closed_attempt_are_refused():
    session = started(num_learners=3, quorum=2, wait_for=3, grace_cap_seconds=0.0)
    session.offer(2, 1)
    session.push(0, 1)
    session.push(1, 1)
    assert session.only(de.AttemptSealed).missed == (2,)
    session.receive(2, 1)
    assert session.only(de.PushRefused).reason == "out_of_round"


# Sealing.


def test_all_answers_seal_at_once_in_learner_order():
    session = started(num_learners=3, quorum=2, wait_for=3)
    for learner in (2, 0, 1):
        session.push(learner, 1)
    sealed = session.only(de.AttemptSealed)
    assert [weighted.learner for weighted in sealed.responders] == [0, 1, 2]
    assert [weighted.weight for weighted in sealed.responders] == [1000.0] * 3
    assert session.only(de.MergeOrdered).responders == sealed.responders


def test_arrival_order_does_not_change_what_is_merged():
    merged = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        session = started(num_learners=3, quorum=3)
        for learner in order:
            session.push(learner, 1, c_tokens=100 + learner, local_step=7)
        merged.append(session.only(de.MergeOrdered))
    assert merged[0] == merged[1] == merged[2]


def test_a_death_after_the_quorum_seals_at_once():
    session = started(num_learners=3, quorum=2, wait_for=3)
    session.push(0, 1)
    session.push(1, 1)
    assert session.pick(de.GraceOpened)
    session.leave(2)
    assert session.only(de.AttemptSealed).missed == (2,)


def test_a_disconnect_never_erases_an_accepted_answer():
    session = started()
    session.push(0, 1)
    session.leave(0)
    session.push(1, 1)
    assert [weighted.learner for weighted in session.only(de.AttemptSealed).responders] == [0, 1]


def test_grace_opens_at_the_quorum_and_seals_when_it_elapses():
    session = started(num_learners=3, quorum=2, wait_for=3)
    session.push(0, 1)
    session.wait(0.25)
    session.push(1, 1)
    assert session.only(de.QuorumReached).quorum_seconds == 0.25
    grace = session.only(de.GraceOpened)
    assert (grace.grace_seconds, grace.xi_step, grace.xi_quorum) == (1.0, None, 0.25)
    assert waiting_for(session.state, 0.25).startswith("round 1 attempt 1: grace for 1 of 3: learner 2")
    session.tell(ev.GraceElapsed, step=1, attempt=1)
    assert session.only(de.Ignored).reason == "early"
    session.fire()
    assert session.at == 1.25
    sealed = session.only(de.AttemptSealed)
    assert sealed.missed == (2,)
    session.finish(1)
    merge = session.all(de.RoundCommitted)[0]
    assert (merge.quorum_seconds, merge.grace_seconds, merge.missed) == (0.25, 1.0, (2,))


def test_a_straggler_within_grace_takes_part():
    session = started(num_learners=3, quorum=2, wait_for=3)
    session.push(0, 1)
    session.push(1, 1)
    session.wait(0.5)
    session.push(2, 1)
    assert len(session.only(de.AttemptSealed).responders) == 3
    session.wait(0.5)
    session.tell(ev.GraceElapsed, step=1, attempt=1)
    assert session.only(de.Ignored).reason == "late"


def test_grace_takes_the_slowest_step_and_the_kth_latency():
    session = started(num_learners=3, quorum=2, wait_for=3, pipeline=1, grace_cap_seconds=10.0)
    for learner in (0, 1, 2):
        beat(session, learner, 0)
    for learner, at in ((0, 0.5), (1, 1.0), (2, 3.0)):
        session.at = at
        beat(session, learner, 1)
    session.wait(1.0)
    session.local_steps = {}
    session.push(1, 1)
    session.wait(1.0)
    session.push(0, 1)
    grace = session.only(de.GraceOpened)
    assert grace.xi_step == 3.0
    assert grace.xi_quorum == 5.0, "the second smallest of 4 and 5 seconds"
    assert grace.grace_seconds == pytest.approx(0.8 * (2 * 3.0 - 5.0))


def test_sync_times_enter_the_next_grace():
    session = started(num_learners=3, quorum=2, wait_for=3, pipeline=1)
    for learner in (0, 1, 2):
        session.push(learner, 1)
    session.merged(1, seconds=0.5)
    session.wait(0.25)
    session.applied(1)
    assert session.state.xi_sync is None, "its checkpoint is not written yet"
    session.written(1, seconds=0.125)
    assert session.state.xi_sync == pytest.approx(0.875)
    assert session.all(de.RoundCommitted)[0].sync_seconds is None


# Discarding and retrying.


def test_the_quorum_deadline_discards_and_retries_at_once():
    session = started()
    session.push(0, 1)
    session.fire()
    discarded = session.pick(de.AttemptDiscarded)[0]
    assert (discarded.step, discarded.reason, discarded.lost) == (1, "quorum_timeout", (0,))
    assert discarded.retry_at == 900.0
    opened = session.only(de.AttemptOpened)
    assert (opened.step, opened.attempt, opened.deadline) == (1, 2, 1800.0)
    session.push(0, 1)
    assert session.all(de.PushRefused)[-1].reason == "out_of_round", "of attempt 1"
    session.fire()
    assert session.only(de.AttemptDiscarded).step == 2, "the pipelined round has its own deadline"


def test_disconnects_discard_at_once_and_retry_after_a_second():
    session = started()
    session.push(1, 1)
    session.wait(3.0)
    session.leave(0)
    first, second = session.pick(de.AttemptDiscarded)
    assert (first.step, first.reason, first.lost, first.retry_at) == (1, "unreachable", (1,), 4.0)
    assert (second.step, second.lost, second.retry_at) == (2, (), 4.0)
    session.join(0)
    assert not session.pick(de.AttemptOpened), "not before its second is over"
    session.fire()
    session.fire()
    assert [opened.attempt for opened in session.all(de.AttemptOpened)[-2:]] == [2, 2]


def test_a_retry_waits_for_the_quorum():
    session = started()
    session.leave(0)
    session.fire()
    session.fire()
    assert next_timer(session.state) is None
    assert "waiting for 2 learners, 1 are connected, without learner " in waiting_for(
        session.state, session.at
    )
    session.join(0)
    assert [opened.step for opened in session.pick(de.AttemptOpened)] == [1, 2]


def test_declines_back_off_and_the_commit_resets_them():
    session = started(pipeline=1)
    waits = []
    for attempt in range(1, 8):
        session.offer(0, 1, attempt, c_steps=0)
        discarded = session.only(de.AttemptDiscarded)
        assert discarded.reason == "unreachable"
        waits.append(discarded.retry_at - session.at)
        session.fire()
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    for learner in (0, 1):
        session.push(learner, 1, 8)
    session.finish(1, 8)
    session.offer(0, 2, c_steps=0)
    assert session.only(de.AttemptDiscarded).retry_at == session.at + 2.0


def test_of_several_causes_the_longest_wait_holds():
    session = started(num_learners=3, quorum=2, wait_for=3, pipeline=1)
    session.leave(0)
    session.offer(1, 1, c_steps=0)
    assert session.only(de.AttemptDiscarded).retry_at == 2.0
    session = started(num_learners=4, quorum=3, wait_for=4, pipeline=1)
    session.leave(0)
    session.fire()
    assert session.only(de.AttemptDiscarded).retry_at == 901.0, "a timeout with a disconnect"


def test_progress_moves_the_quorum_deadline_up_to_four_times_its_length():
    session = started(pipeline=1, quorum_timeout_seconds=100.0)
    session.offer(0, 1)
    for _ in range(6):
        session.wait(60.0)
        session.tell(
            ev.UploadProgress, learner=0, generation=session.gen(0), step=1, attempt=1, received_bytes=1
        )
        assert session.last == ()
        assert session.state.rounds[0].deadline == min(session.at + 65.0, 400.0)
    session.fire()
    assert session.at == 400.0
    assert session.only(de.AttemptDiscarded).reason == "quorum_timeout"
    session.tell(ev.UploadProgress, learner=0, generation=session.gen(0), step=1, attempt=1, received_bytes=1)
    assert session.only(de.Ignored).reason == "late"


@pytest.mark.parametrize(
    ("at", "deadline", "held"),
    [
        (0.0, 100.0, 100.0),
        (35.0, 100.0, 100.0),
        (36.0, 100.0, 101.0),
        (90.0, 100.0, 155.0),
        (390.0, 400.0, 410.0),
        (500.0, 410.0, 410.0),
        (10.0, 500.0, 500.0),
    ],
)
def test_a_held_deadline_never_comes_nearer_and_has_an_end(at, deadline, held):
    assert held_deadline(at, opened_at=10.0, deadline=deadline, timeout_seconds=100.0) == held


def test_an_unfinished_upload_is_freed_when_its_learner_leaves():
    session = started(num_learners=3, quorum=2, wait_for=3, pipeline=1)
    session.offer(2, 1)
    session.leave(2)
    assert not session.state.rounds[0].uploads
    session.push(0, 1)
    session.push(1, 1)
    assert session.only(de.AttemptSealed).missed == (2,)


def test_reconnected_learners_are_not_members_of_the_old_attempt():
    session = started(num_learners=3, quorum=2, wait_for=3, pipeline=1)
    session.leave(2)
    session.join(2)
    session.push(2, 1)
    assert session.only(de.PushRefused).reason == "unexpected_member"


def test_open_rounds_include_those_that_wait_for_a_retry():
    session = started(num_fragments=4, pipeline=2)
    session.leave(0)
    assert [round_.status for round_ in session.state.rounds] == [Status.RETRY, Status.RETRY]
    session.join(0)
    assert len(session.state.rounds) == 2


# Throttle.


def throttled(**changes):
    settings = {"sync_interval_steps": 24.0, "pipeline": 1, "checkpoint_every": 0, **changes}
    return started(num_fragments=4, **settings)


def beat(session, learner, local_step):
    session.local_steps[learner] = local_step
    session.tell(ev.Heartbeat, learner=learner, generation=session.gen(learner), local_step=local_step)


def test_a_start_opens_depth_rounds_until_a_first_estimate_exists():
    session = throttled(pipeline=2)
    assert session.state.next_step == 3
    session.commit(1)
    assert session.state.next_step == 3, "blind: no more than the depth"
    timer = next_timer(session.state)
    assert timer is not None
    assert timer.event == ev.FirstEstimateDeadlinePassed(at=10.0)
    session.wait(2.0)
    beat(session, 0, 5)
    session.wait(1.0)
    beat(session, 0, 6)
    assert session.state.links[0].xi_step == 0.75
    timer = next_timer(session.state)
    assert timer is not None
    assert isinstance(timer.event, ev.GateOpened)


def test_without_any_estimate_rounds_open_after_ten_seconds():
    session = throttled()
    session.commit(1)
    assert waiting_for(session.state, 1.0) == "waiting for a first step-time estimate, at most 9 s"
    session.fire()
    assert session.at == 10.0
    assert session.only(de.AttemptOpened).step == 2
    session.local_steps = {}
    session.commit(2)
    assert session.state.find(3) is not None, "and they go on opening"


def test_the_gate_follows_the_slowest_member_last_frozen():
    session = throttled()
    for learner in (0, 1):
        beat(session, learner, 100)
    session.wait(1.0)
    beat(session, 0, 101)
    beat(session, 1, 102)
    session.commit(1)
    timer = next_timer(session.state)
    assert timer is not None
    assert (timer.at, timer.event) == (6.0, ev.GateOpened(at=6.0, step=2))
    session.wait(1.0)
    session.tell(ev.GateOpened, step=2)
    assert session.only(de.Ignored).reason == "early"
    session.leave(0)
    session.join(0)
    assert next_timer(session.state).at == pytest.approx(session.state.links[1].xi_step * 6.0)
    session.fire()
    assert session.only(de.AttemptOpened).step == 2


def test_when_all_estimates_are_lost_the_fleet_is_looked_at_again():
    session = throttled()
    for learner in (0, 1):
        beat(session, learner, 100)
    session.wait(1.0)
    beat(session, 0, 101)
    beat(session, 1, 101)
    assert session.state.blind_until is None
    for learner in (0, 1):
        session.push(learner, 1)
    for learner in (0, 1):
        session.leave(learner)
        session.join(learner)
    session.finish(1)
    assert session.state.find(2) is not None, "the depth may open"
    assert session.state.blind_until == session.at + 10.0


def test_the_floor_holds_without_the_throttle():
    session = started(pipeline=2, min_round_interval_seconds=0.1, num_fragments=4)
    assert session.state.next_step == 2
    session.fire()
    assert (session.at, session.state.next_step) == (0.1, 3)


def test_retries_are_not_throttled():
    session = throttled(min_round_interval_seconds=500.0)
    session.leave(0)
    session.join(0)
    session.fire()
    assert session.only(de.AttemptOpened).attempt == 2
    assert session.at == 1.0


# Superseded generations and late facts.


def test_late_merge_results_of_a_discarded_attempt_are_ignored():
    session = started(pipeline=1)
    for learner in (0, 1):
        session.push(learner, 1)
    session.merged(1, finite=False, gradient_norm=None)
    session.merged(1)
    assert session.only(de.Ignored).reason == "late"
    session.fire()
    session.merged(1)
    assert session.only(de.Ignored).reason == "late"
    assert session.state.phase is Phase.RUNNING


def test_a_push_cannot_speak_for_another_generation():
    session = started()
    session.offer(0, 1, generation=generation(1))
    assert session.only(de.PushRefused).reason == "unexpected_member"
