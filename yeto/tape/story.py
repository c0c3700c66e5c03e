"""Records for people: one line each, and the records that tell the story of one round.

Text on a tape may come from a peer (why a connection ended, where it came from), so nothing of it reaches a
terminal that could steer one.
"""

from __future__ import annotations

import re
from typing import Any

import attrs

from yeto.core.config import CoreConfig
from yeto.core.decisions import (
    AttemptDiscarded,
    AttemptOpened,
    BroadcastOrdered,
    Decision,
    FinalCutOrdered,
    Ignored,
    RoundCommitted,
    SessionEnded,
)
from yeto.core.events import Event, FinalAckReceived, LearnerJoined, LearnerLeft, SessionResumed
from yeto.tape.records import Header, Record

_LONG_HEX = re.compile(r"[0-9a-f]{20,}")
"""Digests and the like: their beginning is enough for eyes."""


def printable(text: str) -> str:
    """Return text with everything escaped that a terminal would act upon or cannot show."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )


def describe(record: Record) -> str:
    """Return a record as one line: the coordinator's sentence, or what was reported."""
    body = record.body
    if isinstance(body, Header):
        text = f"session {body.session_id}, Yeto {body.software_version}, {body.wall_clock}"
    elif isinstance(body, Decision):
        text = body.why
    else:
        text = _fields(body)
    return printable(f"{record.at:12.6f} s {record.seq:>8}  {record.kind}: {text}".rstrip(": "))


def _fields(event: Event) -> str:
    parts = []
    for field in attrs.fields(type(event)):
        if field.name != "at":
            value = getattr(event, field.name)
            parts.append(f"{field.name} {_short(value)}")
    return ", ".join(parts)


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, CoreConfig):
        return "(settings)"
    if isinstance(value, str):
        return f"{value[:12]}.." if _LONG_HEX.fullmatch(value) else value
    if isinstance(value, tuple):
        return f"[{' '.join(_short(item) for item in value)}]"
    if attrs.has(type(value)):
        return "/".join(_short(part) for part in attrs.astuple(value, recurse=False))
    return str(value)


class RoundStory:
    """Picks the records that concern one round, in tape order.

    These are the records that name the round, its checkpoint and its broadcast, what was ignored of it,
    and who came or left while it was open. A restart after its first record is part of it too: the round
    may come once more on the timeline that begins there.

    Args:
        step: the round, a global step.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.found = False
        """Whether any attempt of the round was opened."""
        self._open = False
        self._cause_concerns = False

    def concerns(self, record: Record) -> bool:
        """Tell whether the next record belongs to the story."""
        body = record.body
        belongs = self._belongs(body)
        if record.because is None:
            self._cause_concerns = belongs
        if isinstance(body, AttemptOpened) and belongs:
            self.found = self._open = True
        elif isinstance(body, RoundCommitted | AttemptDiscarded) and belongs:
            self._open = False
        return belongs

    def _belongs(self, body: Header | Event | Decision) -> bool:
        match body:
            case Ignored():
                return self._cause_concerns
            case LearnerJoined() | LearnerLeft():
                return self._open
            case SessionResumed():
                return self.found
            case BroadcastOrdered(fragments=fragments):
                return any(fragment.version == self.step for fragment in fragments)
            case FinalCutOrdered() | FinalAckReceived() | SessionEnded():
                # Their step is where the run ended, not a round.
                return False
            case _:
                return getattr(body, "step", None) == self.step
