"""The dashboard over real sockets: what it serves of recorded tapes, and what nobody can do to it."""

import contextlib
import gzip
import json
import shutil
import subprocess
import sys

import pytest
import trio
from http_talk import HANGS_SECONDS, EventStream, ask, deaf, serving

from yeto.core.decisions import RoundCommitted
from yeto.view import serving as bounds
from yeto.view import web
from yeto.view.door import REQUEST_BYTES_MAX
from yeto.view.follow import Watcher
from yeto.view.history import history_json
from yeto.view.json import moment_json
from yeto.view.sources import RemoteSource, TapeSource, tell_story

TOKEN = "a-token-of-the-test-0123"


@pytest.fixture
def tape(fixtures, tmp_path):
    """A copy: nothing writes it, and nobody else looks for logs beside it."""
    return shutil.copy(fixtures / "tapes" / "faulty-v1.jsonl", tmp_path / "events.jsonl")


@pytest.fixture
def watcher(tape):
    watcher = Watcher(tape, history=True)
    watcher.look()
    return watcher


def as_json(value):
    return json.loads(json.dumps(value))


async def test_status_and_history_are_those_of_the_tape(tape, watcher):
    async with serving(TapeSource(tape)) as port:
        status = await ask(port, "/api/status")
        assert status.status == 200
        assert status.json == as_json(moment_json(watcher.moment()))
        history = await ask(port, "/api/history")
        assert history.json == as_json(history_json(watcher.history))
        packed = await ask(port, "/api/history", headers=[("accept-encoding", "gzip, br")])
        assert packed.headers["content-encoding"] == "gzip"
        assert gzip.decompress(packed.body) == history.body


async def test_metrics_and_health(tape, watcher):
    async with serving(TapeSource(tape)) as port:
        metrics = await ask(port, "/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=")
        assert f'yeto_session_info{{session_id="{watcher.moment().session.session_id}"' in metrics.text
        health = await ask(port, "/healthz")
        assert (health.status, health.text) == (200, f"{watcher.moment().wait.sentence}\n")


@pytest.mark.parametrize(
    ("name", "lines", "status", "says"),
    [
        ("budget-v1", 123, 503, "exit code 3"),
        ("budget-v1", 237, 200, "exit code 0"),
        ("stop-v1", 123, 503, "stopped by SIGTERM"),
        ("pool-v1", 47, 503, "the SVD pool failed"),
        ("unusable-v1", 82, 503, "unusable merge"),
        ("faulty-v1", 500, 503, "no process on this machine writes its tape"),
    ],
)
async def test_a_run_that_failed_is_not_healthy(fixtures, tmp_path, name, lines, status, says):
    whole = (fixtures / "tapes" / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
    tape = tmp_path / "events.jsonl"
    tape.write_bytes(b"".join(whole[:lines]))
    async with serving(TapeSource(tape)) as port:
        health = await ask(port, "/healthz")
        assert health.status == status
        assert says in health.text


def story_of(tape, step):
    words = [sys.executable, "-m", "yeto", "replay", str(tape), "--round", str(step), "--json"]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [(record["seq"], record["superseded"]) for record in map(json.loads, told.splitlines())]


async def test_the_story_of_a_round_is_the_one_that_replay_tells(tape):
    async with serving(TapeSource(tape)) as port:
        answer = await ask(port, "/api/round/12")
        told = [(record["seq"], record["superseded"]) for record in answer.json["records"]]
        assert told == story_of(tape, 12)
        for path in ("/api/round/9999", "/api/round/-1", "/api/round/1e3", "/api/round/" + "9" * 400):
            assert (await ask(port, path)).status == 404


def test_every_story_is_whole_and_a_story_can_be_given_up(tape):
    asked = []

    def stopped():
        asked.append(True)
        return True

    assert tell_story(tape, 3, stopped) == []
    assert asked == [True]
    assert RoundCommitted.kind in [record["kind"] for record in tell_story(tape, 3)]


async def test_the_page_and_its_parts(tape):
    async with serving(TapeSource(tape)) as port:
        page = await ask(port, "/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "<main>" in page.text
        script = await ask(port, "/page/main.js")
        assert script.headers["content-type"].startswith("text/javascript")
        for answer in (page, script, await ask(port, "/nothing"), await ask(port, "/", method="POST")):
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy


@pytest.mark.parametrize(
    "path",
    [
        *("/page/", "/page", "/page/README.md", "/page/index.html", "/page/__init__.py"),
        *(
            "/page/..%2fdoor.py",
            "/page/%2e%2e/door.py",
            "/page/../door.py",
            "/api",
            "/api/",
            "/etc/passwd",
            "//",
            "/events/",
        ),
    ],
)
async def test_nothing_else_is_there(tape, path):
    async with serving(TapeSource(tape)) as port:
        assert (await ask(port, path)).status in (404, 307)


async def test_requests_that_are_refused(tape):
    async with serving(TapeSource(tape)) as port:
        assert (await ask(port, "/api/status", method="POST")).status == 405
        assert (await ask(port, "/api/status", body=b"much")).status == 413
        assert (await ask(port, "/api/status", host="attacker.example")).status == 421
        long = await ask(port, "/" + "a" * 2 * REQUEST_BYTES_MAX)
        assert long.status == 431
        head = await ask(port, "/api/status", method="HEAD")
        assert (head.status, head.body) == (200, b"")


async def test_a_token_opens_the_page_and_leaves_the_address(tape):
    async with serving(TapeSource(tape), token=TOKEN) as port:
        assert (await ask(port, "/api/status")).status == 401
        first = await ask(port, f"/?token={TOKEN}")
        assert (first.status, first.headers["location"]) == (303, "./")
        cookie = first.headers["set-cookie"].partition(";")[0]
        assert (await ask(port, "/", headers=[("cookie", cookie)])).status == 200
        assert (await ask(port, "/metrics", headers=[("authorization", f"Bearer {TOKEN}")])).status == 200


async def test_a_tape_that_comes_grows_is_torn_and_is_replaced(fixtures, tmp_path, monkeypatch):
    monkeypatch.setattr("yeto.view.looks.REFRESH_SECONDS", 0.0)
    lines = (fixtures / "tapes" / "faulty-v1.jsonl").read_bytes().splitlines(keepends=True)
    other = (fixtures / "tapes" / "two-learners-v1.jsonl").read_bytes()
    tape = tmp_path / "events.jsonl"
    async with serving(TapeSource(tape)) as port:

        async def records():
            answer = await ask(port, "/api/status")
            return answer.json["session"]["records"] if answer.status == 200 else answer.status

        assert await records() == 503
        assert (await ask(port, "/healthz")).status == 503
        assert (await ask(port, "/metrics")).status == 503
        tape.write_bytes(b"")
        assert await records() == 503
        tape.write_bytes(b"".join(lines[:500]) + lines[500][:30])
        assert await records() == 500
        tape.write_bytes(b"".join(lines))
        assert await records() == len(lines)
        aside = tmp_path / "aside"
        aside.write_bytes(other)
        aside.replace(tape)
        assert await records() == other.count(b"\n")
        # A shorter file in the same place is said once, then read for what it is.
        tape.write_bytes(b"".join(lines[:50]))
        assert await records() == other.count(b"\n")
        assert await records() == 50
        with tape.open("ab") as file:
            file.write(b"no record\n")
        await records()
        health = await ask(port, "/healthz")
        assert health.status == 503
        assert "line 51" in health.text


async def test_events_come_as_the_tape_grows(fixtures, tmp_path, monkeypatch):
    monkeypatch.setattr("yeto.view.looks.REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(web, "REFRESH_SECONDS", 0.01)
    lines = (fixtures / "tapes" / "faulty-v1.jsonl").read_bytes().splitlines(keepends=True)
    tape = tmp_path / "events.jsonl"
    async with serving(TapeSource(tape)) as port, EventStream(port) as events:
        name, data = await events.next()
        assert (name, events.status) == ("waiting", 200)
        assert str(tape) in data["error"]
        for count in (400, len(lines)):
            tape.write_bytes(b"".join(lines[:count]))
            while True:
                name, data = await events.next()
                if name == "status" and data["session"]["records"] == count:
                    break
        assert data["session"]["exit_code"] == 0


async def test_streams_are_bounded(tape, monkeypatch):
    monkeypatch.setattr(web, "STREAMS_MAX", 2)
    async with serving(TapeSource(tape)) as port:
        async with EventStream(port) as first, EventStream(port) as second:
            for stream in (first, second):
                assert (await stream.next())[0] == "status"
            assert (await ask(port, "/events")).status == 503
        await follow_when_there_is_room(port)


async def follow_when_there_is_room(port):
    """Ask until a stream has ended elsewhere."""
    with trio.fail_after(HANGS_SECONDS):
        while (await ask(port, "/events", method="HEAD")).status == 503:
            await trio.sleep(0.02)


async def test_connections_are_bounded(tape, monkeypatch):
    monkeypatch.setattr(bounds, "CONNECTIONS_MAX", 2)
    async with serving(TapeSource(tape)) as port, EventStream(port) as first, EventStream(port) as second:
        for stream in (first, second):
            await stream.next()
        with trio.fail_after(HANGS_SECONDS), contextlib.suppress(trio.BrokenResourceError):
            async with await trio.open_tcp_stream("127.0.0.1", port) as third:
                assert await third.receive_some() == b""


async def test_a_client_that_does_not_read_is_dropped(monkeypatch):
    monkeypatch.setattr(bounds, "SEND_SECONDS", 0.2)
    monkeypatch.setattr("yeto.view.looks.REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(web, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(web, "STREAMS_MAX", 1)
    async with serving(Endless()) as port, deaf(port):
        # Its place is free only when it was dropped: it never goes by itself.
        await follow_when_there_is_room(port)


async def test_the_end_does_not_wait_for_clients(monkeypatch):
    monkeypatch.setattr(bounds, "SEND_SECONDS", 10 * HANGS_SECONDS)
    monkeypatch.setattr("yeto.view.looks.REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(web, "REFRESH_SECONDS", 0.0)
    source = Endless()
    async with contextlib.AsyncExitStack() as stack:
        with trio.fail_after(HANGS_SECONDS):
            async with serving(source) as port:
                await stack.enter_async_context(deaf(port))
                async with EventStream(port) as stream:
                    await stream.next()


class Endless:
    """A run whose every moment is another, and large."""

    name = "endless"

    def __init__(self):
        self.asked = 0

    def advance(self, seconds):
        return True

    def status(self):
        self.asked += 1
        return {"number": self.asked, "filling": "x" * 1_000_000}


async def test_a_dashboard_of_a_dashboard_shows_the_same(tape, tmp_path):
    async with serving(TapeSource(tape), token=TOKEN) as port:
        async with serving(RemoteSource(f"http://127.0.0.1:{port}", TOKEN)) as second:
            for path in ("/api/history", "/api/round/12", "/healthz", "/metrics"):
                here = await ask(second, path)
                there = await ask(port, path, headers=[("authorization", f"Bearer {TOKEN}")])
                assert (here.status, here.body) == (there.status, there.body)
            assert (await ask(second, "/api/status")).json["session"]["exit_code"] == 0
        async with serving(RemoteSource(f"http://127.0.0.1:{port}", None)) as second:
            health = await ask(second, "/healthz")
            assert health.status == 503
            assert "--token-file" in health.text
