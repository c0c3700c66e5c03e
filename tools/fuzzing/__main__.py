"""Fuzz what reads the bytes of peers.

    tools/fuzz --seconds 60                  every target, an equal share of the time each
    tools/fuzz --target hello --seconds 600  one of them
    tools/fuzz --grow                        and keep what reaches new ground in fixtures/wire/corpus
    tools/fuzz --replay FILE --target hello  try one input once more, with its traceback

With atheris installed (pip install -e '.[fuzz]') libFuzzer does it, else a mutator of our own. Prints for
each target how often it ran, how much of the code it reached, and what was found. A crash leaves its input
in a file and ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import logging
import math
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from attrs import frozen
from fuzz_targets import TARGETS, examples
from rich.console import Console
from rich.table import Table

from fuzzing import corpus
from fuzzing.plain import Outcome, distilled, fuzz

OUTPUT = corpus.ROOT / "runs" / "fuzz"
LEAVE_SECONDS = 30.0
"""Longest that libFuzzer may take beyond its time."""
PULSE = re.compile(r"#(\d+)\s+(\w+)\s+cov: (\d+) .*?corp: (\d+)")
console = Console(highlight=False, soft_wrap=True)


@frozen(kw_only=True)
class Row:
    """What came of one target."""

    target: str
    executions: int
    coverage: int
    inputs: list[bytes]
    """What it was found with, the corpus included."""
    seconds: float
    crash: Path | None = None


def run_plain(name: str, seconds: float, output: Path, seed: int) -> Row:
    """Fuzz one target in this process."""
    began = time.monotonic()

    def report(outcome: Outcome) -> None:
        console.print(f"  {name}: {outcome.executions:,} runs, {len(outcome.steps):,} steps")

    seeds = [*examples(name), *corpus.read(name)]
    outcome = fuzz(TARGETS[name], seeds, seconds=seconds, rng=random.Random(seed), report=report)
    crash = None
    if outcome.crash is not None:
        output.mkdir(parents=True, exist_ok=True)
        crash = output / f"crash-{name}-{hashlib.sha1(outcome.crash.data).hexdigest()[:16]}"
        crash.write_bytes(outcome.crash.data)
        console.print("".join(traceback.format_exception(outcome.crash.error)), markup=False)
    return Row(
        target=name,
        executions=outcome.executions,
        coverage=len(outcome.steps),
        inputs=[*seeds, *outcome.pool],
        seconds=time.monotonic() - began,
        crash=crash,
    )


def run_atheris(name: str, seconds: float, output: Path) -> Row:
    """Fuzz one target with libFuzzer, in a child."""
    began = time.monotonic()
    executions = coverage = 0
    last_words: list[str] = []
    output.mkdir(parents=True, exist_ok=True)
    before = set(output.glob(f"crash-{name}-*"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for number, data in enumerate([*examples(name), *corpus.read(name)]):
            (folder / f"{number:05d}").write_bytes(data)
        words = [sys.executable, "-m", "fuzzing.with_atheris", name, scratch, f"{seconds:.0f}", str(output)]
        with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as child:
            assert child.stderr is not None
            for line in child.stderr:
                last_words = [*last_words[-40:], line.rstrip()]
                pulse = PULSE.match(line)
                if pulse is not None:
                    executions, coverage = int(pulse[1]), int(pulse[3])
                    if pulse[2] in ("pulse", "DONE"):
                        console.print(f"  {name}: {executions:,} runs, {coverage:,} edges, corpus {pulse[4]}")
                elif line.startswith("stat::number_of_executed_units:"):
                    executions = int(line.split()[1])
            code = child.wait(LEAVE_SECONDS)
        found = sorted(set(output.glob(f"crash-{name}-*")) - before)
        if code != 0:
            console.print("\n".join(last_words), markup=False)
            if not found:
                raise SystemExit(f"tools/fuzz: the fuzzer of {name} ended with {code} and left no input")
        inputs = [path.read_bytes() for path in sorted(folder.iterdir())]
    return Row(
        target=name,
        executions=executions,
        coverage=coverage,
        inputs=inputs,
        seconds=time.monotonic() - began,
        crash=found[0] if found else None,
    )


def grow(row: Row) -> int:
    """Keep the fewest inputs that reach what this run reached; return how many."""
    kept = distilled(TARGETS[row.target], row.inputs)
    corpus.write(row.target, kept)
    return len(kept)


def replay(name: str, path: Path) -> int:
    """Try one input; its exception comes out as it is."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SystemExit(f"tools/fuzz: --replay {path}: {error.strerror}") from None
    TARGETS[name](data)
    console.print(f"{path}: {name} takes it as it should")
    return 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="all targets together (60)")
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), help="only this; may be repeated"
    )
    parser.add_argument("--engine", choices=("auto", "atheris", "plain"), default="auto")
    parser.add_argument(
        "--seed", type=int, default=None, help="chance of the plain engine; by default the time"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where crashing inputs go (runs/fuzz)")
    parser.add_argument("--grow", action="store_true", help="keep what reaches new ground in the corpus")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="try this input and nothing else")
    chosen = parser.parse_args(words)
    names = chosen.target or list(TARGETS)
    if not 0 < chosen.seconds < math.inf:
        parser.error(f"--seconds {chosen.seconds:g}: must be finite and above 0")
    if chosen.replay is not None:
        if len(names) != 1:
            parser.error("--replay needs the --target of its file")
        return replay(names[0], chosen.replay)
    has_atheris = importlib.util.find_spec("atheris") is not None
    if chosen.engine == "atheris" and not has_atheris:
        parser.error(
            "--engine atheris: not installed; pip install -e '.[fuzz]' brings it where there is a build"
        )
    engine = "atheris" if has_atheris and chosen.engine != "plain" else "plain"
    seed = int(time.time()) if chosen.seed is None else chosen.seed
    console.print(
        f"{len(names)} targets, {chosen.seconds:g} s, engine {engine}"
        + (f", seed {seed}" if engine == "plain" else "")
    )
    rows = []
    for name in names:
        share = max(1.0, chosen.seconds / len(names))
        run = run_atheris(name, share, chosen.output) if engine == "atheris" else None
        rows.append(run or run_plain(name, share, chosen.output, seed))
    table = Table("target", "runs", "runs/s", "steps" if engine == "plain" else "edges", "inputs", "found")
    for row in rows:
        kept = f"{grow(row)} kept" if chosen.grow and row.crash is None else f"{len(row.inputs)}"
        table.add_row(
            row.target,
            f"{row.executions:,}",
            f"{row.executions / row.seconds:,.0f}",
            f"{row.coverage:,}",
            kept,
            "nothing" if row.crash is None else "CRASH",
        )
    console.print(table)
    crashes = [row for row in rows if row.crash is not None]
    for row in crashes:
        console.print(f"{row.crash}: see tools/fuzz --target {row.target} --replay {row.crash}")
    return 1 if crashes else 0


if __name__ == "__main__":
    # What a connection is ended for is worth a line in a run, and a million here.
    logging.disable(logging.CRITICAL)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
