"""``yeto replay --round``: the story of a round, and where its time went."""

import json
import re
from itertools import pairwise

import pytest
from recorded_run import CONFIG, SECONDS, Run

from yeto.cli import replay as command
from yeto.core import decisions as de
from yeto.tape import read


def columns(line):
    """Return mark, at, gap, time in the attempt, record number and text of a line of the story."""
    mark, rest = line[0].strip(), line[1:]
    at, gap, inside, seq = (rest[start:end].strip() for start, end in ((0, 13), (13, 27), (27, 40), (40, 49)))
    return mark, at, gap, inside, seq, rest[49:].strip()


def test_the_story_of_a_round(yeto, tape):
    code, out, _ = yeto(tape, "--round", 3)
    title, *lines, blank, attempt = out.splitlines()
    assert (code, blank) == (0, "")
    assert title.split() == ["at", "since", "above", "in", "attempt", "record"]
    assert columns(lines[0])[5].startswith("attempt_opened: round 3 ")
    assert columns(lines[-1])[5].startswith("broadcast_ordered: ")
    _, out, _ = yeto(tape, "--round", 3, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert len(records) == len(lines)
    assert records[0]["kind"] == "attempt_opened"
    assert records[0]["members"][1]["learner"] == 1
    assert [str(entry["seq"]) for entry in records] == [columns(line)[4] for line in lines]
    assert attempt.startswith("  attempt 1: learner 0 at ")


def test_gaps_are_those_between_the_lines_and_since_the_opening(yeto, tape):
    _, out, _ = yeto(tape, "--round", 3, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    opened = records[0]["at"]
    assert records[0]["gap_seconds"] is None
    for above, entry in pairwise(records):
        assert entry["gap_seconds"] == pytest.approx(entry["at"] - above["at"], abs=1e-6)
    for entry in records:
        assert entry["attempt_seconds"] == pytest.approx(entry["at"] - opened, abs=1e-6)
        assert entry["superseded"] is False
    # People get the same numbers.
    _, out, _ = yeto(tape, "--round", 3)
    lines = out.splitlines()[1 : 1 + len(records)]
    for line, entry in zip(lines, records, strict=True):
        _, at, gap, inside, _, _ = columns(line)
        assert float(at) == entry["at"]
        assert gap == ("" if entry["gap_seconds"] is None else f"+{entry['gap_seconds']:.6f}")
        assert float(inside) == entry["attempt_seconds"]
    # A learner takes SECONDS from its header to the end of its upload, the others have to wait for it.
    received = [entry for entry in records if entry["kind"] == "push_received"]
    assert [entry["gap_seconds"] for entry in received] == [SECONDS] * CONFIG.num_learners


def test_a_superseded_timeline_is_marked(yeto, restarted):
    code, out, _ = yeto(restarted, "--round", 3)
    lines = out.splitlines()
    story = [columns(line) for line in lines[1 : lines.index("")]]
    resumed = next(index for index, line in enumerate(story) if line[5].startswith("session_resumed"))
    assert code == 0
    assert {line[0] for line in story[:resumed]} == {"x"}
    assert {line[0] for line in story[resumed:]} == {""}
    # Between the restart and the second opening nothing is in an attempt.
    assert story[resumed][3] == ""
    assert lines[-1] == "x: superseded, a restart fell back below round 3"
    first, second = lines[lines.index("") + 1 : -2]
    assert first.startswith("x attempt 1: ")
    assert second.startswith("  attempt 1: ")
    _, out, _ = yeto(restarted, "--round", 3, "--json")
    assert sum(json.loads(line)["superseded"] for line in out.splitlines()) == resumed


def test_a_round_below_the_restart_stands(yeto, restarted):
    _, out, _ = yeto(restarted, "--round", 2)
    assert "session_resumed" not in out
    assert "superseded" not in out


def test_until_ends_a_story_before_its_restart(yeto, restarted):
    restart = next(entry.seq for entry in read(restarted) if entry.kind == "session_resumed")
    _, out, _ = yeto(restarted, "--round", 3, "--until", restart - 1)
    assert "superseded" not in out


def test_the_slow_learner_is_named_with_its_upload(yeto, tmp_path):
    path = tmp_path / "events.jsonl"
    run = Run(path)
    run.start()
    run.play(until=lambda state: bool(state.rounds))
    opened = next(order for order in run.orders if isinstance(order, de.AttemptOpened))
    run.orders.remove(opened)
    run.push(opened, opened.members[1])
    run.at += 40.0
    run.push(opened, opened.members[0], c_steps=0)
    run.close()
    _, out, _ = yeto(path, "--round", opened.step)
    told = out.splitlines()[-1].strip()
    assert told == (
        f"attempt 1: learner 1 at {2 * SECONDS:.3f} s (upload {SECONDS:.3f} s), "
        f"learner 0 refused at {40 + 3 * SECONDS:.3f} s (no_work), discarded at {40 + 3 * SECONDS:.3f} s "
        "(unreachable)"
    )


def test_the_readme_shows_what_is_printed(yeto, fixtures):
    page = (fixtures.parent / "README.md").read_text(encoding="utf-8")
    (words, shown) = re.findall(
        r"\n\$ yeto replay (fixtures/tapes/\S+ --round \d+)\n(.*?)\n```", page, re.DOTALL
    )[0]
    tape, flag, step = words.split()
    _, out, _ = yeto(fixtures.parent / tape, flag, step)
    printed = out.splitlines()
    for line in shown.splitlines():
        start = line.removesuffix("...").rstrip()
        assert any(other.startswith(start) for other in printed), line


def test_a_round_that_was_never_opened(yeto, tape):
    for words in (("--round", 7), ("--round", 7, "--follow")):
        code, _, err = yeto(tape, *words)
        assert (code, err) == (2, "yeto: --round 7: no attempt of it was opened; 6 are committed\n")


def test_a_round_can_be_followed(tape, capsys):
    content = tape.read_bytes()
    opened = next(
        entry.seq for entry in read(tape) if entry.kind == "attempt_opened" and entry.body.step == 4
    )
    lines = content.splitlines(keepends=True)
    tape.write_bytes(b"".join(lines[: opened + 2]))
    seen = []

    def grow(seconds):
        seen.append(capsys.readouterr().out)
        tape.write_bytes(content)

    assert command._follow(tape, 4, as_json=False, sleep=grow) == 0
    (before,) = seen
    assert columns(before.splitlines()[-1])[4] == str(opened)
    after = capsys.readouterr().out
    assert "attempt_opened" not in after
    assert "broadcast_ordered: fragment 1 is at version 4" in after
    assert "round 3" not in before + after
