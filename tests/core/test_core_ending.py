"""Final cut, learner budgets, stop and resume."""

import pytest
from attrs import evolve
from core_fleet import Session, config, resumed

from yeto.core import Phase, next_timer, step, waiting_for
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.parts import Status
from yeto.core.values import LedgerEntry
from yeto.errors import ConfigError, CoordinatorError


def started(num_fragments=2, learners=None, **changes):
    session = Session(config(**changes), num_fragments=num_fragments)
    session.start(learners)
    return session


def completed(**changes):
    """A session whose final cut is out."""
    session = started(**{"total_steps": 2, **changes})
    session.commit(1)
    session.commit(2)
    return session


# The final cut.


def test_the_last_checkpoint_precedes_the_cut_and_all_acks_end_it():
    session = started(total_steps=2, mark_final_checkpoint=True)
    session.commit(1)
    session.commit(2, write=False)
    ending = session.pick(de.SessionEnding)[0]
    assert (ending.phase, ending.drains_pool) == ("final", True)
    final = session.only(de.CheckpointOrdered)
    assert (final.step, final.final) == (2, True)
    assert not session.pick(de.FinalCutOrdered)
    session.written(2)
    cut = session.only(de.FinalCutOrdered)
    assert (cut.step, cut.versions, cut.awaited) == (2, (1, 2), (0, 1))
    session.ack(0)
    assert waiting_for(session.state, 0.0) == "waiting for the final ACK of learner 1, at most 900 s"
    session.ack(0)
    assert session.only(de.Ignored).reason == "repeated"
    session.ack(1)
    assert [type(decision) for decision in session.last] == [
        de.SessionEnded,
        de.LearnerReleased,
        de.LearnerReleased,
    ]
    ended = session.last[0]
    assert (ended.exit_code, ended.mark_final) == (0, True)
    session.join(0)
    assert session.only(de.Ignored).reason == "phase"


def test_the_marker_is_written_only_when_asked():
    session = completed()
    session.ack(0)
    session.ack(1)
    (ended,) = session.all(de.SessionEnded)
    assert not ended.mark_final


def test_an_ack_of_another_cut_does_not_count():
    session = completed()
    session.tell(ev.FinalAckReceived, learner=0, generation=session.gen(0), step=1)
    assert session.only(de.Ignored).reason == "other_cut"
    session.tell(ev.FinalAckReceived, learner=7, generation="0" * 16, step=2)
    assert session.only(de.Ignored).reason == "other_cut"


def test_whoever_left_less_than_a_minute_before_is_awaited_and_may_come_late():
    session = started(num_learners=4, quorum=1, wait_for=4, total_steps=1, pipeline=1)
    session.leave(2)
    session.wait(30.0)
    session.leave(3)
    session.wait(40.0)
    session.push(0, 1)
    session.push(1, 1)
    session.finish(1)
    cut = session.only(de.FinalCutOrdered)
    assert cut.awaited == (0, 1, 3)
    session.ack(0)
    session.ack(1)
    assert session.state.phase is Phase.FINALISING
    session.wait(100.0)
    session.join(3)
    assert [member.learner for member in session.only(de.FinalCutOrdered).to] == [3]
    assert not session.pick(de.BroadcastOrdered)
    session.ack(3)
    assert session.only(de.SessionEnded).exit_code == 0


def diverge(session, learner):
    """Three non-finite pushes in a row, after which the learner is refused for good."""
    for step_ in (1, 2, 3):
        session.offer(learner, step_)
        session.receive(learner, step_, finite=False, norm=None)
    (refusal,) = session.all(de.LearnerRefused)
    assert (refusal.learner, refusal.reason, refusal.permanent) == (learner, "non_finite", True)


@pytest.mark.parametrize("redials", [False, True])
def test_whoever_was_refused_for_good_is_awaited_only_when_it_dials_again(redials):
    session = started(num_learners=3, quorum=2, wait_for=3, total_steps=3, pipeline=3, num_fragments=3)
    diverge(session, 2)
    if redials:
        session.hello(2)
    for step_ in (1, 2, 3):
        session.commit(step_, learners=(0, 1))
    assert session.only(de.FinalCutOrdered).awaited == ((0, 1, 2) if redials else (0, 1))


def test_a_superseded_learner_is_here_again_and_awaited():
    session = started(num_learners=3, quorum=2, wait_for=3, total_steps=1)
    session.hello(2)
    assert session.only(de.LearnerRefused).reason == "superseded"
    session.commit(1, learners=(0, 1))
    assert session.only(de.FinalCutOrdered).awaited == (0, 1, 2)


def test_late_guests_are_awaited_only_while_connected():
    session = started(num_learners=3, quorum=2, wait_for=2, total_steps=1, learners=2)
    session.commit(1, learners=(0, 1))
    session.join(2)
    assert session.only(de.FinalCutOrdered).awaited == (0, 1, 2)
    session.ack(0)
    session.ack(1)
    assert session.state.phase is Phase.FINALISING
    session.leave(2)
    assert session.only(de.SessionEnded).exit_code == 0


def test_an_accepted_ack_stays_and_the_cut_is_sent_again():
    session = completed()
    session.ack(0)
    session.leave(0)
    session.join(0)
    assert session.only(de.FinalCutOrdered).awaited == (1,)
    session.leave(1)
    assert session.state.phase is Phase.FINALISING, "it was current at the cut: awaited all the same"
    session.join(1)
    session.ack(1)
    assert session.only(de.SessionEnded).exit_code == 0


def test_missing_acks_end_with_3_and_the_names():
    session = completed(mark_final_checkpoint=True)
    session.ack(0)
    session.fire()
    ended = session.only(de.SessionEnded)
    assert (ended.exit_code, ended.mark_final, session.at) == (3, False, 900.0)
    assert "learner 1" in ended.why
    assert not session.pick(de.LearnerReleased)


def test_when_nobody_is_there_the_contributors_are_awaited():
    session = started(total_steps=1, pipeline=1)
    session.push(0, 1)
    session.push(1, 1)
    session.leave(0)
    session.leave(1)
    session.wait(61.0)
    session.finish(1)
    assert session.only(de.FinalCutOrdered).awaited == (0, 1)


def test_the_svd_pool_is_drained_before_the_final_checkpoint():
    session = started(total_steps=1, svd_pool=True)
    session.commit(1, write=False)
    assert session.state.phase is Phase.DRAINING
    assert not session.pick(de.CheckpointOrdered)
    session.tell(ev.SvdPoolDrained)
    assert session.only(de.CheckpointOrdered).final
    session.tell(ev.SvdPoolDrained)
    assert session.only(de.Ignored).reason == "repeated"


def test_a_poisoned_pool_writes_no_final_checkpoint():
    session = started(total_steps=1, svd_pool=True)
    session.commit(1, write=False)
    session.tell(ev.SvdPoolPoisoned, message="worker cuda:1 timed out")
    ended = session.only(de.SessionEnded)
    assert ended.exit_code == 1
    assert "cuda:1" in ended.why
    assert not session.pick(de.CheckpointOrdered)


def test_checkpoint_every_0_still_writes_the_end():
    session = completed(checkpoint_every=0)
    assert [c.step for c in session.all(de.CheckpointOrdered)] == [0, 2]
    assert session.state.phase is Phase.FINALISING


# Learner budgets.


def budget(session, learner, steps=50):
    session.tell(ev.BudgetReported, learner=learner, generation=session.gen(learner), local_steps=steps)


def test_a_budget_cut_off_collects_every_report_then_saves():
    session = started(learner_budget_steps=50, num_fragments=3, pipeline=3, mark_final_checkpoint=True)
    for step_ in (1, 2):
        for learner in (0, 1):
            session.push(learner, step_)
    session.merged(1)
    session.merged(2)
    budget(session, 0)
    ending = session.only(de.SessionEnding)
    assert (ending.phase, ending.drains_pool) == ("budget", True)
    assert [(d.step, d.reason) for d in session.pick(de.AttemptDiscarded)] == [(2, "budget"), (3, "budget")]
    session.applied(1)
    session.written(1)
    assert session.state.step == 1, "the commit-ordered round finishes"
    budget(session, 0)
    assert session.only(de.Ignored).reason == "repeated"
    budget(session, 1)
    ended = session.only(de.SessionEnded)
    assert (ended.exit_code, ended.mark_final) == (0, False)
    assert not session.pick(de.LearnerReleased)


def test_a_report_that_overtakes_the_data_streams_of_its_connection_counts():
    session = started(learner_budget_steps=50)
    budget(session, 0)
    session.leave(1)
    session.hello(1)
    budget(session, 1)
    assert session.only(de.SessionEnded).exit_code == 0
    session = started(learner_budget_steps=50)
    session.leave(1)
    budget(session, 1)
    assert session.only(de.Ignored).reason == "superseded"


def test_a_wrong_budget_is_refused():
    session = started(learner_budget_steps=50)
    budget(session, 0, 49)
    refused = (
        session.only(de.LearnerRefused) if len(session.last) == 1 else session.pick(de.LearnerRefused)[0]
    )
    assert refused.reason == "budget_differs"
    assert "49" in refused.why
    assert "50" in refused.why
    assert session.state.phase is Phase.RUNNING


def test_without_a_budget_reports_are_ignored():
    session = started()
    budget(session, 0)
    assert session.only(de.Ignored).reason == "no_budget"


def test_a_report_before_step_0_is_durable_takes_effect_after_it():
    session = Session(config(learner_budget_steps=50))
    session.join(0)
    session.join(1)
    session.initialise()
    budget(session, 0)
    assert session.last == ()
    session.written(0)
    assert session.only(de.SessionEnding).phase == "budget"
    assert not session.pick(de.RoundsStarted)


def test_a_frozen_learner_cannot_enter_the_cut_off_session():
    session = started(learner_budget_steps=50)
    session.offer(0, 1, c_steps=50)
    assert session.only(de.PushRefused).reason == "out_of_round"


def test_a_learner_that_stays_away_ends_the_cut_off_with_3():
    session = started(learner_budget_steps=50, start_timeout_seconds=600.0, checkpoint_every=0)
    session.commit(1)
    session.leave(1)
    session.wait(100.0)
    budget(session, 0)
    timer = next_timer(session.state)
    assert timer is not None
    assert timer.at == 600.0
    session.fire()
    assert session.only(de.CheckpointOrdered).final
    session.written(1)
    ended = session.only(de.SessionEnded)
    assert ended.exit_code == 3
    assert "learner 1" in ended.why


def test_a_learner_that_comes_back_is_looked_at_again():
    session = started(learner_budget_steps=50, start_timeout_seconds=600.0)
    budget(session, 0)
    assert next_timer(session.state) is None
    session.leave(1)
    session.wait(10.0)
    session.join(1)
    session.wait(100.0)
    session.leave(1)
    session.fire()
    assert session.only(de.Ignored).reason == "back"
    assert next_timer(session.state).at == 710.0
    session.join(1)
    budget(session, 1)
    session.tell(ev.BudgetWaitPassed)
    assert session.state.phase is Phase.ENDED


def finishing(**changes):
    session = Session(
        config(
            num_learners=3, quorum=1, learner_budget_steps=50, budget_finish=True, start_timeout_seconds=600.0
        )
    )
    session.feed(resumed(session, 5, **changes))
    return session


def test_a_budget_finish_runs_p_more_rounds_at_full_quorum_as_a_sweep():
    session = finishing()
    session.join(0)
    session.join(1)
    assert session.state.phase is Phase.WAITING
    session.join(2)
    opened = session.pick(de.AttemptOpened)
    assert [(o.step, o.quorum, o.sweep) for o in opened] == [(6, 3, True), (7, 3, True)]
    budget(session, 0)
    assert session.only(de.Ignored).reason == "no_budget"
    session.commit(6)
    assert session.all(de.CheckpointOrdered)[-1].finish_target == 7
    session.commit(7)
    assert session.only(de.FinalCutOrdered).step == 7


def test_a_later_finish_runs_to_the_recorded_target():
    session = finishing(finish_target=6)
    for learner in range(3):
        session.join(learner)
    assert [opened.step for opened in session.all(de.AttemptOpened)] == [6]


def test_a_finish_without_everybody_ends_with_3():
    session = finishing()
    session.join(0)
    session.join(1)
    session.fire()
    ended = session.only(de.SessionEnded)
    assert (ended.exit_code, session.at) == (3, 600.0)
    assert "learner 2" in ended.why


def test_a_learner_lost_during_the_finish_ends_it_with_3():
    session = finishing()
    for learner in range(3):
        session.join(learner)
    session.wait(50.0)
    session.leave(1)
    while session.state.phase is not Phase.ENDED:
        session.fire()
    assert (session.state.exit_code, session.at) == (3, 650.0)


# Stop.


def stop(session):
    return session.tell(ev.StopRequested, signal="SIGTERM")


def test_stop_before_a_session_exits_at_once():
    session = Session()
    session.join(0)
    stop(session)
    assert session.only(de.SessionEnded).exit_code == 4


def test_stop_waits_for_the_checkpoint_of_step_0():
    session = Session()
    session.join(0)
    session.initialise()
    stop(session)
    assert not session.pick(de.SessionEnded)
    session.hello(1)
    refused = session.only(de.LearnerRefused)
    assert (refused.reason, refused.permanent) == ("ended", False)
    session.written(0)
    assert session.only(de.SessionEnded).exit_code == 4


def test_stop_while_waiting_for_learners_exits():
    session = started(learners=1)
    stop(session)
    assert session.only(de.SessionEnded).exit_code == 4


def test_stop_while_gathering_waits_for_a_grace_then_discards_below_the_quorum():
    session = started(num_fragments=3, pipeline=3)
    session.push(0, 1)
    stop(session)
    ending = session.only(de.SessionEnding)
    assert (ending.phase, ending.drains_pool) == ("stop", False), "a stop waits for no matrix"
    stop(session)
    assert session.only(de.Ignored).event == "stop_requested"
    session.fire()
    assert session.at == 1.0
    assert [(d.step, d.reason) for d in session.pick(de.AttemptDiscarded)] == [
        (1, "stopping"),
        (2, "stopping"),
        (3, "stopping"),
    ]
    assert session.only(de.SessionEnded).exit_code == 4
    assert not session.pick(de.LearnerReleased)


def test_stop_while_gathering_seals_what_has_its_quorum():
    session = started(num_learners=3, quorum=2, wait_for=3, pipeline=1, closing_sweep="plain", total_steps=4)
    session.commit(1)
    session.commit(2)
    session.push(0, 3)
    session.push(1, 3)
    stop(session)
    session.fire()
    assert session.only(de.AttemptSealed).missed == (2,)
    session.merged(3)
    session.applied(3)
    assert session.only(de.CheckpointOrdered).step == 3
    assert not session.pick(de.AttemptOpened)
    session.written(3)
    ended = session.only(de.SessionEnded)
    assert (ended.exit_code, ended.step) == (4, 3)


def test_stop_while_merging_has_the_stop_budget():
    session = started(num_fragments=3, pipeline=3)
    for step_ in (1, 2):
        for learner in (0, 1):
            session.push(learner, step_)
    session.merged(1)
    stop(session)
    session.fire()
    assert [d.step for d in session.pick(de.AttemptDiscarded)] == [3]
    session.applied(1)
    session.written(1)
    session.fire()
    assert session.at == 20.0
    assert [(d.step, d.reason) for d in session.pick(de.AttemptDiscarded)] == [(2, "stopping")]
    assert session.only(de.SessionEnded).step == 1
    session.merged(2)
    assert session.only(de.Ignored).reason == "phase"


def test_stop_drops_a_round_that_waits_for_its_retry_and_all_later_ones():
    session = started(num_fragments=3, pipeline=3)
    for learner in (0, 1):
        session.push(learner, 2)
    session.offer(0, 1, c_steps=0)
    assert session.state.rounds[0].status is Status.RETRY
    stop(session)
    assert [d.step for d in session.pick(de.AttemptDiscarded)] == [2, 3]
    assert session.only(de.SessionEnded).exit_code == 4


def test_a_discard_while_stopping_takes_later_rounds_with_it():
    session = started(num_fragments=3, pipeline=3)
    for step_ in (1, 2):
        for learner in (0, 1):
            session.push(learner, step_)
    session.merged(1)
    session.merged(2)
    stop(session)
    session.applied(1, finite=False)
    assert [(d.step, d.reason) for d in session.pick(de.AttemptDiscarded)] == [
        (1, "not_finite"),
        (2, "stopping"),
        (3, "stopping"),
    ]
    assert session.only(de.SessionEnded).step == 0


def test_stop_while_draining_saves_and_says_4():
    session = started(total_steps=1)
    session.commit(1, write=False)
    stop(session)
    session.written(1)
    assert session.only(de.SessionEnded).exit_code == 4


def test_stop_while_finalising_says_3():
    session = completed()
    session.ack(0)
    stop(session)
    ended = session.only(de.SessionEnded)
    assert ended.exit_code == 3
    assert "learner 1" in ended.why


def test_stop_in_the_budget_phase_says_4():
    session = started(learner_budget_steps=50)
    budget(session, 0)
    stop(session)
    assert session.only(de.SessionEnded).exit_code == 4


def test_stop_writes_the_checkpoint_that_was_not_due():
    session = started(checkpoint_every=0, pipeline=1)
    session.commit(1)
    session.leave(0)
    stop(session)
    assert session.only(de.CheckpointOrdered).final
    session.written(1)
    assert session.only(de.SessionEnded).exit_code == 4


# Resume.


def test_a_resume_rebuilds_the_state_from_its_event_alone():
    session = started(num_fragments=3, pipeline=3)
    session.commit(1)
    session.push(0, 2)
    event = resumed(session, 1, at=77.0, ledger=(LedgerEntry(learner=0, merges=1, c_steps=10, c_tokens=100),))
    again, decisions = step(session.state, event)
    fresh, same = step(Session().state, event)
    assert (again, decisions) == (fresh, same)
    assert isinstance(decisions[0], de.SessionOpened)
    assert again.rounds == ()
    assert again.xi_sync is None
    assert not again.current
    assert (again.step, again.versions, again.at) == (1, (1, 0, 0), 77.0)
    assert step(again, event) == (fresh, same), "resuming twice equals resuming once"


def test_the_next_round_after_a_resume_is_the_first_uncommitted_one():
    session = Session(config(wait_for=2))
    session.feed(resumed(session, 3))
    session.join(0)
    assert [ref.version for ref in session.only(de.BroadcastOrdered).fragments] == [3, 2]
    session.tell(
        ev.FragmentInitialised, learner=0, generation=session.gen(0), fragment=0, digest="", finite=True
    )
    assert session.only(de.Ignored).reason == "phase"
    session.join(1)
    assert [(o.step, o.attempt, o.base_version) for o in session.pick(de.AttemptOpened)] == [
        (4, 1, 2),
        (5, 1, 3),
    ]


def test_a_checkpoint_fixes_the_terms_before_anybody_connects():
    session = Session()
    session.feed(resumed(session, 3))
    session.hello(0, dtype="f32")
    refused = session.only(de.LearnerRefused)
    assert (refused.field, refused.permanent) == ("dtype", True)


def test_a_resume_past_the_total_is_a_configuration_error():
    session = Session(config(total_steps=2))
    with pytest.raises(ConfigError, match="--total-steps"):
        session.feed(resumed(session, 3))


def test_a_resume_that_is_no_prefix_is_illegal():
    session = Session()
    event = resumed(session, 3)
    wrong = evolve(event, fragments=(event.fragments[0], evolve(event.fragments[1], version=1)))
    with pytest.raises(CoordinatorError, match="versions"):
        session.feed(wrong)


def test_resuming_a_finished_run_sends_the_cut_again_to_who_is_missing():
    session = Session(config(total_steps=3))
    session.feed(resumed(session, 3, awaited=(1,), acked=(0,)))
    assert session.only(de.FinalCutOrdered).awaited == (1,)
    session.join(1)
    assert session.only(de.FinalCutOrdered).to[0].learner == 1
    session.ack(1)
    assert session.only(de.SessionEnded).exit_code == 0


def test_resuming_a_run_that_everybody_holds_ends_at_once():
    session = Session(config(total_steps=3, mark_final_checkpoint=True))
    session.feed(resumed(session, 3, acked=(0, 1)))
    ended = session.only(de.SessionEnded)
    assert (ended.exit_code, ended.mark_final) == (0, True)


def test_resuming_before_any_cut_awaits_the_contributors():
    session = Session(config(num_learners=3, total_steps=3, quorum=2))
    ledger = tuple(LedgerEntry(learner=learner, merges=1, c_steps=1, c_tokens=1) for learner in (0, 2))
    session.feed(resumed(session, 3, ledger=ledger))
    assert session.only(de.FinalCutOrdered).awaited == (0, 2)


def test_a_higher_total_goes_on_and_forgets_the_old_cut():
    session = Session(config(total_steps=5))
    session.feed(resumed(session, 3, awaited=(1,), acked=(0,)))
    assert not session.pick(de.FinalCutOrdered)
    session.join(0)
    session.join(1)
    assert session.only(de.RoundsStarted).step == 4
    session.commit(4)
    session.commit(5)
    assert session.only(de.FinalCutOrdered).awaited == (0, 1)
