"""Versions: which rules a tape follows, and how lines of an older format are read.

A tape is proved by the rules it was written under, not by those of today. Its header names them, and this
registry keeps every version that a tape was ever written with. How an old version is kept: the day the
coordinator is to decide anything differently, the machine as it stands (every module of :mod:`yeto.core` but
those that only hold words: config, events, decisions, values) is copied to a package of its own, named after
its version (``yeto/core_v1``), entered here beside the new one, and never edited again. The words stay
shared. They belong to the format: a field that is added gets a default, which the old machine does not
know of and therefore leaves alone.

The format has its own version. A line of an older one is turned, before it is looked at, into what the
present format would have written; the rest of the reader knows one format only. Format 1 had the same objects
and no checksum (:mod:`yeto.tape.checksum`), so there is nothing to turn in it. Format 3 has fields that
joined later (:mod:`yeto.core.later`): they are absent where they say nothing new, as on every older tape.
The header is always called ``header``, stands on line 1 and has both versions, whatever else changes.

Nothing is ever appended to a tape of older rules or of an older format: a run that goes on with a newer
Yeto begins a new tape, and its ``session_resumed`` carries all that the run needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from yeto.core import CoreConfig, State, initial_state, step
from yeto.core.decisions import Decision
from yeto.core.events import Event

Step = Callable[[State, Event], tuple[State, tuple[Decision, ...]]]
Upcast = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes the object of a whole line, ``kind`` and all, and returns that of the present format."""


@frozen(kw_only=True)
class Rules:
    """One version of the coordinator."""

    initial_state: Callable[[CoreConfig], State]
    step: Step


RULES: dict[int, Rules] = {1: Rules(initial_state=initial_state, step=step)}
"""Every version of the rules that a tape can have; the newest is what the syncer runs."""

UPCASTS: dict[int, Upcast | None] = {1: None, 2: None, 3: None}
"""Every version of the format that a tape can have; None for one whose objects are those of the present one,
checksum aside."""
