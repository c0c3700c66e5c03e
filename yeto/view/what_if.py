"""What if the policy had been another one: every recorded attempt, decided anew.

An attempt of the record is taken as it was at its opening, with its members and the estimates of that moment,
and given to the coordinator's own ``step`` under other settings. From there on it is told the facts of the
record, each at its time, and its own deadlines, until it is sealed or discarded. Everything around it stays
as the record has it: who is connected, how fast learners step, what other rounds are doing. So each attempt
is judged by itself. That an earlier seal would have opened the next round earlier, from other values, is not
followed up.

The record is silent where the other policy waits longer or takes more. A push that was refused there, or cut
off because its attempt was over, was never received; here it counts as received one *usual upload* after its
header: the median of its learner's last uploads, nothing before the first. An answer to a later attempt of
the same round counts for this one if this one is still open.

With the settings of the record itself every attempt ends as it did there, at the same time and with the same
learners. That is why a deadline which the record has too passes when it passed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yeto.core import State
from yeto.core.decisions import AttemptDiscarded, AttemptOpened, AttemptSealed, SessionEnded
from yeto.core.events import Event, SessionResumed
from yeto.tape import Header, Record
from yeto.view.what_if_attempt import Branch, Outcome, other_config
from yeto.view.what_if_uploads import Uploads

_UNUSABLE = ("not_finite", "merge_failed")
"""Why an attempt is discarded after it was sealed."""


class WhatIf:
    """The fold: feed it every record of a verified replay, with the state behind it.

    Args:
        policy: fields of :class:`~yeto.core.CoreConfig` that are to be different.
    """

    def __init__(self, policy: Mapping[str, Any]) -> None:
        self._policy = policy
        self._state: State | None = None
        self._open: dict[tuple[int, int], Branch] = {}
        """Attempts of this timeline that did not end both ways."""
        self._done: set[int] = set()
        """Rounds that the other policy has sealed and the record has not committed yet."""
        self._uploads = Uploads()
        self._outcomes: list[Outcome] = []

    def feed(self, record: Record, state: State) -> None:
        """Take the next record and the state after its event."""
        body = record.body
        match body:
            case Header():
                other_config(body.config, self._policy)
            case SessionResumed():
                self._close()
                other_config(body.config, self._policy)
            case Event():
                assert self._state is not None, "the header comes first"
                for branch in self._open.values():
                    branch.advance(body, self._state, state, self._uploads)
                self._uploads.feed(body)
                self._collect()
            case AttemptOpened():
                self._begin(body, record.seq, state)
            case AttemptSealed() | AttemptDiscarded():
                if isinstance(body, AttemptDiscarded) and body.reason in _UNUSABLE:
                    # What was sealed came to nothing, and not for want of answers.
                    self._done.discard(body.step)
                if (body.step, body.attempt) in self._open:
                    self._open[body.step, body.attempt].learn(body, record.at)
                    self._collect()
            case SessionEnded():
                self._close()
            case _:
                pass
        self._state = state

    def outcomes(self) -> list[Outcome]:
        """Return what became of every attempt so far, in the order of their opening."""
        return sorted(self._outcomes + self._undecided(), key=lambda outcome: outcome.seq)

    def _begin(self, opened: AttemptOpened, seq: int, state: State) -> None:
        self._done = {done for done in self._done if done > state.step}
        going_on = any(branch.step == opened.step and branch.other is None for branch in self._open.values())
        needed = opened.step not in self._done and not going_on
        branch = Branch(opened, seq=seq, state=state, policy=self._policy, needed=needed)
        self._open[opened.step, opened.attempt] = branch

    def _collect(self) -> None:
        """Put away what has ended both ways."""
        for key, branch in list(self._open.items()):
            if branch.other is not None and branch.other.status == "sealed":
                self._done.add(branch.step)
            if branch.other is not None and branch.recorded is not None:
                self._outcomes.append(branch.outcome())
                del self._open[key]

    def _close(self) -> None:
        """The timeline ends: nothing more is known of what is open."""
        self._outcomes += self._undecided()
        self._open.clear()
        self._done.clear()

    def _undecided(self) -> list[Outcome]:
        ended_at = None if self._state is None else self._state.at
        return [branch.outcome(ended_at) for branch in self._open.values()]
