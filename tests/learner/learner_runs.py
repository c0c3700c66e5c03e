"""Runs of a whole learner, its training thread included, beside a test."""

import io
import json

import trio
from learner_fakes import eventually

from yeto.errors import YetoError
from yeto.learner.app import Learner
from yeto.learner.progress import Progress


class NoWait:
    """Chance that never waits."""

    def uniform(self, low, high):
        return low


class Run:
    """A learner that runs beside the test."""

    def __init__(self, settings, task):
        self.settings = settings
        self.task = task
        self.output = io.StringIO()
        self.progress = Progress(
            learner_id=settings.learner_id, log_path=settings.log_jsonl, stream=self.output
        )
        self.learner = Learner(settings, lambda: task, self.progress, NoWait())
        self.outcome = self.failure = None
        self.ended = trio.Event()

    async def run(self):
        try:
            with self.progress:
                self.outcome = await self.learner.run()
        except YetoError as error:
            self.failure = error
        self.ended.set()

    async def expect_end(self):
        with trio.fail_after(200):
            await self.ended.wait()
        if self.failure is not None:
            raise self.failure
        return self.outcome

    async def step(self, *, pulls=0):
        """Let the training thread take one step, once so many pulls wait for the boundary after it."""
        await eventually(lambda: self.gate.is_closed)
        await self.arrived(pulls=pulls)
        self.gate.allow(1)

    async def arrived(self, *, pulls=0, broadcasts=0):
        """Wait until so much waits for the next boundary, which the gate keeps the training thread from."""
        waiting = self.learner._arrivals
        await eventually(lambda: (len(waiting._pulls), len(waiting._broadcasts)) == (pulls, broadcasts))

    def log(self, kind):
        records = [json.loads(line) for line in self.settings.log_jsonl.read_text().splitlines()]
        return [record for record in records if record["kind"] == kind]
