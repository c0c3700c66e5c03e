"""The rules of a soak, held against the tape while it is being written.

* **Commits are contiguous**: 1, 2, 3, ... on each timeline; a resumed one goes on behind its checkpoint.
* **Merges go on**: while a quorum of learners that can answer is connected, no more than so many seconds pass
  without a commit.
* **Memory is flat**: what the syncer takes in the last third of a run is what it took in the second.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import define, field
from breaking import Broken

MIB = 1024 * 1024
FLAT_SHARE = 0.1
FLAT_BYTES = 16 * MIB
"""What the last third may take beyond the second: allocators and caches breathe."""
SAMPLES_MIN = 9
"""Fewer samples of the memory say nothing."""


@define
class TapeWatch:
    """Reads the lines that were added to a tape, and knows what they come to."""

    path: Path
    quorum: int
    step: int = 0
    commits: int = 0
    """Over all timelines."""
    joined: dict[int, str] = field(factory=dict)
    """Connected learners and their generations."""
    last_commit_at: float | None = None
    """On the clock of whoever looks; None before the first."""
    records: int = 0
    discards: int = 0
    refused: dict[str, int] = field(factory=dict)
    """Reasons for which learners were refused, and how often."""
    _offset: int = 0
    _able_since: float | None = None

    def look(self, now: float, *, unable: frozenset[int] = frozenset()) -> None:
        """Read what is new.

        Args:
            now: on a monotonic clock.
            unable: learners that were stopped: connected, and in no state to answer.

        Raises:
            Broken: commits are not contiguous.
        """
        before = self.commits
        for record in self._new_records():
            self._take(record)
        if self.commits > before:
            self.last_commit_at = now
        able = len(self.joined.keys() - unable) >= self.quorum
        if not able:
            self._able_since = None
        elif self._able_since is None:
            self._able_since = now

    def restarted(self) -> None:
        """The syncer was killed: nobody is connected, and half a line at the end, never read, is cut off."""
        self.joined.clear()
        self._able_since = None

    def waiting_seconds(self, now: float) -> float:
        """Return for how long a commit has been possible without one."""
        if self._able_since is None:
            return 0.0
        return now - max(self._able_since, self.last_commit_at or 0.0)

    def _new_records(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _take(self, record: dict[str, Any]) -> None:
        self.records += 1
        match record["kind"]:
            case "merge":
                if record["step"] != self.step + 1:
                    raise Broken(
                        f"record {record['seq']}: step {record['step']} is committed after {self.step}"
                    )
                self.step += 1
                self.commits += 1
            case "session_resumed":
                if record["step"] > self.step:
                    raise Broken(
                        f"record {record['seq']}: resumed at {record['step']} when {self.step} was the last"
                    )
                self.step = record["step"]
                self.joined.clear()
            case "learner_joined":
                self.joined[record["learner"]] = record["generation"]
            case "learner_left":
                if self.joined.get(record["learner"]) == record["generation"]:
                    del self.joined[record["learner"]]
            case "learner_refused":
                reason = record["reason"]
                self.refused[reason] = self.refused.get(reason, 0) + 1
                if self.joined.get(record["learner"]) == record["generation"]:
                    del self.joined[record["learner"]]
            case "attempt_discarded":
                self.discards += 1


def check_memory(samples: Sequence[int]) -> None:
    """Hold samples of a process's memory, in bytes and in their order, against the rule.

    Raises:
        Broken: it grows.
    """
    third = len(samples) // 3
    if third * 3 < SAMPLES_MIN:
        return
    second, last = max(samples[third : 2 * third]), max(samples[2 * third :])
    if last > second * (1 + FLAT_SHARE) + FLAT_BYTES:
        raise Broken(
            f"the syncer grows: at most {second / MIB:.0f} MiB in the second third of the run, "
            f"{last / MIB:.0f} MiB in the last"
        )
