"""Runs of a real syncer on real sockets, in this process or as a child, with fake learners."""

import contextlib

import trio
from fake_learner import FakeLearner, small_layout

from yeto.core import CoreConfig
from yeto.syncer.app import serve
from yeto.syncer.config import Bounds, StartMode, SyncerConfig
from yeto.tape import read
from yeto.tape.replay import replay

BOUNDS = Bounds(handshake_seconds=2.0, manifest_seconds=0.5, farewell_seconds=1.0, status_seconds=0.5)


def make_config(folder, *, bounds=BOUNDS, resume=False, auth_key=None, **core):
    settings = {
        "num_learners": 2,
        "total_steps": 6,
        "quorum": 2,
        "wait_for": 2,
        "sync_interval_steps": 0.0,
        "grace_cap_seconds": 0.05,
        "quorum_timeout_seconds": 20.0,
        "final_ack_timeout_seconds": 20.0,
    }
    return SyncerConfig(
        core=CoreConfig(**(settings | core)),
        start=StartMode.RESUME if resume else StartMode.FRESH,
        port=0,
        checkpoint_path=folder / "state.ckpt",
        event_tape=folder / "events.jsonl",
        auth_key=auth_key,
        bounds=bounds,
    ).validated()


class Run:
    """One start of the syncer in this process."""

    def __init__(self, nursery, config):
        self.nursery = nursery
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
                self.exit_code = await serve(self.config, task_status=task_status)
        finally:
            self.ended.set()

    def join(self, learner):
        self.nursery.start_soon(learner.run, self.address.host, self.address.port)

    async def end(self, seconds=60):
        with trio.fail_after(seconds):
            await self.ended.wait()
        return self.exit_code

    def stop(self):
        """Kill the syncer as far as that goes inside a process."""
        self.scope.cancel()


@contextlib.asynccontextmanager
async def running(config, *learners):
    """A syncer with learners; everything left is cancelled at the end, then the tape is verified."""
    async with trio.open_nursery() as nursery:
        run = await Run(nursery, config).start()
        for learner in learners:
            run.join(learner)
        yield run
        nursery.cancel_scope.cancel()
    verify(config.event_tape)


def fakes(count=2, **settings):
    settings.setdefault("layout", small_layout())
    return [FakeLearner(learner=learner, **settings) for learner in range(count)]


def verify(tape):
    """Every test ends with this: the tape replays without divergence."""
    result = replay(tape)
    assert result.divergence is None, result.divergence
    return result


def bodies(tape, kind=None):
    return [record.body for record in read(tape) if kind is None or isinstance(record.body, kind)]


async def until(condition, seconds=30):
    """Wait until something has become true; polling is for tests only."""
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.005)


def on_tape(config, kind, count=1):
    """A condition: the tape in its durable part has so many records of a class."""

    def check():
        return config.event_tape.exists() and len(bodies(config.event_tape, kind)) >= count

    return check
