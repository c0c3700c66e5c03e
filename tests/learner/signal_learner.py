"""A learner process that stays in one phase, for the tests of signals. Prints the phase, then works on."""

import time
from pathlib import Path

from learner_fakes import TinyTask

from yeto.learner.app import run_learner
from yeto.learner.config import LearnerConfig


class SlowTask(TinyTask):
    """Takes its time where it is told to."""

    def __init__(self, phase):
        super().__init__(rows_per_batch=3)
        self.phase = phase

    def batches(self, start=None):
        for index, batch in enumerate(super().batches(start)):
            if self.phase == "training":
                if index == 3:
                    announce("training")
                time.sleep(0.01)
            yield batch

    def loss(self, batch):
        if self.phase == "one-step":
            announce("one-step")
            time.sleep(600)
        return super().loss(batch)


def announce(phase):
    global announced
    if not announced:
        announced = True
        print(phase, flush=True)


announced = False


def run(phase, syncer, folder):

    def make_task():
        if phase == "loading":
            announce("loading")
            time.sleep(600)
        if phase == "waiting":
            announce("waiting")
        return SlowTask(phase)

    config = LearnerConfig(
        syncer=syncer,
        output_dir=Path(folder),
        max_local_steps=10**9,
        torch_threads=1,
    )
    return run_learner(config, make_task)
