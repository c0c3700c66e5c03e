"""What a view tells of a run are the numbers of the replay, wherever the tape is cut off."""

import json
from itertools import pairwise

import pytest
from tape_lines import summed_all
from view_tapes import ROOT, TAPES

from yeto.cli.main import main
from yeto.core import waiting_for
from yeto.errors import TapeError
from yeto.tape import Summary, find_restarts, read, replay
from yeto.view.board import Board
from yeto.view.follow import Watcher
from yeto.view.history import History, history_json
from yeto.view.json import moment_json, moment_of
from yeto.view.present import present

FAULTY = ROOT / "fixtures" / "tapes" / "faulty-v1.jsonl"


def cuts(path):
    """Return numbers of lines to cut a tape after: some anywhere, and just around every restart."""
    lines = path.read_bytes().splitlines()
    restarts = [index for index, line in enumerate(lines) if b'"kind":"session_resumed"' in line]
    around = {cut for index in restarts for cut in (index, index + 1, index + 2)}
    return sorted({*around, *range(60, len(lines), 260), len(lines)})


def cut_to(path, lines, folder):
    """Write the first lines of a tape, and half a line more: its writer was cut off."""
    kept = path.read_bytes().splitlines(keepends=True)
    target = folder / "events.jsonl"
    target.write_bytes(b"".join(kept[:lines]) + b"".join(kept[lines : lines + 1])[:20])
    return target


def seen(path):
    watcher = Watcher(path, running=lambda _: None)
    watcher.look()
    return watcher.moment()


def check(moment, path):
    """Compare a moment with the replay of the same tape and with its summary."""
    result, summary = replay(path), Summary(find_restarts(path))
    for record in read(path):
        summary.feed(record)
    state, told = result.state, summary.to_json()
    assert moment.at == summary.at
    assert moment.session.records == result.records == told["session"]["records"]
    assert moment.session.restarts == len(told["session"]["restarts"])
    assert moment.step == told["rounds"]["step"]
    assert (moment.committed, moment.superseded) == (
        told["rounds"]["committed"],
        told["rounds"]["superseded"],
    )
    assert moment.no_ops == told["rounds"]["no_op"]
    assert (moment.attempts, moment.discarded) == (
        told["attempts"]["opened"],
        told["attempts"]["discarded"],
    )
    assert {str(value): count for value, count in moment.staleness.items()} == told["staleness"]
    for learner in moment.learners:
        theirs = told["learners"][str(learner.learner)]
        for name in (
            "merges",
            "c_steps",
            "c_tokens",
            "contribution",
            "missed",
            "left_out",
            "joins",
            "leaves",
        ):
            assert getattr(learner, name) == theirs[name], (learner.learner, name)
    pushes = [one for one in moment.refusals if one.what == "push"]
    assert [(one.learner, one.reason, one.count, one.seq) for one in pushes] == [
        (one["learner"], one["reason"], one["count"], one["seq"]) for one in told["refused_pushes"]
    ]
    connections = [one for one in moment.refusals if one.what == "connection"]
    assert [(one.reason, one.count) for one in connections] == [
        (one["reason"], one["count"]) for one in told["refused_learners"]
    ]
    return state


@pytest.mark.parametrize("path", TAPES, ids=lambda path: path.stem)
def test_numbers_are_those_of_the_replay_at_every_cut(path, tmp_path):
    for lines in cuts(path):
        tape = cut_to(path, lines, tmp_path)
        moment = seen(tape)
        state = check(moment, tape)
        assert moment_of(json.loads(json.dumps(moment_json(moment)))).step == moment.step
        # Between the decisions of one event the state is ahead of the records.
        following = path.read_bytes().splitlines()[lines : lines + 1]
        if not following or b'"because":' not in following[0][:200]:
            assert (moment.at, moment.step, moment.total_steps) == (state.at, state.step, state.target)
            assert tuple(one.version for one in moment.fragments) == state.versions
            merges = {one.learner: one.merges for one in moment.learners if one.merges}
            assert merges == {learner: entry.merges for learner, entry in state.ledger.items()}
            assert moment.wait.sentence == waiting_for(state, state.at)
            assert moment.phase == state.phase
            connected = {one.learner for one in moment.learners if one.link == "connected"}
            assert connected == (set() if state.phase == "ended" else set(state.current))
            assert [(one.step, one.attempt, one.answered) for one in moment.rounds] == [
                (one.step, one.attempt, tuple(sorted(one.answers))) for one in state.rounds
            ]


@pytest.mark.parametrize("path", TAPES, ids=lambda path: path.stem)
def test_following_a_tape_that_grows_gives_what_reading_it_gives(path, tmp_path):
    whole, tape = path.read_bytes(), tmp_path / "events.jsonl"
    watcher = Watcher(tape, history=True, running=lambda _: None)
    assert not watcher.look()
    assert watcher.moment() is None
    # Not at the ends of lines: what is torn waits for its rest.
    for begin, end in pairwise(sorted({0, 10, *range(3000, len(whole), 41_003), len(whole)})):
        with tape.open("ab") as file:
            file.write(whole[begin:end])
        watcher.look()
    assert watcher.moment() == seen(path)
    fresh = Watcher(path, history=True)
    fresh.look()
    assert history_json(watcher.history) == history_json(fresh.history)
    assert not watcher.look()


@pytest.mark.parametrize("path", TAPES, ids=lambda path: path.stem)
def test_what_is_skipped_in_reading_changes_nothing(path):
    history = History()
    board = Board(find_restarts(path), history)
    for record in read(path):
        board.feed(record)
    watcher = Watcher(path, history=True, running=lambda _: None)
    watcher.look()
    assert present(board) == watcher.moment()
    assert history_json(history) == history_json(watcher.history)


def test_the_command_and_the_replay_print_the_same_numbers(tmp_path, capsys):
    def printed(*words):
        with pytest.raises(SystemExit) as end:
            main(list(map(str, words)))
        assert not end.value.code
        return json.loads(capsys.readouterr().out)

    for lines in (340, 700, len(FAULTY.read_bytes().splitlines())):
        tape = cut_to(FAULTY, lines, tmp_path)
        status = printed("status", tape, "--once", "--json")
        state = printed("replay", tape, "--state")
        assert status["step"] == state["step"]
        assert status["total_steps"] == state["target"]
        assert [one["version"] for one in status["fragments"]] == state["versions"]
        merges = {learner: entry["merges"] for learner, entry in state["ledger"].items()}
        assert {str(one["learner"]): one["merges"] for one in status["learners"] if one["merges"]} == merges
        assert status["checkpoint"]["step"] == state["durable"]


def test_damage_is_named_with_its_line(tmp_path):
    lines = FAULTY.read_bytes().splitlines(keepends=True)
    kept = lines[:300]
    for what, line in (
        ("not a record", b'{"seq":299,"at":1.0,"kind":"merge","step":"x"}\n'),
        ("not a record", b"garbage\n"),
        ("is not a kind of record", b'{"seq":299,"at":1.0,"kind":"gossip"}\n'),
        ("found 301 where 299 is due", next(one for one in lines[301:] if b'"kind":"merge"' in one)),
    ):
        if what.startswith("found"):
            what = (
                f"found {json.loads(line)['seq']} where 299 is due: .*look at the disk, bring the tape back"
            )
        tape = tmp_path / "events.jsonl"
        tape.write_bytes(b"".join(kept[:299]) + line)
        with pytest.raises(TapeError, match=rf"line 300: .*{what}"):
            seen(tape)


def test_a_tape_whose_keys_were_written_anew_reads_the_same(tmp_path):
    """Such as by ``jq --sort-keys``, spaces and all."""
    tape = tmp_path / "events.jsonl"
    lines = [json.dumps(json.loads(line), sort_keys=True) for line in FAULTY.read_bytes().splitlines()]
    tape.write_text("\n".join(lines) + "\n", encoding="ascii")
    assert seen(tape) == seen(FAULTY)
    # With checksums it is another tape, unless whoever writes it anew computes them anew.
    newer = FAULTY.with_name("faulty-v2.jsonl")
    lines = [json.dumps(json.loads(line), sort_keys=True) for line in newer.read_bytes().splitlines()]
    tape.write_text("\n".join(lines) + "\n", encoding="ascii")
    with pytest.raises(TapeError, match="line 1: the checksum does not fit"):
        seen(tape)
    without = [{key: value for key, value in json.loads(line).items() if key != "crc"} for line in lines]
    plain = "".join(json.dumps(record, sort_keys=True) + "\n" for record in without)
    tape.write_bytes(summed_all(plain.encode("ascii")))
    assert seen(tape) == seen(newer)


def test_records_that_are_gone_again_are_an_error_and_another_tape_is_read_anew(tmp_path):
    tape = cut_to(FAULTY, 400, tmp_path)
    watcher = Watcher(tape, running=lambda _: None)
    watcher.look()
    with tape.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(TapeError, match="gone again"):
        watcher.look()
    other = tmp_path / "other.jsonl"
    other.write_bytes(TAPES[-1].read_bytes())
    other.replace(tape)
    watcher.look()
    assert watcher.moment() == seen(TAPES[-1])
