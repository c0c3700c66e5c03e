"""Replay: what follows the rules passes, what does not is named, and the folds beside it."""

import json
import math
import tracemalloc
import typing

import attrs
import immutables
import pytest
from recorded_run import CONFIG, Run, record, record_with_restart
from tape_lines import summed, summed_all

from yeto.core import Phase, initial_state
from yeto.core.decisions import AttemptOpened, Decision, PushAccepted, RoundCommitted
from yeto.core.events import Heartbeat, StopRequested
from yeto.errors import CoordinatorError, TapeError
from yeto.tape import (
    Replayer,
    RoundStory,
    Summary,
    TapeWriter,
    describe,
    encode,
    find_restarts,
    first_difference,
    printable,
    read,
    replay,
    state_to_json,
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the lines of an undisturbed run and its last state."""
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    state = record(path)
    return path.read_bytes().splitlines(keepends=True), state


@pytest.fixture
def tape(tmp_path, recorded):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(recorded[0]))
    return path


def rewrite(path, records):
    """Write records anew, numbered as they come."""
    path.write_bytes(
        b"".join(
            encode(seq=seq, at=entry.at, body=entry.body, because=entry.because)
            for seq, entry in enumerate(records)
        )
    )


def test_a_run_that_follows_the_rules_passes(tape, recorded):
    lines, state = recorded
    result = replay(tape)
    assert result.divergence is None
    assert result.state == state
    assert result.records == len(lines)
    assert result.header.config == CONFIG


def test_a_shadow_fed_line_by_line_always_has_the_runs_state(tmp_path):
    path = tmp_path / "events.jsonl"
    run = Run(path)
    shadow = Replayer("shadow")
    done = 0

    def compare(state):
        nonlocal done
        run.writer.flush()
        with open(path, "rb") as file:
            file.seek(done)
            for line in file:
                shadow.feed(line)
                done += len(line)
        assert shadow.state == state
        assert (shadow.divergence, shadow.due) == (None, 0)
        return state.phase is Phase.ENDED

    run.start()
    run.play(until=compare)
    run.close()


def tampered(body):
    """Yield copies of a decision, each with one field changed to another value of its type."""
    hints = typing.get_type_hints(type(body))
    for field in attrs.fields(type(body)):
        value = getattr(body, field.name)
        match value:
            case bool():
                other = not value
            case int() | float():
                other = value + 1
            case str():
                other = value + "x"
            case ():
                if hints[field.name] != tuple[int, ...]:
                    continue
                other = (9,)
            case tuple():
                other = value[:-1]
            case None:
                continue
            case _:
                other = next(tampered(value))
        yield attrs.evolve(body, **{field.name: other})


def test_every_altered_field_of_every_kind_of_decision_is_found(tmp_path, recorded):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(recorded[0]))
    records = list(read(path))
    firsts = {entry.kind: entry for entry in records if isinstance(entry.body, Decision)}
    assert len(firsts) >= 15
    lines = list(recorded[0])
    for entry in firsts.values():
        for body in tampered(entry.body):
            lines[entry.seq] = encode(seq=entry.seq, at=entry.at, body=body, because=entry.because)
            path.write_bytes(b"".join(lines))
            divergence = replay(path).divergence
            assert (divergence.seq, divergence.line) == (entry.seq, entry.seq + 1)
            assert divergence.recorded == body
            assert divergence.expected == entry.body
            assert divergence.event == records[entry.because].body
            assert len(divergence.fields()) == 1
        lines[entry.seq] = recorded[0][entry.seq]


def test_an_altered_fact_is_found_at_the_first_decision_it_changes(tape):
    records = list(read(tape))
    offer = next(entry for entry in records if entry.kind == "push_offered")
    tape.write_bytes(
        tape.read_bytes().replace(
            encode(seq=offer.seq, at=offer.at, body=offer.body),
            encode(seq=offer.seq, at=offer.at, body=attrs.evolve(offer.body, c_tokens=7)),
        )
    )
    divergence = replay(tape).divergence
    assert divergence.recorded.kind == "attempt_sealed"
    assert [name for name, _, _ in divergence.fields()] == ["responders"]


def with_decision(records, kind):
    """Return the index of the first decision of a kind."""
    return next(index for index, entry in enumerate(records) if entry.kind == kind)


def renumbered(records):
    """Return records with seq and because as their places demand."""
    event, result = 0, []
    for seq, entry in enumerate(records):
        if entry.because is None:
            event = seq
            result.append(attrs.evolve(entry, seq=seq))
        else:
            result.append(attrs.evolve(entry, seq=seq, because=event))
    return result


def test_a_decision_too_many_is_found(tape):
    records = list(read(tape))
    index = with_decision(records, "push_accepted")
    rewrite(tape, renumbered([*records[: index + 1], records[index], *records[index + 1 :]]))
    divergence = replay(tape).divergence
    assert divergence.seq == index + 1
    assert divergence.recorded == records[index].body
    assert divergence.expected is None
    assert divergence.reason == "the rules give no further decision for this event"


def test_a_missing_decision_is_found_at_the_next_record(tape):
    records = list(read(tape))
    index = with_decision(records, "push_accepted")
    rewrite(tape, renumbered([*records[:index], *records[index + 1 :]]))
    divergence = replay(tape).divergence
    assert divergence.seq == index
    assert divergence.expected == records[index].body
    assert divergence.fields() == ()
    assert divergence.reason == "the rules give one more decision before this event"


def test_decisions_in_another_order_are_found(tape):
    records = list(read(tape))
    index = with_decision(records, "attempt_sealed")
    assert records[index - 1].kind == "quorum_reached"
    swapped = [*records[: index - 1], records[index], records[index - 1], *records[index + 1 :]]
    rewrite(tape, renumbered(swapped))
    assert replay(tape).divergence.seq == index - 1


def test_nothing_behind_a_divergence_is_folded(tape, recorded):
    lines = list(recorded[0])
    index = next(index for index, line in enumerate(lines) if b'"kind":"quorum_reached"' in line)
    lines[index] = summed(lines[index].replace(b'"quorum_seconds":', b'"quorum_seconds":1'))
    shadow = Replayer("run")
    for line in lines[: index + 1]:
        shadow.feed(line)
    first, state = shadow.divergence, shadow.state
    assert first.seq == index
    for line in lines[index + 1 :]:
        shadow.feed(line)
    assert shadow.divergence is first
    assert shadow.state is state
    assert shadow.records == len(lines)


def test_an_impossible_event_is_a_divergence(tape):
    def refuse(state, event):
        raise CoordinatorError("there is no such round")

    divergence = replay(tape, step=refuse).divergence
    assert divergence.seq == 1
    assert divergence.recorded == divergence.event
    assert divergence.expected is None
    assert divergence.reason == "the rules say that this event is impossible: there is no such round"


def test_other_rules_diverge(tape):
    from yeto.core import step

    def generous(state, event):
        state, decisions = step(state, event)
        return state, tuple(each for each in decisions if not isinstance(each, PushAccepted))

    assert isinstance(replay(tape, step=generous).divergence.recorded, PushAccepted)


def test_impossible_settings_are_damage(tape):
    tape.write_bytes(summed_all(tape.read_bytes().replace(b'"quorum":2', b'"quorum":5', 1)))
    with pytest.raises(TapeError, match="line 1: impossible settings: --quorum 5"):
        replay(tape)


def test_a_tape_cut_anywhere_between_two_records_passes(tape, recorded):
    lines, _ = recorded
    for count in range(1, len(lines)):
        tape.write_bytes(b"".join(lines[:count]) + lines[count][:7])
        result = replay(tape)
        assert result.divergence is None
        assert result.records == count


def test_decisions_lost_before_a_restart_are_no_divergence(tmp_path):
    path = tmp_path / "events.jsonl"
    run = Run(path)
    run.start()
    run.play(until=lambda state: state.step == 2 and state.durable == 2)
    resumption = run.resumption()
    run.play(until=lambda state: state.step == 3)
    run.close()
    lines = path.read_bytes().splitlines(keepends=True)
    commit = next(index for index, line in enumerate(lines) if b'"kind":"merge","because"' in line)
    assert lines[commit + 1 :], "the commit's event brought more decisions"
    path.write_bytes(b"".join(lines[: commit + 1]))
    shadow = Replayer("run")
    for line in lines[: commit + 1]:
        shadow.feed(line)
    assert shadow.due > 0
    run = Run(path, resumed=resumption)
    run.join(0, 1)
    run.play()
    run.close()
    result = replay(path)
    assert result.divergence is None
    assert result.state == run.state


def test_until_stops_behind_that_record(tape):
    records = list(read(tape))
    opened = next(entry for entry in records if isinstance(entry.body, AttemptOpened))
    assert replay(tape, until=0).state == initial_state(CONFIG)
    before, after = replay(tape, until=opened.because - 1), replay(tape, until=opened.because)
    assert not before.state.rounds
    assert after.state.rounds
    # The state is the event's, whichever of its decisions one stops at.
    assert replay(tape, until=opened.seq).state == after.state
    assert after.divergence is None
    assert after.records == opened.because + 1


def test_damage_is_not_a_divergence(tape):
    content = tape.read_bytes()
    place = content.index(b'"kind":"push_received"')
    tape.write_bytes(content[:place] + b"!" + content[place + 1 :])
    line = content[:place].count(b"\n") + 1
    with pytest.raises(TapeError, match=f"line {line}: "):
        replay(tape)


def test_a_replay_of_nothing_says_so(tmp_path):
    path = tmp_path / "events.jsonl"
    path.touch()
    with pytest.raises(TapeError, match="line 1: no header"):
        replay(path)


def test_memory_does_not_grow_with_the_tape(tmp_path):
    path = tmp_path / "events.jsonl"
    run = Run(path)
    run.start()
    for beat in range(4000):
        run.tell(
            Heartbeat(at=0.0, learner=beat % 2, generation=f"{beat % 2:08x}{1:08x}", local_step=beat),
            after=0.001,
        )
    run.close()
    peaks = []
    for until in (500, 4000):
        tracemalloc.start()
        replay(path, until=until)
        summary = Summary(find_restarts(path))
        for entry in read(path):
            summary.feed(entry)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000


@attrs.frozen
class Odd:
    z_map: immutables.Map
    a_pair: tuple
    limit: float
    names: frozenset


def test_states_become_plain_sorted_json():
    @attrs.frozen(order=True)
    class Key:
        learner: int
        generation: str

    odd = Odd(
        z_map=immutables.Map({(10, "b"): 1, (9, "b"): immutables.Map({3: None})}),
        a_pair=(True, 1, 1.5, "text"),
        limit=math.inf,
        names=frozenset({Key(1, "b"), Key(0, "a")}),
    )
    assert json.dumps(state_to_json(odd)) == (
        '{"a_pair": [true, 1, 1.5, "text"], "limit": null, '
        '"names": [{"generation": "a", "learner": 0}, {"generation": "b", "learner": 1}], '
        '"z_map": {"9,b": {"3": null}, "10,b": 1}}'
    )
    keyed = attrs.evolve(odd, z_map=immutables.Map({Key(2, "c"): 1}))
    assert state_to_json(keyed)["z_map"] == {"2,c": 1}
    with pytest.raises(TypeError, match="a state holds no object"):
        state_to_json(attrs.evolve(odd, a_pair=(object(),)))


def test_the_state_of_a_run_is_json(recorded):
    plain = state_to_json(recorded[1])
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert list(plain) == sorted(plain)
    assert plain["step"] == 6
    assert plain["phase"] == "ended"
    assert type(plain["phase"]) is str
    assert plain["ledger"]["1"] == {"c_steps": 60, "c_tokens": 1200, "learner": 1, "merges": 6}


def summarise(path):
    summary = Summary(find_restarts(path))
    for entry in read(path):
        summary.feed(entry)
    return summary


def test_the_summary_of_a_run(tape, recorded):
    summary = summarise(tape)
    assert (summary.step, summary.commits, summary.superseded, summary.attempts, summary.sealed) == (
        6,
        6,
        0,
        6,
        6,
    )
    assert summary.ledger() == tuple(entry for _, entry in sorted(recorded[1].ledger.items()))
    # tokens squared over steps: 100 and 200 tokens in 10 steps each weigh 1 to 4.
    assert [summary.contribution(learner) for learner in (0, 1)] == pytest.approx([0.2, 0.8])
    assert summary.staleness == {0: 12}
    plain = summary.to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["session"]["ended"]["exit_code"] == 0
    assert plain["learners"]["0"]["merges"] == 6
    assert plain["grace_seconds"] == {"count": 0, "mean": None, "min": None, "max": None}


def test_commits_that_a_restart_fell_back_below_do_not_count(tmp_path):
    path = tmp_path / "events.jsonl"
    state = record_with_restart(path)
    result = replay(path)
    assert result.divergence is None
    assert result.state == state
    summary = summarise(path)
    commits = [entry.body.step for entry in read(path) if isinstance(entry.body, RoundCommitted)]
    assert commits == [1, 2, 3, 4, 3, 4, 5, 6]
    assert (summary.step, summary.commits, summary.superseded) == (6, 6, 2)
    assert summary.quorum_seconds.count == 6
    assert sum(summary.staleness.values()) == 12
    assert summary.contribution(1) == pytest.approx(0.8)
    assert summary.ledger() == tuple(entry for _, entry in sorted(state.ledger.items()))
    assert summary.ledger()[0].merges == 6
    assert [event.step for event in summary.restarts] == [2]


def test_refusals_are_counted_with_the_last_sentence(tmp_path):
    path = tmp_path / "events.jsonl"
    run = Run(path)
    run.start()
    run.play(until=lambda state: bool(state.rounds))
    opened = next(order for order in run.orders if isinstance(order, AttemptOpened))
    for _ in range(2):
        run.push(attrs.evolve(opened, step=9), opened.members[0])
    run.tell(StopRequested(at=0.0, signal="SIGTERM"))
    run.play()
    run.close()
    summary = summarise(path)
    refusal = summary.refused_pushes[0, "out_of_round"]
    assert refusal.count == 2
    assert refusal.why
    assert summary.to_json()["refused_pushes"] == [
        {"learner": 0, "reason": "out_of_round", "count": 2, "seq": refusal.seq, "why": refusal.why}
    ]
    assert summary.ended.exit_code == 4


def test_the_story_of_a_round(tape):
    story = RoundStory(3)
    told = [entry for entry in read(tape) if story.concerns(entry)]
    assert story.found
    assert [entry.kind for entry in told] == [
        "attempt_opened",
        "push_offered",
        "push_admitted",
        "push_received",
        "push_accepted",
        "push_offered",
        "push_admitted",
        "push_received",
        "push_accepted",
        "quorum_reached",
        "attempt_sealed",
        "merge_ordered",
        "merge_finished",
        "commit_ordered",
        "outer_step_applied",
        "merge",
        "checkpoint_ordered",
        "checkpoint_written",
        "broadcast_ordered",
    ]
    assert describe(told[0]).endswith(f"attempt_opened: {told[0].body.why}")
    assert "push_offered: learner 0, generation 0000000000000001, fragment 0, step 3" in describe(told[1])


def test_a_story_has_comings_and_goings_while_the_round_is_open_and_restarts_after_it_began(tmp_path):
    path = tmp_path / "events.jsonl"
    record_with_restart(path)
    story = RoundStory(4)
    told = [entry.kind for entry in read(path) if story.concerns(entry)]
    assert told.count("session_resumed") == 1
    assert told.count("merge") == 2
    assert "learner_joined" not in told[: told.index("session_resumed")]
    story = RoundStory(1)
    assert "learner_joined" not in [entry.kind for entry in read(path) if story.concerns(entry)]


def test_what_a_joining_learner_is_sent_later_is_not_the_story_of_a_round(tmp_path):
    path = tmp_path / "events.jsonl"
    run = Run(path)
    run.start()
    run.play(until=lambda state: state.step == 3 and state.durable == 3)
    run.leave(1)
    run.join(1)
    run.close()
    story = RoundStory(3)
    told = [entry.kind for entry in read(path) if story.concerns(entry)]
    assert told.count("broadcast_ordered") == 1
    assert sum(entry.kind == "broadcast_ordered" for entry in read(path)) > 4


def test_text_of_a_peer_cannot_steer_a_terminal(tmp_path):
    assert printable("plain é text") == "plain é text"
    assert printable("\x1b[2J\u202eabc\n\ud800\u2028") == "\\x1b[2J\\u202eabc\\n\\ud800\\u2028"
    path = tmp_path / "events.jsonl"
    run = Run(path)
    run.join(0)
    run.leave(0, reason="\x1b[31mred")
    run.close()
    left = next(entry for entry in read(path) if entry.kind == "learner_left")
    assert left.body.reason == "\x1b[31mred"
    assert describe(left).endswith("reason \\x1b[31mred")


def test_the_first_difference_of_two_tapes(tmp_path, tape):
    other = tmp_path / "other.jsonl"
    record(other)
    assert other.read_bytes() == tape.read_bytes(), "the same events in the same order give equal tapes"
    named = (
        other.read_bytes().replace(b"5e551011", b"0ther", 1).replace(b"2026-01-02T03", b"2026-01-03T03", 1)
    )
    other.write_bytes(named := summed_all(named))
    assert first_difference(tape, other) is None
    other.write_bytes(summed_all(named.replace(b'"local_step":10,', b'"local_step":11,', 1)))
    difference = first_difference(tape, other)
    assert difference.left.kind == "push_offered"
    assert difference.fields() == (("local_step", 10, 11),)
    assert difference.line == difference.left.seq + 1
    other.write_bytes(summed_all(named.replace(b'"grace_tau":2.0', b'"grace_tau":3.0', 1)))
    assert first_difference(tape, other).line == 1
    lines = named.splitlines(keepends=True)
    other.write_bytes(b"".join(lines[:20]))
    difference = first_difference(tape, other)
    assert (difference.line, difference.right, difference.fields()) == (21, None, ())


def test_the_writer_goes_on_where_a_replay_ended(tmp_path, recorded):
    """What a shadow folded is what the next start finds."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(recorded[0]))
    result = replay(path)
    writer, tail = TapeWriter.resume(path)
    writer.close()
    assert (tail.last_seq, tail.last_at) == (result.records - 1, result.state.at)


def test_recorded_tapes_open_and_replay_for_ever(fixtures):
    """Each tape in fixtures/tapes is a promise: no change of the code may break it."""
    for path in sorted((fixtures / "tapes").glob("*.jsonl")):
        result = replay(path)
        assert result.divergence is None, path
        assert result.records == path.read_bytes().count(b"\n"), path
