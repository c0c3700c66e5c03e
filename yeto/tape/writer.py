"""Writing a tape: one buffered append per record, one write and one fsync per batch.

The pump appends and goes on; it never waits for a disk. A worker thread, one at a time, flushes: everything
appended so far goes out in one write and one fsync, after which ``durable_seq`` tells which decisions may
be acted upon. When a write or an fsync fails, nothing of that batch may be believed, so the file is cut back
to the last durable record and the writer refuses to go on: the session stops on a tape that is whole.

A new tape is written aside with its header and renamed into place, so a tape without a header never exists.
One process writes a tape: it holds ``<tape>.lock`` from opening to close.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from attrs import frozen

from yeto.core.decisions import Decision
from yeto.core.events import Event
from yeto.errors import TapeError
from yeto.storage import Held, hold, sync_folder
from yeto.tape.codec import Decoder, encode
from yeto.tape.reader import complete_lines, no_header, open_tape
from yeto.tape.records import FORMAT_VERSION, RULES_VERSION, Header, Record

PENDING_BYTES_MAX = 64 << 20
"""Most that may wait for the disk. About a quarter of a million records: no disk that works falls so far
behind, and memory stays bounded on one that does not."""


class TapeFile:
    """The system calls of a tape file open for appending; a seam where faults can be put in."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def size(self) -> int:
        """Return the file's length in bytes."""
        return os.fstat(self._descriptor).st_size

    def write(self, data: bytes) -> None:
        """Append all of data. The kernel takes it in one write unless the disk fills up within."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """Make everything written durable."""
        os.fsync(self._descriptor)

    def cut(self, size: int) -> None:
        """Cut the file back to its first ``size`` bytes, durably."""
        os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


@frozen(kw_only=True)
class Tail:
    """Where a tape ended when it was opened again."""

    header: Header
    last_seq: int
    last_at: float
    """``at`` of the last record; the session's time goes on from here."""
    torn_bytes: int
    """Length of the torn tail behind it, which goes when something is written there; 0 without one."""


class TapeWriter:
    """Appends records to one tape; made by ``create`` and ``resume``.

    ``append_event`` and ``append_decisions`` belong to one thread; ``flush`` may run in another at the
    same time. Use it as a context manager, or call ``close``.
    """

    def __init__(
        self,
        file: TapeFile,
        lock: Held,
        *,
        name: str,
        next_seq: int,
        event_seq: int,
        at: float,
        whole_bytes: int,
    ) -> None:
        self._file = file
        self._lock = lock
        self._name = name
        self._next_seq = next_seq
        self._event_seq = event_seq
        self._at = at
        self._durable_seq = next_seq - 1
        self._durable_bytes = whole_bytes
        self._is_torn = file.size() > whole_bytes
        # append and popleft of a deque are atomic, which is all that pump and flusher need of each other.
        self._pending: deque[bytes] = deque()
        self._appended_bytes = self._durable_bytes
        self._flushing = threading.Lock()
        self._failure: str | None = None
        self._closed = False

    @classmethod
    def create(
        cls,
        path: str | PathLike[str],
        header: Header,
        *,
        open_file: Callable[[Path], TapeFile] = TapeFile,
    ) -> TapeWriter:
        """Make a new tape whose header is durable when this returns.

        Args:
            path: the tape; must not exist.
            header: its first line.
            open_file: opens a path for appending.

        Raises:
            TapeError: the tape exists, is being written by another process, or cannot be made.
        """
        target = Path(path)
        aside = target.with_name(target.name + ".new")
        lock = _locked(target)
        try:
            if target.exists():
                raise TapeError(
                    f"{target} exists already: go on with that run (--resume), "
                    f"or name another tape (--event-tape)"
                )
            # Left over by a process that died between writing and renaming; we hold the lock.
            aside.unlink(missing_ok=True)
            file = open_file(aside)
            try:
                file.write(encode(seq=0, at=0.0, body=header))
                file.sync()
                os.rename(aside, target)
                sync_folder(target.parent)
            except BaseException:
                file.close()
                aside.unlink(missing_ok=True)
                raise
            return cls(file, lock, name=str(target), next_seq=1, event_seq=0, at=0.0, whole_bytes=file.size())
        except OSError as error:
            lock.release()
            raise TapeError(f"{target}: cannot make the tape: {error.strerror}") from error
        except BaseException:
            lock.release()
            raise

    @classmethod
    def resume(
        cls,
        path: str | PathLike[str],
        *,
        feed: Callable[[Record], object] | None = None,
        open_file: Callable[[Path], TapeFile] = TapeFile,
    ) -> tuple[TapeWriter, Tail]:
        """Open a tape to write on: read it whole, to go on behind its last record.

        Not a byte is changed before something is written; only then is a torn tail cut away. So whoever
        opens a tape, and finds in it why it may not be gone on with, leaves it as it was.

        Args:
            path: the tape.
            feed: gets every record as it is read.
            open_file: opens a path for appending.

        Raises:
            TapeError: the tape is missing, damaged before its tail, of an older version, or being written by
                another process.
        """
        target = Path(path)
        lock = _locked(target)
        try:
            decoder = Decoder(str(target))
            header: Header | None = None
            event_seq = whole_bytes = 0
            with open_tape(target) as tape:
                for line in complete_lines(tape, str(target)):
                    record = decoder.decode(line)
                    whole_bytes += len(line)
                    if record.seq == 0:
                        assert isinstance(record.body, Header), "the decoder takes nothing else for the first"
                        header = record.body
                    elif record.because is None:
                        event_seq = record.seq
                    if feed is not None:
                        feed(record)
            if header is None:
                raise no_header(str(target))
            if (header.format_version, header.rules_version) != (FORMAT_VERSION, RULES_VERSION):
                raise TapeError(
                    f"{target} has format {header.format_version} and rules {header.rules_version}, this "
                    f"Yeto writes format {FORMAT_VERSION} by rules {RULES_VERSION}; name a new tape to "
                    f"go on (--event-tape): the checkpoint has all that is needed"
                )
            file = open_file(target)
            try:
                torn_bytes = file.size() - whole_bytes
                writer = cls(
                    file,
                    lock,
                    name=str(target),
                    next_seq=decoder.line,
                    event_seq=event_seq,
                    at=decoder.at,
                    whole_bytes=whole_bytes,
                )
            except BaseException:
                file.close()
                raise
        except OSError as error:
            lock.release()
            raise TapeError(f"{target}: cannot open the tape to write: {error.strerror}") from error
        except BaseException:
            lock.release()
            raise
        tail = Tail(header=header, last_seq=decoder.line - 1, last_at=decoder.at, torn_bytes=torn_bytes)
        return writer, tail

    @property
    def next_seq(self) -> int:
        """Number that the next record gets."""
        return self._next_seq

    @property
    def durable_seq(self) -> int:
        """Highest number of a record that is durable; decisions up to it may be acted upon."""
        return self._durable_seq

    def append_event(self, event: Event) -> int:
        """Buffer an event; return its number.

        Raises:
            TapeError: the tape failed before, time would go back, the disk is too far behind, or the
                event holds a value that cannot be written.
        """
        self._check()
        seq = self._next_seq
        if event.at < self._at:
            raise TapeError(f"{self._name}: record {seq}: at {event.at} lies before {self._at}")
        self._buffer((encode(seq=seq, at=event.at, body=event),))
        self._event_seq = seq
        self._at = event.at
        return seq

    def append_decisions(self, decisions: Sequence[Decision], *, because: int, at: float) -> None:
        """Buffer all decisions that the last event brought, or none.

        Args:
            decisions: in the order the coordinator gave them.
            because: number of their event, which must be the last one appended.
            at: that event's ``at``.

        Raises:
            TapeError: as ``append_event``.
        """
        self._check()
        if because != self._event_seq or because == 0 or at != self._at:
            raise TapeError(
                f"{self._name}: decisions because of {because} at {at} do not follow the last event, "
                f"{self._event_seq} at {self._at}"
            )
        if not decisions:
            return
        self._buffer(
            [
                encode(seq=seq, at=at, body=decision, because=because)
                for seq, decision in enumerate(decisions, self._next_seq)
            ]
        )

    def flush(self) -> int:
        """Make everything appended so far durable: one write, one fsync.

        Returns:
            The highest durable record number.

        Raises:
            TapeError: the disk refused; the tape was cut back to its last durable record, and every
                later call fails too.
        """
        with self._flushing:
            self._check()
            # What is appended from here on belongs to the next batch.
            count = len(self._pending)
            if count == 0:
                return self._durable_seq
            batch = b"".join([self._pending.popleft() for _ in range(count)])
            try:
                if self._is_torn:
                    self._file.cut(self._durable_bytes)
                    self._is_torn = False
                self._file.write(batch)
                self._file.sync()
            except OSError as error:
                self._fail(error)
            self._durable_bytes += len(batch)
            self._durable_seq += count
            return self._durable_seq

    def close(self) -> None:
        """Flush unless the tape failed, close it, give the lock back; a second call does nothing.

        Raises:
            TapeError: the last flush failed; the tape is closed all the same.
        """
        if self._closed:
            return
        try:
            if self._failure is None:
                self.flush()
        finally:
            self._closed = True
            self._file.close()
            self._lock.release()

    def __enter__(self) -> TapeWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise TapeError(self._failure)
        if self._closed:
            raise TapeError(f"{self._name}: the tape is closed")

    def _buffer(self, lines: Sequence[bytes]) -> None:
        size = sum(map(len, lines))
        waiting = self._appended_bytes - self._durable_bytes
        if waiting + size > PENDING_BYTES_MAX:
            raise TapeError(
                f"{self._name}: the disk is too slow: {waiting} bytes of records wait to be written; "
                f"put the tape on another disk (--event-tape)"
            )
        self._pending.extend(lines)
        self._next_seq += len(lines)
        self._appended_bytes += size

    def _fail(self, error: OSError) -> NoReturn:
        try:
            self._file.cut(self._durable_bytes)
            state = "the tape is whole up to there"
        except OSError as worse:
            state = f"what is left of it could not be cut away ({worse.strerror})"
        self._failure = (
            f"{self._name}: cannot write beyond record {self._durable_seq}: {error.strerror}; {state}; "
            f"make room on the disk and go on with --resume"
        )
        raise TapeError(self._failure) from error


def _locked(path: Path) -> Held:
    """Hold a tape for this process.

    Raises:
        TapeError: another process holds it, or the folder cannot be written.
    """
    lock = Path(f"{path}.lock")
    try:
        return hold(lock, TapeError(f"{path} is being written by another process ({lock} is held)"))
    except OSError as error:
        raise TapeError(f"{path}: cannot take its lock {lock}: {error.strerror}") from error
