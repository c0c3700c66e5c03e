"""Every scenario script of ``fixtures/scripts`` gives its own text, and together they leave nothing out."""

from functools import cache
from pathlib import Path

import pytest
from script import difference, run_script
from script_commands import COMMANDS, ScriptError

from yeto.core import Phase
from yeto.core import decisions as de
from yeto.core import events as ev

FOLDER = Path(__file__).parents[2] / "fixtures" / "scripts"
SCRIPTS = sorted(FOLDER.glob("*.txt"))


@cache
def story(path):
    """What comes of a script, and the sessions it tells of."""
    return run_script(path.read_bytes().decode(), path.name)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path, request):
    text = path.read_bytes().decode()
    found, _ = story(path)
    if request.config.getoption("--rewrite-scripts") and found != text:
        path.write_bytes(found.encode())
    elif found != text:
        pytest.fail(
            f"{difference(text, found, path.name)}\nRead it line by line; if it is what the rules say: "
            "pytest tests/core/test_core_scripts.py --rewrite-scripts",
            pytrace=False,
        )


# What the scripts cover together.


@pytest.fixture(scope="module")
def told():
    """Every event of every script with the phase it came in, and every decision."""
    events, decisions = [], []
    for path in SCRIPTS:
        for session in story(path)[1]:
            events += session.told
            decisions += session.decisions
    return events, decisions


def test_there_are_scripts():
    assert len(SCRIPTS) >= 100


def test_every_kind_of_event_and_decision_is_told(told):
    events, decisions = told
    assert {event.kind for event, _ in events} == set(ev.EVENTS)
    assert {decision.kind for decision in decisions} == set(de.DECISIONS)


@pytest.mark.parametrize("kind", ["learner_joined", "learner_left", "stop_requested"])
def test_whoever_comes_goes_or_stops_it_does_so_in_every_phase(told, kind):
    events, _ = told
    assert {phase for event, phase in events if event.kind == kind} == set(Phase)


def reasons(told, cls, name="reason"):
    return {getattr(decision, name) for decision in told[1] if isinstance(decision, cls)}


def test_every_reason_is_given(told):
    assert reasons(told, de.PushRefused) == {
        *("out_of_round", "unexpected_member", "future_base", "stale_base"),
        *("duplicate", "no_work", "non_finite"),
    }
    assert reasons(told, de.LearnerRefused) == {
        *("session_differs", "learner_out_of_range", "generation_reused", "superseded"),
        *("non_finite", "init_not_finite", "budget_differs", "ended"),
    }
    assert reasons(told, de.AttemptDiscarded) == {
        *("quorum_timeout", "unreachable", "not_finite", "merge_failed", "stopping", "budget"),
    }
    assert reasons(told, de.Ignored) == {
        *("phase", "superseded", "repeated", "not_the_source", "late"),
        *("early", "other_cut", "no_budget", "back"),
    }
    assert reasons(told, de.LearnerRefused, "field") == {
        *(None, "dtype", "num_fragments", "fingerprint", "contract", "profile"),
    }
    assert reasons(told, de.SessionEnding, "phase") == {"final", "budget", "stop"}
    assert reasons(told, de.SessionEnded, "exit_code") == {0, 1, 3, 4}


# The language.


def run(text):
    return run_script(text)[0]


def test_running_a_script_fills_in_and_replaces_what_comes_of_its_commands():
    filled = run("# A session.\n\nsession learners=1\n    nonsense\n\n# Time.\nwait 2.5\n")
    assert filled == (
        "# A session.\n\n"
        "session learners=1\n"
        "    = 0 provisional 0/100 | here nobody | next start_timeout_passed at 3600\n\n"
        "# Time.\n"
        "wait 2.5\n"
        "    = 2.5 provisional 0/100 | here nobody | next start_timeout_passed at 3600\n"
    )
    assert run(filled) == filled


def test_a_difference_is_shown():
    right = run("# A session.\nsession learners=1\n")
    wrong = right.replace("here nobody", "here 0")
    assert "-    = 0 provisional 0/100 | here 0 |" in difference(wrong, right, "x.txt")
    assert difference(right, right, "x.txt") == ""


HEAD = "# A session.\nsession\nstart\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "without commands"),
        ("\n", "begins with a comment"),
        ("# Only words.\n\n", "without commands"),
        ("session\n", "begins with a comment"),
        ("# A.\n    = 0\nsession\n", "script:2: expected text without a command"),
        ("# A.\nsession\n\n    = 0\n", "script:4: expected text without a command"),
        ("# A.\nstart\n", "script:2: start: the first command is session"),
        ("# A.\nsession\nstrat\n", "script:3: strat: unknown command"),
        ("# A.\nsession\n  start\n", "unknown command"),
        ("# A.\nsession\nquiet: strat\n", "unknown command"),
        ("# A.\nsession\nillegal: strat\n", "unknown command"),
        ("# A.\nsession learners=two\n", "num_learners=two: expected int"),
        ("# A.\nsession colour=red\n", "it has no use for colour"),
        ("# A.\nsession quorum=2 quorum=1\n", "quorum is given twice"),
        ("# A.\nsession quorum=3\n", "--quorum 3"),
        (HEAD + "wait\n", "one number of seconds"),
        (HEAD + "wait 1 2\n", "one number of seconds"),
        (HEAD + "wait 5\nat 4\n", "it is 5 already"),
        (HEAD + "fire 1\n", "no use for 1"),
        (HEAD + "heartbeat 0\n", "it needs local_step"),
        (HEAD + "heartbeat local_step=3\n", "it needs generation, learner"),
        (HEAD + "heartbeat 0 r1 local_step=3\n", "no use for r1"),
        (HEAD + "grace_elapsed r1 1\n", "no use for 1"),
        (HEAD + "push 0 r1 colour=red\n", "no use for colour"),
        (HEAD + "finish r1\n", "r1 is gathering"),
        (HEAD + "finish r7\n", "r7 is not open"),
        (HEAD + "merge_finished r1\n", "no merge of round 1 attempt 1 was ordered"),
        (HEAD + "illegal: push_offered 0 r1\n", "it is legal"),
        (HEAD + "illegal: wait 1\n", "it is legal"),
        (HEAD + "checkpoint_written\n", "it needs step"),
        (HEAD + "session_resumed terms=1\n", "terms cannot be given"),
    ],
)
def test_a_script_that_is_wrong_in_itself_fails(text, message):
    with pytest.raises(ScriptError, match=message):
        run_script(text)


def test_a_session_without_a_deadline_cannot_fire():
    with pytest.raises(ScriptError, match="no deadline is armed"):
        run_script("# A.\nsession\nquiet: start\nstop_requested\nfire\nfire\n")


def test_the_guide_names_every_command_and_every_event():
    guide = (FOLDER / "README.md").read_text()
    for word in (*COMMANDS, *ev.EVENTS):
        assert f"`{word}`" in guide or f"`{word} " in guide, word
