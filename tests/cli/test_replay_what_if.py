"""``yeto replay --what-if``: the policy as it is written, what is printed, and what is refused."""

import json
import re
from pathlib import Path

import attrs
import pytest
from recorded_run import CONFIG, record_with_restart
from tape_lines import summed_all

from yeto.cli.policy import PolicyFlags
from yeto.cli.replay_what_if import POLICY, parse_policy
from yeto.core import CoreConfig
from yeto.tape.rules import RULES
from yeto.view.what_if_uploads import UPLOADS_KEPT

PAGE = (Path(__file__).parents[2] / "docs" / "TAPE.md").read_text(encoding="utf-8")


@pytest.fixture
def faulty(fixtures):
    return fixtures / "tapes" / "faulty-v1.jsonl"


def test_settings_have_the_names_and_the_fields_of_the_syncers_flags():
    flags = {name.replace("_", "-") for name in attrs.fields_dict(PolicyFlags)}
    assert set(POLICY) <= flags
    assert {field for field, _ in POLICY.values()} <= set(attrs.fields_dict(CoreConfig))
    policy = parse_policy(
        "grace-ms=250,grace-gamma=.5, grace-tau=3,quorum=1,quorum-timeout-s=60,max-base-lag=4,"
        "max-norm-ratio=2.5,learner-weight=equal,closing-sweep=off"
    )
    flags = PolicyFlags(
        learners=2,
        total_steps=6,
        grace_ms=250.0,
        grace_gamma=0.5,
        grace_tau=3.0,
        quorum=1,
        quorum_timeout_s=60.0,
        final_ack_timeout_s=900.0,
        max_base_lag=4,
        max_norm_ratio=2.5,
        learner_weight="equal",
        closing_sweep="off",
        outer="stock",
    )
    assert attrs.evolve(CONFIG, **policy) == flags.core_config()
    assert parse_policy("max-base-lag=none,max-norm-ratio=none") == {
        "max_base_lag": None,
        "max_norm_ratio": None,
    }


def test_the_page_lists_the_settings():
    section = PAGE.split("\n## What if\n")[1].split("\n## ")[0]
    listed = section.split("The settings are the syncer's flags: ")[1].split(".\n")[0]
    assert [name for name in re.findall(r"`([^`]+)`", listed) if name != "none"] == list(POLICY)
    assert f"last {UPLOADS_KEPT} uploads" in section


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("grace=0", "'grace=0' is no setting; give NAME=VALUE with commas between them, of grace-ms, "),
        ("quorum", "'quorum' is no setting"),
        ("", "is empty; give it a value"),
        ("quorum=1,,", "'' is no setting"),
        ("quorum=1,quorum=2", "quorum is given twice"),
        ("quorum=1.5", "quorum=1.5: expected a whole number"),
        ("grace-ms=soon", "grace-ms=soon: expected a number"),
        ("max-base-lag=x", "max-base-lag=x: expected a whole number or none"),
        ("learner-weight=heavy", "expected tokens2-over-steps or equal"),
        ("closing-sweep=on", "expected plain or off"),
        ("quorum=3", "--quorum 3: must lie between 1 and --learners 2"),
        ("grace-ms=-1", "--grace-ms -1.0: must be"),
        ("grace-tau=inf", "--grace-tau inf: must be finite and not negative"),
        ("max-norm-ratio=1", "--max-norm-ratio 1.0: must be a finite number above 1"),
    ],
)
def test_what_is_no_policy_is_one_line_with_what_is_allowed(yeto, tape, policy, message):
    code, out, err = yeto(tape, "--what-if", policy)
    assert (code, out) == (2, "")
    assert err.startswith("yeto: --what-if ")
    assert message in err
    assert err.count("\n") == 1


def test_an_unknown_setting_lists_all_that_are_known(yeto, tape):
    _, _, err = yeto(tape, "--what-if", "patience=1")
    assert err.rstrip().endswith(", ".join(POLICY))


def test_the_summary_and_the_attempts_that_change(yeto, tape):
    code, out, err = yeto(tape, "--what-if", "quorum=1,grace-ms=0")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith("every decision follows from its events")
    assert lines[2].startswith("what if quorum=1,grace-ms=0: each attempt is judged by itself")
    assert "later rounds are not simulated" in lines[2]
    rows = {name: cells for name, *cells in (re.split(r"  +", line) for line in lines)}
    assert rows["attempts"] == ["recorded", "what if"]
    assert rows["sealed"] == ["6", "6"]
    assert rows["merged of those asked"] == ["100.0%", "66.7%"]
    assert rows["sealed earlier"] == ["4"]
    changed = lines[lines.index("4 of 6 attempts end otherwise") + 1 :]
    assert changed[0].split() == ["round", "attempt", "record", "opened", "recorded", "what", "if"]
    assert {line.split()[0] for line in changed[1:]} == {"1", "2", "3", "4"}
    assert all(line.endswith("with 0") and "with 0 1  " in line for line in changed[1:])


def test_the_recorded_policy_changes_nothing(yeto, tape, faulty):
    for path, policy in ((tape, "quorum=2"), (faulty, "max-base-lag=4")):
        code, out, _ = yeto(path, "--what-if", policy)
        assert (code, out.splitlines()[-1]) == (0, "every attempt ends as it did")


def test_estimates_and_what_is_not_known_are_said(yeto, faulty):
    _, out, _ = yeto(faulty, "--what-if", "grace-ms=0,quorum=1,quorum-timeout-s=60")
    lines = out.splitlines()
    notes = lines[lines.index("", lines.index(next(x for x in lines if "end otherwise" in x))) + 1 :]
    assert any(note.startswith("not needed: an earlier attempt of the round") for note in notes)
    assert any(note.startswith("undecided: the record ends before") for note in notes)
    _, out, _ = yeto(faulty, "--what-if", "grace-ms=60000,max-base-lag=none")
    assert re.search(r"^~ \d+ pushes never arrived on the tape", out, re.MULTILINE)
    assert re.search(r"with \S.*\d~", out)
    _, out, _ = yeto(faulty, "--what-if", "quorum=4")
    assert "not opened: too few learners were connected for this quorum" in out


def test_json_has_every_attempt(yeto, tape):
    code, out, _ = yeto(tape, "--what-if", "quorum=1,grace-ms=0", "--json")
    said = json.loads(out)
    assert (code, said["verified"]) == (0, True)
    assert said["what_if"]["policy"] == "quorum=1,grace-ms=0"
    assert [attempt["step"] for attempt in said["what_if"]["attempts"]] == [1, 2, 3, 4, 5, 6]
    first = said["what_if"]["attempts"][0]
    assert first["recorded"]["status"] == first["what_if"]["status"] == "sealed"
    assert first["what_if"]["weights"] == {"0": 1000.0}
    assert said["what_if"]["summary"]["sealed_earlier"] == 4
    assert "later rounds are not simulated" in said["what_if"]["note"]


def test_one_round_and_a_part_of_the_tape(yeto, tmp_path):
    path = tmp_path / "events.jsonl"
    record_with_restart(path)
    _, out, _ = yeto(path, "--what-if", "quorum=1", "--round", 3, "--json")
    attempts = json.loads(out)["what_if"]["attempts"]
    assert [attempt["step"] for attempt in attempts] == [3, 3]
    until = attempts[1]["seq"] - 1
    _, out, _ = yeto(path, "--what-if", "quorum=1", "--round", 3, "--until", until, "--json")
    assert [attempt["seq"] for attempt in json.loads(out)["what_if"]["attempts"]] == [attempts[0]["seq"]]
    code, _, err = yeto(path, "--what-if", "quorum=1", "--round", 9)
    assert (code, err) == (2, "yeto: --round 9: no attempt of it was opened; 6 are committed\n")


def test_a_tape_that_does_not_follow_the_rules_is_not_asked(yeto, tape):
    content = tape.read_bytes()
    assert b'"attempt":1,"quorum_seconds":' in content
    content = content.replace(b'"attempt":1,"quorum_seconds":', b'"attempt":2,"quorum_seconds":', 1)
    tape.write_bytes(summed_all(content))
    code, out, _ = yeto(tape, "--what-if", "quorum=1")
    assert code == 1
    assert "diverges: the rules give another decision" in out
    assert "what if" not in out


def test_attempts_of_other_rules_are_not_decided_by_these(yeto, tape, monkeypatch):
    monkeypatch.setitem(RULES, 2, RULES[1])
    tape.write_bytes(summed_all(tape.read_bytes().replace(b'"rules_version":1', b'"rules_version":2', 1)))
    code, _, err = yeto(tape, "--what-if", "quorum=1")
    assert code == 2
    assert "follows rules 2; only attempts of rules 1 can be decided anew" in err
