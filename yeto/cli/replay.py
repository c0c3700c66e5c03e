"""``yeto replay``: proves that a tape follows the rules, then says what happened on it.

Each flag is one pass over the tape: every line is verified by the replayer, and handed on to whatever was
asked for. Needs neither the model nor the tensors, and what only one flag needs is imported for that flag.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

from cyclopts import Parameter

from yeto.cli.reading import Reading
from yeto.cli.replay_checkpoint import check_checkpoint
from yeto.cli.replay_print import (
    print_difference,
    print_divergence,
    print_json,
    print_record,
    print_summary,
    verdict_json,
)
from yeto.cli.replay_round import RoundTeller, tell_round
from yeto.core.decisions import SessionEnded
from yeto.core.events import SessionResumed
from yeto.errors import ConfigError, TapeError
from yeto.tape import (
    Record,
    Replayer,
    Summary,
    complete_lines,
    find_restarts,
    first_difference,
    open_tape,
    state_to_json,
)

FOLLOW_SECONDS = 0.5
"""How often ``--follow`` looks for new records: often enough for eyes, too seldom to burden a disk."""

TOGETHER = ({"--round", "--follow"}, {"--round", "--what-if"})
"""Questions that may be asked at a time: of what is followed or decided anew, only that of one round."""


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
        Path | None, Parameter(help="Check that this checkpoint, files and all, is what the tape says it is.")
    ] = None,
    what_if: Annotated[
        str | None,
        Parameter(
            help="Decide every attempt anew under another policy, such as grace-ms=0,quorum=1: when it would "
            "have been sealed, and with whom."
        ),
    ] = None,
    diff: Annotated[
        Path | None,
        Parameter(
            help="Show the first record where another tape differs: a copy, or a simulation of the same "
            "seed. Other runs differ from the start."
        ),
    ] = None,
    follow: Annotated[
        bool, Parameter(negative=(), help="Print and verify records as they are written, until the end.")
    ] = False,
    tensors: Annotated[
        Path | None,
        Parameter(help="Execute every merge again from this recording (--record-payloads of the syncer)."),
    ] = None,
    threads: Annotated[
        int | None,
        Parameter(help="Threads of --tensors; the results do not depend on their number. Default: 1."),
    ] = None,
    as_json: Annotated[
        bool, Parameter(name="--json", negative=(), help="Print JSON on stdout, and nothing else.")
    ] = False,
) -> int:
    """Re-step a tape, verify every decision, and say what happened.

    The exit code is 0 when every decision follows from its events and 1 when one does not, when the tape is
    damaged, or when what it was compared with (--checkpoint, --diff, --tensors) differs.
    """
    given = {
        "--state": show_state,
        "--round": round_step is not None,
        "--checkpoint": checkpoint is not None,
        "--diff": diff is not None,
        "--follow": follow,
        "--tensors": tensors is not None,
        "--what-if": what_if is not None,
    }
    asked = [flag for flag, is_given in given.items() if is_given]
    if len(asked) > 1 and set(asked) not in TOGETHER:
        raise ConfigError(f"{asked[0]} and {asked[1]}: ask for one of them at a time")
    if until is not None and follow:
        raise ConfigError("--until does not go with --follow")
    if until is not None and until < 0:
        raise ConfigError(f"--until {until}: records are numbered from 0")
    if round_step is not None and round_step < 1:
        raise ConfigError(f"--round {round_step}: rounds are numbered from 1")
    if threads is not None and tensors is None:
        raise ConfigError(f"--threads {threads} goes with --tensors")
    if diff is not None:
        return _diff(path, diff, until, as_json=as_json)
    if follow:
        return _follow(path, round_step, as_json=as_json)
    replayer = Replayer(str(path))
    # Executing it again is slower, and has a progress of its own.
    progress = Reading("yeto replay", path) if tensors is None else lambda _: None
    records = _verified(path, replayer, until, progress)
    if what_if is not None:
        from yeto.cli.replay_what_if import decide_anew

        return decide_anew(path, records, replayer, what_if, step=round_step, as_json=as_json)
    if round_step is not None:
        restarts = find_restarts(path, until=until)
        return tell_round(path, records, replayer, round_step, restarts=restarts, as_json=as_json)
    if checkpoint is not None:
        return check_checkpoint(path, records, replayer, checkpoint, as_json=as_json)
    if tensors is not None:
        # Imported here: nothing else of this command needs torch.
        from yeto.cli.replay_tensors import check_tensors

        return check_tensors(
            path, records, replayer, tensors, threads=1 if threads is None else threads, as_json=as_json
        )
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


def _verified(
    path: Path, replayer: Replayer, until: int | None, progress: Callable[[float], None]
) -> Iterator[Record]:
    """Yield the records of a tape as they are verified, up to the first divergence."""
    last, done = -1, 0
    with open_tape(path) as file:
        size = os.fstat(file.fileno()).st_size
        for line in complete_lines(file, str(path)):
            record = replayer.feed(line)
            last = record.seq
            yield record
            done += len(line)
            progress(min(1.0, done / size))
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


def _diff(left: Path, right: Path, until: int | None, *, as_json: bool) -> int:
    difference = first_difference(left, right, until=until)
    print_difference(left, right, difference, as_json=as_json)
    return 0 if difference is None else 1


def _is_still(file: BinaryIO, path: Path) -> bool:
    """Return whether an open file is what stands at a path: it may have been moved, removed or replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _follow(
    path: Path,
    step: int | None = None,
    *,
    as_json: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print and verify records as they come (all, or of one round) until the session ends, or Ctrl-C."""
    replayer = Replayer(str(path))
    teller = None if step is None else RoundTeller(step, as_json=as_json)
    done = 0
    ended = False
    with open_tape(path) as file:
        while True:
            if os.fstat(file.fileno()).st_size < done:
                raise TapeError(f"{path}: records that were read are gone again: its writer failed")
            if not _is_still(file, path):
                raise TapeError(f"{path}: the tape that was followed is no longer there: follow the new one")
            # A torn tail is read again from its beginning: the rest may be on its way.
            file.seek(done)
            for line in complete_lines(file, str(path)):
                done += len(line)
                record = replayer.feed(line)
                if teller is None:
                    print_record(record, as_json=as_json)
                else:
                    teller.feed(record)
                if replayer.divergence is not None:
                    return print_divergence(path, replayer, as_json=as_json)
                if isinstance(record.body, SessionEnded | SessionResumed):
                    ended = isinstance(record.body, SessionEnded)
            if ended and replayer.due == 0:
                break
            sleep(FOLLOW_SECONDS)
    if teller is not None:
        teller.finish(replayer.state)
    return 0
