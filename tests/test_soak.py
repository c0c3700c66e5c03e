"""``tools/soak``: its rules notice what they are there for, and a short soak leaves nothing behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))

from breaking import Broken  # noqa: E402
from soaking import run  # noqa: E402
from soaking.watch import MIB, TapeWatch, check_memory  # noqa: E402

pytestmark = pytest.mark.begins_early

SHORT = ["--learners", "4", "--kill-every", "0.4", "--stop-every", "1.5"]


@pytest.fixture
def watch(tmp_path):
    """A watch whose tape grows by the records that it is given."""
    watch = TapeWatch(tmp_path / "events.jsonl", quorum=2)
    watch.look(0.0)

    def tell(now, *records, unable=frozenset(), torn=""):
        with watch.path.open("a") as file:
            for record in records:
                file.write(json.dumps({"seq": watch.records} | record) + "\n")
            file.write(torn)
        watch.look(now, unable=unable)
        return watch

    return tell


def joined(learner, generation="a"):
    return {"kind": "learner_joined", "learner": learner, "generation": generation}


def left(learner, generation="a"):
    return {"kind": "learner_left", "learner": learner, "generation": generation}


def merge(step):
    return {"kind": "merge", "step": step}


def test_commits_without_a_gap_are_counted(watch):
    assert watch(1.0, merge(1), merge(2)).step == 2
    assert watch(2.0, {"kind": "session_resumed", "step": 1}, merge(2), merge(3)).commits == 4


@pytest.mark.parametrize("records", [[merge(2)], [merge(1), merge(1)], [merge(1), merge(3)]])
def test_a_gap_between_commits_is_told(watch, records):
    with pytest.raises(Broken, match="is committed after"):
        watch(1.0, *records)


def test_a_resume_ahead_of_the_tape_is_told(watch):
    with pytest.raises(Broken, match="resumed at 5 when 1 was the last"):
        watch(1.0, merge(1), {"kind": "session_resumed", "step": 5})


def test_only_time_in_which_a_quorum_could_answer_counts(watch):
    assert watch(1.0, joined(0)).waiting_seconds(9.0) == 0
    assert watch(10.0, joined(1)).waiting_seconds(14.0) == 4.0
    assert watch(15.0, merge(1)).waiting_seconds(16.0) == 1.0
    assert watch(20.0, left(1)).waiting_seconds(99.0) == 0
    assert watch(30.0, joined(1, "b")).waiting_seconds(31.0) == 1.0
    # The end of its older connection comes late, and a stopped learner cannot answer.
    assert watch(32.0, left(1, "a")).waiting_seconds(33.0) == 3.0
    assert watch(33.0, unable=frozenset({0})).waiting_seconds(99.0) == 0
    there = watch(34.0, joined(2), unable=frozenset({0}))
    assert there.waiting_seconds(36.0) == 2.0
    there.restarted()
    assert there.waiting_seconds(99.0) == 0


def test_half_a_line_is_read_when_it_is_whole(watch):
    assert watch(1.0, merge(1), torn='{"seq": 1, "kind": "me').step == 1
    assert watch(2.0, torn='rge", "step": 2}\n').step == 2


def test_memory_that_grows_is_told():
    flat = [300 * MIB, 350 * MIB, 351 * MIB] * 4
    check_memory(flat)
    check_memory([300 * MIB, 900 * MIB])
    check_memory([100 * MIB] * 4 + [300 * MIB] * 8)
    with pytest.raises(Broken, match=r"at most 351 MiB in the second third of the run, 500 MiB in the last"):
        check_memory([*flat[:-1], 500 * MIB])


def test_a_broken_rule_is_the_exit_code_and_keeps_the_folder(monkeypatch, capsys, tmp_path):
    async def broken(soak):
        raise Broken("no commit for 31 s")

    monkeypatch.setattr(run.Soak, "run", broken)
    monkeypatch.setattr(run.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    assert run.main(["--minutes", "0.01"]) == 1
    assert capsys.readouterr().out.endswith(f"BROKEN: no commit for 31 s\nwhat there is of it: {tmp_path}\n")
    assert tmp_path.exists()


def soak(folder, *words):
    """Start a soak as a command; its files go into ``folder``."""
    environment = os.environ | {
        "PYTHONPATH": "tools:tests/harness",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "soaking", *words, *SHORT],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def left_over(folder):
    """Return what still runs with the folder's path on its command line or in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def soak_in(folder):
    """Return a soak of half a minute that has not begun."""
    plan = run.Plan(
        minutes=0.5,
        learners=3,
        seed=0,
        kill_every=2.0,
        stop_every=1.0,
        kill_syncer_every=None,
        gap_seconds=1.0,
        folder=folder,
    )
    return run.Soak(plan)


@pytest.mark.parametrize("code", [1, -9])
async def test_a_learner_that_the_soak_did_not_kill_is_told(monkeypatch, tmp_path, code):
    monkeypatch.setattr(run, "LOOK_SECONDS", 0.0)
    soaked = soak_in(tmp_path)
    soaked._syncer = SimpleNamespace(poll=lambda: None)
    soaked._learners = {2: SimpleNamespace(exitcode=code)}
    with pytest.raises(Broken, match=f"learner 2 ended by itself with {code}"):
        await soaked._look()


@pytest.mark.parametrize("kills", [9, 10])
def test_a_soak_that_kills_too_few_is_none(monkeypatch, tmp_path, kills):
    """What is judged at the end, on a recorded tape: it replays, its checkpoint is its last step."""
    tape = ROOT / "fixtures" / "tapes" / "stop-v1.jsonl"
    soaked = soak_in(tmp_path)
    shutil.copyfile(tape, soaked.tape)
    monkeypatch.setattr(run, "read_checkpoint", lambda path: SimpleNamespace(step=9))
    soaked.tally.kills = kills
    soaked._code = 4
    if kills < 10:
        with pytest.raises(Broken, match="9 kills instead of 10: the machine is too busy"):
            soaked.judge()
    else:
        assert "records replay, step 9 is checkpointed; 9 commits" in soaked.judge()


def test_ctrl_c_ends_it_and_leaves_nothing_behind(tmp_path):
    with soak(tmp_path, "--minutes", "1") as process:
        for line in process.stdout:
            if re.match(r" +\d+ +[1-9]", line):  # a row of the table, with commits
                break
        assert left_over(tmp_path)
        # As a terminal does it: to everybody in the foreground.
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=200)[0]
    assert process.returncode == 130, said
    assert "stopping" in said
    assert "records replay" in said
    until = time.monotonic() + 200
    while left_over(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert left_over(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
