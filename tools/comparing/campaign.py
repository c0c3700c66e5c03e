"""All runs of a comparison, one after the other or side by side, and what is said on the way."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence

import trio
from attrs import define, field, frozen

from comparing.groups import Place, train_arm, train_baseline
from comparing.logs import read_logs
from comparing.measured import measure
from comparing.processes import RunFailed
from comparing.recipe import Recipe
from comparing.results import BASE, Folder, Result
from comparing.scoring import score
from comparing.settings import Arm, baseline_name
from comparing.summary import differs, percent_over
from yeto.errors import YetoError


@frozen(kw_only=True)
class Run:
    """One run to do."""

    name: str
    seed: int | None
    devices: int = 0
    arm: Arm | None = None

    @property
    def key(self) -> tuple[str, int | None]:
        """What names it."""
        return self.name, self.seed

    @property
    def title(self) -> str:
        """What it is called on the way."""
        return self.name if self.seed is None else f"{self.name} seed {self.seed}"


def plan(arms: Sequence[Arm], seeds: Sequence[int]) -> list[Run]:
    """Return all runs: the untrained model, then seed by seed the baselines and the arms beside them."""
    runs = [Run(name=BASE, seed=None)]
    for seed in seeds:
        sizes = sorted({arm.learners * arm.ranks for arm in arms})
        runs += [Run(name=baseline_name(size), seed=seed, devices=size) for size in sizes]
        runs += [Run(name=arm.name, seed=seed, devices=arm.learners * arm.ranks, arm=arm) for arm in arms]
    return runs


@define(kw_only=True)
class Campaign:
    """Does the runs that are missing."""

    recipe: Recipe
    folder: Folder
    runs: list[Run]
    done: dict[tuple[str, int | None], Result]
    jobs: int = 1
    before_finish: bool = False
    failures: list[str] = field(factory=list)
    _began: float = 0.0
    _finished: int = 0
    _refused: bool = False
    """Whether the model or the held-out rows, which all runs share, cannot be used."""

    @property
    def missing(self) -> list[Run]:
        """The runs without a result."""
        return [run for run in self.runs if run.key not in self.done]

    async def go(self) -> None:
        """Do them; a run that fails is told of and left out, the others are done.

        The untrained model is scored before anything else begins. Where that is refused, the others would
        all be: it is told once, and nothing else is tried.
        """
        missing = self.missing
        self._began, total = time.monotonic(), len(missing)
        limiter = trio.CapacityLimiter(self.jobs)
        if missing and missing[0].seed is None:
            await limiter.acquire_on_behalf_of(missing[0].key)
            await self._one(missing[0], limiter, total)
            if self._refused:
                return
        async with trio.open_nursery() as nursery:
            for run in missing[self._finished :]:
                # In the order of the plan: whoever is started first takes the first place.
                await limiter.acquire_on_behalf_of(run.key)
                nursery.start_soon(self._one, run, limiter, total)

    async def _one(self, run: Run, limiter: trio.CapacityLimiter, total: int) -> None:
        try:
            result = await self._run(run)
            self.folder.keep(result)
        except* (YetoError, OSError) as group:
            failure: BaseException = group
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
            self._refused = run.seed is None and isinstance(failure, RunFailed)
            self.failures.append(f"{run.title}: {failure}")
            self._say(run, f"FAILED: {failure}", total)
        else:
            self.done[run.key] = result
            self._say(run, self._words(run, result), total)
        finally:
            limiter.release_on_behalf_of(run.key)

    async def _run(self, run: Run) -> Result:
        began = time.monotonic()
        place = Place(self.folder.run(run.name, run.seed))
        # Of one that was cut off nothing is believed.
        if place.folder.exists():
            shutil.rmtree(place.folder)
        place.folder.mkdir(parents=True)
        config, threads = self.recipe.text_config(), self.recipe.flags.torch_threads or 1
        if run.seed is None:
            found = await score(config, place.folder, None, threads=threads)
            return Result(
                name=run.name,
                seed=None,
                devices=0,
                steps=0,
                loss=found.loss,
                scored_targets=found.targets,
                scored_rows=found.rows,
                seconds=time.monotonic() - began,
            )
        before = None
        if run.arm is None:
            await train_baseline(self.recipe, run.seed, run.devices, place)
            found = await score(config, place.folder, place.result, threads=threads)
            logs = [place.steps(0)]
        else:
            await train_arm(self.recipe, run.arm, run.seed, place, keep_cut_off=self.before_finish)
            found = await score(config, place.folder, place.result, place.checkpoint, threads=threads)
            if self.before_finish:
                cut_off = await score(
                    config, place.folder, place.folder / "result-cut-off", place.cut_off, threads=threads
                )
                before = cut_off.loss
            logs = [place.steps(learner) for learner in range(run.arm.learners)]
        trained = read_logs(logs)
        return Result(
            name=run.name,
            seed=run.seed,
            devices=run.devices,
            steps=len(trained.targets),
            loss=found.loss,
            scored_targets=found.targets,
            scored_rows=found.rows,
            tokens=trained.tokens,
            targets=trained.targets,
            curve=trained.curve,
            training_seconds=trained.seconds,
            seconds=time.monotonic() - began,
            before_finish=before,
            in_flight_steps=trained.in_flight_steps,
            measured=None if run.arm is None else measure(place.tape).to_json(),
        )

    def _words(self, run: Run, result: Result) -> str:
        words = f"CE {result.loss:.4f}"
        baseline = None if run.arm is None else self.done.get((run.arm.baseline, run.seed))
        if baseline is not None and run.arm is not None:
            why = differs(result, baseline)
            if why is None:
                words += f" ({percent_over(result.loss, baseline.loss):+.2f} % over {run.arm.baseline})"
            else:
                words += f" INVALID: {why}"
        interval = (result.measured or {}).get("interval_steps")
        return words + ("" if interval is None else f", H {interval:g}")

    def _say(self, run: Run, words: str, total: int) -> None:
        self._finished += 1
        elapsed = time.monotonic() - self._began
        left = f"about {_span((total - self._finished) * elapsed / self._finished)} left"
        if self._refused:
            left = "and the others are not tried: they share what was refused"
        print(f"[{self._finished}/{total}] {run.title}: {words}; {_span(elapsed)} so far, {left}", flush=True)


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
