"""What broadcasts do to anchors, counters and residuals, and which pulls are answered when."""

import numpy as np
import pytest

from yeto.errors import ProtocolError
from yeto.learner.anchors import FragmentBook
from yeto.learner.exchanged import Broadcast, Pull, Residual, Taken, Verdict, newest

NUM_FRAGMENTS = 4


def values(*numbers):
    return np.array(numbers, dtype=np.float32)


def broadcast(version, *, fragment=0, generation=1, digest=None, numbers=(0.0,)):
    return Broadcast(
        generation=generation,
        fragment=fragment,
        version=version,
        digest=f"d{version}" if digest is None else digest,
        values=values(*numbers),
    )


def pull(step, *, attempt=1, fragment=0, generation=1):
    return Pull(generation=generation, fragment=fragment, step=step, attempt=attempt)


def kept(book):
    """What the book says of fragment 0."""
    return book.saved().fragments[0]


@pytest.fixture
def book():
    return FragmentBook(num_fragments=NUM_FRAGMENTS, alpha=0.5)


class TestReceipt:
    def test_the_first_broadcast_overwrites(self, book):
        receipt = book.receive(broadcast(7))
        assert (receipt.taken, receipt.alpha, receipt.previous_version) == (Taken.OVERWROTE, 0.0, None)
        assert kept(book).version == 7

    def test_a_higher_version_blends(self, book):
        book.receive(broadcast(1))
        receipt = book.receive(broadcast(5, numbers=(3.0,)))
        assert (receipt.taken, receipt.alpha, receipt.previous_version) == (Taken.BLENDED, 0.5, 1)
        assert kept(book).anchor == values(3.0)

    def test_alpha_zero_overwrites(self):
        book = FragmentBook(num_fragments=1, alpha=0.0)
        book.receive(broadcast(0))
        assert book.receive(broadcast(1)).alpha == 0.0

    def test_counters_start_anew_on_receipt_of_their_own_fragment(self, book):
        book.receive(broadcast(0))
        book.receive(broadcast(0, fragment=1))
        book.count_step(100)
        book.receive(broadcast(2, fragment=1))
        book.count_step(30)
        answer = book.answer(pull(1), local_step=2)
        assert (answer.c_steps, answer.c_tokens, answer.base_version) == (2, 130, 0)
        answer = book.answer(pull(6, fragment=1), local_step=2)
        assert (answer.c_steps, answer.c_tokens, answer.base_version) == (1, 30, 2)

    def test_a_push_does_not_reset_the_counters(self, book):
        book.receive(broadcast(0))
        book.count_step(10)
        assert book.answer(pull(1), local_step=1).c_steps == 1
        book.count_step(10)
        again = book.answer(pull(1, attempt=2), local_step=2)
        assert (again.c_steps, again.c_tokens) == (2, 20)

    def test_the_same_version_and_bytes_on_a_new_connection_change_nothing(self, book):
        book.receive(broadcast(5))
        book.count_step(10)
        receipt = book.receive(broadcast(5, generation=2))
        assert (receipt.taken, receipt.alpha) == (Taken.UNCHANGED, 1.0)
        answer = book.answer(pull(9, generation=2), local_step=1)
        assert (answer.c_steps, answer.c_tokens) == (1, 10)

    @pytest.mark.parametrize(("version", "digest"), [(3, "d3"), (5, "other")])
    def test_anything_not_newer_on_a_new_connection_is_a_roll_back(self, book, version, digest):
        book.receive(broadcast(5))
        book.count_step(10)
        receipt = book.receive(broadcast(version, generation=2, digest=digest))
        assert (receipt.taken, receipt.alpha, receipt.previous_version) == (Taken.ROLLED_BACK, 0.5, 5)
        assert kept(book).version == version
        assert book.verdict(pull(9, generation=2)) is Verdict.HOLD, "no work is counted any more"

    def test_within_a_connection_a_lower_version_is_ignored(self, book):
        book.receive(broadcast(5, numbers=(1.0,)))
        book.count_step(10)
        receipt = book.receive(broadcast(1, numbers=(9.0,)))
        assert (receipt.taken, receipt.alpha) == (Taken.IGNORED, 1.0)
        assert (kept(book).version, kept(book).anchor) == (5, values(1.0))
        assert book.answer(pull(9), local_step=1).c_steps == 1

    def test_within_a_connection_the_same_version_with_other_bytes_is_fatal(self, book):
        book.receive(broadcast(5))
        assert book.receive(broadcast(5)).taken is Taken.UNCHANGED
        with pytest.raises(ProtocolError, match="fragment 0: version 5 came twice"):
            book.receive(broadcast(5, digest="other"))


class TestOwnInit:
    def test_its_echo_changes_nothing(self, book):
        book.adopt_init(0, values(1.0), "init")
        assert not book.is_complete
        receipt = book.receive(broadcast(0, digest="init"))
        assert (receipt.taken, receipt.alpha) == (Taken.UNCHANGED, 1.0)

    @pytest.mark.parametrize(("version", "digest"), [(0, "other"), (8, "d8"), (8, "init")])
    def test_anything_else_overwrites(self, book, version, digest):
        book.adopt_init(0, values(1.0), "init")
        receipt = book.receive(broadcast(version, digest=digest))
        assert (receipt.taken, receipt.alpha) == (Taken.OVERWROTE, 0.0)

    def test_a_confirmed_init_is_an_anchor_like_any_other(self, book):
        book.adopt_init(0, values(1.0), "init")
        book.receive(broadcast(0, digest="init"))
        assert book.receive(broadcast(1)).taken is Taken.BLENDED

    def test_no_pull_is_answered_from_it(self, book):
        book.adopt_init(0, values(1.0), "init")
        book.count_step(1)
        assert book.verdict(pull(1)) is Verdict.HOLD


class TestHolding:
    """The table of the rule: what is answered, held or dropped."""

    @pytest.fixture
    def working(self, book):
        book.receive(broadcast(4))
        book.count_step(10)
        return book

    def test_a_pull_above_the_anchor_is_answered(self, working):
        assert working.verdict(pull(5)) is Verdict.ANSWER

    @pytest.mark.parametrize("step", [1, 4])
    def test_a_pull_at_or_below_the_anchor_is_dropped(self, working, step):
        assert working.verdict(pull(step)) is Verdict.DROP

    def test_without_work_it_is_held(self, book):
        book.receive(broadcast(4))
        assert book.verdict(pull(5)) is Verdict.HOLD
        book.count_step(10)
        assert book.verdict(pull(5)) is Verdict.ANSWER

    def test_without_an_anchor_it_is_held(self, book):
        book.count_step(10)
        assert book.verdict(pull(5)) is Verdict.HOLD

    def test_before_this_connections_broadcast_it_is_held_even_if_it_looks_old(self, working):
        assert working.verdict(pull(5, generation=2)) is Verdict.HOLD
        assert working.verdict(pull(1, generation=2)) is Verdict.HOLD
        working.receive(broadcast(4, generation=2))
        assert working.verdict(pull(5, generation=2)) is Verdict.ANSWER

    def test_a_pull_that_overtook_a_broadcast_is_held_until_it_comes(self, working):
        working.answer(pull(8), local_step=1)
        working.count_step(10)
        assert working.verdict(pull(12)) is Verdict.HOLD
        working.receive(broadcast(8))
        assert working.verdict(pull(12)) is Verdict.HOLD, "nothing was done since"
        working.count_step(10)
        assert working.verdict(pull(12)) is Verdict.ANSWER

    def test_an_older_broadcast_does_not_release_it(self, working):
        working.answer(pull(8), local_step=1)
        working.receive(broadcast(6))
        working.count_step(10)
        assert working.verdict(pull(12)) is Verdict.HOLD

    def test_a_retry_of_the_same_round_is_answered(self, working):
        working.answer(pull(8), local_step=1)
        assert working.verdict(pull(8, attempt=2)) is Verdict.ANSWER

    def test_the_same_pull_again_is_held_until_a_broadcast_came(self, working):
        working.answer(pull(8), local_step=1)
        assert working.verdict(pull(8)) is Verdict.HOLD
        working.receive(broadcast(4))
        assert working.verdict(pull(8)) is Verdict.ANSWER

    def test_the_same_pull_on_another_connection_is_another_pull(self, working):
        working.answer(pull(8), local_step=1)
        working.receive(broadcast(4, generation=2))
        assert working.verdict(pull(8, generation=2)) is Verdict.ANSWER

    def test_other_fragments_do_not_matter(self, working):
        working.receive(broadcast(0, fragment=1))
        working.count_step(10)
        working.answer(pull(8), local_step=1)
        assert working.verdict(pull(6, fragment=1)) is Verdict.ANSWER

    def test_a_roll_back_forgets_what_was_pushed(self, working):
        working.answer(pull(8), local_step=1)
        working.receive(broadcast(0, generation=2))
        working.count_step(10)
        assert working.verdict(pull(4, generation=2)) is Verdict.ANSWER
        assert working.verdict(pull(12, generation=2)) is Verdict.ANSWER

    def test_a_reconnection_that_changes_nothing_remembers_what_was_pushed(self, working):
        working.answer(pull(8), local_step=1)
        working.receive(broadcast(4, generation=2))
        working.count_step(10)
        assert working.verdict(pull(12, generation=2)) is Verdict.HOLD


class TestFrozen:
    @pytest.fixture
    def frozen(self, book):
        book.receive(broadcast(4))
        book.count_step(10)
        book.count_step(10)
        book.freeze(2, 20)
        return book

    def test_a_broadcast_moves_the_anchor_only(self, frozen):
        receipt = frozen.receive(broadcast(8, numbers=(3.0,)))
        assert receipt.alpha == 1.0
        assert kept(frozen).anchor == values(3.0)

    def test_every_push_states_the_whole_budget(self, frozen):
        frozen.receive(broadcast(8))
        answer = frozen.answer(pull(12), local_step=2)
        assert (answer.c_steps, answer.c_tokens, answer.base_version) == (2, 20, 8)

    def test_each_attempt_is_answered_once(self, frozen):
        frozen.answer(pull(8), local_step=2)
        assert frozen.verdict(pull(8)) is Verdict.HOLD
        assert frozen.verdict(pull(8, attempt=2)) is Verdict.ANSWER

    def test_holding_applies(self, frozen):
        frozen.answer(pull(8), local_step=2)
        assert frozen.verdict(pull(12)) is Verdict.HOLD


def test_staleness_is_counted_from_the_version_the_round_is_based_on(book):
    book.receive(broadcast(1))
    book.count_step(1)
    assert book.answer(pull(5), local_step=1).staleness == 0
    assert book.answer(pull(9), local_step=1).staleness == 4
    fresh = FragmentBook(num_fragments=NUM_FRAGMENTS, alpha=0.5)
    fresh.receive(broadcast(0))
    fresh.count_step(1)
    assert fresh.answer(pull(1), local_step=1).staleness == 0


class TestResiduals:
    @pytest.fixture
    def book(self):
        book = FragmentBook(num_fragments=NUM_FRAGMENTS, alpha=0.25, error_feedback=True)
        book.receive(broadcast(0))
        book.count_step(1)
        return book

    def push(self, book, step, *, attempt=1, generation=1, leaves=None):
        """Answer a pull; encode it at once when ``leaves`` says what quantisation took."""
        answer = book.answer(pull(step, attempt=attempt, generation=generation), local_step=1)
        if leaves is not None:
            answer.leaves.fill(values(leaves))
        return answer

    def carried(self, book, step, **kwargs):
        answer = self.push(book, step, **kwargs)
        added = None if answer.carried is None else answer.carried.values()
        return None if added is None else float(added[0])

    def test_nothing_is_owed_at_first(self, book):
        assert self.carried(book, 4) is None

    def test_it_is_due_with_the_broadcast_of_the_round(self, book):
        answer = self.push(book, 4, leaves=0.5)
        assert answer.residual_scale == 0.75
        assert self.carried(book, 4, attempt=2) is None, "a retry is not a later push"
        book.receive(broadcast(4))
        book.count_step(1)
        # The retry's own residual was never filled in, so it stands for what it would have carried: nothing.
        assert self.carried(book, 8) is None

    def test_a_repeated_push_replaces_it(self, book):
        self.push(book, 4, leaves=0.5)
        self.push(book, 4, attempt=2, leaves=0.125)
        book.receive(broadcast(4))
        book.count_step(1)
        assert self.carried(book, 8, leaves=0.0) == 0.125
        # A retry of round 8 from the same anchor adds it again: the first push of 8 was thrown away.
        assert self.carried(book, 8, attempt=2, leaves=2.0) == 0.125
        book.receive(broadcast(8))
        book.count_step(1)
        assert self.carried(book, 12) == 2.0

    def test_a_broadcast_below_the_round_does_not_make_it_due(self, book):
        self.push(book, 4, leaves=0.5)
        book.receive(broadcast(2))
        book.count_step(1)
        assert self.carried(book, 4, attempt=2) is None

    def test_a_push_dropped_before_encoding_passes_on_what_it_carried(self, book):
        self.push(book, 4, leaves=0.5)
        book.receive(broadcast(4))
        book.count_step(1)
        self.push(book, 8)
        book.receive(broadcast(8))
        book.count_step(1)
        assert self.carried(book, 12) == 0.5

    @pytest.mark.parametrize(
        "event",
        [
            lambda book: book.receive(broadcast(0, generation=2, digest="other")),
            lambda book: book.finish(),
        ],
        ids=["roll-back", "final cut"],
    )
    def test_it_is_dropped(self, book, event):
        self.push(book, 4, leaves=0.5)
        event(book)
        book.receive(broadcast(4, generation=3))
        book.count_step(1)
        assert self.carried(book, 8, generation=3) is None

    def test_frozen_weights_owe_nothing_new(self, book):
        book.freeze(1, 1)
        assert self.push(book, 4).leaves is None

    def test_values_come_when_they_are_filled_in(self):
        first = Residual(step=4, carried=None)
        second = Residual(step=8, carried=first)
        assert second.values() is None
        first.fill(values(1.0))
        assert second.values() == values(1.0)
        second.fill(values(2.0))
        assert second.values() == values(2.0)


class TestNewest:
    """Which of two broadcasts of a fragment waits for the boundary."""

    def test_an_empty_place_is_taken(self):
        arrived = broadcast(1)
        assert newest(None, arrived) is arrived

    def test_within_a_connection_the_higher_version_stays(self):
        low, high = broadcast(1), broadcast(5)
        assert newest(low, high) is high
        assert newest(high, low) is None
        assert newest(high, broadcast(5)) is None

    def test_across_connections_the_later_arrival_stays(self):
        high, low = broadcast(5), broadcast(1, generation=2)
        assert newest(high, low) is low

    def test_one_version_with_two_contents_is_fatal(self):
        with pytest.raises(ProtocolError, match="version 5 came twice"):
            newest(broadcast(5), broadcast(5, digest="other"))


def test_training_may_start_when_the_syncer_has_sent_every_fragment(book):
    book.adopt_init(0, values(1.0), "init")
    for fragment in range(1, NUM_FRAGMENTS):
        assert not book.is_complete
        book.receive(broadcast(0, fragment=fragment))
    assert not book.is_complete, "the own INIT is not yet confirmed"
    book.receive(broadcast(0, digest="init"))
    assert book.is_complete


class TestRestart:
    """A process that goes on from what an earlier one saved."""

    def restarted(self, book, **settings):
        again = FragmentBook(num_fragments=NUM_FRAGMENTS, alpha=0.5, **settings)
        again.restore(book.saved())
        return again

    def test_anchors_and_work_are_as_they_were(self, book):
        book.receive(broadcast(5, numbers=(3.0,)))
        book.count_step(100)
        again = self.restarted(book)
        again.count_step(30, steps=2)
        assert (kept(again).version, kept(again).anchor) == (5, values(3.0))
        assert again.receive(broadcast(5, generation=2)).taken is Taken.UNCHANGED
        answer = again.answer(pull(6, generation=2), local_step=3)
        assert (answer.base_version, answer.c_steps, answer.c_tokens) == (5, 3, 130)

    @pytest.mark.parametrize("version", [4, 5, 7], ids=["older", "same-version", "later"])
    def test_what_comes_first_and_is_not_the_anchor_overwrites(self, book, version):
        """The syncer may have gone on, or back; or it is another run's, which gets nothing of this one."""
        book.receive(broadcast(5))
        book.count_step(100)
        again = self.restarted(book)
        again.count_step(30)
        receipt = again.receive(broadcast(version, generation=2, digest="other"))
        assert (receipt.taken, receipt.alpha, receipt.previous_version) == (Taken.OVERWROTE, 0.0, 5)
        assert again.work(0) == (0, 0)
        again.count_step(30)
        assert again.receive(broadcast(9, generation=2)).alpha == 0.5

    def test_one_anchor_that_the_syncer_still_has_proves_that_the_run_is_this_one(self, book):
        for fragment in range(NUM_FRAGMENTS):
            book.receive(broadcast(5 + fragment, fragment=fragment))
        again = self.restarted(book)
        moved, still = broadcast(9, generation=2), broadcast(6, fragment=1, generation=2)
        assert again.due((moved,)) == ()
        assert again.due((still,)) == (moved, still)
        receipt = again.receive(moved)
        assert (receipt.taken, receipt.alpha) == (Taken.BLENDED, 0.5)
        last = broadcast(10, fragment=2, generation=2)
        assert again.due((last,)) == (last,)
        assert again.receive(last).taken is Taken.BLENDED

    def test_without_a_proof_the_fragments_wait_for_each_other_and_overwrite(self, book):
        for fragment in range(NUM_FRAGMENTS):
            # Of version 0 runs of one seed have the same.
            book.receive(broadcast(5 if fragment else 0, fragment=fragment))
        again = self.restarted(book)
        early = broadcast(12, fragment=1, generation=2)
        assert again.due((early, broadcast(0, generation=2))) == ()
        rest = tuple(broadcast(9, fragment=number, generation=2) for number in range(1, NUM_FRAGMENTS))
        due = again.due(rest)
        assert [(one.fragment, one.version) for one in due] == [(0, 0), (1, 9), (2, 9), (3, 9)]
        taken = [again.receive(one).taken for one in due]
        assert taken == [Taken.UNCHANGED] + 3 * [Taken.OVERWROTE]
        later = broadcast(16, fragment=1, generation=2)
        assert again.due((later,)) == (later,)
        assert again.receive(later).taken is Taken.BLENDED

    def test_a_residual_of_another_run_is_not_owed(self):
        book = FragmentBook(num_fragments=NUM_FRAGMENTS, alpha=0.5, error_feedback=True)
        book.receive(broadcast(0))
        book.count_step(1)
        book.answer(pull(4), local_step=1).leaves.fill(values(9.0))
        again = self.restarted(book, error_feedback=True)
        again.receive(broadcast(8, generation=2))
        again.count_step(1)
        assert again.answer(pull(12, generation=2), local_step=2).carried is None

    def test_frozen_weights_are_the_answer_that_is_owed(self, book):
        book.receive(broadcast(5))
        book.freeze(3, 90)
        assert self.restarted(book).receive(broadcast(9, generation=2)).alpha == 1.0

    def test_no_pull_is_answered_before_this_connection_brought_the_fragment(self, book):
        book.receive(broadcast(5))
        book.count_step(1)
        assert self.restarted(book).verdict(pull(6)) is Verdict.HOLD

    @pytest.mark.parametrize(
        ("version", "step", "verdict"),
        [
            (0, 1, Verdict.ANSWER),
            (0, NUM_FRAGMENTS, Verdict.ANSWER),
            (0, NUM_FRAGMENTS + 1, Verdict.HOLD),
            (1, NUM_FRAGMENTS + 1, Verdict.ANSWER),
            (1, 2 * NUM_FRAGMENTS + 1, Verdict.HOLD),
        ],
    )
    def test_its_first_answer_needs_an_anchor_with_every_earlier_round(self, book, version, step, verdict):
        book.receive(broadcast(version))
        book.count_step(1)
        again = self.restarted(book)
        again.receive(broadcast(version, generation=2))
        assert again.verdict(pull(step, generation=2)) is verdict

    def test_after_its_own_first_push_the_usual_rule_is_enough(self, book):
        book.receive(broadcast(0))
        book.count_step(1)
        again = self.restarted(book)
        again.receive(broadcast(0, generation=2))
        again.answer(pull(1, generation=2), local_step=1)
        again.receive(broadcast(1, generation=2))
        again.count_step(1)
        assert again.verdict(pull(3 * NUM_FRAGMENTS + 1, generation=2)) is Verdict.ANSWER

    def test_a_round_it_had_pushed_for_is_remembered(self, book):
        book.receive(broadcast(0))
        book.count_step(1)
        book.answer(pull(1), local_step=1)
        again = self.restarted(book)
        again.receive(broadcast(0, generation=2))
        assert again.verdict(pull(1, attempt=2, generation=2)) is Verdict.ANSWER
        assert again.verdict(pull(2, generation=2)) is Verdict.HOLD

    def test_frozen_weights_stay_frozen(self, book):
        book.receive(broadcast(0))
        book.freeze(50, 500)
        again = self.restarted(book)
        again.receive(broadcast(0, generation=2))
        answer = again.answer(pull(1, generation=2), local_step=50)
        assert (answer.c_steps, answer.c_tokens) == (50, 500)

    def test_residuals_go_on(self):
        book = FragmentBook(num_fragments=NUM_FRAGMENTS, alpha=0.5, error_feedback=True)
        book.receive(broadcast(0))
        book.count_step(1)
        book.answer(pull(1), local_step=1).leaves.fill(values(0.25))
        again = self.restarted(book, error_feedback=True)
        again.receive(broadcast(0, generation=2))
        again.receive(broadcast(1, generation=2))
        again.count_step(1)
        answer = again.answer(pull(5, generation=2), local_step=2)
        assert answer.carried.values() == values(0.25)
        answer.leaves.fill(values(0.5))
        last = self.restarted(again, error_feedback=True)
        last.receive(broadcast(1, generation=3))
        assert last.answer(pull(5, generation=3), local_step=2).carried.values() == values(0.25)

    def test_own_initial_values_are_still_unconfirmed(self, book):
        book.adopt_init(0, values(1.0), "init")
        again = self.restarted(book)
        assert again.receive(broadcast(0, digest="other", generation=2)).taken is Taken.OVERWROTE


class TestCarrying:
    """What comes back merged is taken off; what was not pushed stays, and stays counted."""

    @pytest.fixture
    def book(self):
        book = FragmentBook(num_fragments=NUM_FRAGMENTS, alpha=0.0, carries=True, error_feedback=True)
        book.receive(broadcast(0, numbers=(1.0,)))
        book.count_step(10)
        return book

    def push(self, book, step, *, attempt=1, generation=1, decoded=None):
        """Answer a pull; ``decoded`` is what the encoder finds that was sent, if it ever runs."""
        answer = book.answer(pull(step, attempt=attempt, generation=generation), local_step=1)
        assert answer.leaves is None, "what quantisation took is in the weights already"
        if decoded is not None:
            answer.sent.fill(values(decoded))
        return answer

    def test_what_was_pushed_is_taken_off_and_the_rest_stays_counted(self, book):
        self.push(book, 1, decoded=0.5)
        book.count_step(20)
        receipt = book.receive(broadcast(1, numbers=(2.0,)))
        assert (receipt.taken, receipt.previous_version) == (Taken.CARRIED, 0)
        assert (receipt.carry.anchor, receipt.carry.pushed) == (values(1.0), values(0.5))
        assert book.work(0) == (1, 20)
        assert book.receive(broadcast(5, numbers=(3.0,))).carry.pushed is None, "taken off once"
        assert book.work(0) == (1, 20)

    def test_without_a_push_everything_stays_counted(self, book):
        receipt = book.receive(broadcast(4))
        assert (receipt.taken, receipt.carry.pushed) == (Taken.CARRIED, None)
        assert book.work(0) == (1, 10)

    def test_a_version_below_the_round_takes_nothing_off(self, book):
        self.push(book, 8, decoded=0.5)
        assert book.receive(broadcast(4)).carry.pushed is None
        book.count_step(20)
        assert book.work(0) == (2, 30)
        assert book.receive(broadcast(8)).carry.pushed == values(0.5)
        assert book.work(0) == (1, 20)

    def test_a_missed_broadcast_does_not_matter(self, book):
        self.push(book, 4, decoded=0.5)
        assert book.receive(broadcast(12)).carry.pushed == values(0.5)

    def test_the_newest_push_of_a_round_counts(self, book):
        self.push(book, 4, decoded=0.5)
        book.count_step(20)
        self.push(book, 4, attempt=2, decoded=0.75)
        book.count_step(40)
        assert book.receive(broadcast(4)).carry.pushed == values(0.75)
        assert book.work(0) == (1, 40)

    def test_a_push_that_was_never_encoded_was_never_sent(self, book):
        self.push(book, 4)
        assert book.receive(broadcast(4)).carry.pushed is None
        assert book.work(0) == (1, 10)

    def test_one_that_was_never_encoded_leaves_the_attempt_before_it_in_force(self, book):
        self.push(book, 4, decoded=0.5)
        book.count_step(20)
        book.receive(broadcast(0, generation=2))
        self.push(book, 4, attempt=2, generation=2)
        book.count_step(40)
        assert book.receive(broadcast(4, generation=3)).carry.pushed == values(0.5)
        assert book.work(0) == (2, 60)

    def test_an_overtaking_pull_is_held_as_ever(self, book):
        self.push(book, 4, decoded=0.5)
        book.count_step(10)
        assert book.verdict(pull(8)) is Verdict.HOLD
        book.receive(broadcast(4))
        assert book.verdict(pull(8)) is Verdict.ANSWER

    def test_a_roll_back_takes_nothing_off_and_forgets_what_was_pushed(self, book):
        book.receive(broadcast(4, numbers=(2.0,)))
        self.push(book, 8, decoded=0.5)
        receipt = book.receive(broadcast(0, generation=2, numbers=(1.0,)))
        assert (receipt.taken, receipt.carry.pushed) == (Taken.ROLLED_BACK, None)
        assert receipt.carry.anchor == values(2.0)
        assert book.work(0) == (1, 10)
        assert book.verdict(pull(12, generation=2)) is Verdict.ANSWER
        assert book.receive(broadcast(8, generation=2)).carry.pushed is None

    def test_the_first_broadcast_that_changes_something_after_a_restart_overwrites(self, book):
        self.push(book, 4, decoded=0.5)
        again = FragmentBook(num_fragments=NUM_FRAGMENTS, alpha=0.0, carries=True)
        again.restore(book.saved())
        assert again.receive(broadcast(0, generation=2)).taken is Taken.UNCHANGED
        again.count_step(10)
        assert again.work(0) == (2, 20)
        self.push(again, 4, generation=2, decoded=0.25)
        receipt = again.receive(broadcast(4, generation=2))
        assert (receipt.taken, receipt.alpha, receipt.carry) == (Taken.OVERWROTE, 0.0, None)
        assert again.work(0) == (0, 0)
        again.count_step(10)
        self.push(again, 8, generation=2, decoded=0.25)
        assert again.receive(broadcast(8, generation=2)).carry.pushed == values(0.25)

    def test_a_roll_back_after_a_restart_overwrites(self, book):
        book.receive(broadcast(4))
        again = FragmentBook(num_fragments=NUM_FRAGMENTS, alpha=0.0, carries=True)
        again.restore(book.saved())
        assert again.receive(broadcast(0, generation=2)).taken is Taken.OVERWROTE

    def test_frozen_weights_move_the_anchor_only(self, book):
        book.freeze(1, 10)
        assert book.answer(pull(4), local_step=1).sent is None
        receipt = book.receive(broadcast(4))
        assert (receipt.alpha, receipt.carry) == (1.0, None)
