"""A long run whose syncer is killed at random, again and again: what single points do not show adds up here.

With fakes, a thousand rounds and two hundred kills take minutes; with learners that really train, there are
few of both, and the model that ``yeto-export`` makes at the end is held, bit for bit, against the tape.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio
from breaking import Broken
from safetensors.numpy import load_file

from crashing.judge import Story, tell
from crashing.scene import LEARNERS, Outcome, Scene
from yeto.cli.run_syncer import SyncerFlags
from yeto.state import read_checkpoint
from yeto.wire import TrainingManifest
from yeto.wire.digest import digest

FIXTURES = Path(__file__).parents[2] / "fixtures"
BACKOFF_SECONDS = 0.05
"""Longest that a fake takes to answer, and how long it waits before it dials again."""
THOROUGH_EVERY = 10
"""A long tape is replayed after one death of so many; it is summed up after each."""
HANGS_SECONDS = 900.0
ANYWHERE = 0.2
"""Share of the kills that come at any time after the start, the recovery included."""


class LongScene(Scene):
    """A run whose syncers are killed at moments that are chance, spread over all rounds."""

    def __init__(
        self,
        folder: Path,
        context: ForkServerContext,
        *,
        rounds: int,
        kills: int,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(folder, context, steps=rounds, hangs_seconds=HANGS_SECONDS)
        self.kills = 0
        self._planned = kills
        self._rng = random.Random(seed)
        self._say = say
        self._dial_seconds = BACKOFF_SECONDS
        self._kills = True
        for learner in self.learners:
            learner.before_push = self._train

    async def play_long(self) -> Outcome:
        """Kill as often as planned, then let the run end.

        Raises:
            Broken: a rule does not hold.
        """
        async with trio.open_nursery() as nursery:
            await self._start_learners(nursery)
            for number in range(self._planned):
                target = self._steps * (number + 1) // (self._planned + 1)
                self._target = target
                life = await self.live(None, self._kill)
                if life.code == 0:
                    raise Broken(f"the run was over after {self.kills} of {self._planned} kills")
                self.kills += 1
                if self.kills % THOROUGH_EVERY == 0:
                    assert self.outcome.story is not None
                    self._say(f"{self.kills} kills, step {self.outcome.story.step} of {self._steps}")
            await self.live(None)
            await self._end_learners()
            nursery.cancel_scope.cancel()
        self._judge_end()
        return self.outcome

    async def _start_learners(self, nursery: trio.Nursery) -> None:
        for learner in self.learners:
            nursery.start_soon(self._learn, learner)

    async def _end_learners(self) -> None:
        """Nothing is left to wait for: the run is over when all have the final cut."""

    async def _kill(self, process: ForkServerProcess) -> None:
        """Kill at a moment that is chance: when the run has come so far, or anywhere."""
        if self._rng.random() < ANYWHERE and self.kills:
            await trio.sleep(self._rng.uniform(0.0, 1.0))
        else:
            while self._progress() < self._target:
                await trio.sleep(0.01)
            await trio.sleep(self._rng.uniform(0.0, 2 * BACKOFF_SECONDS))
        process.kill()

    def _progress(self) -> int:
        return max((version for _, version in self._seen), default=0)

    async def _train(self, fake: Any, pull: Any) -> bool:
        await trio.sleep(self._rng.uniform(0.0, BACKOFF_SECONDS))
        return True

    def _read_files(self, number: int) -> Story | None:
        if number % THOROUGH_EVERY and self.tape.exists():
            return tell(self.tape)
        return super()._read_files(number)


class RealScene(LongScene):
    """The same with two learners that train a tiny model, and an export at the end."""

    def __init__(self, folder: Path, context: ForkServerContext, **settings: Any) -> None:
        super().__init__(folder, context, **settings)
        self.learners = []
        self._where = folder / "where"
        self._processes: list[trio.Process] = []

    def flags(self, *, resume: bool, ready: Path) -> SyncerFlags:
        """Return a syncer's flags: some steps between two merges."""
        return attrs.evolve(super().flags(resume=resume, ready=ready), sync_interval_steps=4.0)

    async def export(self) -> str:
        """Export, and hold every tensor against the digests of the last commits; return a line about it.

        Raises:
            Broken: they differ.
        """
        out = self.folder / "adapter"
        words = ["--checkpoint", str(self.checkpoint), "--output-dir", str(out)]
        words += ["--model", str(FIXTURES / "tiny-llama"), "--lookahead", "keep"]
        done = await trio.run_process(
            [sys.executable, "-m", "yeto.cli.export", *words], capture_stderr=True, check=False
        )
        if done.returncode:
            raise Broken(f"yeto-export ended with {done.returncode}: {done.stderr.decode()}")
        stated = read_checkpoint(self.checkpoint).training_manifest
        assert stated is not None
        layout = TrainingManifest.from_dict(stated).layout
        tensors = load_file(out / "adapter_model.safetensors")
        story = self.outcome.story
        assert story is not None
        for fragment, part in enumerate(layout.fragments):
            params = np.empty(part.numel, dtype="<f4")
            for piece in part.slices():
                params[piece.start : piece.stop] = tensors.pop(piece.tensor.name).ravel()
            last = max(step for step, merge in story.commits.items() if merge["fragment"] == fragment)
            if digest(params) != story.commits[last]["params_digest"]:
                raise Broken(f"fragment {fragment} of the export is not what step {last} committed")
        if tensors:
            raise Broken(f"the export has {sorted(tensors)}, which no fragment has")
        return f"the export's {len(layout.fragments)} fragments have the digests of their last commits"

    async def _start_learners(self, nursery: trio.Nursery) -> None:
        for learner in range(LEARNERS):
            words = [
                *("run", "--role", "learner", "--syncer", f"@{self._where}", "--learner-id", str(learner)),
                *("--num-learners", str(LEARNERS), "--model", str(FIXTURES / "tiny-llama")),
                *("--data", str(FIXTURES / "chat" / "train.jsonl"), "--stream-workers", "0"),
                *("--fragments", "3", "--lora-r", "4", "--lora-alpha", "8", "--micro-batch-size", "4"),
                *("--seq-len", "64", "--output-dir", str(self.folder / f"learner-{learner}")),
            ]
            log = (self.folder / f"learner-{learner}.log").open("wb")
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "yeto", *words], stdout=log, stderr=subprocess.STDOUT
            )
            self._processes.append(process)
            nursery.start_soon(self._watch, learner, process)

    async def _watch(self, learner: int, process: trio.Process) -> None:
        try:
            code = await process.wait()
        finally:
            process.kill()
        if code:
            said = (self.folder / f"learner-{learner}.log").read_text(errors="replace").splitlines()[-3:]
            raise Broken(f"learner {learner} ended with {code}: {' | '.join(said)}")

    async def _end_learners(self) -> None:
        for process in self._processes:
            await process.wait()

    def _tell_address(self, address: tuple[str, int] | None) -> None:
        super()._tell_address(address)
        if address is not None:
            aside = self._where.with_suffix(".new")
            aside.write_text(f"{address[0]}:{address[1]}\n")
            aside.replace(self._where)

    def _progress(self) -> int:
        return tell(self.tape).step if self.tape.exists() else 0
