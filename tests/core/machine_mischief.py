"""What can be wrong with a fact that is otherwise due, by name.

A list of such names waits in the world; whichever fits the next fact is used up by it. So a test says "for a
while all goes well, but the next push is stale and the next merge not finite".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from attrs import define, field

LIES: dict[str, dict[str, int | str | Callable[[int], int]]] = {
    "base too new": {"base_version": lambda honest: honest + 1},
    "base older by 1": {"base_version": lambda honest: max(honest - 1, 0)},
    "base older by 3": {"base_version": lambda honest: max(honest - 3, 0)},
    "oldest base": {"base_version": 0},
    "no steps": {"c_steps": 0},
    "no tokens": {"c_tokens": 0},
    "many tokens": {"c_tokens": 90_000},
    "budget used up": {"c_steps": 7},
    "wrong fragment": {"fragment": 3},
    "wrong attempt": {"attempt": 2},
    "wrong round": {"step": 0},
    "wrong generation": {"generation": "0" * 16},
    "wrong learner": {"learner": 3},
}
"""Headers that say something else than the learner's books; a function is given what those say."""
CONTENTS: dict[str, dict[str, Any]] = {
    "not finite": {"finite": False, "norm": None},
    "finite no more": {"finite": False},
    "no norm": {"norm": None},
    "norm too large": {"norm": 1.1e15},
    "largest norm": {"norm": 1e15, "cosine_to_momentum": -0.5},
    "norm 2.5": {"norm": 2.5},
    "norm 40": {"norm": 40.0},
}
"""What is found in the bytes of a push."""
OTHERS = (
    "twice",
    "silent",
    "upload hangs",
    "upload slow",
    "uploader dies",
    "neighbour comes back",
    "merge not finite",
    "merge fails",
    "outer step not finite",
    "initial value not finite",
    "disk slow",
    "stop",
)
SERIES: dict[str, list[str]] = {
    "diverged": ["not finite"] * 4,
    "far behind": ["base older by 3"] * 3,
    "a little behind": ["base older by 1"] * 3,
    "broken merges": ["merge not finite", "merge fails", "outer step not finite"],
    "hanging uploads": ["upload slow"] * 4,
    "idle": ["no steps"] * 8,
}
HEADERS = (*LIES, "a little behind", "far behind", "twice", "silent")
BODIES = (*CONTENTS, "diverged", "hanging uploads", "upload hangs", "uploader dies")
NAMES = (*LIES, *CONTENTS, *OTHERS, *SERIES, "stop")


@define
class Mischief:
    """What will go wrong at its first opportunity."""

    waiting: list[str] = field(factory=list)

    def plan(self, names: Iterable[str]) -> None:
        """Let these go wrong from now on, and nothing else."""
        self.waiting = [each for name in names for each in SERIES.get(name, [name])]

    def strikes(self, name: str) -> bool:
        """Whether this goes wrong now; it is used up then."""
        if name in self.waiting:
            self.waiting.remove(name)
            return True
        return False

    def take(self, table: dict[str, Any]) -> dict[str, Any]:
        """The changes of the first name of a table that waits."""
        for name in self.waiting:
            if name in table:
                self.waiting.remove(name)
                return dict(table[name])
        return {}

    def lie(self, honest: dict[str, Any]) -> dict[str, Any]:
        """A header, with what the first lie that waits makes of it."""
        lies = self.take(LIES)
        return honest | {name: lie(honest[name]) if callable(lie) else lie for name, lie in lies.items()}
