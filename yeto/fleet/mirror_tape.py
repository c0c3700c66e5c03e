"""The tape of a run as its mirror sees it: read on while a syncer writes to it, to the last whole line.

Records are folded for what they say about checkpoints, so that no copy has a checkpoint of which its tape
does not tell: a syncer refuses to go on from such a pair. A tape may also be cut back, by a write that failed
or a machine that lost its power, and go on with other records from there. So the last line that was read is
looked at again before each further reading, and if it has changed the whole tape is.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from yeto.errors import TapeError, YetoError
from yeto.fleet.mirror_copies import Segment
from yeto.state import Manifest
from yeto.tape import Decoder, Header, Mark, PastFold, complete_lines
from yeto.tape.past import RELEVANT_KINDS
from yeto.wire.digest import RunningDigest, digest

SEGMENT_BYTES: Final = 8 << 20
"""Length that a segment of a long tape has, and above which it is never written again."""

SMALL_SEGMENTS_MAX: Final = 32
"""So many shorter ones at the end are written again as one, so that there are never many."""

MARKS_KEPT: Final = 64
"""Checkpoints that are remembered from the tape; the newest on disk is among the last few it orders."""

READ_BYTES: Final = 1 << 20


class TapeCut(YetoError):
    """The tape is shorter than it was when it was read; its writer is recovering, so look again later."""


class LocalTape:
    """A tape that somebody else writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self.reading = 0
        """Counts how often it was read from its beginning, because it is not what it was."""
        self._begin()

    @property
    def session_id(self) -> str | None:
        """Which run it is; None before its first line is there."""
        return self._session_id

    @property
    def end(self) -> int:
        """Bytes of the whole lines read so far."""
        return self._end

    def read_on(self) -> None:
        """Read what is new.

        Raises:
            TapeError: the tape is damaged before its last line.
        """
        try:
            with self._path.open("rb") as file:
                if self._changed(file.fileno()):
                    self._begin()
                    self._identity = _identity(file.fileno())
                file.seek(self._end)
                for line in complete_lines(file, str(self._path)):
                    self._take(line)
        except FileNotFoundError:
            self._begin()
        except OSError as error:
            raise TapeError(f"{self._path}: cannot be read: {error.strerror}") from error

    def tells_of(self, manifest: Manifest) -> bool:
        """Return whether the tape orders this very checkpoint, or resumed from it."""
        digests = {entry.fragment: entry.params_digest for entry in manifest.fragments}
        return any(
            (mark.step, mark.digests) == (manifest.step, digests) and mark.seq in (None, manifest.tape_seq)
            for mark in self._marks
        )

    def unchanged(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """Return the segments from the first on that the tape still begins with.

        Raises:
            OSError: it cannot be read.
        """
        same: list[Segment] = []
        with self._path.open("rb") as file:
            for segment in segments:
                if segment.end > self._end or _digest_of(file.fileno(), segment) != segment.digest:
                    break
                same.append(segment)
        return tuple(same)

    def cut(self, segments: Sequence[Segment]) -> Iterator[tuple[Segment, bytes]]:
        """Yield the segments that are wanted behind others, with their bytes, up to what was read.

        Args:
            segments: what the mirror has, from the first byte on. Many short ones at its end are taken anew,
                as one.

        Raises:
            TapeCut: the tape is shorter than it was.
            OSError: it cannot be read.
        """
        if segments and segments[-1].end == self._end:
            return
        staying = kept(segments)
        start = staying[-1].end if staying else 0
        with self._path.open("rb") as file:
            while start < self._end:
                data = self._lines(file.fileno(), start)
                yield Segment(start=start, bytes=len(data), digest=digest(data)), data
                start += len(data)

    def _lines(self, descriptor: int, start: int) -> bytes:
        """Return whole lines from a byte on: as many as a segment has, or one that is longer."""
        data = b""
        while start + len(data) < self._end:
            size = min(SEGMENT_BYTES, self._end - start - len(data))
            more = os.pread(descriptor, size, start + len(data))
            if not more:
                raise TapeCut(f"{self._path}: was cut back while it was read")
            data += more
            whole = data.rfind(b"\n") + 1
            if whole and len(data) >= SEGMENT_BYTES:
                return data[:whole]
        return data

    def _begin(self) -> None:
        self.reading += 1
        self._decoder = Decoder(str(self._path))
        self._fold = PastFold()
        self._marks: deque[Mark] = deque(maxlen=MARKS_KEPT)
        self._session_id: str | None = None
        self._identity = None
        self._end = 0
        self._last_line = b""

    def _take(self, line: bytes) -> None:
        record = self._decoder.decode(line)
        if isinstance(record.body, Header):
            self._session_id = record.body.session_id
        if record.kind in RELEVANT_KINDS and (mark := self._fold.feed(record)) is not None:
            self._marks.append(mark)
        self._end += len(line)
        self._last_line = line

    def _changed(self, descriptor: int) -> bool:
        if self._identity != _identity(descriptor):
            return True
        begin = self._end - len(self._last_line)
        return os.pread(descriptor, len(self._last_line), begin) != self._last_line


def kept(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return the segments that stay when one more is written: all, unless too many at the end are short."""
    long = len(segments)
    while long and segments[long - 1].bytes < SEGMENT_BYTES // 2:
        long -= 1
    return tuple(segments if len(segments) - long < SMALL_SEGMENTS_MAX else segments[:long])


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _digest_of(descriptor: int, segment: Segment) -> str:
    running, place = RunningDigest(), segment.start
    while place < segment.end:
        data = os.pread(descriptor, min(READ_BYTES, segment.end - place), place)
        if not data:
            break
        running.update(data)
        place += len(data)
    return running.hex()
