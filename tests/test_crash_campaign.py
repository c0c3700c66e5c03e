"""``tools/crash_campaign``: a few of its points hold, and its rules notice what they are there for."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))

from breaking import Broken  # noqa: E402
from crashing import judge, plan  # noqa: E402
from crashing.calls import Call, Fault, read_calls  # noqa: E402
from crashing.judge import check_files, check_pushes, check_seen, tell  # noqa: E402
from crashing.plan import parse_point, points_of, thinned, twice  # noqa: E402

pytestmark = pytest.mark.begins_early

TAPE = ROOT / "fixtures" / "tapes" / "two-learners-v1.jsonl"


POINT = "kill:checkpoint:79"
"""The fourth commit, so both learners have the second."""

TWO_CAMPAIGNS = """
import contextlib, io, json, sys
from crashing import campaign

def play(folder, *words):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = campaign.main(["--folder", folder, "--jobs", "1", *words])
    return code, said.getvalue()

class Forgetful(campaign.Scene):
    def _read_files(self, number):
        if number == 0:
            for path in self.checkpoint.glob("manifest-*.json"):
                path.unlink()
        return super()._read_files(number)

honest, forgetful, point = sys.argv[1:]
played = [play(honest, "--most", "6")]
campaign.Scene = Forgetful
played.append(play(forgetful, "--point", point))
print(json.dumps(played))
"""
"""One process for both, and one server from which their syncers are forked: its imports take longest."""


@pytest.fixture(scope="module")
def campaigns(tmp_path_factory):
    """Return folder, exit code and output of a campaign, and of one that loses its checkpoints."""
    folders = [tmp_path_factory.mktemp(name) for name in ("honest", "forgetful")]
    done = subprocess.run(
        [sys.executable, "-c", TWO_CAMPAIGNS, *map(str, folders), POINT],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(("tools", "tests/harness"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [(folder, *played) for folder, played in zip(folders, json.loads(done.stdout), strict=True)]


def test_a_few_points_of_every_kind_hold(campaigns):
    folder, code, said = campaigns[0]
    assert code == 0, said
    table = said.splitlines()[-9:]
    for kind in ("kill", "twice", "short", "enospc", "eio"):
        assert any(line.startswith(kind) for line in table), said
    assert list(folder.iterdir()) == []


def test_a_broken_rule_is_told_with_the_line_that_plays_it_again(campaigns):
    """Here the checkpoints are lost when the first syncer dies, although learners have seen commits."""
    folder, code, said = campaigns[1]
    assert code == 1, said
    assert "BROKEN: something was broadcast, and there is no checkpoint" in said
    assert f"again: tools/crash_campaign --point {POINT}" in said
    assert list(folder.iterdir()), "what there is of it stays"


@pytest.mark.parametrize("point", ["burn:tape:1", "kill:tape:x", "kill:tape:1:third", "there/kill:tape:1"])
def test_a_point_that_is_none_is_refused(capsys, monkeypatch, point):
    monkeypatch.setattr(sys, "argv", ["crashing", "--point", point])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("crashing", run_name="__main__")
    assert ended.value.code == 2
    assert f"--point {point}: " in capsys.readouterr().err


class TestPlan:
    CALLS = (
        Call("tape", 1, "create", "events.jsonl.new"),
        Call("tape", 2, "write", "events.jsonl.new"),
        Call("tape", 3, "fsync", "events.jsonl.new"),
        Call("checkpoint", 1, "rename", "yeto-state.ckpt/manifest-0.json.tmp"),
    )

    def test_every_call_gives_a_point_of_every_kind_that_can_happen_to_it(self):
        texts = [str(point) for point in points_of(self.CALLS, recovery=2)]
        assert texts == [
            "kill:tape:1+kill:any:2",
            "kill:tape:2+kill:any:1:half",
            "kill:tape:2:half+kill:any:2",
            "kill:tape:3+kill:any:1:half",
            "kill:checkpoint:1+kill:any:2",
            "short:tape:2",
            "enospc:tape:1",
            "enospc:tape:2",
            "enospc:checkpoint:1",
            "eio:tape:3",
        ]

    def test_a_text_is_its_point(self):
        points = [
            *points_of(self.CALLS, 3),
            *twice(Fault(kind="kill", part="tape", number=9), 4),
            *plan.full_disks(2),
            *plan.exports(self.CALLS, plan.REPLACE),
        ]
        assert len(set(map(str, points))) == len(points)
        for point in points:
            again = parse_point(str(point))
            assert (again.faults, again.of) == (point.faults, point.of)

    def test_thinning_keeps_some_of_every_kind(self):
        points = points_of(self.CALLS * 5, 3)
        few = thinned(points, 8)
        assert len(few) == 8
        assert {point.kind for point in few} == {"kill", "short", "enospc", "eio"}
        assert thinned(points, 1000) == points


def hit(tmp_path, kind, number, *, half=False):
    """Run a few calls in a process that is hit; return its exit code and what is left of its file."""
    code = """
import os, sys
from pathlib import Path
from crashing.calls import Calls, Fault
root, kind, number, half = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "True"
Calls(root, root.with_name("calls"), Fault(kind=kind, part="any", number=number, half=half)).install()
file = os.open(root / "aside", os.O_WRONLY | os.O_CREAT)
rest = b"0123456789"
while rest:
    rest = rest[os.write(file, rest):]
os.fsync(file)
os.close(file)
os.rename(root / "aside", root / "name")
"""
    root = tmp_path / "root"
    root.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, root, kind, str(number), str(half)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
        capture_output=True,
        text=True,
        check=False,
    )
    left = {path.name: path.read_bytes() for path in root.iterdir()}
    return done, left, [f"{call.op} {call.name}" for call in read_calls(tmp_path / "calls")]


class TestCalls:
    @pytest.mark.parametrize(
        ("number", "half", "left"),
        [
            (1, False, {}),
            (2, False, {"aside": b""}),
            (2, True, {"aside": b"01234"}),
            (3, False, {"aside": b"0123456789"}),
            (4, False, {"aside": b"0123456789"}),
            (5, False, {"name": b"0123456789"}),
        ],
    )
    def test_a_kill_comes_before_its_call(self, tmp_path, number, half, left):
        done, there, calls = hit(tmp_path, "kill", number, half=half)
        assert done.returncode == (0 if number == 5 else -9)
        assert there == left
        assert calls == ["create aside", "write aside", "fsync aside", "rename aside"][:number]

    def test_a_short_write_is_finished_by_whoever_asked_for_it(self, tmp_path):
        done, there, calls = hit(tmp_path, "short", 2)
        assert (done.returncode, there) == (0, {"name": b"0123456789"})
        assert calls.count("write aside") == 2

    @pytest.mark.parametrize(
        ("kind", "number", "words", "left"),
        [
            ("enospc", 2, "No space left on device: 'aside'", {"aside": b"01234"}),
            ("enospc", 4, "No space left on device", {"aside": b"0123456789"}),
            ("eio", 3, "Input/output error: 'aside'", {"aside": b"0123456789"}),
        ],
    )
    def test_a_refusal_has_the_systems_words(self, tmp_path, kind, number, words, left):
        done, there, _ = hit(tmp_path, kind, number)
        assert done.returncode == 1
        assert words in done.stderr
        assert there == left


class TestRules:
    @pytest.fixture
    def tape(self, tmp_path):
        return Path(shutil.copyfile(TAPE, tmp_path / "events.jsonl"))

    @staticmethod
    def change(tape, kind, change):
        """Change the last record of a kind."""
        lines = tape.read_bytes().splitlines(keepends=True)
        place = max(n for n, line in enumerate(lines) if json.loads(line)["kind"] == kind)
        record = json.loads(lines[place])
        change(record)
        lines[place] = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        tape.write_bytes(b"".join(lines))

    def test_a_tape_is_summed_up(self, tape):
        story = check_files(tape, tape.with_name("nothing"))
        assert story.step == max(story.commits)
        merges = list(story.commits.values())
        for learner, (count, steps, tokens) in story.ledger.items():
            parts = [p for m in merges for p in m["responders"] if p["learner"] == learner]
            assert (count, steps, tokens) == (
                len(parts),
                sum(part["c_steps"] for part in parts),
                sum(part["c_tokens"] for part in parts),
            )

    def test_a_tape_torn_anywhere_in_its_last_lines_holds(self, tape):
        data = tape.read_bytes()
        lines = data.splitlines(keepends=True)
        last_merge = max(n for n, line in enumerate(lines) if b'"kind":"merge"' in line)
        for cut in (last_merge, last_merge + 1):
            tape.write_bytes(b"".join(lines[:cut]) + lines[cut][:20])
            check_files(tape, tape.with_name("nothing"))

    def test_a_changed_decision_is_told(self, tape):
        self.change(tape, "merge", lambda record: record.update(quorum=1))
        with pytest.raises(Broken, match="does not replay"):
            check_files(tape, tape.with_name("nothing"))

    def test_a_gap_and_a_wrong_ledger_are_told(self, tape):
        data = tape.read_bytes().splitlines(keepends=True)
        first = next(n for n, line in enumerate(data) if b'"kind":"merge"' in line)
        tape.write_bytes(b"".join(data[:first] + data[first + 1 :]))
        with pytest.raises(Broken, match="step 2 is committed after 0"):
            tell(tape)
        tape.write_bytes(b"".join(data))
        resumed = {"seq": 9, "kind": "session_resumed", "step": 1, "ledger": []}
        tape.write_bytes(b"".join(data) + json.dumps(resumed).encode() + b"\n")
        with pytest.raises(Broken, match=r"record 9: resumed with the ledger \{\}, the merges sum to \{0:"):
            tell(tape)

    def test_a_ledger_that_the_merges_do_not_sum_to_is_told(self, tape, monkeypatch):
        monkeypatch.setattr(judge, "_with", lambda ledger, merge: ledger)
        with pytest.raises(Broken, match=r"with the ledger .*, the merges sum to \{\}"):
            check_files(tape, tape.with_name("nothing"))

    def test_what_was_broadcast_and_is_lost_is_told(self, tape):
        story = tell(tape)
        commit = story.commits[2]
        check_seen(story, {(commit["fragment"], 2): {commit["params_digest"]}, (0, 0): {"a"}})
        with pytest.raises(Broken, match="version 99 of fragment 0 was broadcast and is lost"):
            check_seen(story, {(0, 99): {"a"}})
        with pytest.raises(Broken, match="was broadcast as"):
            check_seen(story, {(commit["fragment"], 2): {"another"}})
        with pytest.raises(Broken, match="2 first versions"):
            check_seen(story, {(0, 0): {"a", "b"}})

    def test_a_push_that_nobody_sent_is_told(self, tape):
        story = tell(tape)
        with pytest.raises(Broken, match="which no learner sent"):
            check_pushes(story, set())
        story.commits[1]["responders"] *= 2
        with pytest.raises(Broken, match="step 1 merged a learner twice"):
            check_pushes(story, set())
