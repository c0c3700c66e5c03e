"""Commits in order, checkpoints that gate broadcasts, unusable merges, the closing sweep."""

import pytest
from core_fleet import Session, config

from yeto.core import Phase
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.parts import Status
from yeto.core.values import LedgerEntry
from yeto.errors import CoordinatorError


def started(num_fragments=2, learners=None, **changes):
    session = Session(config(**changes), num_fragments=num_fragments)
    session.start(learners)
    return session


def answered(session, step_, attempt=1, learners=None):
    for learner in range(session.config.num_learners) if learners is None else learners:
        session.push(learner, step_, attempt)


def test_merges_finish_in_any_order_commits_do_not():
    session = started(num_fragments=3, pipeline=3)
    for step_ in (3, 1, 2):
        answered(session, step_)
    session.merged(3)
    session.merged(2)
    assert not session.all(de.CommitOrdered)
    session.merged(1)
    assert [order.step for order in session.all(de.CommitOrdered)] == [1]
    for step_ in (1, 2, 3):
        assert session.state.rounds[0].step == step_
        session.applied(step_)
    assert [merge.step for merge in session.all(de.RoundCommitted)] == [1, 2, 3]
    assert session.state.versions == (1, 2, 3)


def test_the_ledger_counts_each_responder():
    session = started()
    session.push(0, 1, c_steps=3, c_tokens=30)
    session.push(1, 1, c_steps=5, c_tokens=100)
    session.finish(1)
    session.commit(2)
    assert session.state.ledger[0] == LedgerEntry(learner=0, merges=2, c_steps=13, c_tokens=130)
    merge = session.all(de.RoundCommitted)[0]
    assert [responder.weight for responder in merge.responders] == [300.0, 2000.0]
    assert sum(responder.contribution for responder in merge.responders) == pytest.approx(1.0)
    assert (merge.members, merge.missed, merge.left_out) == ((0, 1), (), ())
    assert (merge.base_version, merge.version) == (0, 1)


def test_equal_weights_are_shown_as_applied():
    session = started(learner_weight="equal")
    session.push(0, 1, c_tokens=1)
    session.push(1, 1, c_tokens=10**9)
    assert [w.weight for w in session.only(de.AttemptSealed).responders] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("setting", "expected"), [("heloco", [False, True]), ("heloco-all", [True, True]), ("none", [False] * 2)]
)
def test_which_pushes_are_corrected(setting, expected):
    session = started(num_fragments=1, pipeline=1, delta_correction=setting)
    session.commit(1)
    session.push(0, 2)
    session.push(1, 2, base_version=0)
    assert [w.correct for w in session.only(de.AttemptSealed).responders] == expected
    session.merged(2, corrected=(1,))
    session.applied(2)
    assert [r.corrected for r in session.only(de.RoundCommitted).responders] == [False, True]


# Checkpoints and broadcasts.


def test_a_due_checkpoint_gates_its_broadcast_and_all_later_ones():
    session = started(num_fragments=4, pipeline=4, checkpoint_every=2)
    session.commit(1)
    assert [b.fragments[0].version for b in session.all(de.BroadcastOrdered)[1:]] == [1]
    session.commit(2, write=False)
    assert session.only(de.CheckpointOrdered).step == 2
    session.commit(3, write=False)
    assert [b.fragments[0].version for b in session.all(de.BroadcastOrdered)[1:]] == [1]
    session.written(2)
    assert [b.fragments[0].version for b in session.pick(de.BroadcastOrdered)] == [2, 3]


def test_checkpoints_coalesce():
    session = started(num_fragments=4, pipeline=4)
    for step_ in (1, 2, 3):
        session.commit(step_, write=False)
    assert [c.step for c in session.all(de.CheckpointOrdered)] == [0, 1]
    session.written(1)
    assert session.only(de.CheckpointOrdered).step == 3
    assert [b.fragments[0].version for b in session.pick(de.BroadcastOrdered)] == [1]
    session.written(3)
    assert [b.fragments[0].version for b in session.pick(de.BroadcastOrdered)] == [2, 3]
    assert session.state.broadcast == (1, 2, 3, 0)


def test_a_round_opens_only_after_the_last_broadcast_of_its_fragment():
    session = started(num_fragments=2, pipeline=2)
    session.commit(1, write=False)
    assert session.state.find(3) is None
    session.written(1)
    assert session.only(de.AttemptOpened).base_version == 1


def test_without_checkpoints_broadcasts_leave_at_once():
    session = started(checkpoint_every=0)
    session.commit(1)
    assert [c.step for c in session.all(de.CheckpointOrdered)] == [0]
    assert session.state.broadcast == (1, 0)
    assert session.all(de.RoundCommitted)[0].sync_seconds == 0.0


def test_a_failed_checkpoint_stops_the_session_and_broadcasts_nothing():
    session = started()
    session.commit(1)
    session.commit(2, write=False)
    session.tell(ev.CheckpointFailed, step=2, message="No space left on device")
    ended = session.only(de.SessionEnded)
    assert ended.exit_code == 1
    assert "No space left" in ended.why
    assert "checkpoint of step 1 is intact" in ended.why
    assert not session.pick(de.BroadcastOrdered)
    assert session.state.broadcast == (1, 0)


# Unusable merges.


IMPOSSIBLE = [
    ("delta_cosine", 1.5),
    ("delta_cosine", -7.0),
    ("norm_ratio", -0.5),
    ("norm_ratio", float("inf")),
    ("offset_ratio", -1.0),
    ("offset_ratio", float("nan")),
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_figures_that_no_vectors_have_are_refused_and_change_nothing(name, value):
    session = started()
    answered(session, 1)
    tell = session.merged
    if name == "offset_ratio":
        session.merged(1, delta_cosine=-1.0, norm_ratio=0.0)
        tell = session.applied
    before = session.state
    with pytest.raises(CoordinatorError, match=f"{name} {value} is impossible"):
        tell(1, **{name: value})
    assert session.state is before


def test_zero_weights_commit_a_version_and_nothing_else():
    session = started()
    session.push(0, 1, c_tokens=0)
    session.push(1, 1, c_tokens=0)
    assert not session.pick(de.MergeOrdered)
    assert session.only(de.CommitOrdered).no_op
    session.applied(1)
    merge = session.only(de.RoundCommitted)
    assert merge.no_op
    assert "all weights are 0" in merge.why
    assert [responder.contribution for responder in merge.responders] == [0.0, 0.0]
    assert session.state.versions == (1, 0)


def test_a_non_finite_merge_is_retried_without_the_largest_norm():
    session = started(num_learners=3, quorum=2, wait_for=3, pipeline=1)
    answered(session, 1)
    session.merged(1, finite=False, gradient_norm=None)
    discarded = session.only(de.AttemptDiscarded)
    assert (discarded.reason, discarded.retry_at) == ("not_finite", 2.0)
    session.fire()
    for learner, norm in ((0, 1.0), (1, 7.0), (2, 2.0)):
        session.offer(learner, 1, 2)
        session.receive(learner, 1, 2, norm=norm)
    sealed = session.only(de.AttemptSealed)
    assert sealed.left_out == (1,)
    assert [w.learner for w in sealed.responders] == [0, 2]
    session.finish(1, 2)
    merge = session.all(de.RoundCommitted)[0]
    assert (merge.left_out, merge.missed) == ((1,), ())
    assert 1 not in session.state.ledger


def test_the_largest_norm_is_kept_when_the_quorum_needs_it():
    session = started(pipeline=1)
    answered(session, 1)
    session.merged(1)
    session.applied(1, finite=False)
    assert session.only(de.AttemptDiscarded).reason == "not_finite"
    assert session.state.versions == (0, 0)
    session.fire()
    answered(session, 1, 2)
    assert session.only(de.AttemptSealed).left_out == ()


def test_the_third_unusable_merge_stops_and_names_the_learners():
    session = started(pipeline=1)
    session.commit(1)
    for attempt in (1, 2, 3):
        if attempt > 1:
            session.fire()
        answered(session, 2, attempt)
        if attempt == 2:
            session.tell(ev.MergeFailed, step=2, attempt=attempt, message="SVD did not converge")
        else:
            session.merged(2, attempt, finite=False, gradient_norm=None)
    discarded = session.only(de.AttemptDiscarded)
    assert discarded.retry_at is None
    ended = session.only(de.SessionEnded)
    assert (ended.exit_code, ended.step) == (1, 1)
    assert "learners 0, 1" in ended.why


def test_the_outlier_guard_compares_with_the_lower_median_and_keeps_the_quorum():
    session = started(num_learners=4, quorum=2, wait_for=4, pipeline=1, max_norm_ratio=3.0)
    for learner, norm in ((0, 10.0), (1, 1.0), (2, 1.5), (3, 5.0)):
        session.offer(learner, 1)
        session.receive(learner, 1, norm=norm)
    assert session.only(de.AttemptSealed).left_out == (0, 3), "lower median 1.5, limit 4.5"


def test_the_outlier_guard_never_goes_below_the_quorum():
    session = started(num_learners=3, quorum=3, pipeline=1, max_norm_ratio=2.0)
    for learner, norm in ((0, 100.0), (1, 1.0), (2, 1.0)):
        session.offer(learner, 1)
        session.receive(learner, 1, norm=norm)
    assert session.only(de.AttemptSealed).left_out == ()


# The closing sweep.


def sweeping(**changes):
    settings = {
        "num_learners": 3,
        "quorum": 2,
        "wait_for": 3,
        "total_steps": 4,
        "closing_sweep": "plain",
        "pipeline": 1,
        "quorum_timeout_seconds": 100.0,
        **changes,
    }
    return started(**settings)


def test_the_last_rounds_of_a_long_enough_run_are_a_plain_sweep():
    session = sweeping()
    for step_ in (1, 2, 3):
        session.commit(step_)
    assert [opened.sweep for opened in session.all(de.AttemptOpened)] == [False, False, True, True]
    assert [merge.plain_average for merge in session.all(de.MergeOrdered)] == [False, False, True]
    orders = session.all(de.CommitOrdered)
    assert [(order.lr, order.momentum, order.sweep) for order in orders] == [
        (0.7, 0.9, False),
        (0.7, 0.9, False),
        (1.0, 0.0, True),
    ]


@pytest.mark.parametrize("changes", [{"total_steps": 3}, {"closing_sweep": "off"}])
def test_short_runs_and_off_have_no_sweep(changes):
    session = sweeping(**changes)
    session.commit(1)
    session.commit(2)
    assert not any(opened.sweep for opened in session.all(de.AttemptOpened))


def test_a_sweep_round_does_not_correct():
    session = sweeping(delta_correction="heloco-all")
    session.commit(1)
    session.commit(2)
    answered(session, 3)
    assert not any(w.correct for w in session.only(de.AttemptSealed).responders)


def test_a_sweep_round_waits_for_every_live_member_up_to_the_deadline():
    session = sweeping()
    session.commit(1)
    session.commit(2)
    answered(session, 3, learners=(0, 1))
    assert not session.pick(de.GraceOpened)
    session.fire()
    assert session.at == 100.0
    assert session.only(de.AttemptSealed).missed == (2,)
    session.finish(3)
    answered(session, 4, learners=(0, 1))
    assert session.only(de.AttemptSealed).missed == (2,), "the sweep waits for it only once"


def test_a_member_that_answers_is_waited_for_again():
    session = sweeping(total_steps=6, num_fragments=3)
    for step_ in (1, 2, 3):
        session.commit(step_)
    answered(session, 4, learners=(0, 1))
    session.fire()
    session.finish(4)
    session.push(2, 5)
    answered(session, 5, learners=(0, 1))
    session.finish(5)
    answered(session, 6, learners=(0, 1))
    assert session.state.rounds[0].status is Status.GATHERING
    session.push(2, 6)
    assert session.only(de.AttemptSealed).missed == ()


def test_pipelined_sweep_rounds_learn_who_was_missed():
    session = sweeping(pipeline=2)
    session.commit(1)
    session.commit(2)
    answered(session, 3, learners=(0, 1))
    answered(session, 4, learners=(0, 1))
    session.fire()
    assert [sealed.step for sealed in session.pick(de.AttemptSealed)] == [3, 4]
    assert all(sealed.missed == (2,) for sealed in session.pick(de.AttemptSealed))


def test_an_earlier_sweep_round_that_was_retried_learns_who_was_missed_too():
    session = sweeping(pipeline=2)
    session.commit(1)
    session.commit(2)
    for learner in (0, 1):
        session.offer(learner, 3, c_steps=0)
    session.fire()
    answered(session, 3, attempt=2, learners=(0, 1))
    answered(session, 4, learners=(0, 1))
    session.fire()
    assert [sealed.step for sealed in session.pick(de.AttemptSealed)] == [4, 3]
    assert [merge.step for merge in session.pick(de.MergeOrdered)] == [3, 4]


def test_a_sweep_round_below_the_quorum_is_retried():
    session = sweeping()
    session.commit(1)
    session.commit(2)
    answered(session, 3, learners=(0,))
    session.fire()
    assert session.only(de.AttemptDiscarded).reason == "quorum_timeout"
    assert session.only(de.AttemptOpened).attempt == 2


def test_a_death_in_the_sweep_is_not_waited_for():
    session = sweeping()
    session.commit(1)
    session.commit(2)
    answered(session, 3, learners=(0, 1))
    session.leave(2)
    assert session.only(de.AttemptSealed).missed == (2,)
    assert session.state.phase is Phase.RUNNING
