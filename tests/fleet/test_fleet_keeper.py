"""What keeps children alive, and how a signal ends that."""

import os
import signal
import sys
from functools import partial

import pytest
import trio

from yeto.fleet import children
from yeto.fleet.children import Child, stop_all
from yeto.fleet.keeper import Keeper
from yeto.storage import hold

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
COUNTS = """
import signal, sys, time
def told(*_):
    print("told", flush=True)
    time.sleep(float(sys.argv[1]))
    sys.exit()
signal.signal(signal.SIGTERM, told)
print("up", flush=True)
while True:
    time.sleep(600)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """A child that is a line of Python."""

    def make(name, program, *words):
        made = Child(name, (), tmp_path / f"{name}.log")
        monkeypatch.setattr(made, "_words", lambda: [sys.executable, "-c", program, *words])
        made.start()
        return made

    return make


@pytest.fixture
def keeper():
    """A keeper that takes down what happens."""
    made = Keeper(
        say=lambda line: made.lines.append(line),
        stop=lambda: made.lines.append("stop"),
        kill=lambda: made.lines.append("kill"),
    )
    made.lines = []
    return made


async def until(condition):
    with trio.fail_after(200):
        while not condition():
            await trio.sleep(0.01)


async def test_the_first_signal_stops_and_the_next_ones_kill(keeper):
    async def live():
        for number, said in ((signal.SIGTERM, ["stop"]), (signal.SIGINT, ["stop", "kill"])):
            os.kill(os.getpid(), number)
            await until(lambda said=said: keeper.lines == said)
        return 7

    assert await keeper.run(live) == 7
    assert keeper.stopping.is_set()


async def test_what_a_signal_killed_is_started_again_and_what_ended_is_not(
    keeper, child, tmp_path, monkeypatch
):
    monkeypatch.setattr(children, "RELAUNCH_SECONDS", 0.0)
    worker = child("worker", f"import os\nif not os.path.exists({str(tmp_path / 'once')!r}): {DIES}\nexit(5)")
    started = []

    def again():
        (tmp_path / "once").touch()
        return ()

    code = await keeper.keep(
        worker, "the worker", origin=" anew", again=again, started=lambda: started.append(worker.pid)
    )
    assert (code, started) == (5, [worker.pid])
    assert keeper.lines == ["the worker was killed by signal 9; starting it again anew"]


async def test_what_was_to_stop_during_the_pause_is_not_started_again(keeper, child, monkeypatch):
    monkeypatch.setattr(children, "RELAUNCH_SECONDS", 0.3)
    worker = child("worker", DIES)

    async def live():
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def stop():
                await until(lambda: keeper.lines)
                os.kill(os.getpid(), signal.SIGTERM)

            return await keeper.keep(worker, "the worker")

    first = worker.pid
    assert await keeper.run(live) == -signal.SIGKILL
    assert worker.pid == first
    assert keeper.lines[1:] == ["stop"]


async def test_children_that_are_stopped_together_are_told_once_each(child):
    both = [child("slow", COUNTS, "0.3"), child("slower", COUNTS, "0.6")]
    await until(lambda: all("up" in one.log.read_text() for one in both))
    await stop_all(both, 200)
    assert [one.running for one in both] == [False, False]
    assert [one.log.read_text() for one in both] == ["up\ntold\n"] * 2


async def test_what_an_earlier_parent_left_running_is_waited_for(keeper, tmp_path):
    locks = [tmp_path / "syncer.lock", tmp_path / "none" / "lock"]
    held = hold(locks[0], OSError())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run, partial(keeper.until_free, *locks))
        await until(lambda: keeper.lines)
        held.release()
    assert keeper.lines == ["what an earlier start has left running is still saving; waiting for it to end"]


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
async def test_somebody_else_is_not_waited_for_for_ever(keeper, tmp_path, monkeypatch, seconds):
    """Nor once a signal came: then whatever there was to start is not started."""
    monkeypatch.setattr("yeto.fleet.keeper.EARLIER_SECONDS", seconds)
    with hold(tmp_path / "lock", OSError()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run, partial(keeper.until_free, tmp_path / "lock"))
            await until(lambda: keeper.lines)
            if seconds:
                signal.raise_signal(signal.SIGTERM)
    assert keeper.stopping.is_set() == (seconds > 0)
