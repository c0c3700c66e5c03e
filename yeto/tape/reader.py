"""Reading a tape: line by line, in constant memory, to the last record that is whole.

Only LF ends a record, so bytes behind the last LF are a *torn tail*: the writer was cut off, or is writing
at this moment. Wherever the cut went through, also if all but the LF is there, the outcome is the same: the
last record does not count. Damage before the last LF is never skipped, it is an error with its line.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import BinaryIO

from attrs import frozen

from yeto.core.events import SessionResumed
from yeto.errors import TapeError
from yeto.tape.codec import LINE_BYTES_MAX, Decoder
from yeto.tape.records import FORMAT_VERSION, Header, Record


def no_header(name: str) -> TapeError:
    """Return the error of a tape without a single record; no writer of ours leaves one."""
    return TapeError(f"{name}: line 1: no header: the tape holds no record, remove it and start anew")


def open_tape(path: str | PathLike[str]) -> BinaryIO:
    """Open a tape for reading.

    Raises:
        TapeError: there is no such file, or it cannot be read, or not twice.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - whoever asked closes it
    except FileNotFoundError:
        raise TapeError(
            f"{path}: no such tape; a syncer writes events.jsonl in the folder it is started in, "
            "yeto run --role local in its --run-dir"
        ) from None
    except IsADirectoryError:
        raise TapeError(f"{path}: is a folder; name the tape in it, such as events.jsonl") from None
    except OSError as error:
        raise TapeError(f"{path}: cannot be read: {error.strerror}") from error
    if not file.seekable():
        file.close()
        raise TapeError(f"{path}: is a pipe, and a tape is read more than once: write it to a file")
    return file


def complete_lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the lines from the file's position on, LF included, up to a torn tail.

    Args:
        file: a tape, open for reading.
        name: the tape's name in messages.

    Raises:
        TapeError: a line is longer than any record can be; so it is no tape, or no LF is left in it.
    """
    while line := file.readline(LINE_BYTES_MAX + 1):
        if line[-1:] == b"\n":
            yield line
        elif len(line) > LINE_BYTES_MAX:
            raise TapeError(f"{name}: a line of more than {LINE_BYTES_MAX} bytes: this is not a tape")
        else:
            return


def read(path: str | PathLike[str]) -> Iterator[Record]:
    """Yield the records of a tape, the header first; a torn tail is left out.

    Raises:
        TapeError: the tape is missing, damaged before its tail, or of a newer version; names file, line
            and field.
    """
    decoder = Decoder(str(path))
    with open_tape(path) as file:
        for line in complete_lines(file, str(path)):
            yield decoder.decode(line)
    if decoder.line == 0:
        raise no_header(str(path))


@frozen(kw_only=True)
class Restart:
    """A ``session_resumed`` on a tape: commits above ``step`` that stand before it are superseded."""

    seq: int
    step: int


def find_restarts(path: str | PathLike[str], *, until: int | None = None) -> tuple[Restart, ...]:
    """Return the restarts of a tape up to record ``until``, in order.

    A fold over the tape needs them beforehand: a commit counts only if no later restart fell back below
    it, and a fold that had to take back commits would have to remember them all. Lines of other kinds are
    not decoded, so this pass costs little, and says nothing about their health.

    Raises:
        TapeError: the tape cannot be read, or such a record is damaged.
    """
    restarts: list[Restart] = []
    version = FORMAT_VERSION
    kind = SessionResumed.kind.encode()
    with open_tape(path) as file:
        for seq, line in enumerate(complete_lines(file, str(path))):
            if until is not None and seq > until:
                break
            # A string that merely mentions the kind is sorted out by decoding.
            if seq == 0 or kind in line:
                body = Decoder(str(path), line=seq, format_version=version).decode(line).body
                if isinstance(body, Header):
                    version = body.format_version
                elif isinstance(body, SessionResumed):
                    restarts.append(Restart(seq=seq, step=body.step))
    return tuple(restarts)
