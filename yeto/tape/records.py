"""What a tape is made of: a header, then one record per event and per decision.

The tape is the memory of a run. Everything the coordinator was told (events) and everything it answered
(decisions) stands there in the order it happened, so that folding the events through the rules must give
the decisions again, on any machine, for ever. Records are numbered without gaps: the header is 0 and
record n stands on line n + 1. ``at`` never goes back. A decision carries ``because``, the number of its
event, and that event's ``at``; the decisions of one event stand directly behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import frozen

from yeto.core.config import CoreConfig
from yeto.core.decisions import Decision
from yeto.core.events import Event
from yeto.core.parts import made

FORMAT_VERSION = 3
"""Version of the line format: keys, kinds, fields and their types. Since 2 each line has a checksum; since 3
there are fields that joined later (``yeto.core.later``)."""
RULES_VERSION = 1
"""Version of the rules that turn events into decisions; a replay needs the same ones."""
HEADER_KIND = "header"


@frozen(kw_only=True)
class Header:
    """Line 1: which run this is, and the settings and rules it was started with."""

    format_version: int = FORMAT_VERSION
    rules_version: int = RULES_VERSION
    software_version: str
    wall_clock: str
    """Start of the session, ISO 8601 with offset. For people: nothing is computed from it."""
    session_id: str
    config: CoreConfig


# Without slots: frozen classes with slots take twice as long to make, and a tape has millions of these.
@frozen(kw_only=True, slots=False)
class Record:
    """One line of a tape."""

    seq: int
    at: float
    """Seconds since the session began."""
    kind: str
    because: int | None
    """Number of the event that a decision answers; None for the header and for events."""
    body: Header | Event | Decision

    @classmethod
    def of_line(
        cls, seq: int, at: float, kind: str, because: int | None, line: bytes, read: Callable[[bytes], Any]
    ) -> Record:
        """Return the record of a line that was found sound.

        ``read`` makes the body of the line when it is first looked at: most folds look at few kinds.
        """
        fields = {"seq": seq, "at": at, "kind": kind, "because": because, "_read": read, "_line": line}
        return made(cls, fields)

    if not TYPE_CHECKING:  # a checker would believe that a record has every attribute

        def __getattr__(self, name: str) -> Any:
            # Called only for what is not there.
            fields = self.__dict__
            if name != "body" or "_read" not in fields:
                raise AttributeError(f"a record has no {name!r}", name=name, obj=self)
            body = fields["body"] = fields.pop("_read")(fields.pop("_line"))
            return body


def round_at(seconds: float) -> float:
    """Return a time as it goes on the tape: rounded to one microsecond."""
    return round(seconds, 6)
