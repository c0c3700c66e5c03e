"""Replaying a tape: the proof that the run followed its rules.

Every event is folded through the coordinator's ``step``, and each decision it gives is compared with the
one that stands on the tape. The first record that differs is the verdict; nothing behind it means anything,
because it was decided from another state. The decisions of the last event before a restart, or before the
tape's end, may stand there only in part: a process was cut off, or is writing. They were not acted upon
where it mattered (durable decisions wait for the disk), so this is no divergence.

Memory does not grow with the tape: what is held is one state and the decisions of one event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from enum import Enum
from os import PathLike
from typing import Any

import attrs
from attrs import frozen

from yeto.core import State
from yeto.core.decisions import Decision
from yeto.core.events import Event, SessionResumed
from yeto.core.later import later_fields
from yeto.errors import ConfigError, CoordinatorError, TapeError
from yeto.tape.codec import Decoder
from yeto.tape.reader import complete_lines, no_header, open_tape
from yeto.tape.records import Header, Record
from yeto.tape.rules import RULES, Step


@frozen(kw_only=True)
class Divergence:
    """The first record that the rules do not give, and both sides."""

    seq: int
    line: int
    event: Event
    """What was decided upon."""
    recorded: Decision | Event | None
    """What stands on the tape: another decision, or the next event where a decision is missing."""
    expected: Decision | None
    """What the rules give; None where they give nothing more."""
    reason: str

    def fields(self) -> tuple[tuple[str, object, object], ...]:
        """Return (field, recorded, expected) of what differs, when both are decisions of one kind."""
        if self.expected is None or type(self.recorded) is not type(self.expected):
            return ()
        pairs = (
            (field.name, getattr(self.recorded, field.name), getattr(self.expected, field.name))
            for field in attrs.fields(type(self.expected))
        )
        return tuple((name, left, right) for name, left, right in pairs if left != right)


@frozen(kw_only=True)
class ReplayResult:
    """What a replay found."""

    header: Header
    state: State
    """The coordinator's state after the last event folded."""
    records: int
    """Records read, the header included."""
    divergence: Divergence | None


class Replayer:
    """Folds a tape record by record and compares; a shadow of the coordinator that wrote it.

    Args:
        name: the tape's name in messages, usually its path.
        step: other rules than those that the tape's header names.
    """

    def __init__(self, name: str, *, step: Step | None = None) -> None:
        self._decoder = Decoder(name)
        self._step = step
        self._header: Header | None = None
        self._state: State | None = None
        self._event: Event | None = None
        self._due: deque[Decision] = deque()
        self.records = 0
        """Records fed so far, the header included."""
        self.divergence: Divergence | None = None
        """The first one, once found; nothing is folded from there on."""

    @property
    def header(self) -> Header:
        """The tape's header.

        Raises:
            TapeError: nothing was fed yet.
        """
        if self._header is None:
            raise no_header(self._decoder.name)
        return self._header

    @property
    def state(self) -> State:
        """The state after the last event fed.

        Raises:
            TapeError: nothing was fed yet.
        """
        if self._state is None:
            raise no_header(self._decoder.name)
        return self._state

    @property
    def due(self) -> int:
        """How many decisions of the last event the tape still owes."""
        return len(self._due)

    def feed(self, line: bytes) -> Record:
        """Take the next line; return its record.

        Raises:
            TapeError: the line is damaged or out of order.
        """
        record = self._decoder.decode(line)
        self.records += 1
        if self.divergence is None:
            body = record.body
            if isinstance(body, Header):
                self._begin(body)
            elif isinstance(body, Decision):
                self._compare(record.seq, body)
            else:
                self._fold(record.seq, body)
        return record

    def result(self) -> ReplayResult:
        """Return what was found so far.

        Raises:
            TapeError: nothing was fed yet.
        """
        return ReplayResult(
            header=self.header, state=self.state, records=self.records, divergence=self.divergence
        )

    def _begin(self, header: Header) -> None:
        rules = RULES[header.rules_version]
        self._step = self._step or rules.step
        try:
            self._state = rules.initial_state(header.config)
        except ConfigError as error:
            raise TapeError(f"{self._decoder.name}: line 1: impossible settings: {error}") from error
        self._header = header

    def _fold(self, seq: int, event: Event) -> None:
        if self._due and not isinstance(event, SessionResumed):
            self._diverge(seq, event, self._due[0], "the rules give one more decision before this event")
            return
        self._event = event
        assert self._step is not None, "the header comes first"
        try:
            self._state, decisions = self._step(self.state, event)
        except (CoordinatorError, ConfigError) as error:
            self._diverge(seq, event, None, f"the rules say that this event is impossible: {error}")
            return
        self._due = deque(decisions)

    def _compare(self, seq: int, recorded: Decision) -> None:
        if not self._due:
            self._diverge(seq, recorded, None, "the rules give no further decision for this event")
        elif recorded == self._due[0]:
            self._due.popleft()
        else:
            self._diverge(seq, recorded, self._due[0], "the rules give another decision")

    def _diverge(self, seq: int, recorded: Decision | Event, expected: Decision | None, reason: str) -> None:
        # A decision stands behind an event and an event is folded before decisions are due.
        assert self._event is not None
        self.divergence = Divergence(
            seq=seq,
            line=seq + 1,
            event=self._event,
            recorded=recorded,
            expected=expected,
            reason=reason,
        )


def replay(path: str | PathLike[str], *, until: int | None = None, step: Step | None = None) -> ReplayResult:
    """Fold a tape and compare every decision, up to the first that differs.

    Args:
        path: the tape; a torn tail is left out.
        until: number of the last record to take; None takes all.
        step: other rules than those that the tape's header names.

    Raises:
        TapeError: the tape is missing or damaged before its tail; names file, line and field.
    """
    replayer = Replayer(str(path), step=step)
    with open_tape(path) as file:
        for seq, line in enumerate(complete_lines(file, str(path))):
            if until is not None and seq > until:
                break
            replayer.feed(line)
            if replayer.divergence is not None:
                break
    return replayer.result()


def state_to_json(state: object) -> dict[str, Any]:
    """Return a state as plain JSON values, every map sorted by its key.

    attrs classes become objects, without fields that joined later and have their default; maps become objects
    whose keys are joined with commas where they are tuples or values of several fields, sets become sorted
    lists. Infinity and NaN, which JSON lacks, become null.
    """
    result = _plain(state)
    assert isinstance(result, dict), "a state is an attrs class"
    return result


def _plain(value: object) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    cls: Any = type(value)
    if attrs.has(cls):
        later = later_fields(cls)
        fields = {name: getattr(value, name) for name in sorted(attrs.fields_dict(cls))}
        # As on a tape: what joined later stands only where it says something.
        return {k: _plain(v) for k, v in fields.items() if k not in later or v != later[k]}
    if isinstance(value, Mapping):
        return {_key(key): _plain(value[key]) for key in sorted(value)}
    if isinstance(value, Set):
        return [_plain(item) for item in sorted(value)]
    if isinstance(value, tuple | list | deque):
        return [_plain(item) for item in value]
    raise TypeError(f"a state holds no {type(value).__name__}")


def _key(key: Any) -> str:
    if attrs.has(type(key)):
        key = attrs.astuple(key)
    return ",".join(map(str, key)) if isinstance(key, tuple) else str(key)
