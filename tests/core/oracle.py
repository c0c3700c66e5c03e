"""What is due: the rules of the coordinator once more, in the plainest way, as a judge of the real one.

An :class:`Oracle` is told each fact together with the decisions that the coordinator took on it. It works out
for itself which ones were due, from the whole past (:mod:`oracle_past`), and refuses any other: a decision
too many, one too few, another order, another value in any field but the sentence. What was decided then
becomes part of the past.

An answer to a fact comes in two parts. The fact itself is answered (a push is admitted, a learner refused, a
late timer ignored), and then everything is done that has become possible, in the fixed order of the rules,
over and over until nothing more is due.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
from attrs import evolve
from oracle_answers import Answers
from oracle_dues import Dues
from oracle_past import Past
from oracle_rules import Due

from yeto.core import decisions as de
from yeto.core import events as ev


class Oracle(Answers, Dues):
    """The judge of one session, over all its timelines."""

    def judge(self, event: ev.Event, decisions: tuple[de.Decision, ...]) -> None:
        """Take a fact and what was decided on it.

        Raises:
            AssertionError: something else was due.
        """
        expected = self.due(event)
        if not is_same(event, expected, decisions):
            # The recorded ones are the past from now on: a last digit of a sum must not part the two.
            self.past.put_last(event.at, *decisions)

    def due(self, event: ev.Event) -> Due:
        """Work out what must be decided on a fact; both are part of the past afterwards."""
        self.at = event.at
        if isinstance(event, ev.SessionResumed):
            self.past = Past(event.config, resumed=event)
            answers: Due = [de.SessionOpened(terms=event.terms, why="")]
        else:
            answers = self.answer(event)
        self.past.add(event.at, event, *answers)
        expected = list(answers)
        while self.past.phase() != "ended" and (more := list(self.settle())):
            expected += more
        return expected

    def settle(self) -> Iterator[de.Decision]:
        """Everything that is possible now, each in the past before the next is looked for."""
        for stage in (
            self.close_for_budget,
            self.seal_or_discard,
            self.order_merges,
            self.order_commit,
            self.broadcast,
            self.start,
            self.retry,
            self.open,
            self.end,
        ):
            for decision in stage():
                self.past.add(self.at, decision)
                yield decision


# Comparing.


def is_same(event: ev.Event, expected: Due, found: tuple[de.Decision, ...]) -> bool:
    """Compare decisions in everything but their sentences, and the reason why a fact was ignored.

    Returns:
        Whether they are the same to the last digit.

    Raises:
        AssertionError: they are not the same at all.
    """
    for decision in found:
        assert decision.why, f"a decision without a sentence: {decision}"
        assert not isinstance(decision, de.Ignored) or decision.reason
    mine, theirs = [_bare(decision) for decision in expected], [_bare(decision) for decision in found]
    if mine == theirs:
        return True
    if len(mine) == len(theirs) and all(map(_equal, mine, theirs)):
        return False
    lines = [f"on {event}", "the rules give:", *map(_line, mine), "the coordinator decided:"]
    raise AssertionError("\n".join([*lines, *map(_line, theirs)]))


def _bare(decision: de.Decision) -> de.Decision:
    if isinstance(decision, de.Ignored):
        return evolve(decision, why="", reason="")
    return evolve(decision, why="")


def _line(decision: de.Decision) -> str:
    return f"    {decision}"


def _equal(mine: object, theirs: object) -> bool:
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=1e-9, abs_tol=1.5e-6)
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        return len(mine) == len(theirs) and all(map(_equal, mine, theirs))
    if attrs.has(type(mine)):
        names = attrs.fields_dict(type(mine))
        return all(_equal(getattr(mine, name), getattr(theirs, name)) for name in names)
    return mine == theirs
