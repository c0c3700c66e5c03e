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
from yeto.core.later import later_fields
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
    """Return a record as one line: when, its number, and what it says."""
    return f"{record.at:12.6f} s {record.seq:>8}  {sentence(record)}"


def sentence(record: Record) -> str:
    """Return what a record says: its kind with the coordinator's sentence, or with what was reported."""
    body = record.body
    if isinstance(body, Header):
        text = f"session {body.session_id}, Yeto {body.software_version}, {body.wall_clock}"
    elif isinstance(body, Decision):
        text = body.why
    elif isinstance(body, SessionResumed):
        # Its fields are a whole state; what a reader of a story wants to know is where it goes on.
        config = body.config
        text = (
            f"from step {body.step} at {body.wall_clock}, "
            f"{config.num_learners} learners, quorum {config.quorum}, {config.total_steps} rounds in all"
        )
    else:
        text = _fields(body)
    return printable(f"{record.kind}: {text}".rstrip(": "))


def _fields(event: Event) -> str:
    parts = []
    later = later_fields(type(event))
    for field in attrs.fields(type(event)):
        value = getattr(event, field.name)
        # A field that joined later is absent on the tape where it says nothing.
        if field.name == "at" or (field.name in later and value == later[field.name]):
            continue
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

    These are the records that name the round, its checkpoint and its first broadcast, what was ignored of it,
    and who came or left while it was open. A restart below it is part of it too: what stands before is
    superseded, and the round comes once more on the timeline that begins there.

    Args:
        step: the round, a global step.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.found = False
        """Whether any attempt of the round was opened."""
        self._open = False
        self._sent = False
        """Whether it was broadcast: what joining learners are sent later is their story."""
        self._cause_concerns = False

    def concerns(self, record: Record) -> bool:
        """Tell whether the next record belongs to the story."""
        body = record.body
        belongs = self._belongs(body)
        if record.because is None:
            self._cause_concerns = belongs
        if isinstance(body, AttemptOpened) and belongs:
            self.found = self._open = True
            self._sent = False
        elif isinstance(body, BroadcastOrdered) and belongs:
            self._sent = True
        elif isinstance(body, RoundCommitted | AttemptDiscarded) and belongs:
            self._open = False
        return belongs

    def _belongs(self, body: Header | Event | Decision) -> bool:
        match body:
            case Ignored():
                return self._cause_concerns
            case LearnerJoined() | LearnerLeft():
                return self._open
            case SessionResumed(step=step):
                return self.found and step < self.step
            case BroadcastOrdered(fragments=fragments):
                return not self._sent and any(fragment.version == self.step for fragment in fragments)
            case FinalCutOrdered() | FinalAckReceived() | SessionEnded():
                # Their step is where the run ended, not a round.
                return False
            case _:
                return getattr(body, "step", None) == self.step
