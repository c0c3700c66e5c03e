"""The controller of a run on this machine: what it starts again, what it gives up, and how it ends."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import fleet_stand_in
import psutil
import pytest
import trio

from yeto.errors import ConfigError
from yeto.fleet import children, controller, detached
from yeto.fleet.controller import Controller, prepare
from yeto.fleet.launch import Launch
from yeto.fleet.processes import NAME_CHARS, RUN_VARIABLE, processes_of, start_mark
from yeto.fleet.registry import DONE, FAILED, RUNNING, STOPPED, create_run

SECONDS_MAX = 200


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(fleet_stand_in.__file__).parent))
    monkeypatch.setattr(children, "RELAUNCH_SECONDS", 0.0)

    def make(islands=2, quorum=1):
        launch = Launch(
            name="trial",
            islands=",".join(["local:1xcpu"] * islands),
            model="/m",
            data="/d",
            output="/o",
            quorum=quorum,
        )
        run = create_run(tmp_path / "runs", launch, "ab\n")
        prepare(run)
        return run

    return make


@pytest.fixture
def behave(monkeypatch):
    """Say how head and islands behave; an island that is not named stays."""

    def set_up(head=(), **islands):
        monkeypatch.setattr(controller, "head_command", lambda *_: ["fleet_stand_in", "head", *head])
        monkeypatch.setattr(
            controller,
            "island_command",
            lambda _, number, *__: ["fleet_stand_in", "island", *islands.get(f"island_{number}", ())],
        )

    return set_up


async def until(run, condition):
    """Wait for a state of the run; return it."""
    with trio.fail_after(SECONDS_MAX):
        while not condition(state := run.state()):
            await trio.sleep(0.02)
    return state


async def up(run, name, times):
    """Wait until a child has been up so often."""
    with trio.fail_after(SECONDS_MAX):
        while not run.log(name).exists() or run.log(name).read_text().count("is up") < times:
            await trio.sleep(0.02)


def pid_of(state, name):
    return next((child.pid for child in state.children if child.name == name), None)


def everybody_up(state):
    return state.phase == RUNNING and len(state.children) == 3


async def test_what_is_killed_is_started_again_and_sigterm_ends_all_in_order(make_run, behave):
    behave()
    run = make_run()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Controller(run).run)
        state = await until(run, everybody_up)
        assert state.controller.pid == os.getpid()
        for name in ("island-1", "head"):
            await up(run, name, 1)
            before = pid_of(state, name)
            os.kill(before, signal.SIGKILL)
            state = await until(
                run, lambda state, name=name, before=before: pid_of(state, name) not in (None, before)
            )
            await up(run, name, 2)
        pids = [child.pid for child in state.children]
        os.kill(os.getpid(), signal.SIGTERM)
    state = run.state()
    assert (state.phase, state.exit_code, state.children) == (STOPPED, 4, ())
    assert "yeto launch --resume trial goes on" in state.why
    assert [pid for pid in pids if start_mark(pid)] == []
    assert (run.island(0) / "syncer.address").read_text() == "127.0.0.1:29400\n"


async def test_a_run_that_is_done(make_run, behave):
    behave(head=("ends", "0", "0.3"), island_0=("ends", "0", "0.1"), island_1=("ends", "0", "0.1"))
    state = await Controller(make_run()).run()
    assert (state.phase, state.why, state.exit_code) == (DONE, "the result is in /o", 0)


async def test_a_head_that_is_ready_only_when_all_is_to_stop_gets_no_islands(make_run, behave):
    behave()
    run = make_run()
    stopped = Controller(run)
    stopped._keeper.stopping.set()
    (run.head / "ready.json").write_text('{"host": "127.0.0.1", "port": 29400, "pid": 1}')
    async with trio.open_nursery() as nursery:
        await stopped._start_islands(None, nursery)
    assert not run.log("island-0").exists()
    assert not (run.island(0) / "syncer.address").exists()


async def test_a_head_that_cannot_go_on_ends_the_run_with_its_own_words(make_run, behave):
    behave(head=("ends", "1", "0.2"))
    run = make_run()
    state = await Controller(run).run()
    assert (state.phase, state.exit_code) == (FAILED, 1)
    assert state.why == f"head: head says why; its log is {run.log('head')}"
    assert run.log("head").read_text().count("head is up") == 1


@pytest.mark.parametrize(("quorum", "phase"), [(1, STOPPED), (2, FAILED)])
async def test_an_island_that_cannot_go_on_ends_the_run_only_if_the_quorum_needs_it(
    make_run, behave, quorum, phase
):
    behave(island_1=("ends", "2", "0"))
    run = make_run(quorum=quorum)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Controller(run).run)
        if quorum == 1:
            state = await until(run, lambda state: "go on without" in state.why)
            assert state.why.startswith("1 islands go on without island-1: island-1: island says why")
            assert [child.name for child in state.children] == ["head", "island-0"]
            os.kill(os.getpid(), signal.SIGTERM)
    state = run.state()
    assert (state.phase, state.exit_code) == (phase, {STOPPED: 4, FAILED: 2}[phase])
    # Wrong usage does not get better by trying again.
    assert run.log("island-1").read_text().count("island is up") == 1


async def test_an_island_that_dies_again_and_again_is_given_up(make_run, behave):
    behave(island_0=("ends", "1", "0"))
    run = make_run(islands=1)
    state = await Controller(run).run()
    assert (state.phase, state.exit_code) == (FAILED, 1)
    assert state.why.startswith(f"island-0 died {children.RELAUNCHES_MAX + 1} times; its log is ")
    assert run.log("island-0").read_text().count("island is up") == children.RELAUNCHES_MAX + 1


async def test_what_does_not_end_in_order_is_killed(make_run, behave, monkeypatch):
    monkeypatch.setattr(controller, "STOP_SECONDS", 0.2)
    behave(head=("ends", "1", "0.5"), island_0=("deaf",))
    run = make_run()
    state = await Controller(run).run()
    assert state.phase == FAILED
    assert "island is up" in run.log("island-0").read_text()
    assert processes_of(run.folder) == []


def start_controller(run):
    words = [sys.executable, "-m", "fleet_stand_in", "controller", str(run.folder)]
    with run.controller_log.open("ab") as log:
        return subprocess.Popen(
            words, stdout=log, stderr=log, env={**os.environ, RUN_VARIABLE: str(run.folder)}
        )


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells a child of its parent's death"
)
async def test_a_controller_that_is_killed_takes_its_children_along_and_the_registry_says_so(make_run):
    run = make_run()
    with start_controller(run) as process:
        state = await until(run, everybody_up)
        with pytest.raises(ConfigError, match="trial is running; yeto status trial shows it"):
            detached.start_controller(run)
        # One that starts beside it all the same does not touch anything.
        with start_controller(run) as second:
            assert await trio.to_thread.run_sync(second.wait) == 1
        assert "another controller runs it" in run.controller_log.read_text()
        process.kill()
    with trio.fail_after(SECONDS_MAX):
        while any(child.alive for child in state.children):
            await trio.sleep(0.02)
    assert run.state().phase == RUNNING
    state = detached.present_state(run)
    assert (state.phase, state.exit_code) == (FAILED, 1)
    assert state.why == "its controller is gone; yeto launch --resume trial goes on with it"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux shows processes' environments")
def test_down_ends_a_live_controller_and_whatever_else_belongs_to_the_run(make_run, monkeypatch, capsys):
    monkeypatch.setattr(detached, "KILL_SECONDS", 0.3)
    run = make_run()
    environ = {**os.environ, RUN_VARIABLE: str(run.folder)}
    # As if a controller before this one had left it over; it does not listen to SIGTERM.
    long_word = "word" * NAME_CHARS
    words = [sys.executable, "-m", "fleet_stand_in", "island", "deaf", long_word]
    stray = subprocess.Popen(words, env=environ)
    with start_controller(run) as process:
        trio.run(until, run, everybody_up)
        pids = [child.pid for child in run.state().children]
        assert detached.end(run, print) == []
        assert process.wait(SECONDS_MAX) == 4
    assert stray.wait(SECONDS_MAX) == -signal.SIGKILL
    said = capsys.readouterr().out
    assert said.startswith("stopping: the head writes a checkpoint")
    assert f"(process {stray.pid}), which was left over" in said
    assert long_word not in said
    assert all(len(line) < NAME_CHARS + 60 for line in said.splitlines())
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    state = run.state()
    assert (state.phase, state.controller, state.children) == (STOPPED, None, ())
    # And again: there is nothing to do.
    assert detached.end(run, print) == []
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux shows processes' environments")
def test_what_is_a_moment_behind_its_controller_is_not_called_left_over(make_run, capsys):
    run = make_run()
    with start_controller(run) as process:
        trio.run(until, run, everybody_up)
        script = f"while kill -0 {process.pid} 2>/dev/null; do sleep 0.05; done; sleep 0.3"
        words = ["sh", "-c", script]
        with subprocess.Popen(words, env={**os.environ, RUN_VARIABLE: str(run.folder)}) as behind:
            # Until then the system keeps the number of a process that has ended.
            reaping = threading.Thread(target=process.wait)
            reaping.start()
            assert detached.end(run, print) == []
            reaping.join()
            assert behind.wait(SECONDS_MAX) == 0
    assert "left over" not in capsys.readouterr().out
