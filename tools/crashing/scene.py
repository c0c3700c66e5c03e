"""One point: two learners, a syncer that is hit, and those after it, one of which may be hit as well.

Learners are the fakes of tests/harness; they live in this process, through all the syncer's lives, dial
whoever is there, and remember everything that they were sent. After each death the files are judged, and the
next syncer is started with ``--resume``, as a person or a supervisor would. The last one has no fault and
must end the run in order.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import trio
import trio.lowlevel
from attrs import define, field, frozen
from breaking import Broken
from fake_learner import FakeLearner, small_layout

from crashing.calls import ANY, FULL, Call, Fault, read_calls
from crashing.judge import Story, check_files, check_pushes, check_seen
from crashing.process import KILLED, live
from yeto.cli.run_syncer import SyncerFlags
from yeto.state import has_checkpoint, read_checkpoint, read_final_marker
from yeto.wire.digest import digest

LEARNERS = 2
FRAGMENTS = 2
STEPS = 4
HANGS_SECONDS = 120.0
"""A life that takes longer hangs; one takes half a second on a machine that is not busy."""
Killer = Callable[[ForkServerProcess], Awaitable[None]]
AfterDeath = Callable[[], Awaitable[None]]


def processes(*, exports: bool = False) -> ForkServerContext:
    """Return what forks processes from a server that has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    # The last one counts what there is to be looked through, so it comes last.
    context.set_forkserver_preload([*(["crashing.export"] if exports else []), "crashing.warm"])
    return context


@frozen(kw_only=True)
class Life:
    """How one syncer fared."""

    code: int
    calls: tuple[Call, ...]
    said: str
    fault: Fault | None

    @property
    def hit(self) -> bool:
        """Whether its fault came about: its call was made, or the disk was too small."""
        if self.fault is None:
            return False
        if self.fault.kind == FULL:
            return self.code != 0
        if self.fault.part == ANY:
            return self.fault.number <= len(self.calls)
        return any((call.part, call.number) == (self.fault.part, self.fault.number) for call in self.calls)

    def broken(self, why: str) -> Broken:
        """Return what to raise about it, with its last words."""
        words = self.said.strip().splitlines()[-3:]
        return Broken(f"{why}; it said: {' | '.join(words) or 'nothing'}")


@define
class Outcome:
    """How a scene went."""

    lives: list[Life] = field(factory=list)
    story: Story | None = None

    @property
    def word(self) -> str:
        """What the fault did to the first syncer."""
        first = self.lives[0]
        if not first.hit:
            return "not reached"
        return {0: "went on", KILLED: "killed"}.get(first.code, "ended with a line")


class Recorded(FakeLearner):
    """A learner that remembers the digest of every version that it was sent."""

    def __init__(self, learner: int, seen: dict[tuple[int, int], set[str]]) -> None:
        super().__init__(
            learner=learner,
            layout=small_layout(num_fragments=FRAGMENTS),
            binding={"model": "crashed", "seed": 0, "num_learners": LEARNERS},
        )
        self.seen = seen

    async def _deliver(self, kind: Any, head: Any, buffer: Any) -> None:
        before = len(self.versions)
        await super()._deliver(kind, head, buffer)
        if len(self.versions) > before:
            fragment, version = self.versions[-1]
            self.seen.setdefault((fragment, version), set()).add(digest(self.values[fragment]))


class Scene:
    """One run in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        context: ForkServerContext,
        *,
        steps: int = STEPS,
        hangs_seconds: float = HANGS_SECONDS,
    ) -> None:
        self.folder = folder
        self.root = folder / "run"
        self.root.mkdir(exist_ok=True)
        self.tape = self.root / "events.jsonl"
        self.checkpoint = self.root / "yeto-state.ckpt"
        self.outcome = Outcome()
        self._steps = steps
        self._hangs_seconds = hangs_seconds
        self._kills = False
        self._dial_seconds = 0.005
        self._context = context
        self._seen: dict[tuple[int, int], set[str]] = {}
        self.learners = [Recorded(learner, self._seen) for learner in range(LEARNERS)]
        self._address: tuple[str, int] | None = None
        self._address_changed = trio.Event()

    async def play(self, faults: Sequence[Fault], after_death: AfterDeath | None = None) -> Outcome:
        """Let one syncer after the other live, each with its fault, and one without at the end.

        Args:
            faults: of the first, the second, ...
            after_death: called after each life that did not end the run.

        Raises:
            Broken: a rule does not hold.
        """
        async with trio.open_nursery() as nursery:
            for learner in self.learners:
                nursery.start_soon(self._learn, learner)
            for fault in [*faults, None]:
                life = await self.live(fault)
                if life.code == 0:
                    break
                if after_death is not None:
                    await after_death()
            nursery.cancel_scope.cancel()
        self._judge_end()
        return self.outcome

    async def live(self, fault: Fault | None, kill: Killer | None = None) -> Life:
        """Start a syncer, wait for its end, judge what it left.

        Args:
            fault: what happens to it.
            kill: runs beside it, and may kill it.

        Raises:
            Broken: a rule does not hold, or it hangs.
        """
        number = len(self.outcome.lives)
        ready, calls, said = (self.folder / f"{name}-{number}" for name in ("ready", "calls", "said"))
        flags = self.flags(resume=number > 0, ready=ready)
        floor = max((version for _, version in self._seen), default=None)
        if number and floor is not None and not has_checkpoint(self.checkpoint):
            raise Broken("something was broadcast, and there is no checkpoint")
        before = len(self.outcome.story.resumed) if self.outcome.story is not None else 0
        process = self._context.Process(target=live, args=(flags, self.root, calls, said, fault), daemon=True)
        process.start()
        try:
            with trio.move_on_after(self._hangs_seconds) as limit:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._announce, ready)
                    if kill is not None:
                        nursery.start_soon(kill, process)
                    await trio.lowlevel.wait_readable(process.sentinel)
                    nursery.cancel_scope.cancel()
        finally:
            self._tell_address(None)
            process.kill()
            process.join()
            code = process.exitcode
            process.close()
        assert code is not None, "it was joined"
        life = Life(code=code, calls=tuple(read_calls(calls)), said=_text(said), fault=fault)
        self.outcome.lives.append(life)
        if limit.cancelled_caught:
            raise life.broken(f"life {number} hangs")
        self._judge_life(life, number, before, floor)
        return life

    def flags(self, *, resume: bool, ready: Path) -> SyncerFlags:
        """Return a syncer's flags. Nothing to resume is what ``--resume-or-start`` is for."""
        there = has_checkpoint(self.checkpoint)
        return SyncerFlags(
            port=0,
            ready_file=ready,
            learners=LEARNERS,
            quorum=LEARNERS,
            total_steps=self._steps,
            sync_interval_steps=0.0,
            grace_ms=50.0,
            mark_final_checkpoint=True,
            event_tape=self.tape,
            checkpoint_path=self.checkpoint,
            resume=resume and there,
            resume_or_start=resume and not there,
        )

    # -- learners ---------------------------------------------------------------------------------------

    async def _learn(self, learner: Recorded) -> None:
        while not learner.released:
            if learner.error is not None:
                raise Broken(f"learner {learner.learner} was refused: {learner.error}")
            address = self._address
            if address is None:
                await self._address_changed.wait()
                continue
            await learner.run(*address)
            # Whoever hung up may be about to die; a moment, as dialling again always takes.
            await trio.sleep(self._dial_seconds)

    async def _announce(self, ready: Path) -> None:
        """Tell the learners where a syncer listens, once it says so."""
        path = trio.Path(ready)
        while not await path.exists():
            await trio.sleep(0.005)
        said = json.loads(await path.read_text(encoding="utf-8"))
        self._tell_address((said["host"], said["port"]))

    def _tell_address(self, address: tuple[str, int] | None) -> None:
        self._address = address
        self._address_changed.set()
        self._address_changed = trio.Event()

    # -- rules ------------------------------------------------------------------------------------------

    def _judge_life(self, life: Life, number: int, before: int, floor: int | None) -> None:
        fault = life.fault
        allowed = {0, KILLED} if self._kills else {0}
        if fault is not None and life.hit:
            allowed = {"kill": {KILLED}, "short": {0}}.get(fault.kind, {0, 1})
        if life.code not in allowed:
            raise life.broken(f"life {number} ({fault or 'no fault'}) ended with {life.code}")
        if "Traceback" in life.said:
            raise life.broken(f"life {number} ended with a traceback")
        if life.code == 1 and not _is_a_line(life.said):
            raise life.broken(f"life {number} did not say what is wrong")
        story = self._read_files(number)
        self.outcome.story = story
        if story is not None:
            check_seen(story, self._seen)
            if self.learners:
                check_pushes(story, self._sent())
            if len(story.resumed) > before and floor is not None and story.resumed[-1] < floor:
                raise Broken(f"resumed at step {story.resumed[-1]}, and learners have seen step {floor}")
        elif self._seen:
            raise Broken("something was broadcast, and there is no tape")

    def _read_files(self, number: int) -> Story | None:
        return check_files(self.tape, self.checkpoint)

    def _sent(self) -> set[tuple[Any, ...]]:
        return {
            (push.learner, push.step, push.attempt, push.base_version, push.c_steps, push.c_tokens)
            for learner in self.learners
            for push in learner.pushes
        }

    def _judge_end(self) -> None:
        last, story = self.outcome.lives[-1], self.outcome.story
        if last.code != 0 or story is None or not story.ended:
            raise last.broken(f"the last syncer ended with {last.code}")
        state = read_checkpoint(self.checkpoint)
        if (story.step, state.step, read_final_marker(self.checkpoint)) != (self._steps,) * 3:
            raise Broken(
                f"the tape ends at {story.step}, the checkpoint at {state.step}, the marker says "
                f"{read_final_marker(self.checkpoint)}, and {self._steps} were to be done"
            )
        ledger = {e.learner: (e.merges, e.c_steps, e.c_tokens) for e in state.ledger if e.merges}
        if ledger != story.ledger:
            raise Broken(f"the last checkpoint has the ledger {ledger}, the merges sum to {story.ledger}")
        stored = [version.params_digest for version in state.fragments]
        for learner in self.learners:
            if learner.final_digests() != stored:
                raise Broken(f"learner {learner.learner} got another final cut than the checkpoint has")
        left = [str(path.relative_to(self.root)) for path in self.root.rglob("*") if _is_half(path)]
        if left:
            raise Broken(f"half-written files stay behind: {', '.join(left)}")


def _text(path: Path) -> str:
    """Return what a process said; one that was killed at once has said nothing."""
    return path.read_text(errors="replace") if path.exists() else ""


def _is_half(path: Path) -> bool:
    return path.suffix in (".tmp", ".new")


def _is_a_line(said: str) -> bool:
    """Whether the last thing said is one line for a person."""
    lines = said.strip().splitlines()
    return (bool(lines) and lines[-1].startswith("yeto: ")) or any(" ERROR " in line for line in lines)


AnyScene = TypeVar("AnyScene", bound=Scene)


@contextmanager
def scene_in(
    parent: Path, context: ForkServerContext, kind: type[AnyScene], **settings: Any
) -> Iterator[AnyScene]:
    """A scene in a new folder, which goes with the block unless it fails."""
    folder = Path(tempfile.mkdtemp(prefix="scene-", dir=parent))
    yield kind(folder, context, **settings)
    shutil.rmtree(folder)
