"""A whole learner as a process, which dials until it is released. Shows life four times a second."""

import time
from pathlib import Path

from learner_fakes import TinyTask, config

import yeto.link.group
from yeto.learner.app import run_learner


def run(syncer, folder):
    yeto.link.group.HEARTBEAT_SECONDS = 0.25
    settings = config(
        syncer=syncer,
        learner_id=1,
        num_learners=3,
        output_dir=Path(folder) / "out",
        log_jsonl=Path(folder) / "log.jsonl",
        torch_threads=1,
    )
    task = TinyTask(rows_per_batch=3, gate=lambda batch: time.sleep(0.02))
    return run_learner(settings, lambda: task)
