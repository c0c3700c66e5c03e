"""``yeto replay`` as people and programs meet it: the real command line on real tapes."""

import json
import os
import re

import pytest
from recorded_run import CONFIG, Run
from tape_lines import summed_all

from yeto.cli import replay as command
from yeto.core.events import StopRequested
from yeto.errors import TapeError
from yeto.tape import read


def count(path):
    return path.read_bytes().count(b"\n")


def why(path, kind):
    """Return the coordinator's sentence of the last decision of a kind."""
    return [record.body.why for record in read(path) if record.kind == kind][-1]


def spoil(path, old, new):
    """Change what a line says, its checksum with it; return the line's number."""
    content = path.read_bytes()
    assert old in content
    path.write_bytes(summed_all(content.replace(old, new, 1)))
    return content[: content.index(old)].count(b"\n") + 1


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("header", "config.num_learners"),
        ("hello_received", "terms.num_fragments"),
        ("session_opened", "terms.num_fragments"),
        ("session_resumed", "config.num_learners"),
        ("session_resumed", "terms.num_fragments"),
    ],
)
@pytest.mark.parametrize("words", [(), ("--state",), ("--round", "2")])
def test_a_run_of_more_than_anybody_has_is_named_before_room_is_made_for_it(
    yeto, restarted, kind, field, words
):
    lines = restarted.read_bytes().splitlines(keepends=True)
    number = next(place for place, line in enumerate(lines) if f'"kind":"{kind}"'.encode() in line)
    name = field.rpartition(".")[2].encode()
    lines[number] = re.sub(b'"%s":2' % name, b'"%s":4503599627370496' % name, lines[number])
    restarted.write_bytes(summed_all(b"".join(lines)))
    code, out, err = yeto(restarted, *words)
    assert (code, out) == (1, "")
    assert err == (
        f"yeto: {restarted}: line {number + 1}: field {field}: 4503599627370496 is more than any run has "
        "(65536)\n"
    )


def test_the_whole_story_in_numbers(yeto, restarted):
    code, out, err = yeto(restarted)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{restarted}: {count(restarted)} records, every decision follows from its events"
    assert lines[2] == "session    5e551011, Yeto 0.1.0, 2026-01-02T03:04:05+00:00"
    assert lines[3].strip().startswith("2 learners, quorum 2, 2 fragments in bf16, ")
    assert "from step 2" in lines[4]
    assert lines[5].strip() == f"ended with exit code 0: {why(restarted, 'session_ended')}"
    assert lines[6] == "rounds     6 of 6 committed, 2 more superseded by a restart"
    assert lines[7] == "attempts   8 opened, 8 sealed, 0 discarded"
    assert "staleness  0: 12 pushes" in lines
    table = [line.split() for line in lines[-4:-1]]
    assert lines[-1] == "(steps and tokens: of every merged push, so each counts once for every fragment)"
    assert table[0][:5] == ["learner", "merges", "steps", "tokens", "contribution"]
    assert table[1][:5] == ["0", "6", "60", "600", "20.0%"]
    assert table[2][:5] == ["1", "6", "60", "1200", "80.0%"]


def test_refusals_and_discards_are_told_with_their_reason(yeto, tmp_path):
    path = tmp_path / "events.jsonl"
    run = Run(path)
    run.start()
    run.play(until=lambda state: bool(state.rounds))
    opened = next(order for order in run.orders if order.kind == "attempt_opened")
    run.push(opened, opened.members[0], c_steps=0)
    run.tell(StopRequested(at=0.0, signal="SIGTERM"))
    run.play()
    run.close()
    code, out, _ = yeto(path)
    assert code == 0
    assert "ended with exit code 4" in out
    assert "discarded (" in out
    assert "learner 0, push: no_work once, the last in record " in out


def test_json_says_the_same(yeto, restarted):
    code, out, _ = yeto(restarted, "--json")
    said = json.loads(out)
    assert code == 0
    assert (said["records"], said["verified"], said["divergence"], said["due"]) == (
        count(restarted),
        True,
        None,
        0,
    )
    assert said["summary"]["rounds"]["superseded"] == 2
    assert said["summary"]["learners"]["1"]["c_tokens"] == 1200


def test_a_divergence_shows_both_sides(yeto, tape):
    line = spoil(tape, b'"fragment":0,"attempt":1,"members"', b'"fragment":1,"attempt":1,"members"')
    for words in ((), ("--state",), ("--round", "6"), ("--follow",)):
        code, out, err = yeto(tape, *words)
        assert (code, err) == (1, "")
        said = out[out.index(f"{tape}: line {line}") :].splitlines()
        assert said[0].endswith(f"(record {line - 1}) diverges: the rules give another decision")
        assert said[1].startswith('  the event: {"kind": "checkpoint_written"')
        assert said[2].startswith('  the tape:  {"kind": "attempt_opened"')
        assert said[3].startswith('  the rules: {"kind": "attempt_opened"')
        assert said[4] == "  fragment: 1 on the tape, 0 by the rules"
    code, out, _ = yeto(tape, "--json")
    found = json.loads(out)["divergence"]
    assert code == 1
    assert (found["line"], found["recorded"]["fragment"], found["expected"]["fragment"]) == (line, 1, 0)


def test_a_restart_says_after_what(yeto, fixtures):
    _, out, _ = yeto(fixtures / "tapes" / "faulty-v1.jsonl")
    restarts = [line.strip() for line in out.splitlines() if "restarted at" in line]
    assert restarts[0].endswith("from step 6, after it was cut off")
    assert "from step 15, after exit code 1: the checkpoint of step 18 could not be written" in restarts[1]
    assert "from step 24, after exit code 3: no final ACK from learner 2" in restarts[2]
    assert "rounds     24 of 24 committed, 5 more superseded by a restart" in out
    _, out, _ = yeto(fixtures / "tapes" / "faulty-v1.jsonl", "--json")
    after = [restart["after_exit_code"] for restart in json.loads(out)["summary"]["session"]["restarts"]]
    assert after == [None, 1, 3]


def test_damage_is_one_line_with_its_number(yeto, tape):
    line = spoil(tape, b'"kind":"push_offered"', b'"kind":"push_offereD"')
    code, out, err = yeto(tape)
    assert (code, out) == (1, "")
    assert err.startswith(f"yeto: {tape}: line {line}: field kind: ")
    assert err.count("\n") == 1
    tape.write_bytes(tape.read_bytes().replace(b"10.0.0.1:40000", b"10.0.0.2:40000", 1))
    line = tape.read_bytes().split(b"10.0.0.2:40000")[0].count(b"\n") + 1
    code, out, err = yeto(tape)
    assert (code, out) == (1, "")
    assert err == (
        f"yeto: {tape}: line {line}: the checksum does not fit: this line was changed after it was written; "
        f"look at the disk, bring the tape back from a copy, or go on without it "
        f"(--resume with a new --event-tape)\n"
    )


def test_a_torn_tape_is_read_to_its_last_whole_record(yeto, tape):
    tape.write_bytes(tape.read_bytes()[:-1])
    code, out, _ = yeto(tape)
    assert code == 0
    assert f"{count(tape)} records" in out
    assert "ended with exit code 0" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--state", "--follow"), "--state and --follow: ask for one of them at a time"),
        (("--round", "3", "--state"), "--state and --round: ask for one of them at a time"),
        (("--follow", "--what-if", "quorum=1"), "--follow and --what-if: ask for one of them at a time"),
        (("--until", "3", "--follow"), "--until does not go with --follow"),
        (("--until", "9999"), "--until 9999: the tape ends with record "),
        (("--round", "7"), "--round 7: no attempt of it was opened; 6 are committed"),
        (("--round", "x"), "--round"),
        (("--round", "0"), "--round 0: rounds are numbered from 1"),
        (("--until", "-1"), "--until -1: records are numbered from 0"),
        (("--until", "1.5"), "--until 1.5: must be a whole number (see yeto replay --help)"),
        (("--threads", "2"), "--threads 2 goes with --tensors"),
        (("--tensors", ".", "--threads", "0"), "--threads 0: must lie between 1 and 1024"),
        (("--tensors", ".", "--threads", "10000000"), "--threads 10000000: must lie between 1 and 1024"),
    ],
)
def test_wrong_usage_is_code_2(yeto, tape, words, message):
    code, out, err = yeto(tape, *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_missing_tape_is_one_line(yeto, tmp_path):
    code, out, err = yeto(tmp_path / "none.jsonl")
    assert (code, out) == (1, "")
    assert err.startswith(f"yeto: {tmp_path / 'none.jsonl'}: no such tape; a syncer writes events.jsonl in ")
    assert err.count("\n") == 1


def test_until_shows_the_state_then(yeto, tape):
    code, out, _ = yeto(tape, "--until", 0, "--state")
    state = json.loads(out)
    assert (code, state["step"], state["phase"]) == (0, 0, "provisional")
    assert state["config"]["num_learners"] == CONFIG.num_learners
    _, out, _ = yeto(tape, "--state")
    assert json.loads(out)["step"] == 6
    _, out, _ = yeto(tape, "--until", 40)
    assert "41 records" in out
    assert "not ended" in out


def test_until_does_not_know_of_later_restarts(yeto, restarted):
    lines = restarted.read_text().splitlines()
    restart = next(index for index, line in enumerate(lines) if '"kind":"session_resumed"' in line)
    _, out, _ = yeto(restarted, "--until", restart - 1)
    assert "rounds     4 of 6 committed\n" in out


def test_diff_names_the_first_record_that_differs(yeto, tape, restarted, tmp_path):
    code, out, _ = yeto(tape, "--diff", tape)
    assert (code, out) == (0, f"{tape} and {tape} hold the same records\n")
    code, out, _ = yeto(tape, "--diff", restarted)
    lines = out.splitlines()
    assert code == 1
    assert lines[0].startswith("line ")
    assert "session_resumed" in lines[2]
    other = tmp_path / "other.jsonl"
    other.write_bytes(tape.read_bytes())
    line = spoil(other, b'"c_tokens":100,', b'"c_tokens":101,')
    code, out, _ = yeto(tape, "--diff", other)
    assert out.splitlines()[0] == f"line {line} differs"
    assert out.splitlines()[3] == f"  c_tokens: 100 in {tape}, 101 in {other}"
    code, out, _ = yeto(tape, "--diff", other, "--json")
    said = json.loads(out)
    assert (code, said["equal"], said["line"], said["right"]["c_tokens"]) == (1, False, line, 101)


def test_diff_of_two_headers_names_the_settings_that_differ_and_no_other(yeto, tape, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_bytes(tape.read_bytes())
    text = other.read_text().splitlines(keepends=True)
    header = json.loads(text[0])
    header["config"]["outer_momentum"] = 0.25
    changed = json.dumps(header, separators=(",", ":")) + "\n" + "".join(text[1:])
    other.write_bytes(summed_all(changed.encode("ascii")))
    code, out, _ = yeto(tape, "--diff", other)
    assert (code, out.splitlines()) == (
        1,
        [
            "line 1 differs",
            f"  {tape}: header",
            f"  {other}: header",
            f"  config.outer_momentum: null in {tape}, 0.25 in {other}",
        ],
    )


def test_follow_ends_with_the_session(yeto, tape):
    code, out, _ = yeto(tape, "--follow")
    assert code == 0
    assert len(out.splitlines()) == count(tape)
    assert f"session_ended: {why(tape, 'session_ended')}" in out


def test_follow_waits_for_the_rest_of_a_record(tape, capsys):
    content = tape.read_bytes()
    parts = [content[:3000], content[3000:3001], content[3001:9000], content[9000:]]
    tape.write_bytes(parts.pop(0))
    waits = []

    def grow(seconds):
        waits.append(seconds)
        with open(tape, "ab") as file:
            file.write(parts.pop(0))

    assert command._follow(tape, as_json=True, sleep=grow) == 0
    assert waits == [command.FOLLOW_SECONDS] * 3
    seen = [json.loads(line)["seq"] for line in capsys.readouterr().out.splitlines()]
    assert seen == list(range(count(tape)))


def test_follow_goes_on_over_a_restart(tmp_path, capsys):
    path = tmp_path / "events.jsonl"
    run = Run(path)
    run.start()
    run.play(until=lambda state: state.step == 2 and state.durable == 2)
    run.writer.flush()

    def finish(seconds):
        run.play()
        run.writer.flush()

    assert command._follow(path, as_json=False, sleep=finish) == 0
    run.close()
    assert "session_ended" in capsys.readouterr().out


def test_follow_notices_that_the_writer_cut_the_tape_back(tape):
    content = tape.read_bytes()
    tape.write_bytes(content[: content.rindex(b"\n", 0, len(content) // 2) + 1])

    def cut(seconds):
        tape.write_bytes(content[:2000])

    with pytest.raises(TapeError, match="records that were read are gone again"):
        command._follow(tape, as_json=False, sleep=cut)


@pytest.mark.parametrize("replaced", [True, False])
def test_follow_notices_that_the_tape_was_taken_away(tape, replaced):
    rest = tape.read_bytes()
    tape.write_bytes(rest[:-40])

    def take_away(seconds):
        tape.rename(tape.with_name("old.jsonl"))
        if replaced:
            tape.write_bytes(rest)

    with pytest.raises(TapeError, match=r"no longer there: follow the new one"):
        command._follow(tape, as_json=False, sleep=take_away)


def test_a_pipe_is_refused(yeto):
    reading, writing = os.pipe()
    try:
        code, out, err = yeto(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
        os.close(writing)
    assert (code, out) == (1, "")
    assert err.endswith("is a pipe, and a tape is read more than once: write it to a file\n")


def test_who_waits_for_a_long_tape_is_told_how_much_is_read(yeto, tape, monkeypatch):
    assert yeto(tape)[2] == ""
    monkeypatch.setattr("yeto.cli.reading.PROGRESS_SECONDS", 0.0)
    code, out, err = yeto(tape, "--json")
    assert code == 0
    assert json.loads(out)["summary"]
    shares = re.findall(rf"^yeto replay: +(\d+)% of {re.escape(str(tape))} is read$", err, re.MULTILINE)
    assert len(shares) == err.count("\n") == count(tape)
    assert shares[-1] == "100"
    assert shares == sorted(shares, key=int)
