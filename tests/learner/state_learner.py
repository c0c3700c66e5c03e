"""A learner process that says each batch it fetches, for a test that kills it; it trains without a syncer."""

from pathlib import Path

from learner_fakes import TinyTask

from yeto.learner.app import run_learner
from yeto.learner.config import LearnerConfig


class SayingTask(TinyTask):
    """Prints the number of the row that comes next."""

    def batches(self, start=None):
        for batch in super().batches(start):
            print(batch.position, flush=True)
            yield batch


def run(folder, steps):
    folder = Path(folder)
    config = LearnerConfig(
        syncer="none",
        output_dir=folder / "out",
        state_dir=folder / "state",
        state_every=3,
        max_local_steps=steps,
        torch_threads=1,
    )
    return run_learner(config, lambda: SayingTask(rows_per_batch=3))
