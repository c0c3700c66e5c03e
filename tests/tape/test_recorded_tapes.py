"""Recorded tapes: each opens for ever, follows its rules for ever, and ends in the state it ended in.

When one of these fails although its file was not touched, the coordinator decides otherwise than it did, a
sentence included. That takes a new version of the rules (see yeto/tape/rules.py), not a new file.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from recorded_faults import STORIES

from yeto.core.decisions import DECISIONS
from yeto.core.events import EVENTS
from yeto.tape import FORMAT_VERSION, RULES_VERSION, find_restarts, read, replay, state_to_json

ROOT = Path(__file__).parents[2]
TAPES = sorted((ROOT / "fixtures" / "tapes").glob("*.jsonl"))

REASONS = {
    "push_refused": {
        "out_of_round",
        "unexpected_member",
        "future_base",
        "stale_base",
        "duplicate",
        "no_work",
        "non_finite",
    },
    "attempt_discarded": {"quorum_timeout", "unreachable", "not_finite", "stopping", "budget"},
    "learner_refused": {
        "session_differs",
        "learner_out_of_range",
        "generation_reused",
        "superseded",
        "non_finite",
        "init_not_finite",
        "budget_differs",
        "ended",
    },
}
"""Reasons that the recorded runs hold: all that there are, but for an attempt discarded because its merge
failed. Only a decomposition that does not converge does that, and none is known to; a pool that fails ends
the session before."""


def ids(path):
    return path.stem


@pytest.mark.parametrize("path", TAPES, ids=ids)
def test_a_recorded_tape_still_follows_its_rules(path):
    result = replay(path)
    assert result.divergence is None
    assert result.records == path.read_bytes().count(b"\n")
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", TAPES, ids=ids)
def test_a_recorded_tape_ends_in_the_state_that_was_recorded_with_it(path):
    stored = json.loads(path.with_suffix(".state.json").read_text(encoding="ascii"))
    state = json.loads(json.dumps(state_to_json(replay(path).state)))
    # A newer state may know more; what it knew then it still has to know.
    differing = {name: (stored[name], state.get(name)) for name in stored if stored[name] != state.get(name)}
    assert not differing


def test_each_version_of_format_and_rules_has_recorded_tapes():
    headers = [next(read(path)).body for path in TAPES]
    assert {header.format_version for header in headers} == set(range(1, FORMAT_VERSION + 1))
    assert {header.rules_version for header in headers} == set(range(1, RULES_VERSION + 1))


def test_every_story_is_recorded_in_every_format():
    names = {path.stem for path in TAPES}
    stories = ("two-learners", *STORIES)
    missing = [
        f"{story}-v{version}"
        for story in stories
        for version in range(1, FORMAT_VERSION + 1)
        if f"{story}-v{version}" not in names
    ]
    assert not missing, "record them before the format changes again: python tools/record_tape.py"
    headers = {path.stem: next(read(path)).body for path in TAPES}
    assert all(name.endswith(f"-v{header.format_version}") for name, header in headers.items())


def test_together_they_hold_everything_that_a_syncer_writes():
    kinds, reasons = Counter(), Counter()
    for path in TAPES:
        for record in read(path):
            kinds[record.kind] += 1
            if record.kind in REASONS:
                reasons[record.kind, record.body.reason] += 1
    assert set(kinds) == {"header", *EVENTS, *DECISIONS}
    expected = {(kind, reason) for kind, of_kind in REASONS.items() for reason in of_kind}
    assert not expected - set(reasons)


def test_the_faulty_run_fell_back_below_what_it_had_committed():
    path = ROOT / "fixtures" / "tapes" / "faulty-v1.jsonl"
    restarts = find_restarts(path)
    assert [restart.step for restart in restarts] == [6, 15, 24]
    commits = [record for record in read(path) if record.kind == "merge"]
    superseded = [
        commit.body.step
        for commit in commits
        if any(restart.seq > commit.seq and restart.step < commit.body.step for restart in restarts)
    ]
    assert superseded == [7, 8, 16, 17, 18]
    codes = [record.body.exit_code for record in read(path) if record.kind == "session_ended"]
    assert codes == [1, 3, 0]  # the first start was killed and said nothing


@pytest.mark.timeout(600)
def test_the_recorder_records(tmp_path):
    """The shortest story, played again: a syncer process, real sockets, two starts."""
    tool = [sys.executable, str(ROOT / "tools" / "record_tape.py")]
    subprocess.run([*tool, "unusable", "--folder", str(tmp_path)], check=True, capture_output=True)
    path = tmp_path / f"unusable-v{FORMAT_VERSION}.jsonl"
    result = replay(path)
    assert result.divergence is None
    assert json.loads(path.with_suffix(".state.json").read_text())["step"] == 4
    kinds = [record.kind for record in read(path)]
    assert kinds.count("session_resumed") == 1
    again = subprocess.run([*tool, "unusable", "--folder", str(tmp_path)], capture_output=True, text=True)
    assert again.returncode == 1
    assert "never overwritten" in again.stderr
