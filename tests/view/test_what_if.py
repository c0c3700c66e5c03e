"""What-if: with the recorded policy every attempt ends as it did; with another one, as the rules say."""

import attrs
import pytest
from recorded_run import SECONDS, TERMS, record

from yeto.core import CoreConfig, initial_state, step
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.errors import ConfigError
from yeto.sim import simulate
from yeto.sim.campaign import draw
from yeto.tape import Header, Record, Replayer, complete_lines, open_tape, read
from yeto.view.what_if import WhatIf
from yeto.view.what_if_summary import WhatIfSummary, most_changed, outcome_json
from yeto.view.what_if_uploads import UPLOADS_KEPT, Uploads


def decided(path, **policy):
    """Return the outcomes of a tape under another policy."""
    replayer, fold = Replayer(str(path)), WhatIf(policy)
    with open_tape(path) as file:
        for line in complete_lines(file, str(path)):
            fold.feed(replayer.feed(line), replayer.state)
    assert replayer.divergence is None
    return fold.outcomes()


class Told:
    """A run that is told what happens, without a tape."""

    def __init__(self, **changes):
        settings = {
            "num_learners": 3,
            "total_steps": 40,
            "quorum": 2,
            "wait_for": 3,
            "grace_cap_seconds": 1.0,
            "sync_interval_steps": 0.0,
            "pipeline": 1,
            "closing_sweep": "off",
        }
        self.config = CoreConfig(**(settings | changes))
        self.events = []
        self.state = initial_state(self.config)
        self.begun = 0.0
        for learner in range(self.config.num_learners):
            who = {"learner": learner, "generation": f"{learner:016x}"}
            self.tell(ev.HelloReceived, 0.0, **who, address="", terms=TERMS)
            self.tell(ev.LearnerJoined, 0.0, **who)
        for fragment in range(2):
            first = {"fragment": fragment, "digest": "", "finite": True}
            self.tell(ev.FragmentInitialised, 0.0, learner=0, generation=f"{0:016x}", **first)
        self.tell(ev.CheckpointWritten, 0.0, step=0, written_bytes=1, seconds=0.0)

    def tell(self, kind, after, **fields):
        """Tell a fact so many seconds after the round was opened."""
        event = kind(at=round(self.begun + after, 6), **fields)
        self.state, decisions = step(self.state, event)
        self.events.append(event)
        return decisions

    def offer(self, learner, after, round_step=1, attempt=1, **changes):
        fields = {
            "learner": learner,
            "generation": f"{learner:016x}",
            "fragment": (round_step - 1) % 2,
            "step": round_step,
            "attempt": attempt,
            "base_version": 0,
            "local_step": 10,
            "c_steps": 5,
            "c_tokens": 100,
            "payload_bytes": 64,
        }
        return self.tell(ev.PushOffered, after, **(fields | changes))

    def receive(self, learner, after, round_step=1, attempt=1, **changes):
        fields = {
            "learner": learner,
            "generation": f"{learner:016x}",
            "fragment": (round_step - 1) % 2,
            "step": round_step,
            "attempt": attempt,
            "payload_bytes": 64,
            "digest": "",
            "finite": True,
            "norm": 1.0,
            "cosine_to_momentum": None,
        }
        return self.tell(ev.PushReceived, after, **(fields | changes))

    def answer(self, learner, after, upload=0.0, **where):
        self.offer(learner, after - upload, **where)
        return self.receive(learner, after, **where)

    def fire(self, kind, after, round_step=1, attempt=1):
        return self.tell(kind, after, step=round_step, attempt=attempt)

    def commit(self, round_step=1, attempt=1):
        """Merge, commit and checkpoint a sealed round at once."""
        at = self.state.at - self.begun
        of = {"step": round_step, "attempt": attempt}
        merge = {"finite": True, "gradient_norm": 1.0, "corrected": (), "seconds": 0.0}
        self.tell(ev.MergeFinished, at, **of, **merge)
        outer = {"finite": True, "params_digest": "p", "momentum_digest": "m", "seconds": 0.0}
        self.tell(ev.OuterStepApplied, at, **of, **outer)
        self.tell(ev.CheckpointWritten, at, step=round_step, written_bytes=1, seconds=0.0)
        self.begun = self.state.at

    def under(self, **policy):
        """Return the outcomes under another policy."""
        return decided_events(self.config, self.events, **policy)


def decided_events(config, events, **policy):
    """Return the outcomes of facts that were not written to a tape."""
    fold, state, seq = WhatIf(policy), initial_state(config), 0
    header = Header(software_version="", wall_clock="", session_id="", config=config)
    fold.feed(Record(seq=0, at=0.0, kind="header", because=None, body=header), state)
    for event in events:
        state, decisions = step(state, event)
        seq = because = seq + 1
        fold.feed(Record(seq=seq, at=event.at, kind=event.kind, because=None, body=event), state)
        for decision in decisions:
            seq += 1
            fold.feed(Record(seq=seq, at=event.at, kind=decision.kind, because=because, body=decision), state)
    return fold.outcomes()


def tapes(fixtures):
    return sorted((fixtures / "tapes").glob("*.jsonl"))


def test_with_the_recorded_policy_every_recorded_attempt_ends_as_it_did(fixtures):
    sealed = discarded = 0
    for path in tapes(fixtures):
        outcomes = decided(path)
        openings = [line for line in path.read_text().splitlines() if '"kind":"attempt_opened"' in line]
        assert len(outcomes) == len(openings)
        for outcome in outcomes:
            assert outcome.other == outcome.recorded
            assert not outcome.estimated
            sealed += outcome.recorded.status == "sealed"
            discarded += outcome.recorded.status == "discarded"
    assert sealed > 50
    assert discarded >= 8


@pytest.mark.parametrize("seed", [*range(22), 76, 88])
def test_with_the_recorded_policy_every_attempt_of_a_bad_day_ends_as_it_did(seed, tmp_path):
    """Fleets with every fault there is; other policies then keep what they promise by themselves."""
    path = tmp_path / "events.jsonl"
    simulate(draw(seed), tape=path)
    for outcome in decided(path):
        assert outcome.other == outcome.recorded
        assert not outcome.estimated
    for outcome in decided(path, grace_cap_seconds=0.0, quorum=1):
        if outcome.recorded.status == outcome.other.status == "sealed":
            assert outcome.other.seconds <= outcome.recorded.seconds
    for outcome in decided(path, quorum_timeout_seconds=3600.0, grace_cap_seconds=30.0):
        assert set(outcome.other.weights) | set(outcome.estimated) <= set(outcome.members)
        if outcome.recorded.status == outcome.other.status == "sealed":
            assert outcome.other.seconds >= outcome.recorded.seconds


@pytest.mark.parametrize("seed", [2, 76])
def test_a_tape_that_ends_anywhere_tells_of_no_change(seed, tmp_path):
    path = tmp_path / "events.jsonl"
    simulate(draw(seed), tape=path)
    replayer, fold = Replayer(str(path)), WhatIf({})
    for line in path.read_bytes().splitlines(keepends=True):
        fold.feed(replayer.feed(line), replayer.state)
        # Behind an event its decisions are still to come, and the tape may end there.
        assert all(outcome.other == outcome.recorded for outcome in fold.outcomes())


def test_the_verdicts_are_those_of_the_tape(tmp_path):
    path = tmp_path / "events.jsonl"
    record(path)
    outcomes = decided(path)
    commits = [entry.body for entry in read(path) if isinstance(entry.body, de.RoundCommitted)]
    assert [outcome.step for outcome in outcomes] == [commit.step for commit in commits]
    for outcome, commit in zip(outcomes, commits, strict=True):
        weights = {responder.learner: responder.weight for responder in commit.responders}
        assert outcome.recorded.weights == weights
        assert outcome.recorded.seconds == pytest.approx(commit.quorum_seconds)


def test_a_lower_quorum_seals_with_the_first_answer(tmp_path):
    path = tmp_path / "events.jsonl"
    record(path)
    for outcome in decided(path, quorum=1, grace_cap_seconds=0.0)[:4]:
        assert outcome.recorded.seconds - outcome.other.seconds == pytest.approx(2 * SECONDS)
        assert (list(outcome.recorded.weights), list(outcome.other.weights)) == ([0, 1], [0])
    # The closing sweep waits for everybody, whatever the quorum.
    for outcome in decided(path, quorum=1, grace_cap_seconds=0.0)[4:]:
        assert outcome.other == outcome.recorded


def straggled():
    """Learners 0 and 1 answer at 0.3 and 0.4 s, the grace of 1 s ends, learner 2's header comes at 2 s."""
    run = Told()
    run.answer(0, 0.3)
    run.answer(1, 0.4)
    assert run.fire(ev.GraceElapsed, 1.4)
    run.offer(2, 2.0)
    run.commit()
    return run


def test_without_grace_the_quorum_is_enough():
    (outcome, *_) = straggled().under(grace_cap_seconds=0.0)
    assert (outcome.recorded.seconds, outcome.other.seconds) == (1.4, 0.4)
    assert outcome.other.weights == outcome.recorded.weights == {0: 2000.0, 1: 2000.0}


def test_a_longer_grace_takes_the_push_that_was_refused_at_its_header():
    """Before it has uploaded anything, its push counts as here with its header: a lower bound."""
    (outcome, *_) = straggled().under(grace_cap_seconds=3.0)
    assert outcome.other.seconds == 2.0
    assert outcome.other.weights == {0: 2000.0, 1: 2000.0, 2: 2000.0}
    assert outcome.estimated == (2,)


def test_an_upload_that_never_ended_takes_as_long_as_its_learner_usually_needs():
    run = Told()
    run.answer(0, 0.3)
    run.answer(1, 0.4)
    run.answer(2, 1.2, upload=0.5)
    run.commit()
    run.answer(0, 0.3, round_step=2)
    run.answer(1, 0.4, round_step=2)
    run.fire(ev.GraceElapsed, 1.4, round_step=2)
    run.offer(2, 2.0, round_step=2)
    run.commit(2)
    run.offer(0, 5.0, round_step=3)
    outcome = run.under(grace_cap_seconds=3.0)[1]
    assert outcome.other.seconds == 2.5
    # The grace ends first: it is not waited for.
    outcome = run.under(grace_cap_seconds=2.05)[1]
    assert (outcome.other.seconds, outcome.estimated) == (2.45, ())


def test_an_upload_that_was_cut_off_by_the_seal_goes_on():
    run = Told()
    run.answer(2, 0.2, upload=0.2)
    run.answer(0, 0.3)
    run.offer(1, 0.35)
    run.fire(ev.GraceElapsed, 1.3)
    run.commit()
    # Nothing is known of learner 1's uploads; it was not here when the attempt was sealed.
    (outcome, *_) = run.under(grace_cap_seconds=3.0)
    assert (outcome.recorded.seconds, outcome.other.seconds, outcome.estimated) == (1.3, 1.3, (1,))


def test_the_true_arrival_counts_when_the_tape_has_it():
    """It was refused, because its attempt had been sealed while it was examined."""
    run = Told()
    run.answer(0, 0.3)
    run.offer(2, 0.35)
    run.answer(1, 0.4)
    run.fire(ev.GraceElapsed, 1.4)
    run.receive(2, 1.4)
    run.commit()
    (outcome, *_) = run.under(grace_cap_seconds=3.0)
    assert (outcome.other.seconds, sorted(outcome.other.weights)) == (1.4, [0, 1, 2])


def test_a_deadline_that_the_record_has_too_passes_when_it_passed_there():
    run = Told()
    run.answer(0, 0.3)
    run.answer(1, 0.4)
    run.fire(ev.GraceElapsed, 1.400321)  # the clock of the run was that late
    run.commit()
    (outcome, *_) = run.under(max_base_lag=7)
    assert outcome.other == outcome.recorded
    assert outcome.other.seconds == 1.400321


def test_a_quorum_timeout_that_had_been_longer():
    """An answer to the second attempt would have been one to the first, which was still open."""
    run = Told(quorum_timeout_seconds=5.0)
    run.answer(0, 1.0)  # its header holds the deadline, up to four times as long
    run.fire(ev.QuorumDeadlinePassed, 20.0)
    for learner, after in ((0, 21.0), (1, 22.0), (2, 22.5)):
        run.answer(learner, after, attempt=2)
    run.commit(attempt=2)
    first, second, *_ = run.under(quorum_timeout_seconds=60.0)
    assert (first.recorded.status, first.recorded.reason) == ("discarded", "quorum_timeout")
    assert (first.other.status, first.other.seconds) == ("sealed", 22.5)
    assert sorted(first.other.weights) == [0, 1, 2]
    assert second.other.status == "not_needed"
    first, second, *_ = run.under(quorum_timeout_seconds=5.0)
    assert first.other == first.recorded
    assert second.other == second.recorded


def test_a_shorter_quorum_timeout_discards():
    run = Told(quorum_timeout_seconds=900.0)
    run.answer(0, 100.0)
    run.answer(1, 101.0)
    run.answer(2, 101.5)
    run.commit()
    (outcome, *_) = run.under(quorum_timeout_seconds=50.0)
    assert (outcome.other.status, outcome.other.reason, outcome.other.seconds) == (
        "discarded",
        "quorum_timeout",
        50.0,
    )


def test_a_base_that_was_too_old_is_taken_and_one_that_was_not_is_refused():
    run = Told(max_base_lag=0)
    for learner in range(3):
        run.answer(learner, 0.3)
    run.commit()
    for learner in range(3):
        run.answer(learner, 0.3, round_step=2)
    run.commit(2)
    run.offer(0, 0.2, round_step=3, base_version=0)  # refused, and sent the fragment again
    run.offer(1, 0.3, round_step=3, base_version=1)
    run.offer(2, 0.3, round_step=3, base_version=1)
    run.receive(1, 0.4, round_step=3)
    run.receive(2, 0.5, round_step=3)
    run.offer(0, 0.6, round_step=3, base_version=1)
    run.receive(0, 0.7, round_step=3)
    run.commit(3)
    third = run.under(max_base_lag=None)[2]
    # Taken at once, it is the first one there.
    assert (third.recorded.seconds, third.other.seconds, third.estimated) == (0.7, 0.5, (0,))
    assert sorted(third.other.weights) == [0, 1, 2]


def test_a_stricter_lag_declines_after_the_second_chance():
    run = Told()
    for round_step in (1, 2):
        for learner in range(3):
            run.answer(learner, 0.3, round_step=round_step)
        run.commit(round_step)
    run.offer(0, 0.1, round_step=3)  # from version 0, one step behind
    run.receive(0, 0.2, round_step=3)
    for learner in (1, 2):
        run.offer(learner, 0.3, round_step=3, base_version=1)
    for learner in (1, 2):
        run.receive(learner, 0.4, round_step=3)
    run.commit(3)
    run.offer(0, 5.0, round_step=4)
    third = run.under(max_base_lag=0)[2]
    # It would have been sent the fragment once more; what it would have answered is not on the tape.
    assert (third.recorded.seconds, sorted(third.recorded.weights)) == (0.4, [0, 1, 2])
    assert sorted(third.other.weights) == [1, 2]
    assert third.other.seconds == 1.4


def test_weights_and_outliers_are_those_of_the_policy():
    run = Told()
    run.offer(0, 0.1, c_tokens=300)
    run.receive(0, 0.2, norm=50.0)
    run.answer(1, 0.3)
    run.answer(2, 0.4)
    run.commit()
    (equal, *_) = run.under(learner_weight="equal")
    assert equal.recorded.weights == {0: 18000.0, 1: 2000.0, 2: 2000.0}
    assert equal.other.weights == {0: 1.0, 1: 1.0, 2: 1.0}
    (guarded, *_) = run.under(max_norm_ratio=4.0)
    assert (guarded.other.left_out, sorted(guarded.other.weights)) == ((0,), [1, 2])


def test_a_quorum_that_nobody_could_have_met():
    run = Told(wait_for=2)
    run.tell(ev.LearnerLeft, 0.1, learner=2, generation=f"{2:016x}", reason="")
    run.answer(0, 0.3)
    run.answer(1, 0.4)
    run.commit()
    first, second = run.under(quorum=3)
    assert (first.other.status, first.other.reason, first.other.seconds) == ("discarded", "unreachable", 0.1)
    assert (second.members, second.other.status) == ((0, 1), "not_opened")


def test_a_learner_that_is_sent_away_for_another_round_is_lost_here_too():
    """Its third push without a number ends the connection: the round that still waits for it notices."""
    run = Told(pipeline=2, quorum=1, grace_cap_seconds=100.0)
    for round_step, local_step in ((1, 11), (2, 12)):
        run.offer(2, 0.1, round_step=round_step, local_step=local_step)
        run.receive(2, 0.1, round_step=round_step, finite=False, norm=None)
    for round_step in (1, 2):
        for learner in (0, 1):
            run.answer(learner, 0.3, round_step=round_step)
    run.commit(1)
    run.commit(2)
    assert run.state.step == 2
    run.offer(0, 0.2, round_step=3, base_version=1)
    run.receive(0, 0.3, round_step=3)
    run.offer(2, 0.4, round_step=4, base_version=2, local_step=13)
    refused = run.receive(2, 0.5, round_step=4, finite=False, norm=None)
    assert any(isinstance(decision, de.LearnerRefused) for decision in refused)
    run.offer(1, 0.6, round_step=3, base_version=1)
    run.receive(1, 0.7, round_step=3)
    third = run.under(quorum=2)[2]
    assert (third.other.status, third.other.seconds) == ("sealed", 0.7)
    assert third.other == third.recorded


def test_a_stop_ends_both():
    run = Told(quorum=3)
    run.answer(0, 0.3)
    run.tell(ev.StopRequested, 1.0, signal="SIGTERM")
    run.tell(ev.StopDeadlinePassed, 2.0)
    (outcome,) = run.under(quorum=2)
    assert outcome.recorded.reason == outcome.other.reason == "stopping"
    (outcome,) = run.under(quorum=1, grace_cap_seconds=60.0)
    assert (outcome.other.status, outcome.other.seconds) == ("sealed", 2.0)


def test_a_record_that_ends_before_says_so():
    run = Told()
    run.answer(0, 0.3)
    (outcome,) = run.under(grace_cap_seconds=0.0)
    assert outcome.recorded.status == outcome.other.status == "open"
    assert outcome.other.seconds is None


def test_impossible_policies_name_their_flag(tmp_path):
    path = tmp_path / "events.jsonl"
    record(path)
    with pytest.raises(ConfigError, match="--quorum 3: must lie between 1 and --learners 2"):
        decided(path, quorum=3)


def test_a_usual_upload_is_the_median_of_the_last_ones():
    uploads = Uploads()
    fields = {"learner": 0, "generation": "a", "fragment": 0, "step": 1, "attempt": 1}
    head = {"base_version": 0, "local_step": 1, "c_steps": 1, "c_tokens": 1, "payload_bytes": 8}
    came = {"payload_bytes": 8, "digest": "", "finite": True, "cosine_to_momentum": None}
    for seconds in [100.0, 1.0, 2.0, 3.0, *[5.0] * UPLOADS_KEPT, 4.0]:
        uploads.feed(ev.PushOffered(at=10.0, **fields, **head))
        uploads.feed(ev.PushReceived(at=10.0 + seconds, **fields, **came, norm=seconds))
    last = ev.PushOffered(at=20.0, **fields, **head)
    assert uploads.received(last, 0.0).at == 25.0
    assert uploads.received(last, 0.0).norm == 5.0
    assert uploads.received(last, 30.0).at == 30.0
    stranger = attrs.evolve(last, learner=1)
    assert uploads.received(stranger, 0.0).at == 20.0


def test_the_numbers_of_a_comparison():
    run = straggled()
    for learner in range(3):
        run.answer(learner, 0.5, round_step=2)
    run.commit(2)
    outcomes = [outcome for outcome in run.under(grace_cap_seconds=3.0) if outcome.step < 3]
    summary = WhatIfSummary(outcomes)
    assert (summary.attempts, summary.changed, summary.earlier, summary.later) == (2, 1, 0, 1)
    assert (summary.recorded.participation, summary.other.participation) == (5 / 6, 1.0)
    assert summary.mean_seconds(summary.recorded) == pytest.approx((1.4 + 0.5) / 2)
    assert summary.mean_seconds(summary.other) == pytest.approx((2.0 + 0.5) / 2)
    parts = {learner: (part.recorded, part.other, part.gained) for learner, part in summary.learners.items()}
    assert parts == {0: (2, 2, 0), 1: (2, 2, 0), 2: (1, 2, 1)}
    assert summary.share(summary.learners[0].recorded_share, summary.recorded) == pytest.approx(5 / 12)
    assert summary.share(summary.learners[0].other_share, summary.other) == pytest.approx(1 / 3)
    assert [outcome.step for outcome in most_changed(outcomes, 5)] == [1]
    assert outcome_json(outcomes[0])["what_if"]["weights"] == {"0": 2000.0, "1": 2000.0, "2": 2000.0}
    plain = summary.to_json()
    assert plain["learners"]["2"]["merges"] == {"recorded": 1, "what_if": 2}
    assert plain["recorded"]["sealed"] == 2


def test_nothing_to_compare_gives_no_numbers():
    summary = WhatIfSummary([])
    assert summary.mean_seconds(summary.other) is None
    assert summary.other.participation is None
    assert summary.to_json()["what_if"]["mean_seconds"] is None
