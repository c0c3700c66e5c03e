"""A learner's process: the fake of tests/harness, which dials until it is released, refused or killed."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path

import trio
from breaking import wait_for_parent
from fake_learner import FakeLearner, small_layout

from yeto.link import backoff

REFUSED = 3
"""Exit code of a learner that the syncer refused; only the soak's own mistakes bring one about."""
ANSWER_SECONDS = 0.1
"""Longest time that an answer takes; each takes a part of that by chance."""
NUMEL = 4096
"""Parameters of a fragment, about."""


def live(learner: int, num_learners: int, ready_file: Path, seed: int) -> None:
    """Live in this process until the run is over; end with the parent, however that ends.

    Args:
        learner: its id.
        num_learners: of the run.
        ready_file: where the syncer writes its address, a new one after each of its starts.
        seed: of all chance.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    threading.Thread(target=wait_for_parent, daemon=True).start()
    rng = random.Random(seed)

    async def train(fake: FakeLearner, pull: object) -> bool:
        await trio.sleep(rng.uniform(0.0, ANSWER_SECONDS))
        return True

    fake = FakeLearner(
        learner=learner,
        layout=small_layout(numel=NUMEL),
        binding={"model": "soaked", "seed": 0, "num_learners": num_learners},
        before_push=train,
    )
    trio.run(_live, fake, ready_file, rng)


async def _live(fake: FakeLearner, ready_file: Path, rng: random.Random) -> None:
    waits = backoff(rng, base_seconds=0.2, cap_seconds=2.0)
    while not fake.released and fake.error is None:
        address = _address(ready_file)
        if address is not None:
            heard = len(fake.versions)
            await fake.run(*address)
            if len(fake.versions) > heard:
                waits = backoff(rng, base_seconds=0.2, cap_seconds=2.0)
        await trio.sleep(next(waits))
    if fake.error is not None:
        print(f"learner {fake.learner} was refused: {fake.error}", flush=True)
        os._exit(REFUSED)


def _address(path: Path) -> tuple[str, int] | None:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return said["host"], said["port"]
