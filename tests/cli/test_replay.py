"""``yeto replay`` as people and programs meet it: the real command line on real tapes."""

import json
import subprocess
import sys

import attrs
import pytest
from recorded_run import CONFIG, Run, record, record_with_restart

from yeto.cli import replay as command
from yeto.cli.main import main
from yeto.core.events import StopRequested
from yeto.errors import TapeError
from yeto.state.manifest import (
    FORMAT_VERSION,
    LedgerEntry,
    Manifest,
    ManifestFragment,
    encode_manifest,
    fragment_file,
)
from yeto.tape import read


@pytest.fixture
def tape(tmp_path):
    path = tmp_path / "events.jsonl"
    record(path)
    return path


@pytest.fixture
def restarted(tmp_path):
    path = tmp_path / "restarted.jsonl"
    record_with_restart(path)
    return path


@pytest.fixture
def yeto(capsys):
    """Run ``yeto replay``; return exit code, stdout and stderr."""

    def run(*words):
        with pytest.raises(SystemExit) as end:
            main(["replay", *map(str, words)])
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err

    return run


def count(path):
    return path.read_bytes().count(b"\n")


def why(path, kind):
    """Return the coordinator's sentence of the last decision of a kind."""
    return [record.body.why for record in read(path) if record.kind == kind][-1]


def spoil(path, old, new):
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    return content[: content.index(old)].count(b"\n") + 1


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
    table = [line.split() for line in lines[-3:]]
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
    assert "learner 0, push: no_work 1 times, the last in record " in out


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


def test_damage_is_one_line_with_its_number(yeto, tape):
    line = spoil(tape, b'"kind":"push_offered"', b'"kind":"push_offereD"')
    code, out, err = yeto(tape)
    assert (code, out) == (1, "")
    assert err.startswith(f"yeto: {tape}: line {line}: field kind: ")
    assert err.count("\n") == 1


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
        (("--until", "3", "--follow"), "--until does not go with --follow"),
        (("--until", "9999"), "--until 9999: the tape ends with record "),
        (("--round", "7"), "--round 7: no attempt of it was opened; 6 are committed"),
        (("--round", "x"), "--round"),
    ],
)
def test_wrong_usage_is_code_2(yeto, tape, words, message):
    code, out, err = yeto(tape, *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_missing_tape_is_one_line(yeto, tmp_path):
    code, out, err = yeto(tmp_path / "none.jsonl")
    assert (code, out) == (1, "")
    assert err == f"yeto: {tmp_path / 'none.jsonl'}: no such tape\n"


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


def test_the_story_of_a_round(yeto, tape):
    code, out, _ = yeto(tape, "--round", 3)
    lines = out.splitlines()
    assert code == 0
    assert "attempt_opened: round 3 " in lines[0]
    assert "broadcast_ordered: " in lines[-1]
    _, out, _ = yeto(tape, "--round", 3, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert len(records) == len(lines)
    assert records[0]["kind"] == "attempt_opened"
    assert records[0]["members"][1]["learner"] == 1


@pytest.fixture
def stored(tmp_path):
    """Write the manifest that a checkpoint of a state (as JSON) has; return its folder."""

    def store(state, **changes):
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            software_version="0.1.0",
            step=state["step"],
            iso_backend=0,
            dtype=state["terms"]["dtype"],
            layout_fingerprint=state["terms"]["fingerprint"],
            session_contract=state["terms"]["contract"],
            fragments=tuple(
                ManifestFragment(
                    fragment=mark["fragment"],
                    version=mark["version"],
                    file=fragment_file(mark["fragment"], mark["version"]),
                    numel=4,
                    mode="rda",
                    shapes=((4,),),
                    params_digest=mark["params_digest"],
                    momentum_digest=mark["momentum_digest"] or "0" * 32,
                )
                for mark in state["marks"]
            ),
            ledger=tuple(LedgerEntry(**entry) for entry in state["ledger"].values()),
            settings={},
        )
        folder = tmp_path / "state.ckpt"
        folder.mkdir(exist_ok=True)
        content = encode_manifest(attrs.evolve(manifest, **changes))
        (folder / f"manifest-{manifest.step}.json").write_bytes(content)
        return folder

    return store


def test_a_checkpoint_that_agrees(yeto, restarted, stored):
    lines = restarted.read_text().splitlines()
    commits = [index for index, line in enumerate(lines) if '"kind":"merge","because"' in line]
    # Round 3 was committed twice; the checkpoint is of the timeline that stands.
    _, out, _ = yeto(restarted, "--until", commits[4], "--state")
    folder = stored(json.loads(out))
    code, out, _ = yeto(restarted, "--checkpoint", folder)
    assert code == 0
    assert out == f"{folder}: step 3, versions, digests and ledger are what the tape says\n"
    code, out, _ = yeto(restarted, "--checkpoint", folder / "manifest-3.json", "--json")
    assert (code, json.loads(out)["differences"]) == (0, [])


def test_a_checkpoint_before_the_first_commit_agrees(yeto, tape, stored):
    lines = tape.read_text().splitlines()
    written = next(index for index, line in enumerate(lines) if '"kind":"checkpoint_written"' in line)
    _, out, _ = yeto(tape, "--until", written, "--state")
    code, out, _ = yeto(tape, "--checkpoint", stored(json.loads(out)))
    assert (code, "step 0, " in out) == (0, True)


def test_a_checkpoint_that_differs(yeto, tape, stored):
    _, out, _ = yeto(tape, "--state")
    state = json.loads(out)
    state["marks"][0]["params_digest"] = "0" * 32
    state["marks"][1]["momentum_digest"] = "1" * 32
    state["ledger"]["1"]["c_tokens"] = 7
    folder = stored(state, session_contract="d" * 64)
    code, out, _ = yeto(tape, "--checkpoint", folder)
    assert code == 1
    assert out.splitlines() == [
        f"{folder}: not what the tape says",
        f"  session contract: {'d' * 64} in the checkpoint, {'c' * 64} on the tape",
        f"  fragment 0, params digest: {'0' * 32} in the checkpoint, a{'5':0>31} on the tape",
        f"  fragment 1, momentum digest: {'1' * 32} in the checkpoint, b{'6':0>31} on the tape",
        "  learner 1, (merges, steps, tokens): (6, 60, 7) in the checkpoint, (6, 60, 1200) on the tape",
    ]


def test_a_checkpoint_beyond_the_tape(yeto, tape, stored):
    _, out, _ = yeto(tape, "--state")
    folder = stored(json.loads(out))
    spoiled = tape.read_text().splitlines(keepends=True)
    commits = [index for index, line in enumerate(spoiled) if '"kind":"merge","because"' in line]
    tape.write_text("".join(spoiled[: commits[-2] + 1]))
    code, out, _ = yeto(tape, "--checkpoint", folder)
    assert code == 1
    assert out == (
        f"{folder}: not what the tape says\n  the checkpoint is of step 6, the tape ends at step 5\n"
    )


def test_a_checkpoint_that_is_none(yeto, tape, tmp_path):
    code, out, err = yeto(tape, "--checkpoint", tmp_path / "none.ckpt")
    assert (code, out) == (1, "")
    assert "none.ckpt" in err


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
    other.write_text(json.dumps(header, separators=(",", ":")) + "\n" + "".join(text[1:]))
    code, out, _ = yeto(tape, "--diff", other)
    was = CONFIG.outer_momentum
    assert (code, out.splitlines()) == (
        1,
        [
            "line 1 differs",
            f"  {tape}: header",
            f"  {other}: header",
            f"  config.outer_momentum: {was} in {tape}, 0.25 in {other}",
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


def test_neither_torch_nor_a_model_library_is_loaded(yeto, tape, stored):
    _, out, _ = yeto(tape, "--state")
    code = (
        "import sys\n"
        "from yeto.cli.main import main\n"
        "try: main(['replay', *sys.argv[1:]])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'torch', 'transformers', 'peft', 'datasets'}\n"
    )
    words = [sys.executable, "-c", code, tape, "--checkpoint", stored(json.loads(out))]
    subprocess.run(words, check=True, capture_output=True)
