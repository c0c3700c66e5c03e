"""Play it: start everything, kill at random, look at the rules, clean up, and judge the whole.

Learners are forked by a server that has imported everything, so that hundreds of deaths cost little. What is
killed is real: processes, by SIGKILL, wherever they happen to be; now and then one is stopped instead, for
less or for more than the silence that the syncer puts up with.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO

import psutil
import trio
from attrs import define, field, frozen
from breaking import Broken, only_broken, until_interrupted

from soaking.learner import live
from soaking.watch import MIB, TapeWatch, check_memory
from yeto.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from yeto.state import read_checkpoint
from yeto.tape import replay

LOOK_SECONDS = 0.5
AWAY_SECONDS = 1.0
"""Longest time until a killed learner is started again."""
STOPPED_SECONDS = (1.0, 25.0)
"""Shortest and longest stop of a learner: the syncer takes 15 s of silence for death."""
SYNCER_SECONDS = 60.0
"""For the syncer to be ready, and for its end, on a machine that is busy."""
ROWS = 20
"""Lines of the table, at least."""
WIDTHS = (6, 8, 6, 6, 6, 6, 6, 8)
"""Of its columns."""


@frozen(kw_only=True)
class Plan:
    """What is to be done."""

    minutes: float
    learners: int
    seed: int
    kill_every: float
    stop_every: float
    kill_syncer_every: float | None
    gap_seconds: float
    folder: Path

    @property
    def quorum(self) -> int:
        """More than half."""
        return self.learners // 2 + 1


@define
class Tally:
    """What was done."""

    kills: int = 0
    stops: int = 0
    syncer_kills: int = 0
    memory: list[int] = field(factory=list)
    longest_wait: float = 0.0


class Soak:
    """One soak, from the first process to the last."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tally = Tally()
        self._rng = random.Random(plan.seed)
        self._ready = plan.folder / "ready.json"
        self.tape = plan.folder / "events.jsonl"
        self._checkpoint = plan.folder / "state.ckpt"
        self.watch = TapeWatch(self.tape, plan.quorum)
        self._log: IO[bytes] | None = None
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["soaking.learner"])
        self._learners: dict[int, ForkServerProcess] = {}
        self._births = 0
        self._stopped: set[int] = set()
        self._syncer: trio.Process | None = None
        self._is_up = True
        self._code: int | None = None
        self._began = time.monotonic()

    async def run(self) -> None:
        """Play for as long as the plan says.

        Raises:
            Broken: a rule does not hold.
        """
        self._log = (self.plan.folder / "syncer.log").open("ab")
        try:
            await self._start_syncer(resume=False)
            for learner in range(self.plan.learners):
                self._spawn(learner)
            self._head()
            with trio.move_on_after(60 * self.plan.minutes):
                async with trio.open_nursery() as nursery:
                    for task in (self._look, self._sample, self._kill_learners, self._stop_learners):
                        nursery.start_soon(task)
                    if self.plan.kill_syncer_every is not None:
                        nursery.start_soon(self._kill_syncer)
        finally:
            with trio.CancelScope(shield=True):
                self._kill_everybody()
                self._code = await self._end_syncer()
                self._log.close()

    def judge(self, *, whole: bool = True) -> str:
        """Look at what is left; return a line about it.

        Args:
            whole: whether all that was planned was done.

        Raises:
            Broken: a rule does not hold.
        """
        self.watch.look(time.monotonic())
        if self._code != EXIT_STOPPED:
            raise Broken(
                f"the syncer was asked to stop and ended with {self._code}, not {EXIT_STOPPED}; see its log"
            )
        result = replay(self.tape)
        if result.divergence is not None:
            raise Broken(f"the tape does not replay: {result.divergence}")
        if result.state.step != self.watch.step:
            raise Broken(f"the tape replays to step {result.state.step}, {self.watch.step} was committed")
        if self.watch.commits and read_checkpoint(self._checkpoint).step != result.state.step:
            raise Broken(f"the tape ends at step {result.state.step}, the checkpoint is of another")
        if whole:
            if not self.watch.commits:
                raise Broken("nothing was ever committed")
            check_memory(self.tally.memory)
            wanted = math.floor(60 * self.plan.minutes / (1.5 * self.plan.kill_every))
            if self.tally.kills < wanted:
                raise Broken(
                    f"{self.tally.kills} kills instead of {wanted}: the machine is too busy for this"
                )
        return (
            f"{self.watch.records:,} records replay, step {result.state.step:,} is checkpointed; "
            f"{self.watch.commits:,} commits, {self.watch.discards} attempts discarded, "
            f"{self.tally.kills} learners killed, {self.tally.stops} stopped, "
            f"{self.tally.syncer_kills} syncers killed, longest wait for a commit "
            f"{self.tally.longest_wait:.1f} s, refusals {self.watch.refused or 'none'}"
        )

    # -- the processes --------------------------------------------------------------------------------

    async def _start_syncer(self, *, resume: bool) -> None:
        plan = self.plan
        self._ready.unlink(missing_ok=True)
        words = [
            *(sys.executable, "-m", "soaking.syncer", "run", "--role", "syncer", "--port", "0"),
            *("--learners", str(plan.learners), "--quorum", str(plan.quorum), "--total-steps", "1000000"),
            *("--wait-for", str(plan.quorum), "--quorum-timeout-s", "60", "--grace-ms", "300"),
            *("--sync-interval-steps", "0", "--min-round-interval-ms", "100", "--checkpoint-every", "5"),
            *("--ready-file", str(self._ready), "--event-tape", str(self.tape)),
            *("--checkpoint-path", str(self._checkpoint)),
            *(["--resume"] if resume else []),
        ]
        self._syncer = await trio.lowlevel.open_process(
            words,
            stdin=-1,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is ours
        )
        with trio.move_on_after(SYNCER_SECONDS):
            while not self._ready.exists():
                if self._syncer.poll() is not None:
                    raise Broken(f"the syncer did not start ({self._syncer.returncode}); see its log")
                await trio.sleep(0.05)
            return
        raise Broken(f"the syncer was not ready within {SYNCER_SECONDS:.0f} s; see its log")

    async def _end_syncer(self) -> int | None:
        """Ask the syncer to stop; return its exit code, None when it had to be killed."""
        syncer = self._syncer
        if syncer is None:
            return None
        if syncer.poll() is None:
            syncer.terminate()
        with trio.move_on_after(SYNCER_SECONDS):
            return await syncer.wait()
        syncer.kill()
        await syncer.wait()
        return None

    def _spawn(self, learner: int) -> None:
        plan = self.plan
        self._births += 1
        process = self._processes.Process(
            target=live,
            args=(learner, plan.learners, self._ready, plan.seed * 1_000_003 + self._births),
            daemon=True,
        )
        process.start()
        self._learners[learner] = process

    def _kill_everybody(self) -> None:
        """Leave no learner behind."""
        for process in self._learners.values():
            process.kill()
        for process in self._learners.values():
            process.join(10)
            process.close()
        self._learners.clear()

    # -- what goes on at the same time ------------------------------------------------------------------

    async def _look(self) -> None:
        """Hold the tape against the rules."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            assert self._syncer is not None
            if self._is_up and self._syncer.poll() is not None:
                raise Broken(f"the syncer died by itself ({self._syncer.returncode}); see its log")
            self.watch.look(now, unable=frozenset(self._stopped))
            waited = self.watch.waiting_seconds(now)
            self.tally.longest_wait = max(self.tally.longest_wait, waited)
            if waited > self.plan.gap_seconds:
                raise Broken(
                    f"no commit for {waited:.0f} s although {len(self.watch.joined)} learners are connected, "
                    f"{len(self._stopped)} of all are stopped, and {self.plan.quorum} are enough"
                )
            for learner, process in self._learners.items():
                if process.exitcode is not None:
                    raise Broken(f"learner {learner} ended by itself with {process.exitcode}")

    async def _sample(self) -> None:
        """Look at the memory now and then, and print a line of the table."""
        rows = max(ROWS, round(6 * self.plan.minutes))
        pause = 60 * self.plan.minutes / rows
        while True:
            await trio.sleep(pause)
            self._row()

    async def _kill_learners(self) -> None:
        """Kill one learner after the other, at random, and start it again a little later."""
        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(self._rng.uniform(0.2, 1.8) * self.plan.kill_every)
                alive = [learner for learner in self._learners if learner not in self._stopped]
                learner = self._rng.choice(alive)
                nursery.start_soon(self._replace, learner)

    async def _replace(self, learner: int) -> None:
        process = self._learners.pop(learner)
        process.kill()
        self.tally.kills += 1
        await trio.lowlevel.wait_readable(process.sentinel)
        process.join()
        process.close()
        await trio.sleep(self._rng.uniform(0.0, AWAY_SECONDS))
        self._spawn(learner)

    async def _stop_learners(self) -> None:
        """Stop learners for a while; never so many that no quorum is left."""
        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(self._rng.uniform(0.5, 1.5) * self.plan.stop_every)
                able = [learner for learner in self._learners if learner not in self._stopped]
                if len(able) - 2 >= self.plan.quorum:
                    nursery.start_soon(self._stop, self._rng.choice(able))

    async def _stop(self, learner: int) -> None:
        process = self._learners[learner]
        assert process.pid is not None
        self._stopped.add(learner)
        self.tally.stops += 1
        os.kill(process.pid, signal.SIGSTOP)
        try:
            await trio.sleep(self._rng.uniform(*STOPPED_SECONDS))
        finally:
            os.kill(process.pid, signal.SIGCONT)
            self._stopped.discard(learner)

    async def _kill_syncer(self) -> None:
        """Kill the syncer and resume it, again and again."""
        assert self.plan.kill_syncer_every is not None
        while True:
            await trio.sleep(self._rng.uniform(0.5, 1.5) * self.plan.kill_syncer_every)
            assert self._syncer is not None
            self._is_up = False
            # Begun is finished, also at the end of the soak: that asks a syncer to stop that can hear it.
            with trio.CancelScope(shield=True):
                self._syncer.kill()
                await self._syncer.wait()
                self.tally.syncer_kills += 1
                self.watch.look(time.monotonic())
                self.watch.restarted()
                await self._start_syncer(resume=True)
            self._is_up = True

    # -- what is printed --------------------------------------------------------------------------------

    def _head(self) -> None:
        titles = ("s", "commits", "per s", "there", "kills", "stops", "MiB", "tape kB")
        print(" ".join(f"{title:>{width}}" for title, width in zip(titles, WIDTHS, strict=True)))

    def _row(self) -> None:
        assert self._syncer is not None
        with suppress(psutil.NoSuchProcess):  # it was killed just now
            rss = psutil.Process(self._syncer.pid).memory_info().rss
            self.tally.memory.append(rss)
            seconds = time.monotonic() - self._began
            values = (
                f"{seconds:.0f}",
                f"{self.watch.commits:,}",
                f"{self.watch.commits / seconds:.1f}",
                len(self.watch.joined),
                self.tally.kills,
                self.tally.stops,
                f"{rss / MIB:.0f}",
                f"{self.tape.stat().st_size / 1000:,.0f}",
            )
            print(
                " ".join(f"{value:>{width}}" for value, width in zip(values, WIDTHS, strict=True)), flush=True
            )


def _say_that_it_stops() -> None:
    print("stopping; what there is so far is still judged", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/soak",
        description="A real syncer and many fake learners, killed at random; exit code 1 when a rule breaks.",
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (5)")
    parser.add_argument("--learners", type=int, default=20, help="learner processes (20)")
    parser.add_argument("--kill-syncer", action="store_true", help="kill and resume the syncer, too")
    parser.add_argument(
        "--kill-every", type=float, default=2.0, metavar="S", help="mean seconds between kills (2)"
    )
    parser.add_argument(
        "--stop-every", type=float, default=10.0, metavar="S", help="and between SIGSTOPs (10)"
    )
    parser.add_argument(
        "--gap", type=float, default=30.0, metavar="S", help="longest time without a commit (30)"
    )
    parser.add_argument("--seed", type=int, default=None, help="chance; by default the time")
    chosen = parser.parse_args(words)
    if chosen.learners < 2 or chosen.minutes <= 0:
        parser.error("two learners and some time are the least")
    seed = int(time.time()) if chosen.seed is None else chosen.seed
    folder = Path(tempfile.mkdtemp(prefix="yeto-soak-"))
    plan = Plan(
        minutes=chosen.minutes,
        learners=chosen.learners,
        seed=seed,
        kill_every=chosen.kill_every,
        stop_every=chosen.stop_every,
        kill_syncer_every=30.0 if chosen.kill_syncer else None,
        gap_seconds=chosen.gap,
        folder=folder,
    )
    print(
        f"{plan.minutes:g} minutes, {plan.learners} learners, quorum {plan.quorum}, seed {seed}", flush=True
    )
    try:
        soak = Soak(plan)
        interrupted = trio.run(until_interrupted, soak.run, _say_that_it_stops)
        line = soak.judge(whole=not interrupted)
    except (Broken, BaseExceptionGroup) as error:
        broken = only_broken(error)
        if broken is None:
            raise
        print(f"BROKEN: {broken}\nwhat there is of it: {folder}", flush=True)
        return 1
    print(line, flush=True)
    shutil.rmtree(folder)
    return EXIT_INTERRUPTED if interrupted else 0
