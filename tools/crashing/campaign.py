"""Count the points, play them all, say how each kind fared.

Exit code 1 when a rule broke anywhere, with a line for each that plays it again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from attrs import define, field
from breaking import Broken, only_broken, until_interrupted

from crashing.calls import FULL, KINDS, Call
from crashing.full import can_mount, make_room, small_disk, used_pages
from crashing.plan import (
    RUN,
    Point,
    exports,
    full_disks,
    interesting,
    parse_point,
    points_of,
    thinned,
    twice,
)
from crashing.scene import Outcome, Scene, processes, scene_in
from yeto.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from crashing.export import Exports

TRIES = 3
"""How often a point is tried whose run ended before it."""
WORDS = ("killed", "ended with a line", "went on", "not reached", "broken")
"""Columns of the table."""


@define
class Campaign:
    """Plays points and remembers how they went."""

    folder: Path
    context: ForkServerContext
    jobs: int
    say: Callable[[str], None]
    tally: Counter[tuple[str, str, str]] = field(factory=Counter)
    """(kind, part, word) -> points."""
    lives: int = 0
    exports: Exports | None = None
    broken: list[tuple[Point, str]] = field(factory=list)

    async def dry_run(self) -> tuple[Sequence[Call], int]:
        """Return the calls of a run without a fault, and the pages of a disk that it takes.

        Raises:
            Broken: even that does not go well.
        """
        with scene_in(self.folder, self.context, Scene) as scene:
            outcome = await scene.play([])
            pages = used_pages(scene.root)
        return outcome.lives[0].calls, pages

    async def recovery(self, point: Point) -> int:
        """Return how many calls the recovery from a first kill takes, to its first tidied checkpoint."""
        with scene_in(self.folder, self.context, Scene) as scene:
            outcome = await scene.play(point.faults[:1])
        calls = outcome.lives[-1].calls
        copied = [n for n, call in enumerate(calls) if call.op == "rename" and "/manifest.json" in call.name]
        return min(len(calls), copied[0] + 4) if copied else len(calls)

    async def play(self, points: Sequence[Point]) -> None:
        """Play points, so many at a time."""
        waiting = iter(list(enumerate(points)))
        began, told = time.monotonic(), 0.0

        async def work() -> None:
            nonlocal told
            for place, point in waiting:
                await self._play(point)
                if time.monotonic() - told > 30:
                    told = time.monotonic()
                    self.say(f"{place + 1} of {len(points)} points, {told - began:.0f} s")

        async with trio.open_nursery() as nursery:
            for _ in range(self.jobs):
                nursery.start_soon(work)

    async def _play(self, point: Point) -> None:
        word = "not reached"
        for _ in range(TRIES):
            try:
                word, lives = await self._play_once(point)
            except (Broken, BaseExceptionGroup) as error:
                broken = only_broken(error)
                if broken is None:
                    raise
                word, lives = "broken", 0
                self.broken.append((point, str(broken)))
                self.say(f"BROKEN at {point}: {broken}")
            self.lives += lives
            if word != "not reached":
                break
        self.tally[point.kind if point.of == RUN else f"{point.of} {point.kind}", point.part, word] += 1

    async def _play_once(self, point: Point) -> tuple[str, int]:
        """Play a point; return how it went and how many processes that took."""
        if point.of != RUN:
            assert self.exports is not None, "they were begun"
            return await self.exports.play(point)
        outcome: Outcome
        if point.kind == FULL:
            folder = Path(tempfile.mkdtemp(prefix="disk-", dir=self.folder))
            async with small_disk(folder / "run", point.faults[0].number):
                scene = Scene(folder, self.context)
                outcome = await scene.play(point.faults, partial(make_room, folder / "run"))
            shutil.rmtree(folder)
        else:
            with scene_in(self.folder, self.context, Scene) as scene:
                outcome = await scene.play(point.faults)
        return outcome.word, len(outcome.lives)

    def table(self) -> str:
        """Return what happened, a line for each kind and part."""
        rows: list[tuple[str, ...]] = [("kind", "of", "points", *WORDS)]
        for kind, part in sorted({(kind, part) for kind, part, _ in self.tally}):
            counts = [self.tally[kind, part, word] for word in WORDS]
            rows.append((kind, part, str(sum(counts)), *(str(count or "-") for count in counts)))
        sums = [sum(n for (_, _, w), n in self.tally.items() if w == word) for word in WORDS]
        rows.append(("all", "", str(sum(sums)), *(str(count or "-") for count in sums)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            " ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )


async def _campaign(campaign: Campaign, chosen: argparse.Namespace) -> None:
    if chosen.long or chosen.real:
        await _long(campaign, chosen)
        return
    points = await _points(campaign, chosen)
    campaign.say(f"{len(points)} points, {campaign.jobs} at a time")
    await campaign.play(points)


async def _long(campaign: Campaign, chosen: argparse.Namespace) -> None:
    from crashing.long import LongScene, RealScene

    kind, rounds, kills = (RealScene, 60, 5) if chosen.real else (LongScene, 1000, 200)
    rounds, kills = chosen.rounds or rounds, kills if chosen.kills is None else chosen.kills
    seed = int(time.time()) if chosen.seed is None else chosen.seed
    campaign.say(f"{rounds} rounds, {kills} kills, seed {seed}")
    settings = {"rounds": rounds, "kills": kills, "seed": seed, "say": campaign.say}
    with scene_in(campaign.folder, campaign.context, kind, **settings) as scene:
        story = (await scene.play_long()).story
        assert story is not None
        campaign.say(
            f"step {story.step} after {scene.kills} kills, {len(story.resumed)} resumes; {story.superseded} "
            f"commits superseded; the ledger is what {len(story.commits)} merges sum to: {story.ledger}"
        )
        if isinstance(scene, RealScene):
            campaign.say(await scene.export())


async def _points(campaign: Campaign, chosen: argparse.Namespace) -> list[Point]:
    """Return the points that were asked for; begin what is needed to play them."""
    said = parse_point(chosen.point) if chosen.point is not None and ":" in chosen.point else None
    kinds = chosen.kind or KINDS
    if chosen.exports or (said is not None and said.of != RUN):
        points = await _exports(campaign, kinds)
    else:
        points = [] if said is not None else await _runs(campaign, kinds, thorough=chosen.most is None)
    if said is not None:
        return [said]
    if chosen.point is not None:
        wanted = int(chosen.point)
        if not 0 < wanted <= len(points):
            raise Broken(f"--point {wanted}: there are {len(points)} points")
        return [points[wanted - 1]]
    return points if chosen.most is None else thinned(points, chosen.most)


async def _runs(campaign: Campaign, kinds: Sequence[str], *, thorough: bool) -> list[Point]:
    calls, pages = await campaign.dry_run()
    parts = Counter(call.part for call in calls)
    counted = ", ".join(f"{count} of {part}" for part, count in parts.items())
    campaign.say(f"a run makes {len(calls)} calls that write: {counted}")
    firsts = interesting(calls)[: None if thorough else 1] if "kill" in kinds else []
    sizes = [await campaign.recovery(Point(kind="twice", faults=(first,))) for first in firsts]
    points = points_of(calls, max(sizes, default=1), kinds)
    for first, size in zip(firsts, sizes, strict=True):
        points += twice(first, size)
    if "enospc" in kinds:
        if await trio.to_thread.run_sync(can_mount, campaign.folder / "mounted"):
            points += full_disks(pages)
        else:
            campaign.say("no small disk can be mounted here: only made-up refusals stand for a full one")
    return points


async def _exports(campaign: Campaign, kinds: Sequence[str]) -> list[Point]:
    # Imported here: it takes the model library, which nothing else of this does.
    from crashing.export import Exports

    campaign.exports = Exports(campaign.folder / "exports", campaign.context)
    calls = await campaign.exports.begin()
    counted = " and ".join(str(len(some)) for some in calls.values())
    campaign.say(f"an export makes {counted} calls that write, with nothing to replace and with something")
    return [point for of, some in calls.items() for point in exports(some, of, kinds)]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/crash_campaign",
        description="A real syncer, killed or refused at every system call that writes, and resumed; "
        "exit code 1 when a rule breaks.",
    )
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="this kind of fault only; may be repeated"
    )
    parser.add_argument(
        "--point", metavar="N", help="this point only: its number, or its text (kill:tape:17)"
    )
    parser.add_argument("--exports", action="store_true", help="hit yeto-export instead of a syncer")
    parser.add_argument("--long", action="store_true", help="instead: fakes, a long run, kills at random")
    parser.add_argument("--real", action="store_true", help="instead: learners that train, and an export")
    parser.add_argument("--rounds", type=int, help="of --long (1000) or --real (60)")
    parser.add_argument("--kills", type=int, help="of --long (200) or --real (5)")
    parser.add_argument("--seed", type=int, help="of their chance; by default the time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="points at a time (one a core)")
    parser.add_argument("--most", type=int, metavar="N", help="at most so many points, spread evenly")
    parser.add_argument("--folder", type=Path, help="where the runs are (a new folder in the system's own)")
    chosen = parser.parse_args(words)
    if chosen.jobs < 1 or (chosen.most is not None and chosen.most < 1):
        parser.error("--jobs and --most: at least 1")
    try:
        if chosen.point is not None and not chosen.point.isdigit():
            parse_point(chosen.point)
    except ValueError as error:
        parser.error(
            f"--point {chosen.point}: {error} is none; for example kill:tape:17 or kill:tape:17:half"
        )
    folder = Path(tempfile.mkdtemp(prefix="yeto-crash-", dir=chosen.folder))
    campaign = Campaign(
        folder,
        processes(exports=chosen.exports or "/" in (chosen.point or "")),
        chosen.jobs,
        lambda line: print(line, flush=True),
    )
    began = time.monotonic()
    try:
        interrupted = trio.run(until_interrupted, partial(_campaign, campaign, chosen))
    except (Broken, BaseExceptionGroup) as error:
        broken = only_broken(error)
        if broken is None:
            raise
        print(f"BROKEN without any fault: {broken}\nwhat there is of it: {folder}", flush=True)
        return 1
    seconds = f"{time.monotonic() - began:.0f} s"
    print(f"{campaign.table()}\n{campaign.lives} processes in {seconds}" if campaign.tally else seconds)
    for point, why in campaign.broken:
        print(f"BROKEN: {why}\n  again: tools/crash_campaign --point {point}")
    if campaign.broken:
        return 1
    shutil.rmtree(folder)
    return EXIT_INTERRUPTED if interrupted else 0
