"""The fault campaign, and the proof that it can fail."""

from collections import Counter

import pytest
from attrs import evolve

from yeto.core import CoreConfig, checkpoints, sealing
from yeto.learner.anchors import FragmentBook
from yeto.sim import Faults, LearnerSpec, SimConfig, SyncerSpec
from yeto.sim.campaign import KINDS, CampaignError, draw, run_checked, run_seeds
from yeto.sim.client import Client
from yeto.sim.tape import SimTape
from yeto.tape import Past, PastFold

pytestmark = pytest.mark.begins_early

PARTS = 6
happened = Counter()
"""What the parts that ran in this process have met."""
ran = set()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_seed_keeps_every_rule(part, campaign_seeds, tmp_path):
    count = campaign_seeds // PARTS
    happened.update(run_seeds(range(part * count, (part + 1) * count), tmp_path))
    ran.add(part)


def test_every_kind_of_fault_happened():
    if len(ran) < PARTS:
        pytest.skip("needs all parts of the campaign in this process: run the whole file")
    missing = sorted(kind for kind in KINDS if not happened[kind])
    assert not missing
    seeds = sum(count for kind, count in happened.items() if kind.startswith("exit_"))
    assert happened["exit_0"] >= 0.8 * seeds, "most runs reach their end, or the campaign proves little"
    assert not happened["exit_None"]


def first_failure(folder, *, seeds=60, make_config=draw, make_book=None):
    """Return what the first of some seeds to fail says."""
    for seed in range(seeds):
        try:
            run_checked(make_config(seed), folder, make_book=make_book)
        except CampaignError as error:
            return str(error)
    pytest.fail(f"none of {seeds} seeds noticed")


def restarting(seed):
    """Learners that are back from their saved state before their last push is merged."""
    core = CoreConfig(
        num_learners=2,
        total_steps=60,
        quorum=1,
        wait_for=1,
        grace_cap_seconds=10.0,
        grace_tau=100.0,
        pipeline=1,
        sync_interval_steps=0.0,
        min_round_interval_seconds=0.5,
    )
    steady = LearnerSpec(step_seconds=0.2)
    mortal = evolve(
        steady, mean_up_seconds=5.0, mean_repair_seconds=0.1, keeps_state=1.0, state_every_steps=25
    )
    return SimConfig(
        core=core,
        learners=(steady, mortal),
        num_fragments=1,
        push_bytes=1000,
        broadcast_bytes=1000,
        syncer=SyncerSpec(merge_seconds=4.0),
        faults=Faults(late=0.3, late_seconds=6.0),
        seed=seed,
        until_seconds=4000.0,
    )


class Broken(FragmentBook):
    """A book that lacks a rule."""

    @classmethod
    def of(cls, config):
        return cls(num_fragments=config.num_fragments, alpha=config.merge_alpha, carries=config.carries)


class WithoutHolding(Broken):
    def verdict(self, pull):
        for page in self._pages:
            page.pushed_step = None
        return super().verdict(pull)


class WithoutRestartRule(Broken):
    def restore(self, book):
        super().restore(book)
        for page in self._pages:
            page.is_restored = False


class ResettingOnPush(Broken):
    def answer(self, pull, local_step):
        answer = super().answer(pull, local_step)
        self._pages[pull.fragment].begun_at = self._counted
        return answer


class NeverTakingOff(Broken):
    def answer(self, pull, local_step):
        answer = super().answer(pull, local_step)
        self._pages[pull.fragment].sent = ()
        return answer


class CarryingOverRestarts(Broken):
    def restore(self, book):
        super().restore(book)
        for page in self._pages:
            page.is_foreign = False


class CountingFromTheBroadcast(Broken):
    def receive(self, broadcast):
        receipt = super().receive(broadcast)
        if receipt.carry is not None and receipt.carry.pushed is not None:
            self._pages[broadcast.fragment].begun_at = self._counted
        return receipt


class TestBrokenRules:
    """Whatever rule is taken away, some seed notices, and says how to see it again."""

    def test_pulls_that_overtake_broadcasts_are_answered(self, tmp_path):
        text = first_failure(tmp_path, make_book=WithoutHolding.of)
        assert "merged again" in text
        assert "again: python -m yeto.sim.campaign --seeds 1 --first " in text

    def test_a_restarted_learner_answers_at_once(self, tmp_path):
        assert run_checked(restarting(0), tmp_path).happened["restored"] > 10
        text = first_failure(tmp_path, make_config=restarting, make_book=WithoutRestartRule.of)
        assert "merged again" in text

    def test_counters_start_anew_on_a_push(self, tmp_path):
        assert "AccountError" in first_failure(tmp_path, make_book=ResettingOnPush.of)

    def test_what_was_pushed_is_carried_too(self, tmp_path):
        assert "merged again" in first_failure(tmp_path, make_book=NeverTakingOff.of)

    def test_what_was_pushed_before_a_restart_is_carried(self, tmp_path):
        def carrying(seed):
            return evolve(restarting(seed), carries=True)

        assert run_checked(carrying(0), tmp_path).happened["restored"] > 10
        text = first_failure(tmp_path, make_config=carrying, make_book=CarryingOverRestarts.of)
        assert "merged again" in text

    def test_carried_work_is_not_stated(self, tmp_path):
        text = first_failure(tmp_path, make_book=CountingFromTheBroadcast.of)
        assert "AccountError" in text

    def test_acts_do_not_wait_for_the_disk(self, tmp_path, monkeypatch):
        honest = SimTape.durable_at

        def hasty(self, now):
            honest(self, now)
            return now

        monkeypatch.setattr(SimTape, "durable_at", hasty)
        assert "was acted upon" in first_failure(tmp_path)

    def test_a_resume_forgets_who_has_the_final_cut(self, tmp_path, monkeypatch):
        honest = PastFold.past

        def forgetful(self, step, checkpoint_seq):
            past = honest(self, step, checkpoint_seq)
            return Past(checkpoint_seq=past.checkpoint_seq, awaited=past.awaited + past.acked)

        monkeypatch.setattr(PastFold, "past", forgetful)
        assert "acknowledged step" in first_failure(tmp_path, seeds=400)

    def test_broadcasts_do_not_wait_for_their_checkpoint(self, tmp_path, monkeypatch):
        def hasty(draft):
            durable, draft.durable = draft.durable, draft.step
            honest_release(draft)
            draft.durable = durable

        honest_release = checkpoints.release_broadcasts
        monkeypatch.setattr(checkpoints, "release_broadcasts", hasty)
        assert "is durable and" in first_failure(tmp_path)

    def test_an_answer_is_left_out_without_a_word(self, tmp_path, monkeypatch):
        honest = sealing._weighted
        monkeypatch.setattr(sealing, "_left_out", lambda draft, round_: ())
        monkeypatch.setattr(
            sealing,
            "_weighted",
            lambda config, round_, learner, plain: honest(config, round_, min(round_.answers), plain=plain),
        )
        assert "accepted were" in first_failure(tmp_path)

    def test_a_learner_never_dials_again(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Client, "_redial", lambda self: None)
        assert "not at its end" in first_failure(tmp_path)
