"""Both phases of a budget run, as its tape tells them, and everything that can be missing of them."""

import attrs
import pytest
from view_tapes import ROOT

from yeto.core.decisions import RoundCommitted, SessionEnded
from yeto.core.events import BudgetReported, SessionResumed
from yeto.tape import Record, encode, read
from yeto.view.budget import CutOff, fold_budget, read_budget, replay_budget

TAPE = ROOT / "fixtures" / "tapes" / "budget-v2.jsonl"
"""Two learners with a budget of 20; first one reports 19 and stays away, then both report 20."""
N = 20


@pytest.fixture(scope="module")
def recorded():
    return list(read(TAPE))


def missing(records, learners=2, budget=N):
    return list(fold_budget(records).missing(learners, budget))


def until(records, kind, number):
    """Return the records up to the n-th of a class, that one included."""
    places = [place for place, record in enumerate(records) if isinstance(record.body, kind)]
    return records[: places[number] + 1]


def changed(records, kind, change):
    """Return records of which those of a class have other bodies; a change to None takes the record away."""
    result = []
    for record in records:
        body = change(record.body) if isinstance(record.body, kind) else record.body
        if body is not None:
            result.append(
                Record(seq=record.seq, at=record.at, kind=record.kind, because=record.because, body=body)
            )
    return result


def test_a_finished_run(recorded):
    story = fold_budget(recorded)
    assert story.finished
    assert story.cut_off == CutOff(step=story.cut_off.step, reports={0: N, 1: N})
    assert story.target == story.cut_off.step + story.num_fragments
    assert sorted(story.rounds) == list(range(story.cut_off.step + 1, story.target + 1))
    assert missing(recorded) == []
    assert replay_budget(TAPE) == (story, None)
    assert read_budget(TAPE) == story
    assert read_budget(TAPE.with_name("none.jsonl")).cut_off is None


def test_each_moment_on_the_way(recorded):
    # The first session ended with exit code 3: a report of 19 steps is none.
    first = fold_budget(until(recorded, SessionEnded, 0))
    assert (first.cut_off, first.finished, first.reports) == (None, False, {0: N})
    assert first.end.exit_code == 3
    assert missing(until(recorded, SessionEnded, 0)) == [
        "the tape tells of no cut-off at which all learners had used up their budget"
    ]
    second = fold_budget(until(recorded, SessionEnded, 1))
    step = second.cut_off.step
    assert (second.finished, second.target, second.end.phase) == (False, None, "budget")
    assert missing(until(recorded, SessionEnded, 1)) == [
        f"the tape tells of no finish of the cut-off at step {step}"
    ]
    began = until(recorded, SessionResumed, -1)
    assert missing(began) == [
        *(f"terminal round {step + n}: was never committed" for n in (1, 2, 3)),
        "the finish did not end with a final cut that all learners hold: its session has not ended",
    ]


def test_a_finish_that_is_resumed_keeps_its_target_and_what_stands_of_its_rounds(recorded):
    resumed = until(recorded, SessionResumed, -1)[-1]
    story = fold_budget(recorded)
    first = story.cut_off.step + 1
    after_two = until(recorded, RoundCommitted, -2)
    again = attrs.evolve(resumed.body, step=first, finish_target=story.target)
    records = [*after_two, attrs.evolve(resumed, body=again)]
    assert sorted(fold_budget(records).rounds) == [first]
    assert fold_budget(records).target == story.target
    assert fold_budget(records).cut_off == story.cut_off
    # One that goes on as an ordinary run, or from before the cut-off, has none.
    config = attrs.evolve(again.config, budget_finish=False)
    assert (
        fold_budget([*records, attrs.evolve(resumed, body=attrs.evolve(again, config=config))]).cut_off
        is None
    )
    earlier = attrs.evolve(again, step=first - 2, finish_target=None)
    assert fold_budget([*records, attrs.evolve(resumed, body=earlier)]).cut_off is None


def test_what_a_terminal_round_can_lack(recorded):
    story = fold_budget(recorded)
    last = story.target

    def with_round(**changes):
        def change(body):
            return attrs.evolve(body, **changes) if body.step == last else body

        return missing(changed(recorded, RoundCommitted, change))

    responders = story.rounds[last].responders
    assert with_round(responders=responders[:1]) == [f"terminal round {last}: learner 1 has no part in it"]
    short = attrs.evolve(responders[0], c_steps=19)
    assert with_round(responders=(short, responders[1])) == [
        f"terminal round {last}: learner 0 answered with 19 steps, the budget is 20"
    ]
    assert with_round(quorum=1) == [f"terminal round {last}: its quorum was 1 of 2"]
    gone = changed(recorded, RoundCommitted, lambda body: None if body.step == last else body)
    assert missing(gone) == [f"terminal round {last}: was never committed"]


def test_what_else_can_be_missing(recorded):
    step = fold_budget(recorded).cut_off.step
    assert missing(recorded, learners=3)[0] == (
        f"cut-off at step {step}: learner 2 did not report its budget, the budget is 20"
    )
    assert missing(recorded, budget=21)[:2] == [
        f"cut-off at step {step}: learner {n} reported 20 steps, the budget is 21" for n in (0, 1)
    ]
    late = changed(
        recorded,
        SessionEnded,
        lambda body: (
            attrs.evolve(body, exit_code=3, why="no final ACK from learner 1") if body.step > step else body
        ),
    )
    assert missing(late) == [
        "the finish did not end with a final cut that all learners hold: no final ACK from learner 1"
    ]
    target = changed(
        recorded,
        SessionResumed,
        lambda body: attrs.evolve(body, finish_target=step + 2) if body.config.budget_finish else body,
    )
    assert missing(target)[0] == (
        f"the finish ends at step {step + 2}, which is not one round for each of the 3 fragments "
        f"after step {step}"
    )
    unsaid = changed(recorded, BudgetReported, lambda body: None if body.learner == 1 else body)
    assert missing(unsaid)[0].startswith(f"cut-off at step {step}: learner 1 did not report")


def test_a_decision_that_the_rules_do_not_give_is_found(recorded, tmp_path):
    """A tape that says what is wanted, and did not come of what its learners did."""
    path = tmp_path / "events.jsonl"
    last = fold_budget(recorded).target
    wrong = changed(
        recorded,
        RoundCommitted,
        lambda body: attrs.evolve(body, gradient_norm=body.gradient_norm + 1) if body.step == last else body,
    )
    lines = [encode(seq=r.seq, at=r.at, body=r.body, because=r.because) for r in wrong]
    path.write_bytes(b"".join(lines))
    story, divergence = replay_budget(path)
    place = next(r.seq for r in wrong if isinstance(r.body, RoundCommitted) and r.body.step == last)
    assert divergence == f"line {place + 1}: the rules give another decision"
    assert missing(wrong) == []
    assert not story.finished
