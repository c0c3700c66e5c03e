"""The learner: what a syncer costs a step, and whether boundaries leave something behind in memory.

Two runs of the same training in turn: alone (``--syncer none``), and with a syncer in another process on this
machine, which merges each fragment every 24 steps. Both have the first of the cores that there are, the
syncer has the last one: so the learner's network thread takes its time from training, as it does where every
core is busy. A sample is the mean over the steps of one run, without the first ones: by the wall, and in CPU
seconds of all the learner's threads, which leave out the turns of others on a shared machine.

Memory is that of a fresh process that crosses boundaries and does nothing else: each brings a broadcast and a
pull, each answer is encoded.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import trio
from attrs import frozen

from benchmarks.figures import Report, Target, figure_of
from benchmarks.timing import Spent, cpu_clock, in_child, reset_peak, wall_clock
from yeto.layout import build_layout
from yeto.learner.anchors import FragmentBook
from yeto.learner.app import Learner
from yeto.learner.boundary import Boundary
from yeto.learner.config import NO_SYNCER, LearnerConfig
from yeto.learner.exchanged import Broadcast, Pull
from yeto.learner.fragments import LiveFragments
from yeto.learner.loop import StepResult
from yeto.learner.mailbox import Arrivals, Departures
from yeto.learner.progress import Progress
from yeto.learner.push import encode_push
from yeto.learner.stopwatch import Stopwatch
from yeto.text import build_task
from yeto.text.config import TextConfig

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "fixtures" / "tiny-llama"
CHATS = ROOT / "fixtures" / "chat" / "train.jsonl"
READY_SECONDS = 60.0
FIRST_STEPS = 3
"""Steps at the beginning that are not counted: they allocate, and the anchors arrive."""
INTERVAL_STEPS = 24
"""Steps between two merges of one fragment, the default; of eight fragments one is due every third step."""
ON_THE_THREAD = ("boundary", "receive", "send")
SAME_TINY = Target(sense="at most", number=1.10, of="ratio")
SAME_LARGE = Target(sense="at most", number=1.03, of="ratio")
FLAT = Target(sense="at most", number=64, of="value")
"""Bytes a boundary: less than any object that a boundary could leave behind, more than pages of the heap."""
FRAGMENTS, NUMEL = 4, 16 * 1024


def measure(*, repeats: int, steps: int, boundaries: int, model: Path | None = None) -> Report:
    """Measure the learner.

    Args:
        repeats: pairs of runs.
        steps: of each run, more than ``FIRST_STEPS``.
        boundaries: crossed while memory is watched.
        model: folder of another model than the tiny one.
    """
    cores = sorted(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    alone: list[Run] = []
    together: list[Run] = []
    with TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        try:
            with a_syncer(folder, cores[-1]) as address:
                os.sched_setaffinity(0, {cores[0]})
                for turn in range(repeats):
                    pair = (NO_SYNCER, address) if turn % 2 == 0 else (address, NO_SYNCER)
                    for syncer in pair:
                        run = train(folder / "out", syncer, steps, MODEL if model is None else model)
                        (alone if syncer == NO_SYNCER else together).append(run)
        finally:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(threads)
    return Report(
        benchmark="learner",
        what="optimizer steps with a syncer on this machine and without; wall and CPU seconds",
        settings={
            "repeats": repeats,
            "steps": steps,
            "interval_steps": INTERVAL_STEPS,
            "pushes_a_run": round(sum(run.pushes for run in together) / repeats, 1),
            "boundaries": boundaries,
        },
        figures=(
            figure_of(
                "step_milliseconds",
                "step, with a syncer",
                "ms",
                [1e3 * run.step_seconds for run in together],
                peer="--syncer none",
                peer_values=[1e3 * run.step_seconds for run in alone],
                target=SAME_TINY if model is None else SAME_LARGE,
            ),
            figure_of(
                "step_cpu_milliseconds",
                "the same, CPU of all threads",
                "ms",
                [1e3 * run.cpu_seconds for run in together],
                peer="--syncer none",
                peer_values=[1e3 * run.cpu_seconds for run in alone],
            ),
            figure_of(
                "boundary_milliseconds",
                "of a step in the boundary",
                "ms",
                [1e3 * run.boundary_seconds for run in together],
            ),
            figure_of(
                "growth_bytes_per_boundary",
                "memory that a boundary leaves",
                "bytes",
                in_child(partial(growth, boundaries)),
                target=FLAT,
            ),
        ),
        notes=() if len(cores) > 1 else ("there is one core only, which learner and syncer share",),
    )


@frozen(kw_only=True)
class Run:
    """What one run took."""

    step_seconds: float
    """Mean from the end of one step to the end of the next."""
    cpu_seconds: float
    """The same of the whole process."""
    boundary_seconds: float
    """Mean for each step on the training thread: looking, receiving, sending."""
    pushes: int


class Times(Progress):
    """Progress that nobody sees, with the moment of every step."""

    def __init__(self) -> None:
        super().__init__(learner_id=0, stream=io.StringIO())
        self.at: list[Spent] = []
        self.seconds: dict[str, float] = {}
        self.pushes = 0

    def stepped(self, result: StepResult, *, local_step: int, tokens: int) -> None:
        """Note the moment."""
        super().stepped(result, local_step=local_step, tokens=tokens)
        self.at.append(Spent(cpu_clock(), wall_clock()))

    def answered(self, answer: object) -> None:
        """Count it."""
        self.pushes += 1

    def ended(self, code: int, reason: str, *, seconds: dict[str, float], empty_groups: int) -> None:
        """Keep the budget of the training thread."""
        self.seconds = seconds


def train(output: Path, syncer: str, steps: int, model: Path) -> Run:
    """Train in this process, with all that a learner has but signals and a terminal."""
    config = LearnerConfig(
        syncer=syncer, output_dir=output, max_local_steps=steps, torch_threads=1, warmup_steps=0
    )
    text = TextConfig(model=str(model), data=str(CHATS), seq_len=64, micro_batch_size=2, stream_workers=0)
    with Times() as times:
        outcome = trio.run(Learner(config, partial(build_task, text), times).run)
    if len(times.at) != steps:
        raise RuntimeError(f"the learner ended after {len(times.at)} of {steps} steps: {outcome.reason}")
    first, last = times.at[FIRST_STEPS - 1], times.at[-1]
    return Run(
        step_seconds=(last.wall - first.wall) / (steps - FIRST_STEPS),
        cpu_seconds=(last.cpu - first.cpu) / (steps - FIRST_STEPS),
        boundary_seconds=sum(times.seconds.get(name, 0.0) for name in ON_THE_THREAD) / steps,
        pushes=times.pushes,
    )


@contextlib.contextmanager
def a_syncer(folder: Path, core: int) -> Iterator[str]:
    """Run a syncer on one core, for one learner that comes back for every run; yield its address."""
    ready = folder / "ready.json"
    here = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        with (folder / "syncer.txt").open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "yeto", "run", "--role", "syncer", "--port=0", "--learners=1"),
                    *("--quorum=1", "--total-steps=1000000", f"--sync-interval-steps={INTERVAL_STEPS}"),
                    *(f"--ready-file={ready}", f"--checkpoint-path={folder / 'yeto-state.ckpt'}"),
                    f"--event-tape={folder / 'events.jsonl'}",
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
    finally:
        os.sched_setaffinity(0, here)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no syncer: {(folder / 'syncer.txt').read_text()}")
            time.sleep(0.02)
        yield f"127.0.0.1:{json.loads(ready.read_text())['port']}"
    finally:
        process.kill()
        process.wait()


def growth(boundaries: int) -> list[float]:
    """Cross boundaries, each with a broadcast and a pull; return the bytes that each left, in two halves."""
    parameters = {
        f"layers.{index}.weight": torch.nn.Parameter(torch.zeros(NUMEL)) for index in range(FRAGMENTS)
    }
    layout = build_layout(dict.fromkeys(parameters, (NUMEL,)), fragments=FRAGMENTS)
    book = FragmentBook(num_fragments=FRAGMENTS, alpha=0.5, error_feedback=True)
    arrivals = Arrivals()
    departures = Departures(ring_pushes=lambda: None, ring_news=lambda: None)
    boundary = Boundary(
        fragments=LiveFragments(layout, parameters),
        book=book,
        arrivals=arrivals,
        departures=departures,
        stopwatch=Stopwatch(),
        on_broadcast=lambda broadcast, receipt: None,
        on_answer=lambda answer: None,
    )
    arrivals.begin_generation(1)
    departures.begin_generation()
    values = np.ones(NUMEL, dtype=np.float32)
    step = pushes = 0

    def cross(count: int) -> None:
        nonlocal step, pushes
        for _ in range(count):
            fragment = step % FRAGMENTS
            arrivals.put_broadcast(
                Broadcast(
                    generation=1, fragment=fragment, version=step, digest=str(step), values=values.copy()
                )
            )
            arrivals.put_pull(Pull(generation=1, fragment=fragment, step=step + FRAGMENTS, attempt=1))
            book.count_step(128)
            boundary.cross(step)
            step += 1
            while (push := departures.take_push()) is not None:
                encode_push(push, 0, "q4")
                pushes += 1

    cross(max(100, boundaries // 10))
    left = []
    for _ in range(2):
        before = reset_peak()
        first = step
        cross(boundaries // 2)
        left.append(max(0.0, (reset_peak() - before) / (step - first)))
    # A pull is answered a step after the broadcast that came with it; the last one waits still.
    if pushes != step - 1:
        raise RuntimeError(f"{step} boundaries were crossed with {pushes} pushes")
    return left
