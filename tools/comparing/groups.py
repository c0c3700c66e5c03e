"""One run: a synchronous group, or an arm's syncer and islands, up to a folder that can be scored.

An arm ends by the learner-budget protocol, so that it is compared for the work that was done and not for
where a round happened to be: at the last step of their budget the learners freeze, the syncer cuts off with a
checkpoint, and the same command with ``--resume --budget-finish`` merges what each of them still holds.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import trio
from attrs import evolve, frozen

from comparing.processes import Child, Command, Family, RunFailed, family, island, obey
from comparing.recipe import Recipe, words
from comparing.settings import Arm
from yeto.core.decisions import SessionEnded
from yeto.tape import read

LOOK_SECONDS = 0.02
"""Between two looks for a syncer's port."""

READY_SECONDS = 120.0
"""Longest time from starting a syncer to its port; a busy machine takes a small part of it."""


@frozen
class Place:
    """The folder of one run."""

    folder: Path

    @property
    def tape(self) -> Path:
        """The syncer's tape."""
        return self.folder / "events.jsonl"

    @property
    def checkpoint(self) -> Path:
        """The syncer's checkpoint."""
        return self.folder / "yeto-state.ckpt"

    @property
    def result(self) -> Path:
        """What is scored: an adapter or a model folder."""
        return self.folder / "result"

    @property
    def cut_off(self) -> Path:
        """A copy of the checkpoint as the budget left it, if one was asked for."""
        return self.folder / "cut-off.ckpt"

    def log(self, who: str) -> Path:
        """Return the file that a child's output goes to."""
        return self.folder / f"{who}.log"

    def steps(self, learner: int) -> Path:
        """Return the file with a learner's steps, one JSON object a line."""
        return self.folder / f"learner-{learner}.jsonl"


async def train_baseline(recipe: Recipe, seed: int, devices: int, place: Place) -> None:
    """Train a synchronous group; its result is its own.

    Raises:
        RunFailed: a rank could not do its part.
    """
    flags = recipe.baseline(seed, devices, output_dir=place.result, log_jsonl=place.steps(0))
    async with family() as children, trio.open_nursery() as nursery:
        for rank, command in enumerate(island(words(flags), devices)):
            child = await _start(children, place, f"rank-{rank}", command)
            nursery.start_soon(child.succeed)


async def train_arm(recipe: Recipe, arm: Arm, seed: int, place: Place, *, keep_cut_off: bool = False) -> None:
    """Train an arm to its last merge; its result is the checkpoint.

    Args:
        recipe: what is trained.
        arm: how it is exchanged.
        seed: root of all chance.
        place: an empty folder.
        keep_cut_off: keep a copy of the checkpoint as it was before the finish.

    Raises:
        RunFailed: the syncer or a learner could not do its part.
    """
    at = {"checkpoint_path": place.checkpoint, "event_tape": place.tape}
    ready = place.folder / "syncer-ready.json"
    async with family() as children, trio.open_nursery() as nursery:
        command = Command(words=words(recipe.syncer(arm, port=0, ready_file=ready, **at)))
        syncer = await _start(children, place, "syncer", command)
        port = await _port(ready, syncer)
        for learner in range(arm.learners):
            flags = recipe.learner(
                arm,
                seed,
                learner,
                syncer=f"127.0.0.1:{port}",
                output_dir=place.folder / f"learner-{learner}",
                log_jsonl=place.steps(learner),
            )
            for rank, command in enumerate(island(words(flags), arm.ranks)):
                name = f"learner-{learner}" + (f"-rank-{rank}" if arm.ranks > 1 else "")
                slow = arm.slow if learner == arm.learners - 1 else 1.0
                child = await _start(children, place, name, evolve(command, slow=slow))
                nursery.start_soon(child.succeed)
        await syncer.succeed()
        if keep_cut_off:
            shutil.copytree(place.checkpoint, place.cut_off)
        command = Command(words=words(recipe.finish(arm, _cut_off(place), port=port, **at)))
        finish = await _start(children, place, "syncer-finish", command)
        await finish.succeed()


async def _start(children: Family, place: Place, name: str, command: Command) -> Child:
    return await children.start(name, place.log(name), obey, command)


async def _port(ready: Path, syncer: Child) -> int:
    """Return the port that a syncer listens on, once it does."""
    with trio.move_on_after(READY_SECONDS):
        while not await trio.Path(ready).exists():
            if syncer.process.exitcode is not None:
                await syncer.succeed()
            await trio.sleep(LOOK_SECONDS)
        return int(json.loads(await trio.Path(ready).read_text(encoding="utf-8"))["port"])
    raise RunFailed(f"the syncer has not opened its port in {READY_SECONDS:.0f} s; its log is {syncer.log}")


def _cut_off(place: Place) -> int:
    """Return the global step at which the budget ended the session."""
    ended = [record.body for record in read(place.tape) if isinstance(record.body, SessionEnded)]
    if not ended:
        raise RunFailed(f"{place.tape}: the session was not ended by its learners' budget")
    return ended[-1].step
