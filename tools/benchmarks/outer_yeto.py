"""Yeto as a party of ``peers``: a syncer as anybody starts it, and learners that train nothing.

The learners are the fakes of tests/harness, one process each: the whole protocol over TCP, deltas that are
encoded for every push, broadcasts that are decoded. An outer round is one global step of every fragment. To
wait between two turns they hold back the answers to pulls of later steps; the syncer knows them as slow.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from benchmarks.outer_party import START_SECONDS, Told, context, difference
from benchmarks.tcp_bytes import tcp_bytes
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec

FRAGMENTS: Final = 8
ENDLESS: Final = 1_000_000


class Yeto:
    """A syncer and its learners, all connected; a context manager."""

    def __init__(self, folder: Path, *, learners: int, elements: int, checkpoint_every: int) -> None:
        """Start them.

        Args:
            folder: an empty one, for tape and checkpoint.
            learners: M, all of them in every round.
            elements: of the whole model.
            checkpoint_every: as the flag of that name.
        """
        self._stack = ExitStack()
        self._step = 0
        self._bytes: int | None = None
        self._syncer = context().Process(
            target=_serve, args=(folder, learners, checkpoint_every), daemon=True
        )
        self._syncer.start()
        self._stack.callback(self._syncer.join)
        ready = folder / "ready.json"
        self._learners = Told(_live, [(ready, learner, elements) for learner in range(learners)])

    def __enter__(self) -> Yeto:
        self._stack.enter_context(self._learners)
        return self

    def __exit__(self, *_: object) -> None:
        self._syncer.kill()  # before its learners, lest it say that they have left
        self._stack.close()

    def round(self) -> int | None:
        """Commit and broadcast a version of every fragment."""
        self._step += FRAGMENTS
        before, self._bytes = self._bytes, self._learners.tell(self._step)[0]
        return difference(before, self._bytes)


def _serve(folder: Path, learners: int, checkpoint_every: int) -> None:
    """Be the syncer."""
    from yeto.cli.run_syncer import SyncerFlags
    from yeto.syncer.app import run_syncer

    flags = SyncerFlags(
        learners=learners,
        quorum=learners,
        total_steps=ENDLESS,
        sync_interval_steps=0.0,
        checkpoint_every=checkpoint_every,
        port=0,
        ready_file=folder / "ready.json",
        checkpoint_path=folder / "state.ckpt",
        event_tape=folder / "events.jsonl",
    )
    logging.basicConfig(filename=folder / "syncer.log")
    # Its one line, about the port, is for people.
    with redirect_stdout(StringIO()):
        run_syncer(flags.config())


def _live(pipe: Connection, ready: Path, learner: int, elements: int) -> None:
    """Be one learner; an order is the step up to which it answers, the reply its bytes when it is there."""
    trio.run(_learn, pipe, ready, learner, elements)


async def _learn(pipe: Connection, ready: Path, learner: int, elements: int) -> None:
    from fake_learner import FakeLearner

    layout = _layout(elements)
    random = np.random.default_rng(learner)
    deltas = [(0.01 * random.standard_normal(part.numel)).astype(np.float32) for part in layout.fragments]
    allowed = 0
    moved = trio.Condition()

    async def hold(_: Any, pull: Any) -> bool:
        async with moved:
            while pull.step > allowed:
                await moved.wait()
        return True

    class Watched(FakeLearner):
        async def _deliver(self, kind: Any, head: Any, buffer: Any) -> None:
            await super()._deliver(kind, head, buffer)
            async with moved:
                moved.notify_all()

    fake = Watched(
        learner=learner,
        layout=layout,
        dtype="bf16",
        make_delta=lambda pull, numel: deltas[pull.fragment],
        before_push=hold,
    )

    def holds(step: int) -> bool:
        """Whether it has got every fragment as of a step that ends a round."""
        try:
            versions = [fake.anchor(fragment) for fragment in range(FRAGMENTS)]
        except KeyError:
            return False
        return step == 0 or all(
            version >= step - FRAGMENTS + 1 + fragment for fragment, version in enumerate(versions)
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fake.run, *await trio.to_thread.run_sync(_address, ready))
        while True:
            async with moved:
                while not holds(allowed):
                    await moved.wait()
            pipe.send(tcp_bytes())
            allowed = await trio.to_thread.run_sync(pipe.recv, abandon_on_cancel=True)
            async with moved:
                moved.notify_all()


def _address(ready: Path) -> tuple[str, int]:
    ends = time.monotonic() + START_SECONDS
    while not ready.exists():
        if time.monotonic() > ends:
            raise TimeoutError("the syncer did not start")
        time.sleep(0.02)
    said = json.loads(ready.read_text())
    return said["host"], said["port"]


def _layout(elements: int) -> Layout:
    rows = elements // FRAGMENTS // 64
    return Layout(
        fragments=tuple(
            FragmentLayout(
                mode=MergeMode.RDA, tensors=(TensorSpec(name=f"layers.{index}.weight", shape=(rows, 64)),)
            )
            for index in range(FRAGMENTS)
        )
    )
