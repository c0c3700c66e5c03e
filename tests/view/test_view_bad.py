"""What a tape or a log should not say: one line for a person, and a dashboard that goes on."""

import json

import pytest

from yeto.errors import TapeError
from yeto.view.follow import Watcher
from yeto.view.json import moment_json
from yeto.view.logs import LogFolder


def changed(fixtures, path, kind, change):
    """Write a recorded run with its first record of a kind changed; return the number of that line."""
    lines = (fixtures / "tapes" / "two-learners-v1.jsonl").read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if f'"kind":"{kind}"' in line)
    record = json.loads(lines[place])
    change(record)
    lines[place] = json.dumps(record, separators=(",", ":"))
    path.write_text("".join(f"{line}\n" for line in lines))
    return place + 1


def test_a_commit_of_a_learner_that_there_is_not_is_one_line(fixtures, tmp_path):
    path = tmp_path / "events.jsonl"
    line = changed(fixtures, path, "merge", lambda record: record["missed"].append(2**31))
    with pytest.raises(
        TapeError, match=f"events.jsonl: line {line}: contradicts what stands before it"
    ) as told:
        Watcher(path, history=True).look()
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(("kind", "place"), [("header", "config"), ("session_opened", "terms")])
def test_a_number_that_no_run_has_takes_no_memory(fixtures, tmp_path, kind, place):
    path = tmp_path / "events.jsonl"
    name = "num_learners" if place == "config" else "num_fragments"
    line = changed(fixtures, path, kind, lambda record: record[place].update({name: 2**40}))
    with pytest.raises(TapeError, match=f"events.jsonl: line {line}: .*{2**40} .* more than any run has"):
        Watcher(path).look()


ODD = [
    {"kind": "step", "local_step": "x", "loss": "y", "tokens_per_second": []},
    {"kind": "step", "local_step": 10**400, "loss": 10**400, "tokens_per_second": float("nan")},
    {"kind": "step", "local_step": float("inf"), "loss": float("nan"), "tokens_per_second": float("-inf")},
    {"kind": ["step"], "loss": 1.0},
    {"kind": "phase", "phase": {"a": 1}},
]


def test_odd_lines_of_a_log_do_no_harm(fixtures, tmp_path):
    (tmp_path / "events.jsonl").write_bytes((fixtures / "tapes" / "two-learners-v1.jsonl").read_bytes())
    logs = tmp_path / "logs"
    logs.mkdir()
    good = json.dumps({"kind": "step", "local_step": 7, "loss": 2.5, "tokens_per_second": 3.0})
    odd = [*map(json.dumps, ODD), "[" * 100_000, "\x00", "null"]
    (logs / "learner-0.jsonl").write_text("".join(f"{line}\n" for line in [*odd[:3], *odd[4:], odd[3], good]))
    (logs / "learner-1.jsonl").mkdir()
    watcher = Watcher(tmp_path / "events.jsonl")
    watcher.look()
    moment = moment_json(watcher.moment())
    json.dumps(moment, allow_nan=False)
    live = LogFolder(logs).look(2)
    assert (live[0].local_step, live[0].loss, live[0].tokens_per_second) == (7, 2.5, 3.0)
    assert live[1].loss is None
