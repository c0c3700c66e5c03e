"""``yeto replay``: proves that a tape follows the rules, then says what happened on it.

Each flag is one pass over the tape in constant memory: every line is verified by the replayer, and handed
on to whatever was asked for. Needs neither the model nor the tensors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from yeto.cli.replay_checkpoint import manifest_differences
from yeto.cli.replay_print import (
    print_difference,
    print_divergence,
    print_json,
    print_record,
    print_summary,
    verdict_json,
)
from yeto.core import State
from yeto.core.decisions import SessionEnded
from yeto.core.events import SessionResumed
from yeto.errors import ConfigError, TapeError
from yeto.tape import (
    Record,
    Replayer,
    RoundStory,
    Summary,
    complete_lines,
    find_restarts,
    first_difference,
    open_tape,
    state_to_json,
)

FOLLOW_SECONDS = 0.5
"""How often ``--follow`` looks for new records: often enough for eyes, too seldom to burden a disk."""


def replay_command(
    path: Annotated[Path, Parameter(help="The tape (events.jsonl).")],
    /,
    *,
    until: Annotated[int | None, Parameter(help="Stop behind this record (its seq).")] = None,
    show_state: Annotated[
        bool, Parameter(name="--state", negative=(), help="Print the coordinator's state as JSON.")
    ] = False,
    round_step: Annotated[
        int | None, Parameter(name="--round", help="Tell the story of one round, record by record.")
    ] = None,
    checkpoint: Annotated[
        Path | None, Parameter(help="Check that this checkpoint is what the tape says it is.")
    ] = None,
    diff: Annotated[Path | None, Parameter(help="Show the first record where another tape differs.")] = None,
    follow: Annotated[
        bool, Parameter(negative=(), help="Print and verify records as they are written, until the end.")
    ] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON, for programs.")] = False,
) -> int:
    """Re-step a tape, verify every decision, and say what happened.

    The exit code is 0 when every decision follows from its events and 1 when one does not, when the tape is
    damaged, or when what it was compared with (--checkpoint, --diff) differs.
    """
    given = {
        "--state": show_state,
        "--round": round_step is not None,
        "--checkpoint": checkpoint is not None,
        "--diff": diff is not None,
        "--follow": follow,
    }
    asked = [flag for flag, is_given in given.items() if is_given]
    if len(asked) > 1:
        raise ConfigError(f"{asked[0]} and {asked[1]}: ask for one of them at a time")
    if until is not None and (diff is not None or follow):
        raise ConfigError(f"--until does not go with {asked[0]}")
    if diff is not None:
        return _diff(path, diff, as_json=as_json)
    if follow:
        return _follow(path, as_json=as_json)
    replayer = Replayer(str(path))
    records = _verified(path, replayer, until)
    if round_step is not None:
        return _tell_round(path, records, replayer, round_step, as_json=as_json)
    if checkpoint is not None:
        return _check_checkpoint(path, records, replayer, checkpoint, as_json=as_json)
    if show_state:
        return _show_state(path, records, replayer, as_json=as_json)
    summary = Summary(find_restarts(path, until=until))
    for record in records:
        summary.feed(record)
    if as_json:
        print_json({**verdict_json(path, replayer), "summary": summary.to_json()})
    elif replayer.divergence is None:
        print(f"{path}: {replayer.records} records, every decision follows from its events\n")
        print_summary(summary, replayer)
    else:
        print_divergence(path, replayer, as_json=False)
    return 0 if replayer.divergence is None else 1


def _verified(path: Path, replayer: Replayer, until: int | None) -> Iterator[Record]:
    """Yield the records of a tape as they are verified, up to the first divergence."""
    last = -1
    with open_tape(path) as file:
        for line in complete_lines(file, str(path)):
            record = replayer.feed(line)
            last = record.seq
            yield record
            if replayer.divergence is not None or last == until:
                return
    replayer.result()  # a tape without a header is an error, and not an empty one
    if until is not None:
        raise ConfigError(f"--until {until}: the tape ends with record {last}")


def _show_state(path: Path, records: Iterator[Record], replayer: Replayer, *, as_json: bool) -> int:
    for _ in records:
        pass
    if replayer.divergence is not None:
        return print_divergence(path, replayer, as_json=as_json)
    print_json(state_to_json(replayer.state))
    return 0


def _tell_round(
    path: Path, records: Iterator[Record], replayer: Replayer, step: int, *, as_json: bool
) -> int:
    story = RoundStory(step)
    for record in records:
        if story.concerns(record):
            print_record(record, as_json=as_json)
    if replayer.divergence is not None:
        return print_divergence(path, replayer, as_json=as_json)
    if not story.found:
        raise ConfigError(f"--round {step}: no attempt of it was opened; {replayer.state.step} are committed")
    return 0


def _check_checkpoint(
    path: Path, records: Iterator[Record], replayer: Replayer, checkpoint: Path, *, as_json: bool
) -> int:
    # Imported here: nothing else of this command needs what a manifest is checked with.
    from yeto.state import read_manifest

    manifest = read_manifest(checkpoint)
    reached: State | None = None
    for _ in records:
        # The last time that the tape was at this step; the times before it are superseded.
        if replayer.state.step == manifest.step:
            reached = replayer.state
    if replayer.divergence is not None:
        return print_divergence(path, replayer, as_json=as_json)
    if reached is None:
        wrong = [f"the checkpoint is of step {manifest.step}, the tape ends at step {replayer.state.step}"]
    else:
        wrong = manifest_differences(manifest, reached)
    if as_json:
        print_json({"checkpoint": str(checkpoint), "step": manifest.step, "differences": wrong})
    elif wrong:
        print(f"{checkpoint}: not what the tape says")
        print("\n".join(f"  {sentence}" for sentence in wrong))
    else:
        print(f"{checkpoint}: step {manifest.step}, versions, digests and ledger are what the tape says")
    return 1 if wrong else 0


def _diff(left: Path, right: Path, *, as_json: bool) -> int:
    difference = first_difference(left, right)
    print_difference(left, right, difference, as_json=as_json)
    return 0 if difference is None else 1


def _follow(path: Path, *, as_json: bool, sleep: Callable[[float], None] = time.sleep) -> int:
    """Print and verify records as they come, until the session ends (or Ctrl-C)."""
    replayer = Replayer(str(path))
    done = 0
    ended = False
    with open_tape(path) as file:
        while True:
            if os.fstat(file.fileno()).st_size < done:
                raise TapeError(f"{path}: records that were read are gone again: its writer failed")
            # A torn tail is read again from its beginning: the rest may be on its way.
            file.seek(done)
            for line in complete_lines(file, str(path)):
                done += len(line)
                record = replayer.feed(line)
                print_record(record, as_json=as_json)
                if replayer.divergence is not None:
                    return print_divergence(path, replayer, as_json=as_json)
                if isinstance(record.body, SessionEnded | SessionResumed):
                    ended = isinstance(record.body, SessionEnded)
            if ended and replayer.due == 0:
                return 0
            sleep(FOLLOW_SECONDS)
