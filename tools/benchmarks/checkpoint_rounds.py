"""What a checkpoint after every commit costs a run: rounds a second with it, and without any.

The syncer is a real one in a process of its own, with pipeline and tape as in any run, on the disk to be
measured. That process serves one run after the other, so that none of them begins with imports and compiling.
The learners are the fakes of tests/harness: the whole protocol, no training. Two of them, in this process,
each answering a pull at once. Rounds are counted on the tape.

With a pace of 250 ms the syncer opens a round no more often than that, which is faster than islands of any
size are: H steps of training lie between two merges of a fragment. Without a pace a round takes what the
machine takes, and the disk shows.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import trio
from fake_learner import FakeLearner

from benchmarks.figures import Figure, Target, figure_of
from yeto.cli.run_syncer import SyncerFlags
from yeto.core.decisions import RoundCommitted
from yeto.syncer.app import run_syncer
from yeto.tape import read
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec

FRAGMENTS: Final = 4
LEARNERS: Final = 2
SKIPPED_ROUNDS: Final = FRAGMENTS
"""Not counted: the first of each fragment, in which caches and compiled loops are filled."""
PACE_MILLISECONDS: Final = 250
KEPT: Final = Target(sense="at least", number=0.9, of="ratio")
START_SECONDS: Final = 120.0
RUN_SECONDS: Final = 300.0


def round_figures(
    *, repeats: int, elements: int, rounds: int, free_rounds: int, folder: Path
) -> list[Figure]:
    """Measure rounds a second with a checkpoint after every commit, beside none.

    Args:
        repeats: runs of each kind.
        elements: of each fragment; its checkpoint takes 8 bytes for each.
        rounds: global steps that are counted, one every 250 ms at most.
        free_rounds: global steps that are counted, as fast as they go.
        folder: on the disk to be measured.
    """
    context = multiprocessing.get_context("spawn")
    orders, there = context.Pipe()
    syncer = context.Process(target=_syncers, args=(there,), daemon=True)
    syncer.start()
    there.close()
    try:
        return _figures(
            partial(_rounds_per_second, syncer, orders, elements, folder), repeats, rounds, free_rounds
        )
    finally:
        syncer.kill()
        syncer.join()


def _figures(
    run: Callable[[int, int, int], float], repeats: int, rounds: int, free_rounds: int
) -> list[Figure]:
    figures = []
    for key, name, pace, count, target in (
        ("rounds_per_second_of_250_ms", f"rounds of {PACE_MILLISECONDS} ms", PACE_MILLISECONDS, rounds, KEPT),
        ("rounds_per_second_unthrottled", "rounds as fast as they go", 0, free_rounds, None),
    ):
        with_it: list[float] = []
        without: list[float] = []
        for turn in range(repeats):
            kinds = [(1, with_it), (0, without)]
            for every, rates in kinds if turn % 2 == 0 else reversed(kinds):
                rates.append(run(every, pace, count))
        figures.append(
            figure_of(
                key,
                name + ", --checkpoint-every 1",
                "rounds/s",
                with_it,
                peer="--checkpoint-every 0",
                peer_values=without,
                target=target,
            )
        )
    return figures


def _rounds_per_second(
    syncer: BaseProcess,
    orders: Connection,
    elements: int,
    folder: Path,
    every: int,
    pace: int,
    rounds: int,
) -> float:
    with TemporaryDirectory(prefix="rounds-", dir=folder) as name:
        run = Path(name)
        orders.send((run, every, pace, rounds + SKIPPED_ROUNDS))
        trio.run(_live, elements, *_address(run / "ready.json", syncer))
        # It ends by itself when its learners are released; an end of the pipe is the end of its process.
        code = orders.recv()
        if code != 0:
            raise RuntimeError(f"the syncer ended with exit code {code}")
        commits = [r.at for r in read(run / "events.jsonl") if isinstance(r.body, RoundCommitted)]
        assert len(commits) == rounds + SKIPPED_ROUNDS, "every round commits once"
        return rounds / (commits[-1] - commits[SKIPPED_ROUNDS - 1])


def _syncers(orders: Connection) -> None:
    """Be the syncer of one run after the other, in the child's process."""
    while True:
        orders.send(_serve(*orders.recv()))


def _serve(run: Path, every: int, pace: int, total_steps: int) -> int:
    """Be the syncer of one run; return its exit code."""
    flags = SyncerFlags(
        learners=LEARNERS,
        total_steps=total_steps,
        sync_interval_steps=0.0,
        min_round_interval_ms=float(pace),
        checkpoint_every=every,
        port=0,
        ready_file=run / "ready.json",
        checkpoint_path=run / "state.ckpt",
        event_tape=run / "events.jsonl",
    )
    # Its one line, about the port, is for people.
    with redirect_stdout(StringIO()):
        return run_syncer(flags.config())


def _address(path: Path, syncer: BaseProcess) -> tuple[str, int]:
    ends = time.monotonic() + START_SECONDS
    while not path.exists():
        if not syncer.is_alive() or time.monotonic() > ends:
            raise RuntimeError("the syncer did not start")
        time.sleep(0.02)
    said = json.loads(path.read_text())
    return said["host"], said["port"]


async def _live(elements: int, host: str, port: int) -> None:
    """Be all learners, until the syncer releases them."""
    layout = Layout(
        fragments=tuple(
            FragmentLayout(
                mode=MergeMode.RDA, tensors=(TensorSpec(name=f"layers.{index}", shape=(elements,)),)
            )
            for index in range(FRAGMENTS)
        )
    )
    delta = (0.01 * np.random.default_rng(0).standard_normal(elements)).astype(np.float32)
    learners = [
        FakeLearner(learner=learner, layout=layout, dtype="bf16", make_delta=lambda pull, numel: delta)
        for learner in range(LEARNERS)
    ]
    with trio.fail_after(RUN_SECONDS):
        async with trio.open_nursery() as nursery:
            for learner in learners:
                nursery.start_soon(learner.run, host, port)
    for learner in learners:
        if not learner.released:
            raise RuntimeError(f"learner {learner.learner}: {learner.error or learner.closed}")
