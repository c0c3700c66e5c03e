"""A supervisor as a process of its own, beside a test, and learners that take a budget of made-up steps."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable

import trio
from attrs import define
from fake_learner import FakeLearner, small_layout

from yeto.tape import read
from yeto.wire.layout import MergeMode

SECONDS_MAX = 300


class Supervisor:
    """One start of ``yeto run --role supervisor``, and the files of its run."""

    def __init__(self, place, process):
        self.place = place
        self.process = process
        self.tape, self.checkpoint = place / "events.jsonl", place / "state.ckpt"

    async def port(self):
        """Return where the syncer listens; waits until it does."""
        await self.until((self.place / "ready.json").exists)
        return json.loads((self.place / "ready.json").read_text())["port"]

    async def until(self, condition):
        """Wait until something has become true, which it does while the process is there."""
        with trio.fail_after(SECONDS_MAX):
            while not condition():
                assert self.process.poll() is None, self.said()
                await trio.sleep(0.02)

    async def end(self):
        """Return the exit code."""
        with trio.fail_after(SECONDS_MAX):
            return await self.process.wait()

    def said(self):
        """Return what it printed so far, to either side."""
        return (self.place / "supervisor.log").read_text()

    def complaint(self):
        """Return its last line, which is why it failed."""
        return self.said().splitlines()[-1]


def supervisor_words(place, **flags):
    """Return the production command, with what this machine needs instead of a part of its values."""
    flags = {
        "checkpoint_path": place / "state.ckpt",
        "event_tape": place / "events.jsonl",
        "syncer_log": place / "syncer.log",
        "ready_file": place / "ready.json",
        "port": 0,
        "iso_worker_python": sys.executable,
    } | flags
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    return ["run", "--role=supervisor", "--preset=miles-six-islands", *words]


@contextlib.asynccontextmanager
async def supervised(place, **flags):
    """A supervisor; it is killed at the end if it is still there, and everything it started with it."""
    place.mkdir(exist_ok=True)
    (place / "ready.json").unlink(missing_ok=True)
    words = [sys.executable, "-m", "yeto", *supervisor_words(place, **flags)]
    with (place / "supervisor.log").open("wb") as log:
        process = await trio.lowlevel.open_process(words, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Supervisor(place, process)
    finally:
        with trio.CancelScope(shield=True):
            if process.poll() is None:
                process.kill()
            await process.wait()


def records(tape, kind):
    """Return the records of a class on a tape that may not be there yet."""
    return [record.body for record in read(tape) if isinstance(record.body, kind)] if tape.exists() else []


@define(eq=False)
class Frugal(FakeLearner):
    """A learner that takes a budget of steps, reports that, and answers with all of them from then on."""

    budget: int = 0
    stays: Callable[[], bool] = lambda: True
    """Whether it dials once more."""

    async def connect(self, host, port):
        if not self.stays():
            await trio.sleep_forever()
        await super().connect(host, port)


def frugal(learner, budget, **settings):
    """Return such a learner of six."""

    async def before_push(made, pull):
        if made.c_steps == budget:
            made.local_step = 0  # it is about to be what it was
        elif made.local_step + made.c_steps > budget:
            made.local_step, made.c_steps = 0, budget
            made.report_budget(budget)
            return False
        return True

    async def on_connected(made):
        # At its budget it says so on every connection.
        if made.c_steps == budget:
            made.report_budget(budget)

    settings = {"before_push": before_push, "on_connected": on_connected} | settings
    return Frugal(
        learner,
        budget=budget,
        layout=small_layout(mode=MergeMode.ISO),
        binding={"model": "fake", "seed": 0, "num_learners": 6},
        reconnects=True,
        **settings,
    )
