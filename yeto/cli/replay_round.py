"""``yeto replay --round``: the story of one round with the time it took, line by line.

Beside each line stands how long after the line above it came, and how long after the opening of its attempt:
the gaps are where the time went. Behind the story stands, per attempt, when each learner answered. Lines of
a timeline that a restart fell back below are marked: they happened, but the model does not contain them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import define, field

from yeto.cli.replay_print import print_divergence, record_json
from yeto.core import State
from yeto.core.decisions import (
    AttemptDiscarded,
    AttemptOpened,
    AttemptSealed,
    BroadcastOrdered,
    GraceOpened,
    PushAccepted,
    PushRefused,
    RoundCommitted,
)
from yeto.core.events import MergeFinished, PushOffered, PushReceived
from yeto.errors import ConfigError
from yeto.tape import Record, Replayer, Restart, RoundStory
from yeto.tape.story import sentence

SUPERSEDED = "x"
"""Stands before a line whose timeline was fallen back from."""

_TITLE = f"  {'at':>12} {'since above':>13} {'in attempt':>12} {'record':>8}"


def tell_round(
    path: Path,
    records: Iterator[Record],
    replayer: Replayer,
    step: int,
    *,
    restarts: Sequence[Restart],
    as_json: bool,
) -> int:
    """Tell the story of one round while the tape is verified.

    Args:
        path: the tape.
        records: its records as they are verified.
        replayer: what verifies them.
        step: the round.
        restarts: all restarts of the records that come.
        as_json: print JSON.

    Raises:
        ConfigError: no attempt of the round was opened.
    """
    teller = RoundTeller(step, restarts, as_json=as_json)
    for record in records:
        teller.feed(record)
    if replayer.divergence is not None:
        return print_divergence(path, replayer, as_json=as_json)
    teller.finish(replayer.state)
    return 0


def no_such_round(step: int, state: State) -> ConfigError:
    """Return the error of asking for a round that the tape has nothing of."""
    return ConfigError(f"--round {step}: no attempt of it was opened; {state.step} are committed")


class RoundTeller:
    """Prints what concerns one round of the records it is fed.

    Args:
        step: the round.
        restarts: all restarts of the records that will be fed, as far as known.
        as_json: print JSON, one record a line.
    """

    def __init__(self, step: int, restarts: Sequence[Restart] = (), *, as_json: bool) -> None:
        self.story = RoundStory(step)
        self._step = step
        self._restarts = restarts
        self._as_json = as_json
        self._last_at: float | None = None
        self._attempts: list[_Attempt] = []
        self._open = False
        """Whether an attempt of the present timeline was opened."""

    def feed(self, record: Record) -> None:
        """Take the next record of the tape."""
        if not self.story.concerns(record):
            return
        superseded = any(restart.seq > record.seq and restart.step < self._step for restart in self._restarts)
        body = record.body
        if isinstance(body, AttemptOpened):
            self._attempts.append(_Attempt(opened=body, at=record.at, superseded=superseded))
            self._open = True
        elif record.kind == "session_resumed":
            self._open = False
        elif self._open:
            self._attempts[-1].feed(record)
        gap = None if self._last_at is None else record.at - self._last_at
        since = record.at - self._attempts[-1].at if self._open else None
        self._print(record, gap, since, superseded)
        self._last_at = record.at

    def finish(self, state: State) -> None:
        """Print, for people, when each learner answered.

        Raises:
            ConfigError: no attempt of the round was opened.
        """
        if not self.story.found:
            raise no_such_round(self._step, state)
        if self._as_json:
            return
        print()
        for attempt in self._attempts:
            print(f"{SUPERSEDED if attempt.superseded else ' '} {attempt.told()}")
        if any(attempt.superseded for attempt in self._attempts):
            print(f"\n{SUPERSEDED}: superseded, a restart fell back below round {self._step}")

    def _print(self, record: Record, gap: float | None, since: float | None, superseded: bool) -> None:
        if self._as_json:
            times = {
                "gap_seconds": None if gap is None else round(gap, 6),
                "attempt_seconds": None if since is None else round(since, 6),
                "superseded": superseded,
            }
            print(json.dumps({**record_json(record), **times}), flush=True)
            return
        if self._last_at is None:
            print(_TITLE)
        mark = SUPERSEDED if superseded else " "
        above = "" if gap is None else f"+{gap:.6f}"
        inside = "" if since is None else f"{since:.6f}"
        print(
            f"{mark} {record.at:>12.6f} {above:>13} {inside:>12} {record.seq:>8}  {sentence(record)}",
            flush=True,
        )


@define
class _Attempt:
    """One attempt, and how long after its opening what happened."""

    opened: AttemptOpened
    at: float
    superseded: bool
    offered: dict[int, float] = field(factory=dict)
    """When the header of each learner's last push came."""
    received: dict[int, float] = field(factory=dict)
    answered: dict[int, float] = field(factory=dict)
    refused: dict[int, str] = field(factory=dict)
    marks: list[str] = field(factory=list)
    """What else happened, in order."""

    def feed(self, record: Record) -> None:
        """Take a record behind the attempt's opening."""
        if getattr(record.body, "attempt", self.opened.attempt) != self.opened.attempt:
            return
        seconds = record.at - self.at
        match record.body:
            case PushOffered(learner=learner):
                self.offered[learner] = seconds
            case PushReceived(learner=learner):
                self.received[learner] = seconds
            case PushAccepted(learner=learner):
                self.answered[learner] = seconds
            case PushRefused(learner=learner, reason=reason) if learner not in self.answered:
                self.refused[learner] = f"refused at {seconds:.3f} s ({reason})"
            case GraceOpened(grace_seconds=grace):
                self.marks.append(f"grace of {grace:.3f} s from {seconds:.3f} s")
            case AttemptSealed():
                self.marks.append(f"sealed at {seconds:.3f} s")
            case AttemptDiscarded(reason=reason):
                self.marks.append(f"discarded at {seconds:.3f} s ({reason})")
            case MergeFinished():
                self.marks.append(f"merged at {seconds:.3f} s")
            case RoundCommitted():
                self.marks.append(f"committed at {seconds:.3f} s")
            case BroadcastOrdered():
                self.marks.append(f"broadcast at {seconds:.3f} s")
            case _:
                pass

    def told(self) -> str:
        """Return one line: who answered when, slowest last, and what happened then."""
        members = [member.learner for member in self.opened.members]
        by_time = sorted(members, key=lambda learner: self.answered.get(learner, float("inf")))
        parts = [f"learner {learner} {self._answer(learner)}" for learner in by_time]
        return f"attempt {self.opened.attempt}: {', '.join([*parts, *self.marks])}"

    def _answer(self, learner: int) -> str:
        if learner in self.answered:
            upload = self.received[learner] - self.offered[learner]
            return f"at {self.answered[learner]:.3f} s (upload {upload:.3f} s)"
        if learner in self.refused:
            return self.refused[learner]
        return "uploading" if learner in self.offered else "silent"
