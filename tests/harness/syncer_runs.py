"""Runs of a real syncer on real sockets, in this process or as a child, with fake learners."""

import contextlib

import trio
from fake_learner import FakeLearner, small_layout

from yeto.core import CoreConfig
from yeto.syncer.app import serve
from yeto.syncer.config import Bounds, StartMode, SyncerConfig
from yeto.tape import read
from yeto.tape.replay import replay

HANGS_SECONDS = 200
"""What has not happened by then never does. It is so long because a machine may be busy."""

BOUNDS = Bounds(
    # Nobody is late because the machine is busy; who is to be late is given less by its test.
    handshake_seconds=60.0,
    manifest_seconds=60.0,
    farewell_seconds=60.0,
    silence_seconds=60.0,
    second_look_seconds=0.2,
    status_seconds=0.5,
)


def make_config(folder, *, bounds=BOUNDS, resume=False, auth_key=None, tls=None, **core):
    settings = {
        "num_learners": 2,
        "total_steps": 6,
        "quorum": 2,
        "wait_for": 2,
        "sync_interval_steps": 0.0,
        "grace_cap_seconds": 0.05,
        "quorum_timeout_seconds": 120.0,
        "final_ack_timeout_seconds": 120.0,
    }
    return SyncerConfig(
        core=CoreConfig(**(settings | core)),
        start=StartMode.RESUME if resume else StartMode.FRESH,
        port=0,
        checkpoint_path=folder / "state.ckpt",
        event_tape=folder / "events.jsonl",
        auth_key=auth_key,
        tls=tls,
        bounds=bounds,
    ).validated()


class Run:
    """One start of the syncer in this process."""

    def __init__(self, nursery, config, beside=None):
        self.nursery = nursery
        self.beside = beside
        self.config = config
        self.address = None
        self.exit_code = None
        self.error = None
        self.ended = trio.Event()
        self.scope = trio.CancelScope()

    async def start(self):
        self.address = await self.nursery.start(self._serve)
        return self

    async def _serve(self, task_status=trio.TASK_STATUS_IGNORED):
        try:
            with self.scope:
                self.exit_code = await serve(self.config, beside=self.beside, task_status=task_status)
        finally:
            self.ended.set()

    def join(self, learner):
        self.nursery.start_soon(learner.run, self.address.host, self.address.port)

    async def end(self, seconds=HANGS_SECONDS):
        with trio.fail_after(seconds):
            await self.ended.wait()
        return self.exit_code

    def stop(self):
        """Kill the syncer as far as that goes inside a process."""
        self.scope.cancel()


@contextlib.asynccontextmanager
async def running(config, *learners, beside=None):
    """A syncer with learners; everything left is cancelled at the end, then the tape is verified."""
    async with trio.open_nursery() as nursery:
        run = await Run(nursery, config, beside).start()
        for learner in learners:
            run.join(learner)
        yield run
        nursery.cancel_scope.cancel()
    verify(config.event_tape)


def fakes(count=2, **settings):
    settings.setdefault("layout", small_layout())
    return [FakeLearner(learner=learner, **settings) for learner in range(count)]


def held_back(learners):
    """Have learners keep their answers to themselves until the event that is returned."""
    told = trio.Event()

    async def wait(learner, pull):
        await told.wait()
        return True

    for learner in learners:
        learner.before_push = wait
    return told


def verify(tape):
    """Every test ends with this: the tape replays without divergence."""
    result = replay(tape)
    assert result.divergence is None, result.divergence
    return result


def bodies(tape, kind=None):
    return [record.body for record in read(tape) if kind is None or isinstance(record.body, kind)]


async def until(condition, seconds=HANGS_SECONDS):
    """Wait until something has become true; polling is for tests only."""
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.005)


@contextlib.asynccontextmanager
async def hurrying(clock, seconds):
    """Set the clock forward again and again while the block lasts, in which nothing may have a limit."""

    async def hurry():
        while True:
            await trio.sleep(0.02)
            clock.jump(seconds)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hurry)
        yield
        nursery.cancel_scope.cancel()


def on_tape(config, kind, count=1):
    """A condition: the tape in its durable part has so many records of a class."""

    def check():
        return config.event_tape.exists() and len(bodies(config.event_tape, kind)) >= count

    return check
