"""A mutator without helpers: what it finds new ground with, it builds on.

New ground is a step from one line to another, within the code that reads what peers send, that no input has
taken before. The interpreter's own tracing tells of it, so nothing has to be compiled or installed.
"""

from __future__ import annotations

import random
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType

from attrs import define, field, frozen

from fuzzing.limits import INPUT_BYTES_MAX, INPUT_SECONDS
from yeto.wire.frames import MAGIC

WATCHED = ("/yeto/wire/", "/yeto/link/", "/yeto/syncer/", "/yeto/learner/")
STEPS_MAX = 6
"""Changes made to an input at a time."""
REPORT_SECONDS = 5.0

Target = Callable[[bytes], object]
Step = tuple[CodeType, int, int]

NUMBERS = [
    0,
    1,
    2,
    12,
    16,
    48,
    127,
    128,
    255,
    256,
    2**16 - 1,
    2**22,
    2**31,
    2**32 - 1,
    2**53,
    2**63,
    2**64 - 1,
]
"""Integers at which something may change."""
TOKENS = [
    struct.pack("<I", MAGIC),
    *(struct.pack("<IB", MAGIC, kind) for kind in range(17)),
    b"\xc3",
    b"[",
    b"{",
]


class Hang(Exception):
    """An input took too long."""


@frozen
class Crash:
    """An input that a target does not take as it should."""

    data: bytes
    error: BaseException


@define
class Outcome:
    """What came of a run."""

    executions: int = 0
    pool: list[bytes] = field(factory=list)
    """Inputs that each found new ground, in the order they were found."""
    steps: set[Step] = field(factory=set)
    crash: Crash | None = None


def fuzz(
    target: Target,
    seeds: Iterable[bytes],
    *,
    seconds: float,
    rng: random.Random,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Change inputs and try them, until the time is over or one crashes.

    Args:
        target: raises on a bug.
        seeds: what to begin with; all of them are tried.
        seconds: how long.
        rng: chance.
        report: told every few seconds.
    """
    outcome = Outcome()
    until = time.monotonic() + seconds
    report_at = time.monotonic() + REPORT_SECONDS
    inputs = _endless(list(seeds) or [b""], outcome.pool, rng)
    while outcome.crash is None and (time.monotonic() < until or outcome.executions == 0):
        data = next(inputs)
        outcome.executions += 1
        found: set[Step] = set()
        try:
            with _traced(found), _limited():
                target(data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome.crash = Crash(data, error)
        if not found <= outcome.steps:
            outcome.steps |= found
            outcome.pool.append(data)
        if time.monotonic() >= report_at:
            report_at += REPORT_SECONDS
            report(outcome)
    return outcome


def distilled(target: Target, inputs: Iterable[bytes]) -> list[bytes]:
    """Return inputs, short ones first, that together reach all that these reach."""
    steps: set[Step] = set()
    kept = []
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        found: set[Step] = set()
        with _traced(found):
            target(data)
        if not found <= steps:
            steps |= found
            kept.append(data)
    return kept


def _endless(seeds: Sequence[bytes], pool: list[bytes], rng: random.Random) -> Iterator[bytes]:
    yield from seeds
    while True:
        yield mutated(rng, [*seeds, *pool] if rng.random() < 0.1 else pool or seeds)


def mutated(rng: random.Random, pool: Sequence[bytes]) -> bytes:
    """Return an input of the pool with a few changes."""
    data = bytearray(rng.choice(pool))
    for _ in range(rng.randint(1, STEPS_MAX)):
        _change(rng, data, pool)
    return bytes(data[:INPUT_BYTES_MAX])


def _change(rng: random.Random, data: bytearray, pool: Sequence[bytes]) -> None:
    place = rng.randint(0, len(data))
    end = min(len(data), place + rng.choice((1, 4, 8, 13, 37, 200)))
    match rng.randrange(8):
        case 0 if place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        case 1 if place < len(data):
            data[place] = rng.randrange(256)
        case 2:
            code = rng.choice("BHIQ")
            number = rng.choice(NUMBERS) + rng.randint(-1, 1)
            size = struct.calcsize(code)
            data[place : place + size] = (number % 256**size).to_bytes(size, "little")
        case 3:
            data[place:place] = rng.choice(TOKENS)
        case 4:
            del data[place:end]
        case 5:
            data[end:end] = data[place:end]
        case 6:
            other = rng.choice(pool)
            start = rng.randint(0, len(other))
            data[place:] = other[start:]
        case _:
            other = rng.choice(pool)
            start = rng.randint(0, len(other))
            data[place:place] = other[start : start + rng.choice((1, 8, 37, 200))]


@contextmanager
def _traced(found: set[Step]) -> Iterator[None]:
    """Collect the steps between lines of the watched code."""
    watched: dict[CodeType, bool] = _WATCHED

    def enter(frame: FrameType, event: str, arg: object) -> object:
        code = frame.f_code
        wanted = watched.get(code)
        if wanted is None:
            wanted = watched[code] = any(part in code.co_filename for part in WATCHED)
        if not wanted:
            return None
        last = 0

        def line(frame: FrameType, event: str, arg: object) -> object:
            nonlocal last
            found.add((code, last, frame.f_lineno))
            last = frame.f_lineno
            return line

        return line

    before = sys.gettrace()
    sys.settrace(enter)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.settrace(before)


_WATCHED: dict[CodeType, bool] = {}


@contextmanager
def _limited() -> Iterator[None]:
    """Raise `Hang` in an input that takes too long; main thread only."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"still running after {INPUT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    alarm = signal.setitimer(signal.ITIMER_REAL, INPUT_SECONDS)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *alarm)  # somebody else's, or none
