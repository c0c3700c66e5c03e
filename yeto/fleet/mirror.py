"""``python -m yeto.fleet.mirror push | restore``: a second home for a run, in a store.

A rented machine takes its disk with it. So beside the syncer, and apart from it, a process copies what the
syncer has made durable, whenever there is something new. It may lag; a syncer that goes on from what was
copied is then some merges behind its learners, which roll back to it. What it never has is half of anything:
see :mod:`yeto.fleet.mirror_copies` for what is there, :mod:`yeto.fleet.mirror_push` for the order in which it
gets there, and :mod:`yeto.fleet.mirror_restore` for the way back.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn, TypeVar

from yeto.errors import EXIT_INTERRUPTED, ConfigError, YetoError
from yeto.fleet.mirror_push import Pushed, Pusher, held_folder
from yeto.fleet.mirror_restore import restore, restoring
from yeto.fleet.mirror_tape import TapeCut
from yeto.fleet.store import StorageError, Store
from yeto.storage import Held, hold, size_text
from yeto.tape import printable

T = TypeVar("T")

INTERVAL_SECONDS: Final = 10.0
"""Time between two looks at what is new: about what a machine that vanishes costs in merges."""

INTERVAL_SECONDS_MAX: Final = 86_400.0
"""A mirror that looks less often than once a day is none."""

WAIT_SECONDS_MAX: Final = 60.0
"""Longest wait before a store that did not answer is asked again; it begins with one second and doubles."""

LAST_TRIES: Final = 6
"""Tries of the last push, and of a restore: half a minute of waiting in all."""

PROG: Final = "python -m yeto.fleet.mirror"

DESCRIPTION: Final = """Copy checkpoint and tape of a running syncer to a store, and bring them back.

push copies whatever is new, again and again, until SIGTERM or Ctrl-C; then
once more, and ends. restore brings the newest complete copy back where there is
no checkpoint; with nothing to restore it says so and exits with 0, so that a
machine that starts can always call it first.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with a line like that of any other command, and without the page above it."""
        self.exit(ConfigError.exit_code, printable(f"yeto: {message} (see {self.prog} --help)") + "\n")


def build() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(prog=PROG, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("push", "restore"), help="copy there until stopped, or bring back")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="FOLDER", help="the syncer's --checkpoint-path"
    )
    parser.add_argument(
        "--event-tape", type=Path, required=True, metavar="FILE", help="the syncer's --event-tape"
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="URI",
        help="where the mirror is: s3://BUCKET/RUN, gs://BUCKET/RUN, ... (with fsspec's package for it), or "
        "a folder; one place for one run",
    )
    parser.add_argument(
        "--interval-s",
        type=float,
        default=INTERVAL_SECONDS,
        metavar="SECONDS",
        help=f"push: time between two looks at what is new (default: {INTERVAL_SECONDS:g})",
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 done (also with nothing to restore), 1 failed, 2 wrong usage.
    """
    options = build().parse_args(words)
    try:
        if not 0 < options.interval_s <= INTERVAL_SECONDS_MAX:
            raise ConfigError(
                f"--interval-s {options.interval_s:g}: must be above 0 and at most {INTERVAL_SECONDS_MAX:g}"
            )
        store = Store(options.to)
        _check_places(store, options.checkpoint, options.event_tape)
        if options.what == "restore":
            with _held(options.checkpoint, "restore", "restores"):
                return _restore(store, options.checkpoint, options.event_tape)
        with _told_to_stop() as stop, _held(options.checkpoint, "mirror", "mirrors"):
            pusher = Pusher(store, options.checkpoint, options.event_tape, _say)
            return push_until(pusher, stop, options.interval_s)
    except YetoError as error:
        print(printable(f"yeto: {' '.join(str(error).split())}"), file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        print(printable(f"yeto: {error}"), file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("yeto: interrupted; the same command begins anew", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED


def push_until(pusher: Pusher, stop: threading.Event, interval_seconds: float) -> int:
    """Push whatever is new until ``stop`` is set, then a last time; return the exit code.

    Raises:
        YetoError: checkpoint or tape are damaged, somebody else writes there, the store will never take
            anything, or the last push failed.
    """
    failures, done, idle = 0, False, False
    while True:
        last = stop.is_set()
        wait = interval_seconds
        try:
            pushed = pusher.push()
            if pushed is not None:
                _say(_words(pushed))
            elif not (done or idle or last):
                idle = True
                _say(f"nothing new to copy yet; looking every {interval_seconds:g} s")
            done, failures = done or pushed is not None, 0
            if last:
                return 0
        except (StorageError, TapeCut) as error:
            failures += 1
            hopeless = isinstance(error, StorageError) and error.hopeless and not done
            if hopeless or (last and failures >= LAST_TRIES):
                raise
            wait = _wait_seconds(failures)
            _say(f"{error}; trying again in {wait:g} s")
        if last:
            threading.Event().wait(wait)
        elif stop.wait(wait):
            failures = 0


def _restore(store: Store, checkpoint: Path, tape: Path) -> int:
    restored = _patiently(lambda: restore(store, checkpoint, tape, _say))
    if restored is not None:
        index = restored.index
        _say(
            f"restored step {index.step} to {checkpoint} and {restored.records} records to {tape} "
            f"(copy {index.number} of {store.uri})"
        )
    return 0


def _patiently(ask: Callable[[], T]) -> T:
    """Ask a store, and ask again what it may answer later."""
    for tries in range(1, LAST_TRIES):
        try:
            return ask()
        except StorageError as error:
            if error.hopeless:
                raise
            _say(f"{error}; trying again in {_wait_seconds(tries):g} s")
            threading.Event().wait(_wait_seconds(tries))
    return ask()


def _wait_seconds(failures: int) -> float:
    return float(min(WAIT_SECONDS_MAX, 2.0 ** (failures - 1)))


def _words(pushed: Pushed) -> str:
    index = pushed.index
    return (
        f"copy {index.number}: step {index.step}, {size_text(index.tape_bytes)} of tape; {pushed.objects} "
        f"objects of {size_text(pushed.bytes)} copied in {pushed.seconds:.1f} s"
    )


@contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """Yield what is set by the first SIGTERM or Ctrl-C; the second one ends the process as usual."""
    stop = threading.Event()

    def heed(number: int, _: FrameType | None) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, heed) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_places(store: Store, checkpoint: Path, tape: Path) -> None:
    """Refuse places that are in each other's way.

    Raises:
        ConfigError: one of them is.
    """
    for flag, path in (("--checkpoint", checkpoint), ("--event-tape", tape)):
        if not path.name:
            raise ConfigError(f"{flag} {path}: has no name of its own; write it out")
    if _is_within(tape, checkpoint):
        raise ConfigError(
            f"--event-tape {tape}: is in the checkpoint's folder; a restore could not bring it back"
        )
    if store.folder is not None:
        for place in (checkpoint, held_folder(checkpoint), restoring(checkpoint), restoring(tape)):
            if _is_within(store.folder, place):
                raise ConfigError(
                    f"--to {store.uri}: is in {place}, which is not for it; name another folder"
                )


def _is_within(path: Path, folder: Path) -> bool:
    # Unlike Path.resolve, it lives with a link that leads to itself.
    there, found = (Path(os.path.realpath(one)) for one in (folder, path))
    return there in (found, *found.parents)


def _held(checkpoint: Path, name: str, does: str) -> Held:
    """Hold a checkpoint for this process, for one of the two things that are done to it here.

    Raises:
        ConfigError: another process of this machine does it.
    """
    taken = ConfigError(f"{checkpoint}: another process {does} it already")
    return hold(Path(f"{checkpoint}.{name}.lock"), taken)


def _say(line: str) -> None:
    print(printable(f"mirror: {line}"), flush=True)


if __name__ == "__main__":
    sys.exit(main())
