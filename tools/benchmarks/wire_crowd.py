"""A crowd: hundreds of connected learners with tiny fragments, through a whole syncer.

The syncer is ``yeto run --role syncer`` in a process of its own, with its tape and a checkpoint after every
commit, as anybody starts it. The learners are bare ones (`benchmarks.wire_learners`), in a few processes
beside it; they answer each pull at once, and every round waits for all of them. So what is left is what the
syncer does for each push whatever its size: a pull, a look at the header, an examination, four records on the
tape, a share of a merge, a broadcast.

Pushes are counted on the tape. The learners need the machine, too, so the syncer's own processor time for a
push is told beside the rate.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Final

from attrs import frozen

from benchmarks.figures import Figure, Target, figure_of
from benchmarks.wire_learners import Fleet, live, tiny_layout
from yeto.core.decisions import PushAccepted, RoundCommitted
from yeto.tape import read

STREAMS: Final = 4
NUMEL: Final = 64
FRAGMENTS: Final = 4
SKIPPED_ROUNDS: Final = FRAGMENTS
"""Not counted: the first of each fragment, in which caches and compiled loops are filled."""
PROCESSES: Final = 2
"""The learners are spread over so many."""
PUSHES_PER_SECOND: Final = Target(sense="at least", number=1000, of="value")
START_SECONDS: Final = 120.0
RUN_SECONDS: Final = 300.0


@frozen(kw_only=True)
class Crowd:
    """What a run of many learners came to."""

    pushes_per_second: list[float]
    """Of each stretch of rounds, one for each fragment; not of the first."""
    syncer_microseconds: float
    """Processor time of the syncer's process for each push, from when all are connected to the end."""
    learners_microseconds: float
    """The same of all learners' processes."""


def crowd_figures(*, learners: int, rounds: int) -> list[Figure]:
    """Measure pushes a second through the whole syncer.

    Args:
        learners: M, all of them in every round.
        rounds: global steps that are counted.
    """
    crowd = run_crowd(learners=learners, rounds=rounds, processes=PROCESSES)
    return [
        figure_of(
            "crowd_pushes_per_second",
            f"{learners} learners, tiny fragments",
            "pushes/s",
            crowd.pushes_per_second,
            target=PUSHES_PER_SECOND,
        ),
        figure_of(
            "crowd_syncer_microseconds_per_push",
            "the same, processor time of the syncer",
            "µs/push",
            [crowd.syncer_microseconds],
            peer="all the learners",
            peer_values=[crowd.learners_microseconds],
        ),
    ]


def run_crowd(
    *, learners: int, rounds: int, processes: int, flags: Mapping[str, object] | None = None
) -> Crowd:
    """Run a syncer with many learners to the end of its session.

    Args:
        learners: M, all of them in every round.
        rounds: global steps that are counted.
        processes: the learners are spread over so many.
        flags: more of the syncer's, without their dashes.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        total = rounds + SKIPPED_ROUNDS
        syncer = stack.enter_context(_syncer(folder, learners, total, flags or {}))
        stack.callback(syncer.kill)
        address = _address(folder / "ready.json", syncer)
        context = multiprocessing.get_context("spawn")
        connected = context.Semaphore(0)
        shares = [list(range(first, learners, processes)) for first in range(processes)]
        host, port = address
        fleet = Fleet(
            host=host,
            port=port,
            layout=tiny_layout(FRAGMENTS, NUMEL),
            dtype="bf16",
            num_streams=STREAMS,
        )
        children = [
            context.Process(target=live, args=(fleet, share, connected), daemon=True) for share in shares
        ]
        for child in children:
            child.start()
            stack.callback(child.kill)
        ends = time.monotonic() + START_SECONDS
        for _ in children:
            while not connected.acquire(timeout=0.2):
                if time.monotonic() > ends or not all(child.is_alive() for child in children):
                    raise RuntimeError("the learners did not connect")
        began, learners_began = _cpu_seconds(syncer.pid), sum(_cpu_seconds(child.pid) for child in children)
        ended = _ended_seconds()
        ends = time.monotonic() + RUN_SECONDS
        while syncer.poll() is None:
            if time.monotonic() > ends:
                raise RuntimeError(f"the syncer has not ended after {RUN_SECONDS:g} s")
            time.sleep(0.05)
        spent = _ended_seconds() - ended
        if syncer.returncode != 0:
            raise RuntimeError((folder / "syncer.log").read_text()[-2000:])
        for child in children:
            child.join()
        learner_spent = _ended_seconds() - ended - spent
        return _counted(folder / "events.jsonl", spent - began, learner_spent - learners_began)


def _syncer(
    folder: Path, learners: int, total_steps: int, more: Mapping[str, object]
) -> subprocess.Popen[bytes]:
    words = {
        "learners": learners,
        "quorum": learners,
        "total-steps": total_steps,
        "sync-interval-steps": 0,
        "port": 0,
        "ready-file": folder / "ready.json",
        "checkpoint-path": folder / "state.ckpt",
        "event-tape": folder / "events.jsonl",
        **more,
    }
    flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    with (folder / "syncer.log").open("wb") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "yeto",
                "run",
                "--role",
                "syncer",
                *flags,
            ],
            stdout=subprocess.DEVNULL,
            stderr=log,
        )


def _address(path: Path, syncer: subprocess.Popen[bytes]) -> tuple[str, int]:
    ends = time.monotonic() + START_SECONDS
    while not path.exists():
        if syncer.poll() is not None or time.monotonic() > ends:
            raise RuntimeError("the syncer did not start")
        time.sleep(0.02)
    said = json.loads(path.read_text())
    return said["host"], said["port"]


def _cpu_seconds(pid: int | None) -> float:
    """Return the processor time of a process's threads; 0 when it is gone."""
    nanoseconds = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    except (OSError, IndexError):
        return 0.0
    return 1e-9 * nanoseconds


def _ended_seconds() -> float:
    """Return the processor time of all children that have ended and were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _counted(tape: Path, cpu: float, learner_cpu: float) -> Crowd:
    accepted, stretches = 0, []
    for record in read(tape):
        if isinstance(record.body, PushAccepted):
            accepted += 1
        elif isinstance(record.body, RoundCommitted) and record.body.step % FRAGMENTS == 0:
            stretches.append((record.at, accepted))
    return Crowd(
        pushes_per_second=[
            (after - before) / (ends - begins) for (begins, before), (ends, after) in pairwise(stretches)
        ],
        syncer_microseconds=1e6 * cpu / accepted,
        learners_microseconds=1e6 * learner_cpu / accepted,
    )
