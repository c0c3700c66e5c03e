"""``yeto status``: on a tape that is there, grows, ended, is not there yet, and at an address."""

import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
from fcntl import ioctl
from termios import TIOCSWINSZ

import pytest
from http_serving import Handler, serving
from recorded_run import Run, record

from yeto.cli import status
from yeto.cli.main import main
from yeto.view.follow import Watcher
from yeto.view.json import moment_json


@pytest.fixture
def yeto_status(capsys):
    """Run ``yeto status``; return exit code, stdout and stderr."""

    def run(*words):
        with pytest.raises(SystemExit) as end:
            main(["status", *map(str, words)])
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err

    return run


def test_an_ended_run_is_shown_and_that_is_all(tape, yeto_status):
    code, once, _ = yeto_status(tape, "--once")
    assert code == 0
    assert "ended with exit code 0" in once
    assert "6 of 6 committed" in once
    code, line, _ = yeto_status(tape)
    assert code == 0
    assert line.count("\n") == 1
    assert line.startswith("round 6/6, ended with exit code 0")
    code, lines, _ = yeto_status(tape, "--json")
    assert code == 0
    assert json.loads(lines)["phase"] == "ended"


def test_without_a_name_the_tape_is_where_the_syncer_puts_it(tape, monkeypatch, yeto_status):
    monkeypatch.chdir(tape.parent)
    assert yeto_status("--once")[:2] == yeto_status(tape, "--once")[:2]


def test_a_tape_that_is_not_there_is_an_error_once_and_waited_for_else(tmp_path, yeto_status):
    path = tmp_path / "events.jsonl"
    code, out, err = yeto_status(path, "--once")
    assert (code, out) == (1, "")
    assert err.startswith(f"yeto: {path}: there is no run yet; name the tape of one")

    words = [sys.executable, "-m", "yeto", "status", str(path), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "waiting for it" in process.stderr.readline()
        # It appears at once as a whole; what it shows of one that grows is tested below.
        record(tmp_path / "whole.jsonl")
        (tmp_path / "whole.jsonl").replace(path)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["step"] == 6


def test_a_growing_tape_is_followed_line_by_line(tmp_path, capsys):
    run = Run(tmp_path / "events.jsonl")
    run.start()
    run.writer.flush()
    steps = iter((2, 4, None))

    def sleep(seconds):
        """The run goes on while the command sleeps."""
        assert seconds == status.LINE_SECONDS
        step = next(steps)
        run.play(until=None if step is None else lambda state: state.step >= step)
        run.writer.flush()

    watcher = Watcher(tmp_path / "events.jsonl", running=lambda _: None)
    assert status._keep_looking(watcher, "events.jsonl", as_json=False, sleep=sleep) == 0
    run.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["round 0/6", "round 2/6", "round 4/6", "round 6/6"]


def test_ctrl_c_ends_the_looking_quietly(tmp_path):
    run = Run(tmp_path / "events.jsonl")
    run.start()
    run.writer.flush()
    words = [sys.executable, "-m", "yeto", "status", str(tmp_path / "events.jsonl")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("round 0/6")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    assert (process.returncode, out, err) == (0, "", "")
    run.close()


def test_a_terminal_is_redrawn_and_keeps_to_its_width(tape):
    leader, follower = pty.openpty()
    ioctl(follower, TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    words = [sys.executable, "-m", "yeto", "status", str(tape)]
    process = subprocess.Popen(
        words, stdout=follower, stderr=subprocess.PIPE, env=environment | {"TERM": "xterm"}
    )
    os.close(follower)
    printed = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # how a terminal says that nobody holds its other end any more
            break
        if not chunk:
            break
        printed += chunk
    os.close(leader)
    assert process.wait(timeout=200) == 0, process.stderr.read()
    process.stderr.close()
    text = printed.decode()
    assert "\x1b[" in text
    assert "waited for" in text
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))
    assert max(map(len, lines)) <= 60
    assert "ended with exit code 0" in text.replace("\r\n", " ")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--once", "--webhook", "http://127.0.0.1:9"], 2, "--webhook needs to keep looking"),
        (["--webhook", "nowhere"], 2, "--webhook nowhere: give an address"),
        (["--token-file", "token"], 2, "--token-file token goes with the address of a dashboard"),
    ],
)
def test_wrong_usage_is_one_line(tape, yeto_status, words, code, said):
    assert yeto_status(tape, *words)[0] == code
    found = yeto_status(tape, *words)[2]
    assert said in found
    assert found.count("\n") == 1


def dashboard(code, body):
    """Serve one answer at ``/api/status``."""

    class Status(Handler):
        def do_GET(self):
            assert self.path == "/api/status"
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

    return serving(Status)


def test_an_address_shows_what_the_tape_shows(tape, yeto_status):
    watcher = Watcher(tape)
    watcher.look()
    with dashboard(200, json.dumps(moment_json(watcher.moment())).encode()) as url:
        assert yeto_status(url, "--once") == yeto_status(tape, "--once")
        assert json.loads(yeto_status(url, "--json")[1]) == moment_json(watcher.moment())


@pytest.mark.parametrize(
    ("code", "body", "said"),
    [
        (200, b"<html>", "is it a dashboard?"),
        (200, b'{"format": 1}', "is it a dashboard"),
        (200, b'{"format": 99}', "not a moment of format 1"),
        (401, b"", "--token-file"),
        (500, b"broken", "500"),
    ],
)
def test_an_address_that_is_none_of_a_run_is_one_line(yeto_status, code, body, said):
    with dashboard(code, body) as url:
        exit_code, out, err = yeto_status(url, "--once")
        assert (exit_code, out) == (1, "")
        assert url in err
        assert said in err
        assert err.count("\n") == 1
    code, _, err = yeto_status(url, "--once")  # nobody listens there any more
    assert code == 1
    assert url in err
