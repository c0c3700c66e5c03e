"""Following a tape while it is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from yeto.errors import TapeError
from yeto.tape import Decoder, Record, complete_lines, open_tape


class TapeFollower:
    """Reads what was added to a tape since the last look; a tape that is not there yet has nothing."""

    def __init__(self, path: Path) -> None:
        """Begin at the tape's first record."""
        self._path = path
        self._decoder = Decoder(str(path))
        self._done = 0

    def poll(self) -> Iterator[Record]:
        """Yield the records that are whole by now and were not yielded before.

        Raises:
            TapeError: the tape is damaged, or records that were read are gone again.
        """
        if not self._path.exists():
            return
        with open_tape(self._path) as file:
            if os.fstat(file.fileno()).st_size < self._done:
                raise TapeError(f"{self._path}: records that were read are gone again: its writer failed")
            file.seek(self._done)
            for line in complete_lines(file, str(self._path)):
                self._done += len(line)
                yield self._decoder.decode(line)
