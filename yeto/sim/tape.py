"""The simulated syncer's tape: real lines, and a simulated disk that is behind by an fsync.

Everything that is appended while one fsync is under way goes into the next, as in the syncer. So when a
record becomes durable is known at the moment it is appended, and needs no event of its own. A crash cuts the
tape at any byte behind what is durable at that moment.

Without a path no line is made: what counts then is the order of the records, and a crash cuts between two.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from attrs import frozen

from yeto.core.decisions import Decision
from yeto.core.events import Event
from yeto.errors import TapeError
from yeto.tape import Header, PastFold, Record, encode
from yeto.tape.past import RELEVANT

WRITE_BUFFER_BYTES = 1 << 16
"""Small enough to stay in a cache of the core, beside everything else that is looked at all the time."""
MACHINE_SURVIVES = 0.25
"""How likely a crash takes nothing of the tape: only the process died."""


@frozen(kw_only=True)
class Tail:
    """Where a tape ends after a crash."""

    last_seq: int
    last_at: float


_Pending = tuple[int, float, int, int | None, Event | Decision]
"""A record that is not durable yet: its number, its time, the bytes (without a path: records) of the tape
up to its end, its ``because`` and its body."""


class SimTape:
    """One tape over all processes of a simulated syncer."""

    def __init__(
        self,
        path: Path | None,
        *,
        fsync_seconds: float,
        can_crash: bool = True,
        on_line: Callable[[bytes], None] | None = None,
    ) -> None:
        """Prepare; ``begin`` writes the header.

        Args:
            path: where to write; None writes nothing.
            fsync_seconds: how long an fsync takes.
            can_crash: whether ``crash`` may be called; then what is not durable yet is remembered.
            on_line: told every line, as soon as it is appended; makes lines without a path, too.

        Raises:
            TapeError: there is something at the path already.
        """
        self.path = path
        self._fsync_seconds = fsync_seconds
        self._can_crash = can_crash
        self._file: BinaryIO | None = None
        self._takers: list[Callable[[bytes], object]] = [] if on_line is None else [on_line]
        """Take every line; without any, no line is made."""
        if path is not None:
            try:
                self._file = open(path, "xb", buffering=WRITE_BUFFER_BYTES)  # noqa: SIM115
            except FileExistsError:
                raise TapeError(f"{path} exists already: name another tape, or remove it") from None
            except OSError as error:
                raise TapeError(f"{path}: cannot make the tape: {error.strerror}") from error
            self._takers.insert(0, self._file.write)
        self._flush_ends: float | None = None
        """When the fsync that is under way ends; None while there is none."""
        self.num_events = 0
        self.num_records = 0
        """Written over all processes, those that a crash cut away included."""

    def begin(self, header: Header) -> None:
        """Begin a tape with its header, durably; what was there is set aside, and here that means gone."""
        self._pending: deque[_Pending] = deque()
        self.past = PastFold()
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate()
        line = encode(seq=0, at=0.0, body=header)
        self._size = len(line) if self._takers else 1
        for take in self._takers:
            take(line)
        self.next_seq = 1
        self.num_records += 1
        self._durable_time = 0.0
        self._all_is_durable()

    def append_event(self, event: Event) -> int:
        """Append an event; return its number."""
        seq = self.next_seq
        self.num_events += 1
        self._append(event, None, event.at)
        return seq

    def append_decisions(self, decisions: Sequence[Decision], *, because: int, at: float) -> None:
        """Append what was decided about the last event."""
        if self._takers or self._can_crash:
            for decision in decisions:
                self._append(decision, because, at)
            return
        seq = self.next_seq
        self.next_seq = seq + len(decisions)
        self.num_records += len(decisions)
        self._size += len(decisions)
        for place, decision in enumerate(decisions, seq):
            if type(decision) in RELEVANT:
                self._fold(place, at, because, decision)

    def durable_at(self, now: float) -> float:
        """Return when what was just appended will be durable; to be asked after every event."""
        if self._flush_ends is not None and self._flush_ends <= now:
            self._flush(now)
        self._known_seq, self._known_size = self.next_seq - 1, self._size
        if self._flush_ends is None:
            self._batch_seq, self._batch_size = self._known_seq, self._known_size
            self._flush_ends = now + self._fsync_seconds
            return self._flush_ends
        # It goes out with the fsync after the one that is under way.
        return self._flush_ends + self._fsync_seconds

    def durable_seq(self, now: float) -> int:
        """Return the number of the last record that is durable."""
        self._flush(now)
        return self._durable_seq

    def crash(self, now: float, rng: random.Random) -> Tail:
        """The process is gone: cut the tape anywhere behind what is durable; return where it ends."""
        self._flush(now)
        # Often only the process dies: what it had written, the machine still writes to the disk.
        survives = rng.random() < MACHINE_SURVIVES
        cut = self._size if survives else rng.randint(self._durable_size, self._size)
        last_seq, last_at, end = self._durable_seq, self._durable_time, self._durable_size
        for seq, at, record_end, because, body in self._pending:
            if record_end > cut:
                break
            if type(body) in RELEVANT:
                self._fold(seq, at, because, body)
            last_seq, last_at, end = seq, at, record_end
        self._pending.clear()
        if self._file is not None:
            self._file.flush()
            os.ftruncate(self._file.fileno(), cut)
        self._size = end
        self._durable_time = last_at
        self.next_seq = last_seq + 1
        return Tail(last_seq=last_seq, last_at=last_at)

    def resume(self) -> None:
        """Open the tape again behind its last whole record; a torn one is cut away."""
        if self._file is not None:
            os.ftruncate(self._file.fileno(), self._size)
            self._file.seek(self._size)
        self._all_is_durable()

    def flush(self) -> Tail:
        """Make everything durable, and visible to whoever reads the file; return where it ends."""
        for seq, at, _, because, body in self._pending:
            self._durable_time = at
            if type(body) in RELEVANT:
                self._fold(seq, at, because, body)
        self._pending.clear()
        self._all_is_durable()
        if self._file is not None:
            self._file.flush()
        return Tail(last_seq=self._durable_seq, last_at=self._durable_time)

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._file is not None:
            self._file.close()

    def _append(self, body: Event | Decision, because: int | None, at: float) -> None:
        seq = self.next_seq
        self.next_seq = seq + 1
        self.num_records += 1
        if self._takers:
            line = encode(seq=seq, at=at, body=body, because=because)
            self._size += len(line)
            for take in self._takers:
                take(line)
        else:
            self._size += 1
        if self._can_crash:
            self._pending.append((seq, at, self._size, because, body))
            return
        self._durable_time = at
        if type(body) in RELEVANT:
            self._fold(seq, at, because, body)

    def _flush(self, now: float) -> None:
        """Let every fsync that has ended by now have ended."""
        pending = self._pending
        while self._flush_ends is not None and self._flush_ends <= now:
            durable = self._durable_seq = self._batch_seq
            self._durable_size = self._batch_size
            while pending and pending[0][0] <= durable:
                seq, self._durable_time, _, because, body = pending.popleft()
                if type(body) in RELEVANT:
                    self._fold(seq, self._durable_time, because, body)
            if self._known_seq > durable:
                self._batch_seq, self._batch_size = self._known_seq, self._known_size
                self._flush_ends += self._fsync_seconds
            else:
                self._flush_ends = None

    def _all_is_durable(self) -> None:
        self._durable_seq = self._batch_seq = self._known_seq = self.next_seq - 1
        self._durable_size = self._batch_size = self._known_size = self._size
        self._flush_ends = None

    def _fold(self, seq: int, at: float, because: int | None, body: Event | Decision) -> None:
        self.past.feed(Record(seq=seq, at=at, kind=body.kind, because=because, body=body))
