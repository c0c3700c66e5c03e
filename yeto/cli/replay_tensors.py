"""``yeto replay --tensors``: executes every merge of a tape again from the recorded payloads."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from yeto.cli.replay_print import print_divergence, print_json, verdict_json
from yeto.errors import ConfigError
from yeto.syncer.payloads import Arithmetic
from yeto.syncer.recorded import Difference
from yeto.syncer.reexecute import Reexecution, reexecuting
from yeto.syncer.reexecute_round import CLOSE, Kind
from yeto.tape import Record, Replayer, printable

PROGRESS_SECONDS = 5.0
"""Time between two lines of progress: a check that is done sooner says nothing but its result."""

THREADS_MAX = 1024
"""More than any machine has cores; the system has no room for millions of threads."""


def check_tensors(
    path: Path, records: Iterator[Record], replayer: Replayer, folder: Path, *, threads: int, as_json: bool
) -> int:
    """Execute a tape again while it is verified; say what came of it.

    Args:
        path: the tape.
        records: its records as they are verified.
        replayer: what verifies them.
        folder: the recording.
        threads: threads of torch and of ours.
        as_json: print JSON.

    Returns:
        0 when every recorded round came to what the tape says, else 1.

    Raises:
        RecordingError: there is no recording, or it is of another session.
    """
    if not 1 <= threads <= THREADS_MAX:
        raise ConfigError(f"--threads {threads}: must lie between 1 and {THREADS_MAX}")
    with reexecuting(folder, str(path), threads=threads) as execution:
        said = time.monotonic()
        for record in records:
            if replayer.divergence is not None:
                break
            execution.feed(record, replayer.state)
            if execution.difference is not None:
                break
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                print(_progress(execution, replayer), file=sys.stderr, flush=True)
        if replayer.divergence is None:
            execution.finish()
    if execution.difference is None and replayer.divergence is not None:
        return print_divergence(path, replayer, as_json=as_json)
    if as_json:
        print_json({**verdict_json(path, replayer), "tensors": _to_json(execution, folder, threads)})
    elif execution.difference is not None:
        print(printable(execution.difference.sentence))
    else:
        print(f"{path}: {replayer.records} records, every decision follows from its events")
        print("\n".join(printable(f"{folder}: {line}") for line in _sentences(execution, threads)))
    return 0 if execution.difference is None else 1


def _progress(execution: Reexecution, replayer: Replayer) -> str:
    state = replayer.state
    return f"yeto: {execution.rounds} rounds executed again, the tape is at {state.step} of {state.target}"


def _sentences(execution: Reexecution, threads: int) -> list[str]:
    """Return what to tell a person of a run that could be executed again."""
    done = execution.outcomes
    equal, iso, close = done[Kind.EQUAL], done[Kind.ISO_EQUAL], done[Kind.ISO_CLOSE]
    on = "1 thread" if threads == 1 else f"{threads} threads"
    lines = [f"{equal} of {equal} average and RDA merges are bit-equal ({on})"]
    if iso or close:
        line = f"{iso} of {iso + close} iso merges are bit-equal"
        if close:
            elsewhere = " and on ".join(sorted(map(_computer, execution.close_to)))
            line += (
                f", {close} are close (within {CLOSE:g}): computed on {elsewhere}, "
                f"here it is {_computer(Arithmetic.here())}"
            )
        lines.append(line)
    if done[Kind.NO_OP]:
        lines.append(f"commits that moved nothing, as the tape says (all weights 0): {done[Kind.NO_OP]}")
    if execution.superseded:
        lines.append(f"commits superseded by a restart, executed all the same: {execution.superseded}")
    if execution.not_recorded:
        starts = ", ".join(map(str, execution.not_recorded_starts))
        lines.append(
            "commits NOT executed, because the syncer ran without --record-payloads from record "
            f"{starts} on: {execution.not_recorded}"
        )
    return lines


def _to_json(execution: Reexecution, folder: Path, threads: int) -> dict[str, Any]:
    done = execution.outcomes
    return {
        "recording": str(folder),
        "threads": threads,
        "average_and_rda_bit_equal": done[Kind.EQUAL],
        "iso_bit_equal": done[Kind.ISO_EQUAL],
        "iso_close": done[Kind.ISO_CLOSE],
        "no_op": done[Kind.NO_OP],
        "superseded": execution.superseded,
        "not_recorded": execution.not_recorded,
        "difference": _difference_json(execution.difference),
    }


def _difference_json(difference: Difference | None) -> dict[str, Any] | None:
    return None if difference is None else {"sentence": difference.sentence, **attrs.asdict(difference)}


def _computer(arithmetic: Arithmetic) -> str:
    backend, device = arithmetic.iso_backend, arithmetic.device
    return f"{arithmetic.machine} with torch {arithmetic.torch_version} ({backend} on {device})"
