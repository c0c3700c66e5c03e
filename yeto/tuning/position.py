"""Where a learner stands in its rows, as JSON: written with its saved state, read when it goes on.

A position means something only to the same rows, read in the same way. So it names the settings that it
depends on, and a restart with another one is refused by its flag instead of training on rows that were seen
already, or on none that follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from yeto.errors import ConfigError
from yeto.tuning.rows import Cursor, Row
from yeto.wire.digest import digest

REMEDY: Final = "give the same as before, or remove the folder of --state-dir to begin anew"

SEAT_SETTINGS: Final = {
    "seed": "--seed",
    "learner_id": "--learner-id",
    "num_learners": "--num-learners",
    "rank": "the rank in the island:",
    "num_ranks": "the number of ranks of the island:",
    "data_shard": "--data-shard",
}
"""Fields of every task's settings that decide which rows are a process's, and what people call them."""


@frozen(kw_only=True)
class RowsRead:
    """Which rows are read, and how; a position holds it, and is good for what is equal to it only."""

    settings: Mapping[str, Any]
    """Name to value, of every setting that decides what comes next."""
    first_row: str
    """Digest of the first row of the share; tells another file from the same one elsewhere."""

    def to_json(self) -> dict[str, Any]:
        """Return what a position says about it."""
        return {"first_row": self.first_row, "settings": self.settings}

    def require_same(self, position: Mapping[str, Any], flags: Mapping[str, str]) -> None:
        """Refuse a position that was reached in another way.

        Args:
            position: has what :meth:`to_json` gave.
            flags: what people call each setting.

        Raises:
            ConfigError: it was reached with other settings, or in other rows.
        """
        before = position["settings"]
        for name, now in self.settings.items():
            if before[name] != now:
                raise ConfigError(
                    f"{flags[name]} {now}: the saved position in the rows was reached with {before[name]}; "
                    f"{REMEDY}"
                )
        if position["first_row"] != self.first_row:
            raise ConfigError(
                "--data: its first row is not the first row of what the saved position belongs to; " + REMEDY
            )


def row_digest(row: Row, default: Callable[[Any], Any] = str) -> str:
    """Return the digest of what a row says, wherever it stands.

    Args:
        row: the row.
        default: turns a value that JSON has no word for into one that it has.
    """
    return digest(json.dumps(row.value, sort_keys=True, default=default).encode())


def cursor_to_json(cursor: Cursor) -> list[int]:
    """Return a place between two rows as JSON."""
    return [cursor.row, cursor.file, cursor.byte, cursor.line]


def cursor_from_json(value: Sequence[int]) -> Cursor:
    """Return the place that :func:`cursor_to_json` wrote."""
    row, file, byte, line = value
    return Cursor(row=row, file=file, byte=byte, line=line)
