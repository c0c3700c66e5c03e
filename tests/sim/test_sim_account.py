"""Where units of work end, told by hand: one learner, one fragment, P 1 unless a test says more."""

import pytest

from yeto.core import decisions as de
from yeto.core.values import Responder, Weighted
from yeto.sim.account import Account, AccountError, Fate


@pytest.fixture
def account():
    account = Account(1, 1, can_go_back=True)
    account.begin(0, 0, 0)
    return account


def push(account, work, step, attempt=1, c_steps=None, learner=0):
    return account.pushed(
        learner, 0, work, step=step, attempt=attempt, c_steps=work if c_steps is None else c_steps, now=0.0
    )


def commit(account, step, attempt=1, learners=(0,)):
    part = {"generation": "a", "base_version": 0, "staleness": 0, "c_steps": 1, "c_tokens": 1, "weight": 1.0}
    account.committed(
        de.RoundCommitted(
            step=step,
            fragment=0,
            attempt=attempt,
            base_version=0,
            version=step,
            quorum=1,
            members=learners,
            responders=tuple(
                Responder(
                    learner=learner,
                    contribution=1.0,
                    delta_norm=1.0,
                    cosine_to_momentum=None,
                    corrected=False,
                    **part,
                )
                for learner in learners
            ),
            missed=(),
            left_out=(),
            quorum_seconds=0.0,
            grace_seconds=None,
            merge_seconds=0.0,
            sync_seconds=None,
            gradient_norm=1.0,
            params_digest="",
            momentum_digest="",
            no_op=False,
            why="",
        )
    )


def seal(account, step, *merged, members=(0,), left_out=()):
    part = {"generation": "a", "base_version": 0, "staleness": 0, "c_steps": 1, "c_tokens": 1, "weight": 1.0}
    account.sealed(
        de.AttemptSealed(
            step=step,
            fragment=0,
            attempt=1,
            responders=tuple(Weighted(learner=learner, correct=False, **part) for learner in merged),
            missed=(),
            left_out=left_out,
            why="",
        ),
        members,
    )


def discard(account, step, attempt=1):
    account.discarded(
        de.AttemptDiscarded(step=step, attempt=attempt, reason="unreachable", lost=(), retry_at=None, why=""),
        (0,),
    )


def test_a_round_as_it_should_be(account):
    account.accepted(push(account, 10, 1))
    commit(account, 1)
    account.reset(0, 0, 13, Fate.UNASKED)
    account.accepted(push(account, 20, 2, c_steps=7))
    commit(account, 2)
    account.reset(0, 0, 21, Fate.UNASKED)
    assert account.closed([25]) == ({"between": 4, "local": 4, "merged": 17},)


def test_what_no_push_carried_before_a_broadcast(account):
    account.reset(0, 0, 5, Fate.UNASKED)
    account.reset(0, 0, 6, Fate.ROLLED_BACK)
    account.close(0, 8, Fate.DIED)
    assert account.closed([8]) == ({"died": 2, "rolled_back": 1, "unasked": 5},)


def test_what_became_of_a_push(account):
    push(account, 2, 1)
    seal(account, 1)
    account.reset(0, 0, 2, Fate.UNASKED)
    account.accepted(push(account, 5, 2, c_steps=3))
    discard(account, 2)
    account.reset(0, 0, 5, Fate.UNASKED)
    account.refused(push(account, 9, 3, c_steps=4), "stale_base")
    account.reset(0, 0, 9, Fate.UNASKED)
    account.accepted(push(account, 14, 4, c_steps=5))
    seal(account, 4, left_out=(0,))
    account.reset(0, 0, 14, Fate.UNASKED)
    account.link_lost([push(account, 20, 5, c_steps=6)])
    account.reset(0, 0, 20, Fate.UNASKED)
    push(account, 27, 6, c_steps=7)
    account.syncer_lost()
    assert account.closed([27]) == (
        {
            "discarded": 3,
            "left_out": 5,
            "link_lost": 6,
            "missed_seal": 2,
            "refused:stale_base": 4,
            "syncer_lost": 7,
        },
    )


def test_a_retry_carries_what_the_discarded_attempt_did(account):
    account.accepted(push(account, 3, 1))
    discard(account, 1)
    account.accepted(push(account, 5, 1, attempt=2))
    commit(account, 1, attempt=2)
    assert account.closed([6]) == ({"local": 1, "merged": 5},)


def test_a_push_that_is_merged_after_an_older_broadcast_came(account):
    account.accepted(push(account, 3, 2))
    account.reset(0, 0, 4, Fate.UNASKED)
    commit(account, 2)
    assert account.closed([4]) == ({"between": 1, "merged": 3},)


def test_a_unit_that_is_merged_twice_is_reported(account):
    account.accepted(push(account, 10, 1))
    commit(account, 1)
    account.accepted(push(account, 12, 2))
    with pytest.raises(AccountError, match=r"units 0\.\.9 are merged again by round 2") as caught:
        commit(account, 2)
    assert "for round 1 attempt 1" in str(caught.value)


def test_steps_that_were_not_done_are_reported(account):
    with pytest.raises(AccountError, match="states 11 steps"):
        push(account, 10, 1, c_steps=11)


def test_who_is_merged_must_have_answered(account):
    push(account, 10, 1)
    with pytest.raises(AccountError, match="round 1 merges learner 0"):
        commit(account, 1)


def test_after_a_resume_the_same_units_may_be_merged_once_more(account):
    account.accepted(push(account, 10, 1))
    commit(account, 1)
    account.syncer_lost()
    account.resumed(0)
    account.accepted(push(account, 12, 1))
    commit(account, 1)
    assert account.closed([12]) == ({"merged": 12},)


def test_what_a_resume_took_back_is_superseded(account):
    account.accepted(push(account, 10, 1))
    commit(account, 1)
    account.reset(0, 0, 11, Fate.UNASKED)
    account.syncer_lost()
    account.resumed(0)
    account.reset(0, 0, 13, Fate.ROLLED_BACK)
    assert account.closed([13]) == ({"between": 1, "rolled_back": 2, "superseded": 10},)


def test_what_a_checkpoint_keeps_for_good_is_final(account):
    account.accepted(push(account, 10, 1))
    commit(account, 1)
    account.final_up_to(1)
    account.resumed(1)
    account.accepted(push(account, 12, 2))
    with pytest.raises(AccountError, match="merged again"):
        commit(account, 2)


def test_a_restarted_learner_goes_on_counting_from_what_it_saved(account):
    account.reset(0, 0, 4, Fate.UNASKED)
    saved = account.saved(0, 10, None)
    account.close(0, 15, Fate.DIED)
    account.restored(saved, 15)
    account.accepted(push(account, 18, 1, c_steps=6 + 3))
    commit(account, 1)
    assert account.closed([20]) == ({"died": 5, "local": 2, "merged": 9, "unasked": 4},)


def test_a_restart_from_before_a_push_that_was_merged(account):
    saved = account.saved(0, 10, None)
    account.accepted(push(account, 12, 1))
    account.close(0, 15, Fate.DIED)
    account.restored(saved, 15)
    commit(account, 1)
    account.reset(0, 0, 16, Fate.UNASKED)
    assert account.closed([16]) == ({"between": 1, "died": 3, "merged": 12},)


def test_two_restarts_from_one_saved_state(account):
    saved = account.saved(0, 10, None)
    account.close(0, 12, Fate.DIED)
    account.restored(saved, 12)
    account.close(0, 15, Fate.DIED)
    account.restored(saved, 15)
    account.accepted(push(account, 16, 1, c_steps=11))
    commit(account, 1)
    assert account.closed([16]) == ({"died": 5, "merged": 11},)


def test_a_restart_with_work_that_was_merged_is_reported(account):
    saved = account.saved(0, 10, None)
    account.accepted(push(account, 12, 1))
    commit(account, 1)
    account.close(0, 12, Fate.DIED)
    account.restored(saved, 12)
    account.accepted(push(account, 13, 2, c_steps=11))
    with pytest.raises(AccountError, match="merged again"):
        commit(account, 2)


def test_work_that_is_carried_is_merged_by_the_next_push(account):
    account.accepted(push(account, 10, 1))
    commit(account, 1)
    account.carried(0, 0, 10)
    account.accepted(push(account, 20, 2, c_steps=10))
    commit(account, 2)
    account.carried(0, 0, 20)
    assert account.closed([25]) == ({"local": 5, "merged": 20},)


def test_a_carried_push_that_missed_its_merge_is_lost_whole(account):
    account.accepted(push(account, 10, 1))
    seal(account, 1)
    account.carried(0, 0, 10)
    account.accepted(push(account, 20, 2, c_steps=10))
    commit(account, 2)
    assert account.closed([20]) == ({"merged": 10, "missed_seal": 10},)


def test_carried_work_that_is_not_taken_off_is_reported(account):
    account.accepted(push(account, 10, 1))
    commit(account, 1)
    account.accepted(push(account, 20, 2))
    with pytest.raises(AccountError, match="merged again"):
        commit(account, 2)


@pytest.mark.parametrize("second", [14, 18])
def test_a_restart_from_before_a_push_was_taken_off(account, second):
    """Units 8 to 13 are both in what was saved and in the periods after: each is told of once."""
    account.accepted(push(account, 8, 1))
    saved = account.saved(0, 14, None)
    commit(account, 1)
    account.carried(0, 0, 8)
    account.accepted(push(account, second, 2, c_steps=second - 8))
    commit(account, 2)
    account.carried(0, 0, second)
    account.close(0, 20, Fate.DIED)
    account.restored(saved, 20)
    account.reset(0, 0, 22, Fate.UNASKED)
    (tally,) = account.closed([22])
    assert tally["merged"] == second
    assert sum(tally.values()) == 22


def test_a_copy_of_an_accepted_push_changes_nothing(account):
    first = push(account, 10, 1)
    account.accepted(first)
    account.refused(first, "out_of_round")
    commit(account, 1)
    assert account.closed([10]) == ({"merged": 10},)


def test_what_is_decided_is_forgotten():
    account = Account(1, 1, can_go_back=True)
    account.begin(0, 0, 0)
    for step in range(1, 2001):
        account.accepted(push(account, 3 * step - 1, step, c_steps=2))
        commit(account, step)
        account.final_up_to(step - 2)
        account.reset(0, 0, 3 * step, Fate.UNASKED)
    assert len(account._waiting) < 100
    assert len(account._commits) <= 2
    assert not account._pushes
    assert account.closed([6000]) == ({"between": 2000, "merged": 4000},)
